"""Random small bodies for shard_map, each next to the same computation on whole tensors.

Every value in a body is a block of shape (8, 4). On the whole it is a `Family`: one block for each place along the axes
over which it varies. So a value that devices share is one tensor there, and its gradient is a sum without further ado.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from collective_table import TABLE
from mapped import MESHES
from torch.func import grad, jvp, vmap

import spmdfn as sp
from spmdfn import P

Tensor = torch.Tensor
Axes = tuple[str, ...]
ROWS, COLUMNS = 8, 4


@dataclass
class Family:
    """A value on all devices: a block for every place along `axes`, which are in the mesh's order."""

    mesh: sp.Mesh
    axes: Axes
    blocks: dict[tuple[int, ...], Tensor]

    def at(self, place: dict[str, int]) -> Tensor:
        return self.blocks[tuple(place[axis] for axis in self.axes)]


def ordered(mesh: sp.Mesh, axes: Any) -> Axes:
    return tuple(axis for axis in mesh.axis_names if axis in axes)


def places(mesh: sp.Mesh, axes: Axes) -> list[dict[str, int]]:
    """All places along some axes, the first axis major."""
    ranges = [range(mesh.shape[axis]) for axis in axes]
    return [dict(zip(axes, place, strict=True)) for place in itertools.product(*ranges)]


def local(mesh: sp.Mesh, function: Callable[..., Tensor], *families: Family) -> Family:
    """A function of blocks, on every device: the result varies as its operands do together."""
    axes = ordered(mesh, {axis for family in families for axis in family.axes})
    blocks = {tuple(p.values()): function(*[family.at(p) for family in families]) for p in places(mesh, axes)}
    return Family(mesh, axes, blocks)


def together(family: Family, name: str, over: Axes) -> Family:
    """A collective of the table."""
    mesh, row = family.mesh, TABLE[name]
    axes = ordered(mesh, {*family.axes, *over})
    rest = tuple(axis for axis in axes if axis not in over)
    blocks = {}
    for fixed in places(mesh, rest):
        group = [{**fixed, **place} for place in places(mesh, over)]
        for place, result in zip(group, row.whole([family.at(place) for place in group]), strict=True):
            blocks[tuple(place[axis] for axis in axes)] = result
    if row.equal:
        blocks = {
            tuple(p.values()): blocks[tuple({**dict.fromkeys(axes, 0), **p}.values())] for p in places(mesh, rest)
        }
        axes = rest
    return Family(mesh, axes, blocks)


