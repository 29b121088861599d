"""From one layout to another: which local slices and which collectives, and what they move.

Both layouts are first written over common factors, so that every block is a box and a step acts on one factor. Order:
free slices and reduce-scatters, all-reduce, all-to-all, all-gather, and the slices that had to wait for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ..layout import Axes, Dim, Layout, axes_of, join, size_of, split, whole
from ..mesh import Mesh


@dataclass(frozen=True)
class Step:
    """One slice, mask or collective. `dim` and `to_dim` count factors of the common shape; `moved` counts elements."""

    op: str  # "slice" "mask" "all_reduce" "reduce_scatter" "all_gather" "all_to_all" "permute"
    axes: Axes
    dim: int = 0
    to_dim: int = 0
    reduce: str = "sum"
    sources: tuple[int, ...] = ()
    moved: float = 0.0

    @property
    def is_collective(self) -> bool:
        return self.op not in ("slice", "mask")


@dataclass(frozen=True)
class Plan:
    """The steps from `source` to `target`; `start` is the local shape over common factors."""

    source: Layout
    target: Layout
    start: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def moved(self) -> float:
        """Elements moved per device."""
        return sum(step.moved for step in self.steps)


@cache
def plans(source: Layout, target: Layout) -> tuple[Plan, ...]:
    """The plans that lead from one layout to another, in order: usually one, none if they are equal."""
    if source is target:
        return ()
    common = [_common(a, b, source.mesh) for a, b in zip(source.dims, target.dims, strict=True)]
    if None in common:  # factors that do not align: those dims go through the whole
        dims = [whole(size_of(d)) if c is None else d for d, c in zip(source.dims, common, strict=True)]
        kept = [entry for entry in source.pending if entry in target.pending]
        # what waits to be reduced is so before the gather or after it, a reduce-scatter then
        stops = [[Layout(source.mesh, dims, source.pending)]]
        stops += [[Layout(source.mesh, source.dims, kept), Layout(source.mesh, dims, kept)]] * (
            len(kept) < len(source.pending)
        )
        routes = [_through([source, *middle, target]) for middle in stops]
        return min(routes, key=lambda route: sum(plan.moved for plan in route))
    now = [piece for pair in common if pair for piece in pair[0]]
    wanted = [piece for pair in common if pair for piece in pair[1]]
    return (_Planner(source, target, now, wanted).plan(),)


def _through(stops: Sequence[Layout]) -> tuple[Plan, ...]:
    return tuple(plan for source, target in pairwise(stops) for plan in plans(source, target))


def moved(source: Layout, target: Layout) -> float:
    """Elements that each device moves to get from one layout to another."""
    return sum(plan.moved for plan in plans(source, target))


def _common(a: Dim, b: Dim, mesh: Mesh) -> tuple[tuple[Dim, ...], tuple[Dim, ...]] | None:
    """Both dims over common factors, or None if their boundaries do not align."""
    if len(a) <= 1 and len(b) <= 1:
        return ((a,), (b,))
    if not axes_of(a) or not axes_of(b):
        sizes = [factor.size for factor in (b if not axes_of(a) else a)]
    else:
        edges = sorted({*_edges(a), *_edges(b)})
        if any(high % low for low, high in pairwise(edges)):
            return None
        sizes = [high // low for low, high in pairwise(edges)]
    first, second = split(a, sizes, mesh), split(b, sizes, mesh)
    if join(first, mesh) != a or join(second, mesh) != b:
        return None
    return first, second


def _edges(dim: Dim) -> list[int]:
    edges = [1]
    for factor in dim:
        edges.append(edges[-1] * factor.size)
    return edges


class _Planner:
    """The steps over common factors; `now[i]` are the axes of factor i, `local` the block's shape."""

    def __init__(self, source: Layout, target: Layout, now: Sequence[Dim], wanted: Sequence[Dim]):
        self.mesh, self.source, self.target = source.mesh, source, target
        self.now = [list(axes_of(dim)) for dim in now]
        self.wanted = [list(axes_of(dim)) for dim in wanted]
        self.local = [size_of(d) // self._n(axes_of(d)) for d in now]
        self.pending = {axis: op for axis, op in source.pending if (axis, op) not in target.pending}
        self.start = tuple(self.local)
        self.steps: list[Step] = []

    def plan(self) -> Plan:
        if not self._permute():
            self._slice_and_scatter()
            self._all_reduce()
            while self._slice_and_scatter() or self._all_to_all() or self._all_gather():
                pass
        new = tuple(axis for axis, op in self.target.pending if (axis, op) not in self.source.pending)
        if new:
            self.steps.append(Step("mask", new))
        return Plan(self.source, self.target, self.start, tuple(self.steps))

    def _n(self, axes: Sequence[str]) -> int:
        return self.mesh.axis_size(tuple(axes)) if axes else 1

    def _numel(self) -> int:
        numel = 1
        for size in self.local:
            numel *= size
        return numel

    def _next(self, i: int) -> list[str]:
        """The axes that factor i still has to get, if all it has now is right."""
        done = len(self.now[i])
        return self.wanted[i][done:] if self.now[i] == self.wanted[i][:done] else []

    def _extra(self, i: int) -> list[str]:
        """The minor axes that factor i has to give up."""
        same = 0
        while same < min(len(self.now[i]), len(self.wanted[i])) and self.now[i][same] == self.wanted[i][same]:
            same += 1
        return self.now[i][same:]

    def _slice_and_scatter(self) -> bool:
        before = len(self.steps)
        for i in range(len(self.now)):
            while axes := self._ready(i):
                n = self._n(axes)
                if axes[0] in self.pending:
                    self.steps.append(Step("reduce_scatter", axes, i, moved=(n - 1) / n * self._numel()))
                    for axis in axes:
                        del self.pending[axis]
                else:
                    self.steps.append(Step("slice", axes, i))
                self.now[i] += axes
                self.local[i] //= n
        return len(self.steps) > before

    def _ready(self, i: int) -> Axes:
        """The longest run of axes that factor i can take now, all by slicing or all by reduce-scatter."""
        used = {axis for axes in self.now for axis in axes}
        run: list[str] = []
        for axis in self._next(i):
            op = self.pending.get(axis)
            if axis in used or op in ("max", "min") or (run and (run[0] in self.pending) != (axis in self.pending)):
                break
            run.append(axis)
        return tuple(run)

    def _all_reduce(self) -> None:
        for op in sorted(set(self.pending.values())) if self._numel() else ():
            axes = tuple(axis for axis in self.mesh.axis_names if self.pending.get(axis) == op)
            n = self._n(axes)
            self.steps.append(Step("all_reduce", axes, reduce=op, moved=2 * (n - 1) / n * self._numel()))
        self.pending.clear()

    def _all_to_all(self) -> bool:
        for i in range(len(self.now)):
            extra = self._extra(i)
            for j in range(len(self.now)):
                wants = self._next(j)
                for count in range(len(extra), 0, -1):
                    axes = extra[-count:]
                    if j != i and wants[:count] == axes:
                        n = self._n(axes)
                        self.steps.append(Step("all_to_all", tuple(axes), j, i, moved=(n - 1) / n * self._numel()))
                        del self.now[i][-count:]
                        self.now[j] += axes
                        self.local[i] *= n
                        self.local[j] //= n
                        return True
        return False

    def _all_gather(self) -> bool:
        for i in range(len(self.now)):
            axes = self._extra(i)
            if axes:
                n = self._n(axes)
                self.steps.append(Step("all_gather", tuple(axes), i, moved=(n - 1) * self._numel()))
                del self.now[i][-len(axes) :]
                self.local[i] *= n
                return True
        return False

    def _permute(self) -> bool:
        """Same block shapes, other places: one exchange of whole blocks."""
        if self.pending or self.now == self.wanted:
            return False
        if any(self._n(a) != self._n(b) for a, b in zip(self.now, self.wanted, strict=True)):
            return False
        changed = [i for i in range(len(self.now)) if self.now[i] != self.wanted[i]]
        among = {axis for i in changed for axis in (*self.now[i], *self.wanted[i])}
        axes = tuple(axis for axis in self.mesh.axis_names if axis in among)
        self.steps.append(Step("permute", axes, sources=self._sources(axes, changed), moved=float(self._numel())))
        self.now = [list(axes) for axes in self.wanted]
        return True

    def _sources(self, axes: Axes, changed: Sequence[int]) -> tuple[int, ...]:
        """For every device of the group (mesh order), the one whose block it needs; no two need the same one's.

        Over axes that split nothing yet many have that block: those that split nothing any more tell them apart.
        """
        old = [axis for axis in axes if any(axis in self.now[i] for i in changed)]
        new = [axis for axis in axes if any(axis in self.wanted[i] for i in changed)]
        pairs: list[tuple[Sequence[str], Sequence[str]]] = [(self.wanted[i], self.now[i]) for i in changed]
        pairs.append(([axis for axis in old if axis not in new], [axis for axis in new if axis not in old]))
        sources = []
        for device in range(self._n(axes)):
            place = dict(zip(axes, self._digits(device, axes), strict=True))
            source: dict[str, int] = {}
            for mine, theirs in pairs:
                source.update(zip(theirs, self._digits(self._number(place, mine), theirs), strict=True))
            sources.append(self._number(source, axes))
        return tuple(sources)

    def _number(self, place: Mapping[str, int], axes: Sequence[str]) -> int:
        number = 0
        for axis in axes:
            number = number * self.mesh.shape[axis] + place[axis]
        return number

    def _digits(self, number: int, axes: Sequence[str]) -> list[int]:
        digits = []
        for axis in reversed(axes):
            number, digit = divmod(number, self.mesh.shape[axis])
            digits.append(digit)
        return digits[::-1]
