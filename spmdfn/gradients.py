"""A gradient lies like its primal: that of an Array is an Array in its layout, that of a plain tensor is plain.

A backward is a walk of autograd's own, and torch.func keeps the tensors it differentiates to itself. So the first op of
a backward looks ahead along the graph to the leaves, and leaves a hook at each, which the engine runs once.
"""

from __future__ import annotations

from typing import Any

import torch

from ._compat import graph_task_id, innermost, is_functorch_wrapped, unwrapped
from .collectives import LIBRARY

LIBRARY.define("lay_like(Tensor x, Tensor like, int batch) -> Tensor")
lay_like = torch.ops.spmdfn.lay_like.default
_SEEN = "spmdfn_seen"


@torch.library.impl("spmdfn::lay_like", "CompositeExplicitAutograd")
def _(x: torch.Tensor, like: torch.Tensor, batch: int) -> torch.Tensor:
    return x.clone()  # neither is an Array: one that is answers for itself


class _LayLike(torch.autograd.Function):
    """`x`, after its first `batch` dims, laid out as `like`; the identity on values and on cotangents."""

    spmd_own = True

    @staticmethod
    def forward(x: torch.Tensor, like: torch.Tensor, batch: int) -> torch.Tensor:
        return lay_like(x, like, batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return cotangents[0], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, like: torch.Tensor, batch: int) -> tuple[torch.Tensor, int]:
        dim, like_dim, _ = in_dims
        if like_dim is None:
            return _LayLike.apply(x.movedim(dim, 0), like, batch + 1), 0
        x = x.unsqueeze(batch).expand(*x.shape[:batch], info.batch_size, *x.shape[batch:]) if dim is None else x
        return _LayLike.apply(x if dim is None else x.movedim(dim, batch), like.movedim(like_dim, 0), batch), batch


class _Hook:
    """Runs once on the gradient of a leaf. It holds what the leaf looks at, not the leaf: no cycle."""

    def __init__(self, leaf: torch.Tensor):
        self.like = unwrapped(leaf) if is_functorch_wrapped(leaf) else leaf.detach()
        self.handle = leaf.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.handle.remove()
        has, wants = _layout(gradient), _layout(self.like)
        return None if has is (wants and wants.settled) else _LayLike.apply(gradient, self.like, 0)


def _layout(value: torch.Tensor) -> Any:
    """The layout of an Array under any number of functorch levels; None for a plain tensor."""
    return getattr(innermost(value), "_layout", None)


def watch(node: Any) -> None:
    """Leave hooks at the leaves that this node of a running backward leads to. A node is looked at once a backward."""
    task = graph_task_id()
    pending = [node]
    while pending:
        found = pending.pop()
        notes = found.metadata
        if notes.get(_SEEN) == task:
            continue
        notes[_SEEN] = task
        pending += [following for following, _ in found.next_functions if following is not None]
        leaf = getattr(found, "variable", None) if type(found).__name__ == "AccumulateGrad" else None
        if leaf is not None and not any(type(hook) is _Hook for hook in (leaf._backward_hooks or {}).values()):
            _Hook(leaf)
