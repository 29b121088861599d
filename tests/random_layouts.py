"""Random layouts: dims of several factors, axes in any order, pending sums."""

from __future__ import annotations

import math
import random

import spmdfn as sp
from spmdfn.layout import Dim, Factor, Layout, fits, join

MESHES = [
    sp.make_mesh((4,), ("a",)),
    sp.make_mesh((2, 2), ("a", "b")),
    sp.make_mesh((2, 2, 2), ("a", "b", "c")),
    sp.make_mesh((4, 2), ("a", "b")),
]


def random_sizes(choose: random.Random, size: int) -> list[int]:
    """Numbers whose product is `size`, in random order."""
    sizes = []
    while size > 1:
        piece = choose.choice([d for d in range(2, size + 1) if size % d == 0])
        sizes.append(piece)
        size //= piece
    return sizes


def random_dim(choose: random.Random, size: int, axes: list[str], mesh: sp.Mesh) -> Dim:
    """A dim of that size; the axes that it uses are taken out of `axes`."""
    pieces: list[Dim] = []
    for piece in random_sizes(choose, size):
        mine: tuple[str, ...] = ()
        while axes and choose.random() < 0.5 and fits(piece, (*mine, axes[-1]), mesh):
            mine = (*mine, axes.pop())
        pieces.append((Factor(piece, piece, mine),))
    return join(pieces, mesh)


def random_layout(choose: random.Random, shape: tuple[int, ...], mesh: sp.Mesh, pending: float = 0.3) -> Layout:
    """A layout of that shape; each axis that splits no dim is a pending sum with that probability."""
    axes = list(mesh.axis_names)
    choose.shuffle(axes)
    dims: list[Dim] = [()] * len(shape)
    for place in choose.sample(range(len(shape)), len(shape)):
        dims[place] = random_dim(choose, shape[place], axes, mesh)
    waiting = [(axis, "sum") for axis in axes if choose.random() < pending]
    layout = Layout(mesh, dims, waiting)
    assert layout.shape == shape and math.prod(shape) == layout.numel
    return layout


def random_shape(choose: random.Random) -> tuple[int, ...]:
    return tuple(choose.choice([1, 2, 3, 4, 6, 8, 8, 12, 16, 24]) for _ in range(choose.choice([0, 1, 1, 2, 2, 3])))
