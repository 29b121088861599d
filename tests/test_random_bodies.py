"""Random bodies under shard_map against the same computation on whole tensors: values and gradients, in both modes."""

from __future__ import annotations

import pytest
from mapped import same, whole
from random_bodies import Program, gradients


def check(seed: int, traced: bool) -> None:
    """The eager body against the whole, and the traced one against it, to the rounding of sums in another order."""
    program = Program(seed)
    got = whole("eager", gradients(program.mapped()), program.mesh)(*program.inputs)
    same(got, gradients(program.whole)(*program.inputs), 1e-9)
    if traced:
        same(whole("traced", gradients(program.mapped()), program.mesh)(*program.inputs), got, 1e-12)


@pytest.mark.parametrize("start", range(0, 300, 10))
def test_random_bodies(start: int):
    for seed in range(start, start + 10):
        check(seed, traced=seed % 6 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("start", range(300, 3300, 50))
def test_many_random_bodies(start: int):
    for seed in range(start, start + 50):
        check(seed, traced=seed % 3 == 0)
