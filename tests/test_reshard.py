"""Plans from any layout to any other: the blocks are right, and no more is moved than by gathering everything."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from random_layouts import MESHES, random_layout, random_shape

import spmdfn as sp
from spmdfn import P
from spmdfn.backends.local import LocalBackend
from spmdfn.blocks import assemble, take
from spmdfn.layout import Layout, from_entries, replicated
from spmdfn.partition.emit import Emitter
from spmdfn.partition.engine import Partitioned
from spmdfn.partition.reshard import moved, plans
from spmdfn.program import Program

SQUARE = sp.make_mesh((2, 2), ("x", "y"))


def program_of(source: Layout, target: Layout) -> Program:
    """The program that only leads from one layout to another."""
    emitter = Emitter(source.mesh)
    node = emitter.placeholder("x")
    result = emitter.convert(node, source, target, torch.int64, ("here", "test"))
    emitter.graph.output([result])
    coordinates = tuple(place.name for place in emitter.coordinates.values())
    return Program(Partitioned(emitter.graph, source.mesh, {}, (source,), (torch.int64,), coordinates, (target,), ()))


def blocks_for(value: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The blocks of a value; the pieces that wait to be combined differ in sign and size."""
    mesh, kinds = layout.mesh, {op for _, op in layout.pending}
    axes = [axis for axis in mesh.axis_names if axis in layout.pending_axes]
    count = mesh.axis_size(tuple(axes)) if axes else 1
    pieces = _pieces(value, count, next(iter(kinds), "sum"))
    cut = [take(piece, layout.settled) for piece in pieces]
    blocks = []
    for device in mesh.devices:
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        number = 0
        for axis in axes:
            number = number * mesh.shape[axis] + place[axis]
        blocks.append(cut[number][device])
    return blocks


def _pieces(value: torch.Tensor, count: int, op: str) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(count)
    others = [torch.randint(-99, 120, value.shape, generator=numbers) * (i + 1) for i in range(count - 1)]
    if op == "sum":
        return [*others, value - sum(others)]
    sign = 1 if op == "min" else -1
    pieces = [value + sign * other.abs() for other in others] + [value]
    return pieces[::-1] if count % 3 else pieces


def check(source: Layout, target: Layout) -> None:
    value = (torch.arange(source.numel).reshape(source.shape) * 7 - 20) ** 2 % 101 - 40
    program = program_of(source, target)
    (blocks,) = LocalBackend().run(program, [blocks_for(value, source)])
    assert torch.equal(assemble(blocks, target), value), f"{source} -> {target}"
    if not target.pending:
        for got, want in zip(blocks, take(value, target), strict=True):
            assert torch.equal(got, want), f"{source} -> {target}"
    for step in (step for plan in plans(source, target) for step in plan.steps if step.op == "permute"):
        assert sorted(step.sources) == list(range(len(step.sources))), f"{source} -> {target}: {step.sources}"
    rows = program.collectives
    assert abs(sum(row.bytes for row in rows) - 8 * moved(source, target)) <= len(rows)
    most = moved(source, replicated(source.mesh, source.shape))
    assert moved(source, target) <= most + 1e-9, f"{source} -> {target}: {moved(source, target)} of at most {most}"


def pairs(seed: int, count: int) -> list[tuple[Layout, Layout]]:
    choose = random.Random(seed)
    found = []
    for _ in range(count):
        mesh, shape = choose.choice(MESHES), random_shape(choose)
        found.append((random_layout(choose, shape, mesh), random_layout(choose, shape, mesh, choose.choice([0, 0.3]))))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_any_layout_to_any_other(seed: int):
    for source, target in pairs(seed, 100):
        check(source, target)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_layouts_to_many_others(seed: int):
    for source, target in pairs(seed, 300):
        check(source, target)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("seed", range(2))
def test_pending_extrema(op: str, seed: int):
    for source, target in pairs(seed + 50, 60):
        check(Layout(source.mesh, source.dims, [(axis, op) for axis, _ in source.pending]), target.settled)


def test_equal_layouts_cost_nothing():
    choose = random.Random(1)
    for _ in range(200):
        shape, mesh = random_shape(choose), choose.choice(MESHES)
        layout = random_layout(choose, shape, mesh)
        assert plans(layout, Layout(mesh, layout.dims, layout.pending)) == () and moved(layout, layout) == 0


def layout(*entries: Sequence[str], pending: str = "", shape: tuple[int, ...] = (8, 8)) -> Layout:
    return from_entries(SQUARE, shape, [tuple(axes) for axes in entries], tuple(pending))


@pytest.mark.parametrize(
    ("source", "target", "steps", "elements"),
    [
        (layout("", ""), layout("xy", ""), ["slice"], 0),
        (layout("x", ""), layout("xy", ""), ["slice"], 0),
        (layout("x", ""), layout("x", "y"), ["slice"], 0),
        (layout("xy", ""), layout("x", ""), ["all_gather"], 16),
        (layout("xy", ""), layout("", ""), ["all_gather"], 48),
        (layout("xy", ""), layout("yx", ""), ["permute"], 16),
        (layout("x", "y"), layout("y", "x"), ["permute"], 16),
        (layout("x", ""), layout("y", ""), ["permute"], 32),
        (layout("x", ""), layout("", "x"), ["all_to_all"], 16),
        (layout("xy", ""), layout("", "xy"), ["all_to_all"], 12),
        (layout("xy", ""), layout("x", "y"), ["all_to_all"], 8),
        (layout("", "", pending="x"), layout("", ""), ["all_reduce"], 64),
        (layout("", "", pending="xy"), layout("", ""), ["all_reduce"], 96),
        (layout("", "", pending="x"), layout("x", ""), ["reduce_scatter"], 32),
        (layout("", "", pending="xy"), layout("xy", ""), ["reduce_scatter"], 48),
        (layout("", "", pending="xy"), layout("x", ""), ["reduce_scatter", "all_reduce"], 64),
        (layout("y", "", pending="x"), layout("y", "x"), ["reduce_scatter"], 16),
        (layout("", "", pending="xy"), layout("", "", pending="y"), ["all_reduce"], 64),
        (layout("", ""), layout("", "", pending="x"), ["mask"], 0),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_the_expected_steps(source: Layout, target: Layout, steps: list[str], elements: float):
    (plan,) = plans(source, target)
    assert [step.op for step in plan.steps] == steps and plan.moved == elements
    check(source, target)


def test_axes_are_reordered_by_one_permute_in_a_program():
    x = sp.shard(torch.arange(8.0), P(("y", "x")), mesh=SQUARE)
    move = sp.spmd_jit(lambda x: x, mesh=SQUARE, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    assert [(row.op, row.axes, row.bytes) for row in move.lower(x).collectives] == [("permute", ("x", "y"), 8)]
    assert [block.tolist() for block in move(x).shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
