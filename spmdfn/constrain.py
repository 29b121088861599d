"""`constrain`: pin the layout of a value inside a traced function. The identity on values and on cotangents."""

from __future__ import annotations

from typing import Any

import torch

from .collectives import LIBRARY
from .spec import Resolved

LIBRARY.define("constrain(Tensor x, str[] entries, str[] unreduced) -> Tensor")
op = torch.ops.spmdfn.constrain.default


@torch.library.register_fake("spmdfn::constrain")
def _like(x: torch.Tensor, entries: list[str], unreduced: list[str]) -> torch.Tensor:
    return torch.empty_like(x)


LIBRARY.impl("constrain", _like, "CompositeExplicitAutograd")  # a trace meets tensors with data too


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, entries: list[str], unreduced: list[str]) -> torch.Tensor:
        return op(x, entries, unreduced)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return cotangents[0], None, None  # pinned cotangents would turn reduce-scatters into all-reduces

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, entries: list[str], unreduced: list[str]) -> tuple[Any, int]:
        return _Constrain.apply(x.movedim(in_dims[0], 0), ["", *entries], unreduced), 0


def pin(x: torch.Tensor, resolved: Resolved) -> torch.Tensor:
    """Record in the trace that `x` has this layout; `entries` are comma-joined axes, one a dim."""
    return _Constrain.apply(x, [",".join(axes) for axes in resolved.entries], sorted(resolved.unreduced))


def pinned(entries: list[str], unreduced: list[str]) -> Resolved:
    """The layout that a `constrain` node records."""
    return Resolved(tuple(tuple(e.split(",")) if e else () for e in entries), frozenset(unreduced))
