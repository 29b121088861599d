"""The border of a device-view body in the partitioner, and its ops that need a device's place.

Inside a body, values have the shape of a block with regard to the manual axes, and a layout over the other axes only:
the engine treats them like any value, and since it invents no split, it never touches a manual axis.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import collectives as c
from ..layout import Axes, Dim, Layout, axes_of, join, size_of, split, split_over, whole
from ..mesh import Mesh

BORDER = frozenset([c.enter, c.leave])


def entries_of(node: fx.Node, mesh: Mesh) -> list[Axes]:
    """The manual axes of every dim, without those of size 1."""
    given = [tuple(entry.split(",")) if entry else () for entry in node.args[1]]  # type: ignore[union-attr]
    return [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in given]


def outside(node: fx.Node, layout: Layout) -> Layout:
    """The layout that a value must have to enter: split as the map says, and over other axes as it is, if that fits."""
    mesh, manual = layout.mesh, set(node.args[3])  # type: ignore[arg-type]
    dims = []
    for dim, axes in zip(layout.dims, entries_of(node, mesh), strict=True):
        rest = dim
        if manual.intersection(axes_of(dim)) or axes:
            size, n = size_of(dim), mesh.axis_size(axes) if axes else 1
            fits = axes and axes_of(dim)[: len(axes)] == axes
            inner = split(dim, [n, size // n], mesh)[1] if fits else whole(size // n)
            if manual.intersection(axes_of(inner)):
                inner = whole(size // n)
            rest = join([split_over(n, axes), inner], mesh) if axes else inner
        dims.append(rest)
    return Layout(mesh, dims)


def inside(node: fx.Node, layout: Layout) -> Layout:
    """The layout of the block of a value that has entered."""
    dims = []
    for dim, axes in zip(layout.dims, entries_of(node, layout.mesh), strict=True):
        n = layout.mesh.axis_size(axes) if axes else 1
        dims.append(split(dim, [n, size_of(dim) // n], layout.mesh)[1] if axes else dim)
    return Layout(layout.mesh, dims)


def left(node: fx.Node, layout: Layout) -> Layout:
    """The layout of a value that has left."""
    mesh = layout.mesh
    dims: list[Dim] = []
    for dim, axes in zip(layout.dims, entries_of(node, mesh), strict=True):
        dims.append(join([split_over(mesh.axis_size(axes), axes), dim], mesh) if axes else dim)
    return Layout(mesh, dims)


def keep(x: torch.Tensor, here: bool) -> torch.Tensor:
    """x on one device, zeros elsewhere."""
    return x if here else torch.zeros_like(x)


def placed(emitter: Any, op: Any, args: Sequence[Any], device: str) -> fx.Node:
    """Emit an op that follows from this device's place. Axes of size 1 have one place."""
    call = emitter.graph.call_function
    axes = tuple(axis for axis in args[1] if emitter.mesh.shape[axis] > 1)
    place = emitter.place(axes) if axes else 0
    if op is c.axis_index:
        return call(torch.full, ((), place), {"dtype": torch.int32, "device": device})
    if op is c.pcast:
        return args[0]
    if op is c.keep_source:
        return call(keep, (args[0], call(operator.eq, (place, args[2]))))
    _, _, size, dim = args
    return call(own_block, (args[0], place, size, dim))


def own_block(x: torch.Tensor, place: int, n: int, dim: int) -> torch.Tensor:
    """Block number `place` of n along a dim."""
    length = x.shape[dim] // n
    return x.narrow(dim, place * length, length)