def shaped(x: Tensor, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """What a collective gave, as a block again."""
    n = rows * columns
    x = x.reshape(-1, n).sum(0) if x.numel() >= n else x.flatten().repeat(n // x.numel())
    return torch.tanh(x.reshape(rows, columns) / 2)


# ---------------------------------------------------------------- steps: in a body, and on the whole

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda x: x * x / 2,
    lambda x: x.softmax(1),
    lambda x: x - x.mean(0),
    lambda x: torch.nn.functional.layer_norm(x, (COLUMNS,)),
    lambda x: x.t().reshape(ROWS, COLUMNS),
    lambda x: x.cumsum(0) / 4,
    lambda x: x.flip(1) + 1,
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: torch.cat([x[4:], x[:4]]),
    lambda x: x.detach() / 2 + x,
    lambda x: x * torch.arange(4),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    lambda x, y: x - 0.5 * y,
    lambda x, y: x * y,
    lambda x, y: torch.tanh(x @ y.t() @ x / 8),
    lambda x, y: torch.tanh(x @ y[:4]),
    lambda x, y: x / (1 + y.square()),
    lambda x, y: torch.stack([x, y.cos()]).mean(0),
    lambda x, y: torch.where(x > y, x, y.sin()),
    lambda x, y: torch.einsum("ij,kj->ik", x, y)[:, :4] / 4,
]
COLLECTIVES = [name for name in TABLE if name not in ("axis_index", "pcast", "ppermute none")]


@dataclass(frozen=True)
class Step:
    """One step: what is done, to which earlier values, by which collective over which axes."""

    kind: str
    operands: tuple[int, ...]
    function: Any
    collective: str = ""
    over: Axes = ()
    cast: Axes = ()

    def in_body(self, *xs: Tensor) -> Tensor:
        run = lambda x: TABLE[self.collective].body(sp.pcast(x, self.cast) if self.cast else x, self.over)  # noqa: E731
        if self.kind == "local":
            return self.function(*xs)
        if self.kind == "collective":
            return shaped(run(xs[0]))
        if self.kind == "vmap":
            return vmap(lambda c: shaped(run(wide(c)), ROWS, 1)[:, 0], in_dims=1, out_dims=1)(xs[0])
        if self.kind == "jvp":
            return sum(jvp(lambda x: shaped(run(x.sin())), (xs[0],), (xs[0].cos(),)))  # type: ignore[return-value]

        def loss(x: Tensor) -> Tensor:
            result = self.function(shaped(run(x.sin())), xs[1]).sum()
            axes = sp.typeof(result).partition("V:")[2].rstrip("}")
            return sp.psum(result, tuple(axes.split(","))) if axes else result

        return grad(loss)(xs[0])

    def on_whole(self, *xs: Family) -> Family:
        mesh = xs[0].mesh
        if self.kind == "local":
            return local(mesh, self.function, *xs)
        run = lambda x: together(x, self.collective, self.over)  # noqa: E731
        if self.kind == "collective":
            return local(mesh, shaped, run(xs[0]))
        if self.kind == "vmap":
            columns = [run(local(mesh, lambda x, i=i: wide(x[:, i]), xs[0])) for i in range(COLUMNS)]
            return local(mesh, lambda *cs: torch.cat([shaped(c, ROWS, 1) for c in cs], 1), *columns)

        def along(blocks: dict[Any, Tensor]) -> Family:
            return local(mesh, shaped, run(local(mesh, torch.sin, Family(mesh, xs[0].axes, blocks))))

        if self.kind == "jvp":
            blocks = xs[0].blocks
            tangents = {place: block.cos() for place, block in blocks.items()}
            value, tangent = jvp(lambda blocks: along(blocks).blocks, (blocks,), (tangents,))
            return Family(mesh, along(blocks).axes, {place: value[place] + tangent[place] for place in value})

        def loss(blocks: dict[Any, Tensor]) -> Tensor:
            return sum(block.sum() for block in local(mesh, self.function, along(blocks), xs[1]).blocks.values())  # type: ignore[return-value]

        return Family(mesh, xs[0].axes, grad(loss)(xs[0].blocks))


def wide(column: Tensor) -> Tensor:
    return torch.stack([column, column.cos()], 1)


# ---------------------------------------------------------------- bodies


class Program:
    """A random body over a random mesh with random specs, and the function of whole tensors that it amounts to."""

    def __init__(self, seed: int):
        choose = self.choose = random.Random(seed)
        self.mesh = MESHES[choose.choice(["1", "2", "4", "2x2", "2x2", "2x2x2"])]
        self.entries = [self._entries(choose.choice([0, 1, 1, 2, 3])) for _ in range(3)]
        types = [frozenset(axis for axes in entry for axis in axes) for entry in self.entries]
        self.steps: list[Step] = []
        for _ in range(choose.randint(3, 6)):
            self.steps.append(self._step(types))
        used = {place for step in self.steps for place in step.operands}
        rest = tuple(place for place in range(len(types)) if place not in used)
        self.steps.append(Step("local", rest, lambda *xs: sum(x.sin() for x in xs)))  # every input counts
        types.append(frozenset().union(*(types[place] for place in rest)))
        self.results = sorted({len(types) - 1, choose.randrange(3, len(types))})
        self.outs = [self._out(types[place]) for place in self.results]
        numbers = torch.Generator().manual_seed(seed)
        shapes = [self._whole_shape(entry) for entry in self.entries]
        self.inputs = [torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes]

    def _entries(self, count: int) -> tuple[Axes, Axes]:
        """Axes for the two dims of a block: so many of the mesh's, in any order."""
        axes = self.choose.sample(self.mesh.axis_names, min(count, len(self.mesh.axis_names)))
        cut = self.choose.randint(0, len(axes))
        return tuple(axes[:cut]), tuple(axes[cut:])

    def _whole_shape(self, entries: tuple[Axes, Axes]) -> list[int]:
        sizes = [self.mesh.axis_size(axes) if axes else 1 for axes in entries]
        return [ROWS * sizes[0], COLUMNS * sizes[1]]

    def _step(self, types: list[frozenset[str]]) -> Step:
        choose = self.choose
        pick = lambda: max(choose.randrange(len(types)), choose.randrange(len(types)))  # noqa: E731
        kind = choose.choice(["local", "local", "collective", "collective", "vmap", "grad", "jvp"])
        if kind == "local":
            if choose.random() < 0.4:
                step = Step(kind, (pick(),), choose.choice(UNARY))
            else:
                step = Step(kind, (pick(), pick()), choose.choice(BINARY))
            types.append(frozenset().union(*(types[place] for place in step.operands)))
            return step
        name = choose.choice([n for n in COLLECTIVES if kind != "vmap" or n != "ragged_all_to_all"])
        axes = self.mesh.axis_names
        over = tuple(choose.sample(axes, choose.randint(1, len(axes))))
        place = pick()
        cast = tuple(axis for axis in over if axis not in types[place])
        step = Step(kind, (place, pick()) if kind == "grad" else (place,), choose.choice(BINARY), name, over, cast)
        if kind == "grad":
            types.append(types[place])
        elif TABLE[name].equal:
            types.append(types[place] - set(over))
        else:
            types.append(types[place] | set(over))
        return step

    def _out(self, varying: frozenset[str]) -> tuple[Axes, Axes]:
        """Axes for a result: all over which it varies, and now and then one more, in any order."""
        spare = [axis for axis in self.mesh.axis_names if axis not in varying]
        axes = [*sorted(varying), *(spare[:1] if self.choose.random() < 0.3 else [])]
        self.choose.shuffle(axes)
        cut = self.choose.randint(0, len(axes))
        return tuple(axes[:cut]), tuple(axes[cut:])

    def body(self, *blocks: Tensor) -> list[Tensor]:
        values = list(blocks)
        for step in self.steps:
            values.append(step.in_body(*[values[place] for place in step.operands]))
        return [values[place] for place in self.results]

    def mapped(self) -> Callable[..., list[Tensor]]:
        specs = [P(*[axes or None for axes in entry]) for entry in self.entries]
        outs = [P(*[axes or None for axes in entry]) for entry in self.outs]
        return sp.shard_map(self.body, mesh=self.mesh, in_specs=tuple(specs), out_specs=outs)

    def whole(self, *inputs: Tensor) -> list[Tensor]:
        values = [self._cut(x, entry) for x, entry in zip(inputs, self.entries, strict=True)]
        for step in self.steps:
            values.append(step.on_whole(*[values[place] for place in step.operands]))
        return [self._joined(values[place], entry) for place, entry in zip(self.results, self.outs, strict=True)]

    def _cut(self, x: Tensor, entries: tuple[Axes, Axes]) -> Family:
        axes = ordered(self.mesh, {*entries[0], *entries[1]})
        blocks = {}
        for place in places(self.mesh, axes):
            row, column = (self._number(place, one) for one in entries)
            blocks[tuple(place.values())] = x[row * ROWS : (row + 1) * ROWS, column * COLUMNS : (column + 1) * COLUMNS]
        return Family(self.mesh, axes, blocks)

    def _number(self, place: dict[str, int], axes: Axes) -> int:
        number = 0
        for axis in axes:
            number = number * self.mesh.shape[axis] + place[axis]
        return number

    def _joined(self, family: Family, entries: tuple[Axes, Axes]) -> Tensor:
        rows, columns = (places(self.mesh, axes) for axes in entries)
        return torch.cat([torch.cat([family.at({**row, **column}) for column in columns], 1) for row in rows])


def gradients(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Any]:
    """Gradients of a loss of the results with regard to every input, and the results."""

    def loss(*inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        results = list(function(*inputs))
        ramps = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
        return sum((r * ramp).sum() for r, ramp in zip(results, ramps, strict=True)), results  # type: ignore[return-value]

    return grad(loss, argnums=(0, 1, 2), has_aux=True)
