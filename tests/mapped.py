"""Run a body under shard_map in both ways: eager, op by op in lock-step, and traced inside spmd_jit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

import spmdfn as sp

MODES = ("eager", "traced")
MESHES = {
    "1": sp.make_mesh((1,), ("i",)),
    "2": sp.make_mesh((2,), ("i",)),
    "4": sp.make_mesh((4,), ("i",)),
    "2x2": sp.make_mesh((2, 2), ("x", "y")),
    "2x2x2": sp.make_mesh((2, 2, 2), ("x", "y", "z")),
}
LINE, SQUARE, CUBE = MESHES["4"], MESHES["2x2"], MESHES["2x2x2"]


def mapped(mode: str, body: Callable[..., Any], mesh: sp.Mesh, ins: Any, outs: Any, **options: Any) -> Any:
    """The mapped function, called directly or traced in a function of spmd_jit. Its results are whole tensors."""
    inner = sp.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, **options)
    return whole(mode, inner, mesh)


def whole(mode: str, function: Callable[..., Any], mesh: sp.Mesh) -> Callable[..., Any]:
    """A function of maps, run in one of the ways; its results are whole tensors."""
    outer = function if mode == "eager" else sp.spmd_jit(function, mesh=mesh)
    return lambda *args, **kwargs: sp.unshard(outer(*args, **kwargs))


def same(got: Any, want: Any, close: float = 0.0) -> None:
    """Equal trees of tensors: structure, shapes, dtypes, and values up to `close` (relative to 1 or the largest)."""
    got_leaves, got_tree = optree.tree_flatten(got)
    want_leaves, want_tree = optree.tree_flatten(want)
    assert got_tree == want_tree
    for g, w in zip(got_leaves, want_leaves, strict=True):
        w = torch.as_tensor(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype), (g, w)
        if not close:
            assert torch.equal(g, w), (g, w)
            continue
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        assert torch.allclose(g, w, rtol=0, atol=close * scale), (g, w)
