"""Factors of dims: split and join undo each other, and blocks are the boxes that the factors say."""

from __future__ import annotations

import math
import random

import pytest
import torch
from random_layouts import MESHES, random_dim, random_layout, random_shape, random_sizes

from spmdfn import make_mesh
from spmdfn.blocks import assemble, take
from spmdfn.layout import (
    Factor,
    Layout,
    axes_of,
    blocks_of,
    fits,
    from_entries,
    join,
    replicated,
    size_of,
    split,
    whole,
)

LINE, SQUARE, CUBE, OBLONG = MESHES
SIZES = [1, 2, 4, 6, 8, 12, 16, 24, 48]


def test_canonical_forms():
    a, b = (Factor(4, 4, ("a",)),), (Factor(2, 2),)
    assert whole(1) == () and whole(4) == (Factor(4, 4),) and join([], LINE) == ()
    assert join([a, b], LINE) == (Factor(8, 8, ("a",)),)  # a is used up by its blocks: one factor says it
    assert join([b, a], LINE) == (Factor(2, 2), Factor(4, 4, ("a",)))
    assert join([b, b], LINE) == (Factor(4, 4),)
    assert join([(Factor(2, 2, ("a",)),), (Factor(4, 4, ("b",)),)], SQUARE) == (Factor(8, 8, ("a", "b")),)
    assert join([(Factor(4, 4, ("a",)),), (Factor(4, 4, ("b",)),)], SQUARE) == (
        Factor(4, 4, ("a",)),
        Factor(4, 4, ("b",)),
    )


def test_an_empty_dim_is_whole():
    split_dim = (Factor(4, 4, ("a",)),)
    assert join([whole(0), split_dim], LINE) == join([split_dim, whole(0)], LINE) == whole(0)
    assert split(whole(0), [0, 4], LINE) == (whole(0), whole(4)) and not fits(0, ("a",), LINE) and fits(0, (), LINE)


def test_split_of_a_split_dim():
    dim = (Factor(16, 16, ("a", "b")),)
    assert split(dim, [2, 8], SQUARE) == ((Factor(2, 2, ("a",)),), (Factor(8, 8, ("b",)),))
    assert split(dim, [4, 4], SQUARE) == ((Factor(4, 4, ("a", "b")),), (Factor(4, 4),))
    assert split(dim, [1, 16, 1], SQUARE) == ((), dim, ())
    # an axis that fits no piece is dropped: it must be gathered
    assert split((Factor(12, 12, ("a",)),), [3, 4], SQUARE) == ((Factor(3, 3),), (Factor(4, 4),))
    assert split((Factor(12, 12, ("a",)),), [6, 2], LINE) == ((Factor(6, 6),), (Factor(2, 2),))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_split_then_join_gives_the_dim(mesh):
    choose = random.Random(0)
    for _ in range(500):
        size = choose.choice(SIZES)
        axes = list(mesh.axis_names)
        choose.shuffle(axes)
        dim = random_dim(choose, size, axes, mesh)
        assert size_of(dim) == size and join([dim], mesh) == dim
        sizes = [factor.size for factor in dim]
        assert join(split(dim, sizes, mesh), mesh) == dim
        assert join([(factor,) for factor in dim], mesh) == dim


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_split_keeps_sizes_and_blocks(mesh):
    """Pieces have the sizes asked for, axes in order; where none was dropped, joining gives the dim again."""
    choose = random.Random(1)
    for _ in range(500):
        size = choose.choice(SIZES)
        axes = list(mesh.axis_names)
        choose.shuffle(axes)
        dim = random_dim(choose, size, axes, mesh)
        sizes = random_sizes(choose, size) or [1]
        pieces = split(dim, sizes, mesh)
        assert [size_of(piece) for piece in pieces] == sizes
        kept = tuple(axis for piece in pieces for axis in axes_of(piece))
        assert kept == tuple(axis for axis in axes_of(dim) if axis in kept)
        assert all(fits(factor.size, factor.axes, mesh) for piece in pieces for factor in piece)
        if kept == axes_of(dim):
            assert join(pieces, mesh) == dim


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_blocks_are_boxes(mesh):
    choose = random.Random(2)
    for _ in range(200):
        shape = random_shape(choose)
        layout = random_layout(choose, shape, mesh, pending=0)
        value = torch.arange(layout.numel).reshape(shape)
        blocks = take(value, layout)
        assert {tuple(block.shape) for block in blocks} == {layout.local_shape}
        assert layout.local_numel * mesh.axis_size(tuple(layout.axes)) == layout.numel
        assert torch.equal(assemble(blocks, layout), value)
        view = value.reshape([factor.size for factor in layout.factors])
        for device, block in zip(mesh.devices, blocks, strict=True):
            part = view
            for dim, (start, length) in enumerate(layout.box(mesh.coordinates(device))):
                part = part.narrow(dim, start, length)
            assert torch.equal(part.reshape(layout.local_shape), block)
        distinct = {tuple(layout.box(mesh.coordinates(device))) for device in mesh.devices}
        assert len(distinct) == math.prod(blocks_of(factor, mesh) for factor in layout.factors)


def test_layouts_are_interned():
    a = from_entries(SQUARE, (8, 4), [("a", "b"), ()], ())
    assert a is Layout(SQUARE, [(Factor(8, 8, ("a", "b")),), whole(4)]) and a.entries == (("a", "b"), ())
    pending = from_entries(SQUARE, (8,), [("a",)], ("b",))
    assert pending.pending_axes == {"b"} and pending.settled is from_entries(SQUARE, (8,), [("a",)])
    assert Layout(CUBE, [], [("c", "sum"), ("a", "sum")]) is Layout(CUBE, [], [("a", "sum"), ("c", "sum")])
    assert replicated(SQUARE, (3, 1)).is_whole and not pending.is_whole


def test_axes_of_size_one_split_nothing():
    mesh = make_mesh((1, 2), ("one", "two"))
    assert from_entries(mesh, (4,), [("one", "two")]) is from_entries(mesh, (4,), [("two",)])
    assert from_entries(mesh, (4,), [()], ("one",)) is replicated(mesh, (4,))


def test_text():
    layout = Layout(SQUARE, [(Factor(2, 2), Factor(4, 4, ("a",))), ()], [("b", "sum")])
    assert repr(layout) == "[2*4@a, 1 +b]" and layout.entries is None
    assert repr(Layout(SQUARE, [whole(3)], [("a", "max")])) == "[3 max:a]"
