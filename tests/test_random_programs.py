"""Random programs of a dozen ops over random layouts: what one op at a time cannot show of memos, wishes and sums."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laid_out import CUBE, LINE, SQUARE, layouts, n
from torch.func import vmap
from versus import Table, case, told

import spmdfn as sp
from spmdfn import P

MESHES = [LINE, SQUARE, CUBE, sp.make_mesh((3, 2), ("x", "y")), sp.make_mesh((2, 6), ("x", "y"))]
N = 12
"""Every value is an (N, N) matrix: 2, 3, 4 and 6 divide it."""

UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.tanh,
    torch.sin,
    lambda x: x * 0.5,
    lambda x: x + 1,
    lambda x: -x,
    lambda x: x.t(),
    lambda x: x.t().reshape(N, N),
    lambda x: x.view(N // 2, 2, N).transpose(0, 1).reshape(N, N),
    lambda x: x.view(3, 4, N).transpose(0, 1).reshape(N, N),
    lambda x: x.view(N * N).view(2, N // 2, N).mean(0).repeat(2, 1),
    lambda x: x.view(4, 3, N).flip(0).flatten(0, 1),
    lambda x: x.softmax(1),
    lambda x: x.log_softmax(0) / 4,
    lambda x: x.cumsum(0) / N,
    lambda x: F.layer_norm(x, (N,)),
    lambda x: x - x.mean(0),
    lambda x: x / (1 + x.square().sum()),
    lambda x: x - x.logsumexp(1, keepdim=True),
    lambda x: x * (torch.arange(N)[:, None] >= torch.arange(N)),
    lambda x: torch.cat([x[:, N // 2 :], x[:, : N // 2]], 1),
    lambda x: x.flip(0).roll(3, 1),
    lambda x: x[torch.tensor([3, 1, 1, 7, 0, 2, 6, 5, 11, 11, 8, 4])],
    lambda x: x.clamp(-1, 1).abs(),
    lambda x: x.sum(0).expand(N, N) / N,
    lambda x: torch.stack([x[:, 1], *x.unbind(1)[1:]], 1),
    lambda x: F.pad(x[2:6], (0, 0, N - 5, 1)),
    lambda x: x.detach() * 0.25 + x,
    lambda x: vmap(lambda r: r - r.amax())(x),
    lambda x: torch.zeros_like(x).index_add(0, torch.tensor([0, 0, 5, 1, 2, 2, 7, 3, 11, 9, 9, 0]), x),
    lambda x: torch.fft.fft(x).real / N,  # no rule: gathered
]
BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x - 0.5 * y,
    lambda x, y: x * y.tanh(),
    lambda x, y: x @ y / N,
    lambda x, y: x @ y.t() / N,
    lambda x, y: F.linear(x, y, y[0]) / N,
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: (x.view(N, 3, 4).transpose(0, 1) @ y.view(3, 4, N)).mean(0) / 4,
    lambda x, y: torch.cat([x[:4], y[4:]]),
    lambda x, y: x + y.sum(1, keepdim=True) / N,
    lambda x, y: x * y.mean(),
    lambda x, y: torch.einsum("ij,kj->ik", x, y.tanh()) / N,
]


def random_program(seed: int, mesh: sp.Mesh) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function of three (N, N) matrices, plain and with values pinned here and there."""
    choose = random.Random(seed)
    steps: list[tuple[Callable[..., torch.Tensor], list[int], P | None]] = []
    for place in range(3, 3 + choose.randint(5, 12)):
        # later values are the likelier operands; now and then all of them are
        pick = lambda place=place: max(choose.randrange(place), choose.randrange(place))  # noqa: E731
        op: Any = choose.choice(UNARY) if choose.random() < 0.5 else choose.choice(BINARY)
        settled = [spec for spec in layouts(torch.empty(N, N), mesh) if not spec.unreduced]
        pin = choose.choice(settled) if choose.random() < 0.15 else None
        steps.append((op, [pick() for _ in range(2 if op in BINARY else 1)], pin))
    results = sorted({len(steps) + 2, choose.randrange(3, len(steps) + 3)})

    def run(pinned: bool, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for op, operands, pin in steps:
            value = op(*[values[operand] for operand in operands])
            values.append(sp.constrain(value, pin) if pinned and pin is not None else value)
        return [values[place] for place in results] + [values[-1].square().sum()]

    return (lambda a, b, c: run(False, a, b, c)), (lambda a, b, c: run(True, a, b, c))


def check(seed: int, mesh: sp.Mesh, count: int) -> None:
    plain, pinned = random_program(seed, mesh)
    table = Table(case(f"program {seed}", plain, n(N, N), n(N, N), n(N, N)))
    table.case = table.case._replace(function=pinned)
    outs = [None, *layouts(torch.empty(N, N), mesh)]
    choose = random.Random(seed)
    told(
        table.check(specs, mesh, out)
        for specs, out in zip(table.random(mesh, count), choose.choices(outs, k=count), strict=True)
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_random_programs(seed: int, mesh: sp.Mesh):
    check(seed, mesh, 4)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_programs(seed: int):
    for mesh in MESHES:
        check(seed, mesh, 6)
