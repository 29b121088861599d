"""The border of a map as two differentiable functions: a global value becomes a block, and a block a global value.

Each is the other's transpose, so gradients taken outside a map work in any order and under any transform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import collectives as c
from ._compat import no_function_modes, tracing
from .array import Array
from .block import Block
from .blocks import assemble, take
from .device_types import Stamp
from .layout import Axes, Layout, from_entries
from .mesh import Mesh
from .moves import Sum, apply

Reshard = Callable[[Array, Layout], Array]


@dataclass(frozen=True)
class Border:
    """How one value crosses: the manual axes of every dim. `plain`: outside it is a plain tensor, not an Array.

    Without types (`checked=False`) a cotangent is summed over the axes that an in spec does not name, and divided by
    the size of those that an out spec does not name; `raw` crosses without either.
    """

    mesh: Mesh
    manual: tuple[str, ...]
    entries: tuple[Axes, ...]
    reshard: Reshard
    plain: bool = False
    checked: bool = True
    raw: bool = False

    @property
    def unnamed(self) -> tuple[str, ...]:
        named = {axis for axes in self.entries for axis in axes}
        return tuple(axis for axis in self.manual if axis not in named)

    def batched(self) -> Border:
        return replace(self, entries=((), *self.entries))

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        return from_entries(self.mesh, shape, self.entries)

    def _arguments(self) -> tuple[list[str], list[int], list[str]]:
        sizes = [self.mesh.axis_size(axes) if axes else 1 for axes in self.entries]
        return [",".join(axes) for axes in self.entries], sizes, list(self.manual)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if tracing():
            return c.enter(x, *self._arguments())
        with no_function_modes():
            return self._blocks(x)

    def _blocks(self, x: torch.Tensor) -> Block:
        layout = self._layout(tuple(x.shape))
        if isinstance(x, Array):
            blocks = list(self.reshard(x, layout).shards)
        elif isinstance(x, Block):
            blocks = [take(block, layout)[device] for device, block in enumerate(x.blocks)]
        else:
            blocks = take(x, layout)
        return Block(blocks, self.mesh, Stamp(frozenset(axis for axes in self.entries for axis in axes)))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if tracing():
            return c.leave(x, *self._arguments())
        assert isinstance(x, Block)
        _, sizes, _ = self._arguments()
        layout = self._layout(tuple(n * size for n, size in zip(x.shape, sizes, strict=True)))
        with no_function_modes():
            return assemble(x.blocks, layout) if self.plain else Array(x.blocks, layout)


class _Enter(torch.autograd.Function):
    spmd_own = True

    @staticmethod
    def forward(x: torch.Tensor, border: Border) -> torch.Tensor:
        return border.enter(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.border = inputs[1]
        ctx.set_materialize_grads(False)  # torch's zeros would be a plain tensor

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        border, g = ctx.border, cotangents[0]
        if g is None:
            return None, None
        if not border.checked and not border.raw and border.unnamed:
            g = apply(g, Sum(border.unnamed, (), False))
        return _Leave.apply(g, replace(border, raw=True)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return _Enter.apply(tangents[0], ctx.border)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, border: Border) -> tuple[torch.Tensor, int]:
        return _Enter.apply(x.movedim(in_dims[0], 0), border.batched()), 0


class _Leave(torch.autograd.Function):
    spmd_own = True

    @staticmethod
    def forward(x: torch.Tensor, border: Border) -> torch.Tensor:
        return border.leave(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.border = inputs[1]
        ctx.set_materialize_grads(False)  # torch's zeros would be a plain tensor

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        border, g = ctx.border, cotangents[0]
        if g is None:
            return None, None
        if not border.checked and not border.raw and border.unnamed:
            g = g / border.mesh.axis_size(border.unnamed)
        return _Enter.apply(g, replace(border, raw=True)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return _Leave.apply(tangents[0], ctx.border)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, border: Border) -> tuple[torch.Tensor, int]:
        return _Leave.apply(x.movedim(in_dims[0], 0), border.batched()), 0


def enter(x: torch.Tensor, border: Border) -> torch.Tensor:
    """A global value as this map's block."""
    return _Enter.apply(x, border)


def leave(x: torch.Tensor, border: Border) -> torch.Tensor:
    """A block as a global value."""
    return _Leave.apply(x, border)
