"""The layout of one tensor on a mesh: every dim as a product of factors, some of them split over mesh axes.

A `Dim` is a tuple of factors, major to minor, in canonical form; a dim of size 1 is the empty tuple. A merged dim keeps
its factors, so `(b t)` with `t` split survives a flatten. Pure arithmetic: nothing here knows a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

from .mesh import Mesh

Axes = tuple[str, ...]


class Factor(NamedTuple):
    """`size` indices stored as `padded` (equal while layouts divide), split over `axes`, major first."""

    size: int
    padded: int
    axes: Axes = ()


Dim = tuple[Factor, ...]


def whole(size: int) -> Dim:
    """A dim that is not split."""
    return () if size == 1 else (Factor(size, size),)


def split_over(size: int, axes: Axes) -> Dim:
    """A dim whose blocks lie on `axes`, major first."""
    return (Factor(size, size, axes),) if axes else whole(size)


def size_of(dim: Dim) -> int:
    return math.prod(factor.size for factor in dim)


def axes_of(dim: Dim) -> Axes:
    """All axes of a dim, major to minor."""
    if len(dim) == 1:
        return dim[0].axes
    return tuple(axis for factor in dim for axis in factor.axes)


def blocks_of(factor: Factor, mesh: Mesh) -> int:
    """Into how many blocks a factor is cut."""
    return mesh.axis_size(factor.axes) if factor.axes else 1


def fits(size: int, axes: Axes, mesh: Mesh) -> bool:
    """Whether the axes divide a factor of that size."""
    return not axes or (size > 0 and size % mesh.axis_size(axes) == 0)


def join(dims: Iterable[Dim], mesh: Mesh) -> Dim:
    """The product of dims, major to minor, in canonical form: neighbours that one factor can describe are one."""
    result: list[Factor] = []
    for dim in dims:
        for factor in dim:
            if not factor.size:
                return whole(0)  # nothing to split
            if result:
                major = result[-1]
                if not factor.axes or major.padded == blocks_of(major, mesh):
                    result[-1] = Factor(
                        major.size * factor.size, major.padded * factor.padded, major.axes + factor.axes
                    )
                    continue
            if factor.size != 1 or factor.axes:
                result.append(factor)
    return tuple(result)


def split(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> tuple[Dim, ...]:
    """Cut a dim into consecutive dims of the given sizes. Axes that fit no piece are dropped: they must be gathered."""
    if len(sizes) == 1:
        return (dim,)
    if not axes_of(dim) or 0 in sizes:
        return tuple(whole(size) for size in sizes)
    rest = list(reversed(dim))
    pieces: list[Dim] = []
    for size in sizes:
        piece: list[Factor] = []
        need = size
        while need > 1 and rest:
            factor = rest.pop()
            if need % factor.size == 0:
                piece.append(factor)
                need //= factor.size
                continue
            major, minor = _cut(factor, need, mesh)
            if major is None:  # the boundary falls inside: nothing from here on can be placed
                rest.clear()
                break
            piece.append(major)
            rest.append(minor)
            need = 1
        if need > 1:
            piece.append(Factor(need, need))
            rest.clear()
        pieces.append(join([tuple(piece)], mesh))
    return tuple(pieces)


def _cut(factor: Factor, size: int, mesh: Mesh) -> tuple[Factor | None, Factor]:
    """Cut a factor in two, the major part of the given size."""
    if factor.size % size:
        return None, factor
    minor = factor.size // size
    count, blocks = 0, 1
    while count < len(factor.axes) and size % (blocks * mesh.axis_size(factor.axes[count])) == 0:
        blocks *= mesh.axis_size(factor.axes[count])
        count += 1
    head, tail = factor.axes[:count], factor.axes[count:]
    if tail and (blocks != size or not fits(minor, tail, mesh)):
        tail = ()  # these axes straddle the boundary
    return Factor(size, size, head), Factor(minor, minor, tail)


class Layout:
    """How one tensor lies on a mesh: its dims, and for the axes over which it is a pending sum, max or min, that.

    Interned: equal layouts are the same object.
    """

    __slots__ = ("__dict__", "dims", "mesh", "pending")
    mesh: Mesh
    dims: tuple[Dim, ...]
    pending: tuple[tuple[str, str], ...]

    def __new__(cls, mesh: Mesh, dims: Iterable[Dim], pending: Iterable[tuple[str, str]] = ()) -> Layout:
        return _intern(mesh, tuple(dims), tuple(sorted(pending)))

    def __repr__(self) -> str:
        dims = [
            "*".join(f"{f.size}@{','.join(f.axes)}" if f.axes else str(f.size) for f in dim) or "1" for dim in self.dims
        ]
        pending = "".join(f" +{axis}" if op == "sum" else f" {op}:{axis}" for axis, op in self.pending)
        return f"[{', '.join(dims)}{pending}]"

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of every device's block."""
        return tuple(math.prod(f.padded // blocks_of(f, self.mesh) for f in dim) for dim in self.dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes that split a dim."""
        return frozenset(axis for dim in self.dims for axis in axes_of(dim))

    @cached_property
    def pending_axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.pending)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @cached_property
    def is_whole(self) -> bool:
        """Every device holds the whole tensor."""
        return not self.axes and not self.pending

    @cached_property
    def settled(self) -> Layout:
        """The same dims with nothing pending."""
        return Layout(self.mesh, self.dims) if self.pending else self

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all dims in a row: the shape under which every block is a box."""
        return tuple(factor for dim in self.dims for factor in dim)

    @cached_property
    def entries(self) -> tuple[Axes, ...] | None:
        """The axes of every dim, or None if a dim has several split factors (no `P` can say that)."""
        if any(len(dim) > 1 for dim in self.dims):
            return None
        return tuple(axes_of(dim) for dim in self.dims)

    def box(self, coordinates: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """For every factor of `factors`, the (start, length) that the device at these coordinates owns."""
        place = dict(zip(self.mesh.axis_names, coordinates, strict=True))
        boxes = []
        for factor in self.factors:
            index = 0
            for axis in factor.axes:
                index = index * self.mesh.shape[axis] + place[axis]
            length = factor.padded // blocks_of(factor, self.mesh)
            boxes.append((index * length, length))
        return tuple(boxes)


@cache
def _intern(mesh: Mesh, dims: tuple[Dim, ...], pending: tuple[tuple[str, str], ...]) -> Layout:
    layout = object.__new__(Layout)
    layout.mesh, layout.dims, layout.pending = mesh, dims, pending
    return layout


def from_entries(mesh: Mesh, shape: Sequence[int], entries: Sequence[Axes], pending: Iterable[str] = ()) -> Layout:
    """The layout that a resolved spec asks for: one tuple of axes a dim, and the axes of a pending sum.

    Axes of size 1 split nothing and are left out of layouts.
    """
    dims = (
        split_over(size, tuple(axis for axis in axes if mesh.shape[axis] > 1))
        for size, axes in zip(shape, entries, strict=True)
    )
    return Layout(mesh, dims, ((axis, "sum") for axis in pending if mesh.shape[axis] > 1))


def replicated(mesh: Mesh, shape: Sequence[int]) -> Layout:
    return Layout(mesh, (whole(size) for size in shape))
