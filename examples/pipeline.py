"""A pipeline (GPipe): the layers of a network split over devices, microbatches flowing through them.

Device i holds stage i, the layers that follow those of device i - 1. A batch is cut into microbatches. In each tick
every stage works on the microbatch that it has and hands the result on with `sp.ppermute`:

    tick       0    1    2    3    4    5
    device 0   m0   m1   m2   m3    -    -
    device 1    -   m0   m1   m2   m3    -
    device 2    -    -   m0   m1   m2   m3      4 microbatches, 3 stages: 6 ticks; (stages - 1) / ticks are a bubble

All devices run the same code, so a stage that waits works too, on zeros, and nobody takes what comes of it. Only two
lines know where they are: stage 0 takes the next microbatch instead of what the ring brought it, and the results are
those of the last stage. Weights are one tensor with all layers along dim 0, split over the stages by its spec.

The backward is not written down anywhere. The transpose of a ppermute is the ppermute back, so cotangents flow from the
last stage to the first, one tick after the other, and the gradients of all microbatches add up in each stage.
`sp.scan` runs the ticks. With `sp.remat` only what a stage took in is kept for the backward, which recomputes the
stage's insides; `remat=False` keeps them all, and gives the same gradients.

Run it: `python examples/pipeline.py`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import grad_and_value

import spmdfn as sp
from spmdfn import P

# Suffixes of names are shapes: L layers (of the network, or of one stage), M microbatches, B rows of a microbatch,
# T ticks, D features.
Params = dict[str, Tensor]
PARAMS = {"w_LDD": "(pipe l) d e", "b_LD": "(pipe l) d"}


def init(key: Tensor, layers: int, d: int, dtype: torch.dtype = torch.float32) -> Params:
    w, b = sp.random.split(key)
    return {
        "w_LDD": sp.random.normal(w, (layers, d, d), dtype) / d**0.5,
        "b_LD": 0.1 * sp.random.normal(b, (layers, d), dtype),
    }


def layers(params: Params, x_BD: Tensor) -> Tensor:
    """Residual layers, one after the other: the whole network, or one stage of it."""
    for w_DD, b_D in zip(params["w_LDD"], params["b_LD"], strict=True):
        x_BD = x_BD + torch.tanh(x_BD @ w_DD + b_D)
    return x_BD


def one_device(params: Params, x_MBD: Tensor, y_MBD: Tensor) -> Tensor:
    """The loss of the sequential network."""
    return ((layers(params, x_MBD) - y_MBD) ** 2).mean()


def pipelined(params: Params, x_MBD: Tensor, y_MBD: Tensor, *, remat: bool) -> Tensor:
    """The same loss, with `params` one stage's: the body of a map over "pipe"."""
    stages, stage = sp.axis_size("pipe"), sp.axis_index("pipe")
    work = sp.remat(layers) if remat else layers
    hand_on = [(i, i + 1) for i in range(stages - 1)]  # stage 0 gets zeros
    idle = x_MBD.new_zeros(stages - 1, *x_MBD.shape[1:])
    incoming_TBD = torch.cat([x_MBD, idle])

    def tick(arrived_BD: Tensor, incoming_BD: Tensor) -> tuple[Tensor, Tensor]:
        out_BD = work(params, torch.where(stage == 0, incoming_BD, arrived_BD))
        return sp.ppermute(out_BD, "pipe", hand_on), out_BD

    _, out_TBD = sp.scan(tick, torch.zeros_like(x_MBD[0]), incoming_TBD)
    out_MBD = out_TBD[stages - 1 :]  # when the last stage has its first result
    loss = ((out_MBD - y_MBD) ** 2).mean()  # the others' is of no use, and dropped here:
    return sp.pbroadcast(loss, "pipe", stages - 1)


def make(mesh: sp.Mesh, *, remat: bool = True) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """(params, x, y) -> loss, over whole tensors."""
    return sp.shard_map(partial(pipelined, remat=remat), mesh=mesh, in_specs=(PARAMS, P(), P()), out_specs=P())


def main() -> None:
    mesh = sp.make_mesh((4,), ("pipe",))
    params = init(sp.random.key(0), 8, 16)
    x_MBD, y_MBD = sp.random.normal(sp.random.key(1), (2, 6, 4, 16))  # 6 microbatches of 4 rows

    step = sp.spmd_jit(grad_and_value(make(mesh)), mesh=mesh, in_specs=(PARAMS, P(), P()), out_specs=(PARAMS, P()))
    table = sp.explain(step)(params, x_MBD, y_MBD)
    ticks = 6 + 4 - 1
    print(f"{ticks} ticks of 4 stages, of which {4 - 1} are a bubble; {len(table.rows)} collectives")

    grads, loss = step(params, x_MBD, y_MBD)
    expected, expected_loss = grad_and_value(one_device)(params, x_MBD, y_MBD)
    print(f"\nloss {float(loss):.6f}, on one device {float(expected_loss):.6f}")
    for name, found in grads.items():
        difference = float((found.unshard() - expected[name]).abs().max())
        print(f"largest difference of the gradient of {name}: {difference:.1e}; laid out as {found}")


if __name__ == "__main__":
    main()
