"""Indexing by a scalar that has no value in Python: this device's index in a map, a traced argument elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import spmdfn as sp
from spmdfn import P

MESH = sp.make_mesh((4,), ("i",))
X = torch.arange(64, dtype=torch.float64).reshape(4, 4, 4)


def written(x: torch.Tensor, i: torch.Tensor | int) -> torch.Tensor:
    x = x * 1
    x[:, i] = x[0] + 1
    x[i, 1:3] = 7
    x[None, ..., i, 2] = x[2, i, :1]
    x[i, i, i] = -1.0
    x[torch.tensor([3, 1]), i] = 5.0
    return x


READS: dict[str, Callable] = {
    "x[i]": lambda x, i: x[i],
    "x[-1 - i]": lambda x, i: x[-1 - i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[i, :2]": lambda x, i: x[i, :2],
    "x[i, :, i]": lambda x, i: x[i, :, i],
    "x[..., i]": lambda x, i: x[..., i],
    "x[..., i, :]": lambda x, i: x[..., i, :],
    "x[None, i]": lambda x, i: x[None, i],
    "x[i, 2, None]": lambda x, i: x[i, 2, None],
    "x[i, 2, i]": lambda x, i: x[i, 2, i],
    "x[1, i, ::2]": lambda x, i: x[1, i, ::2],
    "x[[2, 0], :, i]": lambda x, i: x[torch.tensor([2, 0]), :, i],
    "x[[2, 0], i]": lambda x, i: x[torch.tensor([2, 0]), i],
    "x[[2, 0], i, 1]": lambda x, i: x[torch.tensor([2, 0]), i, 1],
    "x[:, [2, 0], i]": lambda x, i: x[:, torch.tensor([2, 0]), i],
    "written": written,
}


@pytest.mark.parametrize("name", READS)
def test_an_index_that_differs_between_devices_selects(name: str) -> None:
    f = READS[name]

    def body(x: torch.Tensor) -> torch.Tensor:
        return f(sp.pcast(x, "i"), sp.axis_index("i"))[None]

    def loss(g: Callable) -> Callable:
        return lambda x: (g(x) ** 2).sum()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([f(x, i) for i in range(4)])

    mapped = sp.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P("i"))
    expected, slope = plain(X), torch.func.grad(loss(plain))(X)
    for run in (lambda g: g, lambda g: sp.spmd_jit(g, mesh=MESH, out_specs=P())):
        torch.testing.assert_close(sp.unshard(run(mapped)(X)), expected, rtol=0, atol=0)
        torch.testing.assert_close(sp.unshard(run(torch.func.grad(loss(mapped)))(X)), slope, rtol=0, atol=0)


@pytest.mark.parametrize("name", READS)
def test_a_traced_index_selects(name: str) -> None:
    for layout in (P(), P(None, "i")):
        jitted = sp.spmd_jit(READS[name], mesh=MESH, in_specs=(layout, P()))
        for i in (0, 3, -2) if name != "x[-1 - i]" else (0, 3):
            expected = READS[name](X, i)
            torch.testing.assert_close(jitted(X, torch.tensor(i)).unshard(), expected, rtol=0, atol=0)


def test_a_slice_by_it_has_no_shape() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x[: sp.axis_index("i")]

    mapped = sp.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P("i"))
    with pytest.raises(sp.VaryingError, match="differs between devices"):
        mapped(X)
    with pytest.raises(sp.TracingError, match="value of a traced tensor"):
        sp.spmd_jit(mapped, mesh=MESH)(X)
