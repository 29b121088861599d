"""Reads and writes through strides become views and writes of tensors that may be split."""

from __future__ import annotations

import random

import pytest
import torch
from sharded import moves, run_both
from test_trace_rewrites import MESH, C, N, X, draw, ops
from torch.func import grad

from spmdfn import P
from spmdfn.errors import TracingError

STRIDED = {
    "slice": ((2, 2), (C, 1), 1),
    "columns": ((N, 3), (C, 2), 1),
    "turned": ((3, 4), (1, C), 2),
    "row": ((C,), (1,), 2 * C),
    "column": ((N,), (C,), 3),
    "element": ((), (), 5),
    "diagonal": ((5,), (C + 1,), 6),
    "reshaped": ((4, 12), (12, 1), 0),
    "split": ((N, 2, 3), (C, 3, 1), 0),
    "split and turned": ((3, 2, N), (1, 3, C), 0),
    "merged": ((N * C,), (1,), 0),
    "run": ((2, 5), (5, 1), 7),
    "expanded": ((3, N, 2), (0, C, 1), 0),
    "windows": ((5, 3), (1, 1), 2),
    "odd": ((5, 2), (7, 2), 1),
    "rows apart": ((2, C), (3 * C, 1), C),
    "empty": ((0, 3), (1, 1), 0),
    "ones": ((1, 3, 1), (99, 2, 99), 4),
}
BASES = {
    "plain": lambda x: x,
    "turned": lambda x: x.t(),
    "computed": lambda x: x * 2,
    "computed and turned": lambda x: x.t() * 2,
    "slice": lambda x: x[1:],
    "copy of a slice": lambda x: x[:, 1:].t() + 0,
    "half": lambda x: x.split(N // 2)[1],
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_become_views(name, base):
    size, stride, offset = STRIDED[name]
    view = BASES[base]
    memory = view(X).untyped_storage().nbytes() // 8
    if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= memory:
        size = tuple(min(n, 1) for n in size)

    def read(x):
        return torch.as_strided(view(x), size, stride, offset)

    assert "as_strided" not in ops(read, X)
    for spec in (P("a"), P("a", "b"), P(None, "a")):
        _, error = run_both(read, MESH, (spec,), P(), (X,))
        assert error == 0, spec


@pytest.mark.parametrize("name", [n for n in STRIDED if n not in ("expanded", "windows")])
def test_writes_through_strides_become_writes(name):
    def write(x):
        y = x * 2
        y.as_strided(*STRIDED[name]).mul_(3)
        return y

    def back(x):
        return (torch.as_strided(x, *STRIDED[name]) ** 3).sum()

    for function in (write, grad(back), grad(lambda x: write(x).cos().sum())):
        assert not {"as_strided", "as_strided_scatter"} & ops(function, X)
        _, error = run_both(function, MESH, (P("a", "b"),), P("a"), (X,))
        assert error < 1e-12


def test_random_strides_against_torch():
    dice = random.Random(0)
    for _ in range(150):
        shape = [dice.randint(1, 5) for _ in range(dice.randint(1, 3))]
        x = draw(*shape)
        order = dice.sample(range(len(shape)), len(shape))
        size = [dice.randint(1, 4) for _ in range(dice.randint(0, 3))]
        stride = [dice.randint(0, 8) for _ in size]
        room = x.numel() - 1 - sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if room >= 0:
            offset = dice.randint(0, room)
            function = lambda x: torch.as_strided(x.permute(order), size, stride, offset)  # noqa: B023, E731
            assert "as_strided" not in ops(function, x)


def test_views_that_strides_only_renamed_move_nothing():
    program, error = run_both(lambda x: x.as_strided((N, 2, 3), (C, 3, 1)), MESH, (P("a", "b"),), None, (X,))
    assert error == 0 and moves(program) == []
    program, error = run_both(lambda x: x.as_strided((3, N), (1, C), 1), MESH, (P("a"),), P(None, "a"), (X,))
    assert error == 0 and moves(program) == []


def test_memory_outside_of_one_tensor_is_refused():
    with pytest.raises(TracingError, match="reads memory that is not that of one dense tensor") as caught:
        ops(lambda x: x.expand(3, N, C).contiguous().as_strided((2,), (1,), 3 * N * C), X)
    assert "slices" in str(caught.value) and "test_trace_strides.py" in str(caught.value)
