"""Data parallelism by hand: every device holds all parameters and its own part of the batch.

Under `shard_map` you write what one device does. It sees its block of each argument, and talks to the others through
collectives that name a mesh axis. Training needs one of them: the mean over the batch is a mean over devices, too.

`step` takes the mean of the *loss*, and differentiates that. `params` came in with `P()`: equal on all devices, called
*invariant*. The gradient of an invariant value is invariant as well, so it arrives **already summed** over devices;
autograd knows that each device's loss depends on the same parameters. There is nothing left to reduce.

`step_by_gradients` is what one writes in other libraries: gradients of this device's loss alone, then their mean. Here
that has to be said. `sp.pcast` makes the parameters *varying*, as if each device had a copy of its own, and from then
on each device's gradient is its own until `sp.pmean` brings them together.

Mix the two, and gradients would come out too large by the number of devices. `sp.typeof` tells varying from invariant
(`f32[8, 1]` and `f32[8, 1]{V:dp}`), and psum or pmean of a value that is equal already is an error: see the last lines
that this file prints. Run it: `python examples/data_parallel.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

import spmdfn as sp
from spmdfn import P

# Suffixes of names are shapes: B batch (of all devices, or of one), D inputs, H hidden, C outputs.
Params = dict[str, Tensor]


def init(key: Tensor, d: int, h: int, c: int, dtype: torch.dtype = torch.float32) -> Params:
    up, down = sp.random.split(key)
    return {
        "up_DH": sp.random.normal(up, (d, h), dtype) / d**0.5,
        "down_HC": sp.random.normal(down, (h, c), dtype) / h**0.5,
    }


def loss_fn(params: Params, x_BD: Tensor, y_BC: Tensor) -> Tensor:
    """The mean squared error of a small network: a function of one device, of whole tensors or of blocks."""
    predicted_BC = torch.tanh(x_BD @ params["up_DH"]) @ params["down_HC"]
    return ((predicted_BC - y_BC) ** 2).mean()


def update(params: Params, grads: Params, rate: float = 0.1) -> Params:
    return {name: p - rate * grads[name] for name, p in params.items()}


def one_device(params: Params, x_BD: Tensor, y_BC: Tensor) -> tuple[Params, Tensor]:
    """The step without a mesh, to compare with."""
    grads, loss = grad_and_value(loss_fn)(params, x_BD, y_BC)
    return update(params, grads), loss


def make_steps(mesh: sp.Mesh) -> tuple[Callable, ...]:
    """Two ways to write the same step: (params, x, y) -> (new params, loss)."""
    specs: dict[str, Any] = {"in_specs": (P(), "(dp b) d", "(dp b) c"), "out_specs": (P(), P())}

    @sp.shard_map(mesh=mesh, **specs)
    def step(params: Params, x_BD: Tensor, y_BC: Tensor) -> tuple[Params, Tensor]:
        def mean_loss(params: Params) -> Tensor:
            return sp.pmean(loss_fn(params, x_BD, y_BC), "dp")

        grads, loss = grad_and_value(mean_loss)(params)
        return update(params, grads), loss

    @sp.shard_map(mesh=mesh, **specs)
    def step_by_gradients(params: Params, x_BD: Tensor, y_BC: Tensor) -> tuple[Params, Tensor]:
        own = sp.pcast(params, "dp", to="varying")
        grads, loss = grad_and_value(loss_fn)(own, x_BD, y_BC)
        grads, loss = sp.pmean((grads, loss), "dp")
        return update(params, grads), loss

    return step, step_by_gradients


def make_wrong_step(mesh: sp.Mesh) -> Callable:
    """The bug that types catch: the mean of gradients that are summed already."""

    @sp.shard_map(mesh=mesh, in_specs=(P(), "(dp b) d", "(dp b) c"), out_specs=P())
    def wrong_step(params: Params, x_BD: Tensor, y_BC: Tensor) -> Params:
        grads = torch.func.grad(loss_fn)(params, x_BD, y_BC)
        return update(params, sp.pmean(grads, "dp"))

    return wrong_step


def main() -> None:
    mesh = sp.make_mesh((4,), ("dp",))
    params = init(sp.random.key(0), 8, 16, 2)
    x_BD = sp.random.normal(sp.random.key(1), (32, 8))
    y_BC = torch.stack([x_BD.sum(1), x_BD.prod(1)], 1)

    expected, _ = one_device(params, x_BD, y_BC)
    for step in make_steps(mesh):
        print(f"\n{step.__name__}, one line a collective:")
        sp.explain(sp.spmd_jit(step, mesh=mesh))(params, x_BD, y_BC)  # a trace: nothing runs
        found, _ = step(params, x_BD, y_BC)  # runs op by op: print and pdb work in the body
        difference = max(float((found[k].unshard() - expected[k]).abs().max()) for k in found)
        print(f"largest difference from one device: {difference:.1e}")

    train = sp.spmd_jit(make_steps(mesh)[0], mesh=mesh)  # one program, replayed
    for i in range(201):
        params, loss = train(params, x_BD, y_BC)
        if i % 50 == 0:
            print(f"step {i:3}  loss {float(loss):.4f}")

    try:
        make_wrong_step(mesh)(params, x_BD, y_BC)
    except sp.VaryingError as error:
        print(f"\nwrong_step is refused:\n{error}")


if __name__ == "__main__":
    main()
