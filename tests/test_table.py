"""Every case of the table over every layout of its inputs, against the plain function: values and gradients."""

from __future__ import annotations

import itertools
import random

import pytest
from laid_out import CUBE, LINE, SQUARE, specs_of, word
from table import CASES
from versus import Case, Table, told

from spmdfn import P

ENOUGH, MOST = 10, 250
"""How many combinations of layouts `make test` tries for one case on one mesh, and how many a long sweep does."""

cases = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@cases
def test_layouts(case: Case):
    table = Table(case)
    told(table.check(specs, LINE) for specs in _some([*table.plain(LINE), *table.same(LINE)]))
    told(table.check(specs, SQUARE) for specs in _some([*table.pending(SQUARE), *table.random(SQUARE, case.samples)]))
    told(table.check(specs, CUBE) for specs in table.random(CUBE, max(1, case.samples // 3)))
    outs = table.outs(LINE)
    told(table.check(specs, LINE, out) for specs, out in zip(table.random(LINE, len(outs)), outs, strict=True))
    _free(table)
    _cheap(table)


def _some(found: list[list[P]]) -> list[list[P]]:
    """No layout twice; a model of many inputs gets a fixed choice of them."""
    once = [list(specs) for specs in dict.fromkeys(map(tuple, found))]
    return once if len(once) <= ENOUGH else random.Random(0).sample(once, ENOUGH)


def _free(table: Table) -> None:
    """Layouts that must cost nothing."""
    case = table.case
    written = [word for word in case.free.split(" ") if word != "each"] if case.free else []
    layouts = [(specs_of(word, len(case.inputs)), SQUARE) for word in written]
    if "each" in case.free:
        layouts += [(specs, LINE) for specs in table.same(LINE)]
    for specs, mesh in layouts:
        rows = table.forward_rows(specs, mesh)
        assert not rows, f"{', '.join(map(word, specs))} costs {[(r.op, r.axes, r.bytes, r.why) for r in rows]}"
    if "each" in case.free and len({value.shape for value in table.args}) == 1:
        for specs in table.same(LINE):  # element by element, backward too
            rows = table.rows([*specs, *specs[:1] * len(table.cotangents)], LINE)
            assert not rows, f"{word(specs[0])} costs {[(r.op, r.axes, r.bytes, r.why) for r in rows]}"


def _cheap(table: Table) -> None:
    """Layouts under which no collective gathers the operand, not even half of it."""
    case = table.case
    for text in case.cheap.split():
        specs = specs_of(text, len(case.inputs))
        operand = case.inputs[0]
        limit = operand.numel() * operand.element_size() * 3 / 4 / 2
        for row in table.rows(specs, LINE):
            assert row.bytes < limit, f"{text}: {row.op} of {row.bytes} bytes, limit {limit}, {row.why}"


@pytest.mark.sweep
@cases
def test_every_layout(case: Case):
    table = Table(case)
    for mesh in (LINE, SQUARE):
        told(table.check(specs, mesh) for specs in itertools.chain(table.product(mesh, MOST), table.same(mesh)))
        told(table.check(specs, mesh, out) for out in table.outs(mesh) for specs in table.random(mesh, 4))
    told(table.check(specs, CUBE) for specs in table.random(CUBE, 20))
