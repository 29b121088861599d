"""The lines of the table, and what runs one: a function over laid-out inputs against the plain function."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import optree
import torch
from laid_out import is_smooth, lay_out, layouts, word

import spmdfn as sp
from spmdfn import P


class Case(NamedTuple):
    """One line of the table.

    diff     the inputs that are differentiated
    free     layouts of the inputs under which the values must cost no collective: words as above, commas between
             inputs, spaces between layouts; "each" is every dim, the same one in all inputs that have it
    cheap    layouts under which no collective, forward or backward, may move half as much as a gather of input 0 would
    close    the tolerance, relative to the largest value
    samples  how many random combinations `make test` tries on each mesh
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    diff: tuple[int, ...]
    free: str = ""
    cheap: str = ""
    close: float = 1e-10
    samples: int = 2


def case(name: str, function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> Case:
    """A line of the table; all floating and complex inputs are differentiated unless `diff` says otherwise."""
    smooth = tuple(i for i, value in enumerate(inputs) if is_smooth(value))
    return Case(name, function, inputs, options.pop("diff", smooth), **options)


class Table:
    """One case, traced once a mesh: every layout of its inputs costs a partition and a small run."""

    def __init__(self, case: Case):
        self.case = case
        leaves = _tensors(case.function(*case.inputs))
        smooth = [value for value in leaves if is_smooth(value)] if case.diff else []
        self.cotangents = [_cotangent(value, i) for i, value in enumerate(smooth)]
        self.args = (*case.inputs, *self.cotangents)
        self.wanted = self._both(*self.args)
        self.traces: dict[Any, Any] = {}
        self.jitted = self._jit(None)
        self.values = sp.spmd_jit(case.function)

    def _jit(self, out_specs: Any) -> Any:
        jitted = sp.spmd_jit(self._both, out_specs=out_specs)
        jitted._traces = self.traces  # one trace serves every out spec
        return jitted

    def _both(self, *args: torch.Tensor) -> Any:
        """The values, and the gradients for the cotangents."""
        count, diff = len(self.case.inputs), self.case.diff
        inputs, cotangents = args[:count], args[count:]
        if not cotangents:
            return _tensors(self.case.function(*inputs)), [], []

        def part(*moving: torch.Tensor) -> Any:
            given = list(inputs)
            for place, value in zip(diff, moving, strict=True):
                given[place] = value
            found = _tensors(self.case.function(*given))
            return [v for v in found if is_smooth(v)], [v for v in found if not is_smooth(v)]

        values, pull, rest = torch.func.vjp(part, *[inputs[place] for place in diff], has_aux=True)
        return values, rest, list(pull(list(cotangents)))

    def arrays(self, specs: Sequence[P], mesh: sp.Mesh) -> list[Any]:
        """The inputs, and the cotangents: whole unless there are specs for them too."""
        specs = [*specs, *[P()] * (len(self.args) - len(specs))]
        return [lay_out(value, spec, mesh) for value, spec in zip(self.args, specs, strict=True)]

    def check(self, specs: Sequence[P], mesh: sp.Mesh, out: P | None = None) -> str | None:
        """What is wrong under a layout (and one of the first value), or None."""
        label = f"{mesh.size}: " + ", ".join(map(word, specs))
        if out is not None:
            label += " -> " + word(out)
        jitted = self.jitted if out is None else self._jit(self._out_specs(out))
        try:
            got = jitted(*self.arrays(specs, mesh))
        except Exception as error:  # told with its layout, after the others have been tried
            return f"{label}\n    {type(error).__name__}: {str(error)[:400]}"
        wrong = _difference(got, self.wanted, self.case.close)
        return f"{label}\n    {wrong}" if wrong else None

    def rows(self, specs: Sequence[P], mesh: sp.Mesh) -> Any:
        """The collectives of values and gradients."""
        return self.jitted.lower(*self.arrays(specs, mesh)).collectives

    def forward_rows(self, specs: Sequence[P], mesh: sp.Mesh) -> Any:
        """The collectives of the values alone."""
        inputs = [lay_out(value, spec, mesh) for value, spec in zip(self.case.inputs, specs, strict=True)]
        return self.values.lower(*inputs).collectives

    # which layouts

    def plain(self, mesh: sp.Mesh) -> Iterator[list[P]]:
        """One input split or pending, the others whole."""
        count = len(self.case.inputs)
        for place, value in enumerate(self.case.inputs):
            for spec in layouts(value, mesh):
                if len([axes for axes in spec.entries if axes]) + len(spec.unreduced) == 1:
                    yield [spec if i == place else P() for i in range(count)]

    def pending(self, mesh: sp.Mesh) -> Iterator[list[P]]:
        """One input a pending sum over the last axis or over all, the others whole; and all inputs at once."""
        able = [value.dtype != torch.bool for value in self.case.inputs]
        for axes in (mesh.axis_names[-1:], mesh.axis_names):
            alone = [
                [P(unreduced=axes if i == place else ()) for i in range(len(able))]
                for place, yes in enumerate(able)
                if yes
            ]
            yield from [*alone, [P(unreduced=axes if yes else ()) for yes in able]]

    def same(self, mesh: sp.Mesh) -> Iterator[list[P]]:
        """Every dim of the first input, split in all inputs that have it."""
        first = self.case.inputs[0]
        for dim in range(first.ndim):
            if first.shape[dim] % mesh.size == 0:
                spec = P(*[None] * dim, mesh.axis_names)
                has = [v.ndim == first.ndim and v.shape[dim] == first.shape[dim] for v in self.case.inputs]
                yield [spec if yes else P() for yes in has]

    def random(self, mesh: sp.Mesh, count: int) -> Iterator[list[P]]:
        """Random combinations; every other one lays the cotangents out as well."""
        choose = random.Random(f"{self.case.name} {mesh.size}")
        every = [layouts(value, mesh) for value in self.args]
        inputs = len(self.case.inputs)
        for i in range(count):
            yield [choose.choice(specs) for specs in (every if i % 2 else every[:inputs])]

    def product(self, mesh: sp.Mesh, most: int) -> Iterator[list[P]]:
        """Every combination of the inputs' layouts, or `most` random ones if there are more."""
        every = [layouts(value, mesh) for value in self.case.inputs]
        total = 1
        for specs in every:
            total *= len(specs)
        yield from map(list, itertools.product(*every)) if total <= most else self.random(mesh, most)

    def outs(self, mesh: sp.Mesh) -> list[P]:
        """The layouts of the first value with one dim split."""
        value = next(iter(_tensors(self.wanted)))
        return [spec for spec in layouts(value, mesh) if not spec.unreduced and any(spec.entries)]

    def _out_specs(self, spec: P) -> Any:
        values, rest, gradients = self.wanted
        flat = [spec] + [None] * (len(values) + len(rest) - 1)
        return flat[: len(values)], flat[len(values) :], [None] * len(gradients)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _cotangent(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Multiples of 1/4 of mixed sign and size."""
    numbers = torch.Generator().manual_seed(seed + value.ndim)
    shape = (*value.shape, 2) if value.is_complex() else value.shape
    found = torch.randint(-9, 14, shape, generator=numbers).to(value.real.dtype if value.is_complex() else value.dtype)
    return torch.view_as_complex(found / 4) if value.is_complex() else found / 4


def _difference(got: Any, wanted: Any, close: float) -> str | None:
    groups = zip(("value", "other value", "gradient"), got, wanted, strict=True)
    for group, found, right in groups:
        if len(found) != len(right):
            return f"{len(found)} {group}s, wanted {len(right)}"
        for place, (array, want) in enumerate(zip(found, right, strict=True)):
            value = array.unshard()
            if (value.shape, value.dtype) != (want.shape, want.dtype):
                return f"{group} {place} is {value.dtype}{list(value.shape)}, wanted {want.dtype}{list(want.shape)}"
            if not is_smooth(want):
                if not torch.equal(value, want):
                    return f"{group} {place} is {value.tolist()}, wanted {want.tolist()}"[:600]
                continue
            finite = want.abs().nan_to_num(0, 0, 0)
            scale = max(1.0, finite.max().item()) if want.numel() else 1.0
            if not torch.allclose(value, want, rtol=0, atol=close * scale, equal_nan=True):
                worst = (value - want).abs().nan_to_num(0).max().item() / scale
                first = value.flatten()[:8].tolist(), want.flatten()[:8].tolist()
                return f"{group} {place} is off by {worst:.3g}: {first[0]}, wanted {first[1]}"
    return None


def told(problems: Iterable[str | None]) -> None:
    """Fail with the first few problems, if there are any."""
    found = [problem for problem in problems if problem is not None]
    assert not found, f"{len(found)} layouts are wrong\n" + "\n".join(found[:6])
