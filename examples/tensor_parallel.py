"""Tensor parallelism, twice: Megatron's MLP by hand, and the same program from the single-device function.

The first matrix is split by columns, the second by rows. Each device makes its own hidden features, so the GELU between
needs no communication; the second product is a summand on each device, and one sum over devices completes it.

`by_hand` says so in the device view: blocks in, `sp.psum` where the sum belongs. Its backward has one sum as well,
which nobody wrote: `x` is invariant and meets weights that vary, so it is cast to varying there, and the transpose of
that cast is a psum (Megatron's "f"; the psum above, whose transpose is a cast, is its "g").

The global view says nothing: it is the function of one device, `mlp`, with layouts for its arguments, and the engine
finds both sums. The two programs have the same collectives, as `main` asserts. So the rule of thumb: use `spmd_jit`,
and `shard_map` where you know a better algorithm than the engine could find. They mix: a mapped function may be called
anywhere in a global-view one, as `mixed` does.

Run it: `python examples/tensor_parallel.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import spmdfn as sp
from spmdfn import P

# Suffixes of names are shapes: B batch, D features, H hidden features (of all devices, or of one).
Weights = dict[str, Tensor]
WEIGHTS = {"up_DH": "d (tp h)", "down_HD": "(tp h) d"}


def init(key: Tensor, d: int, h: int, dtype: torch.dtype = torch.float32) -> Weights:
    up, down = sp.random.split(key)
    return {
        "up_DH": sp.random.normal(up, (d, h), dtype) / d**0.5,
        "down_HD": sp.random.normal(down, (h, d), dtype) / h**0.5,
    }


def mlp(w: Weights, x_BD: Tensor) -> Tensor:
    """The function of one device."""
    return F.gelu(x_BD @ w["up_DH"]) @ w["down_HD"]


def make_by_hand(mesh: sp.Mesh) -> Callable[[Weights, Tensor], Tensor]:
    """The device view: `w` has this device's columns of `up` and rows of `down`."""

    @sp.shard_map(mesh=mesh, in_specs=(WEIGHTS, P()), out_specs=P())
    def by_hand(w: Weights, x_BD: Tensor) -> Tensor:
        summand_BD = F.gelu(x_BD @ w["up_DH"]) @ w["down_HD"]
        return sp.psum(summand_BD, "tp")

    return by_hand


def with_gradients(f: Callable[[Weights, Tensor], Tensor]) -> Callable:
    """(w, x, target) -> (gradients of w and x, loss), for any of the functions here."""

    def loss_fn(w: Weights, x_BD: Tensor, target_BD: Tensor) -> Tensor:
        return ((f(w, x_BD) - target_BD) ** 2).mean()

    return torch.func.grad_and_value(loss_fn, argnums=(0, 1))


def make_mixed(mesh: sp.Mesh) -> Callable[[Weights, Tensor], Tensor]:
    """A residual block in the global view, whose MLP is the one by hand."""
    by_hand = make_by_hand(mesh)

    def mixed(w: Weights, x_BD: Tensor) -> Tensor:
        return x_BD + by_hand(w, F.layer_norm(x_BD, x_BD.shape[-1:]))

    return mixed


def make_steps(mesh: sp.Mesh) -> tuple[Any, Any]:
    """The gradients in both views, as programs: by hand, and the global view."""
    specs: dict[str, Any] = {"in_specs": (WEIGHTS, P(), P()), "out_specs": ((WEIGHTS, P()), P())}
    by_hand = sp.spmd_jit(with_gradients(make_by_hand(mesh)), mesh=mesh, **specs)
    global_view = sp.spmd_jit(with_gradients(mlp), mesh=mesh, **specs)
    return by_hand, global_view


def collectives(program: sp.Program) -> list[tuple]:
    return [(row.op, row.reduce, row.axes, row.bytes) for row in program.collectives]


def main() -> None:
    mesh = sp.make_mesh((4,), ("tp",))
    w = init(sp.random.key(0), 16, 64)
    x_BD, target_BD = sp.random.normal(sp.random.key(1), (2, 8, 16))
    (expected, expected_dx), _ = with_gradients(mlp)(w, x_BD, target_BD)

    by_hand, global_view = make_steps(mesh)
    for name, step in (("by hand", by_hand), ("global view", global_view)):
        print(f"\n{name}, forward and backward:")
        sp.explain(step)(w, x_BD, target_BD)
        (grads, dx_BD), _ = step(w, x_BD, target_BD)
        pairs = [(dx_BD, expected_dx), *((grads[k], expected[k]) for k in w)]
        difference = max(float((found.unshard() - value).abs().max()) for found, value in pairs)
        print(f"largest difference of a gradient from one device: {difference:.1e}")
        print(f"the gradient of up is laid out like up: {grads['up_DH']}")

    both = [collectives(step.lower(w, x_BD, target_BD)) for step in (by_hand, global_view)]
    assert both[0] == both[1]
    print(f"\nthe same collectives in both: {both[0]}")

    mixed = sp.spmd_jit(make_mixed(mesh), mesh=mesh, in_specs=(WEIGHTS, P()))
    value_BD = x_BD + mlp(w, F.layer_norm(x_BD, (16,)))
    difference = float((mixed(w, x_BD).unshard() - value_BD).abs().max())
    print(f"mixed: largest difference from one device: {difference:.1e}")


if __name__ == "__main__":
    main()
