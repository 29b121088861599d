"""What partitioning costs grows with the number of ops, not of devices. Counted in calls of functions: no noise."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

import spmdfn as sp
import spmdfn.jit
from spmdfn import P


def calls_after_tracing(monkeypatch, function, mesh, in_specs, out_specs, args) -> int:
    """The calls that partitioning makes: a measure without noise. Run twice, since rules are remembered."""
    after = spmdfn.jit.lower
    counts: list[int] = []

    def counted(*given, **options):
        profile = cProfile.Profile()
        result = profile.runcall(after, *given, **options)
        result.program.as_text()
        counts.append(pstats.Stats(profile).total_calls)
        return result

    monkeypatch.setattr(spmdfn.jit, "lower", counted)
    for _ in range(2):
        sp.spmd_jit(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs).lower(*args)
    monkeypatch.undo()
    return counts[-1]


def step(params, x):
    """A deep residual network and a momentum step."""

    def loss(weights):
        y = x
        for up, down in weights:
            y = y + F.gelu(F.layer_norm(y, y.shape[-1:]) @ up) @ down
        return y.square().mean()

    grads = grad(loss)([layer[:2] for layer in params])
    new = []
    for (up, down, m, n), (du, dd) in zip(params, grads, strict=True):
        m, n = 0.9 * m + du, 0.9 * n + dd
        new.append((up - 0.1 * m, down - 0.1 * n, m, n))
    return new


def calls_of_step(monkeypatch, layers: int, shape: tuple[int, int, int]) -> int:
    mesh = sp.make_mesh(shape, ("dp", "fsdp", "tp"), backend="fake")
    up, down = torch.empty(512, 2048, device="meta"), torch.empty(2048, 512, device="meta")
    params = [(up, down, up, down)] * layers
    specs = [(P("fsdp", "tp"), P("tp", "fsdp")) * 2] * layers
    args = (params, torch.empty(65536, 512, device="meta"))
    return calls_after_tracing(monkeypatch, step, mesh, (specs, P(("dp", "fsdp"))), specs, args)


def test_partitioning_is_linear_in_depth(monkeypatch):
    few, some, many = (calls_of_step(monkeypatch, layers, (2, 2, 2)) for layers in (2, 4, 8))
    assert (many - some) / 4 < 1.15 * (some - few) / 2


def test_partitioning_does_not_depend_on_the_number_of_devices(monkeypatch):
    small, large = (calls_of_step(monkeypatch, 2, shape) for shape in ((2, 2, 2), (16, 16, 64)))
    assert large < 1.1 * small


def free_chain(n):
    def function(x):
        y = torch.arange(8.0)
        for _ in range(n):
            y = y * 0.5 + y
        return x, y

    return function


def pending_chain(n):
    def function(x):
        y = x.sum(0)
        for _ in range(n):
            y = y * 0.5 + y
        return y

    return function


def fan_out(n):
    def function(x):
        ys = [x.sum(0) * (i + 1.0) for i in range(n)]
        return sum(ys), [y.sin() for y in ys]

    return function


def shared_scalar(n):
    def function(x):
        scale = x.square().sum()
        return [x * (scale + i) for i in range(n)]

    return function


def growing(n):
    def function(x):
        for _ in range(n):
            y = x[0].expand(8, 8)
            x = sum(((y + j).sin() for j in range(4)), x)
        return x

    return function


@pytest.mark.parametrize("make", [free_chain, pending_chain, fan_out, shared_scalar, growing])
@pytest.mark.parametrize("spec", [P("a"), P()])
def test_graphs_of_awkward_shape(monkeypatch, make, spec):
    mesh, x = sp.make_mesh((2, 2), ("a", "b"), backend="fake"), torch.empty(8, 8, device="meta")
    small, large = (calls_after_tracing(monkeypatch, make(n), mesh, spec, None, (x,)) for n in (8, 24))
    assert large < 3.3 * small
