"""Random numbers in a map: equal for devices that share a key, others by fold_in, blocks of a global draw by spec=."""

from __future__ import annotations

import pytest
import torch
from mapped import CUBE, LINE, MODES, SQUARE, mapped, same, whole
from torch.func import grad, vmap

import spmdfn as sp
from spmdfn import P

KEY = sp.random.key(42)
SAMPLERS = {
    "normal": lambda key, shape, **o: sp.random.normal(key, shape, **o),
    "uniform bf16": lambda key, shape, **o: sp.random.uniform(key, shape, torch.bfloat16, -1, 3, **o),
    "bernoulli": lambda key, shape, **o: sp.random.bernoulli(key, 0.3, shape, **o),
    "randint": lambda key, shape, **o: sp.random.randint(key, shape, 0, 100, **o),
    "bits": lambda key, shape, **o: sp.random.bits(key, shape, **o),
}
both_modes = pytest.mark.parametrize("mode", MODES)


@both_modes
def test_an_invariant_key_gives_every_device_the_same_numbers(mode: str):
    draw = lambda key: (sp.random.normal(key, (3,)), sp.random.split(key, 3), sp.random.permutation(key, 5))  # noqa: E731
    same(mapped(mode, draw, LINE, P(), P())(KEY), draw(KEY))
    f = lambda key, w: grad(lambda w: (sp.random.normal(key, (3,)) * w).sum())(w)  # noqa: E731
    same(mapped(mode, f, LINE, P(), P())(KEY, torch.ones(3)), sp.random.normal(KEY, (3,)))


@both_modes
def test_folding_the_index_in_gives_each_device_its_own(mode: str):
    x = torch.arange(4.0)
    for body in (
        lambda key, x: x + sp.random.normal(sp.random.fold_in(key, sp.axis_index("i")), (1,)),
        lambda key, x: x + sp.random.normal(sp.random.fold_in(KEY, sp.axis_index("i")), (1,)),  # closed over
    ):
        want = torch.cat([sp.random.normal(sp.random.fold_in(KEY, i), (1,)) for i in range(4)]) + x
        same(mapped(mode, body, LINE, (P(), P("i")), P("i"))(KEY, x), want)
    own = lambda keys: sp.random.normal(keys[0], (1,))  # noqa: E731
    same(mapped(mode, own, LINE, P("i"), P("i"))(sp.random.split(KEY, 4)), want - x, 1e-6)
    later = lambda key: sp.random.bits(sp.random.fold_in(sp.random.split(key)[0], sp.axis_index("i")), (1,))  # noqa: E731
    key = sp.random.split(KEY)[0]
    want = torch.cat([sp.random.bits(sp.random.fold_in(key, i), (1,)) for i in range(4)])
    same(mapped(mode, later, LINE, P(), P("i"))(KEY), want)


@both_modes
def test_pcast_says_that_equal_samples_are_meant(mode: str):
    x = torch.arange(4.0)
    body = lambda key, x: x + sp.pcast(sp.random.normal(key, (1,)), "i", to="varying")  # noqa: E731
    same(mapped(mode, body, LINE, (P(), P("i")), P("i"))(KEY, x), x + sp.random.normal(KEY, (1,)))
    total = lambda key, x: sp.psum(x, "i") + sp.random.normal(key, (1,))  # noqa: E731
    same(mapped(mode, total, LINE, (P(), P("i")), P())(KEY, x), x.sum() + sp.random.normal(KEY, (1,)))


@both_modes
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_draw_with_spec_is_this_devices_block_of_the_global_one(mode: str, name: str):
    draw = SAMPLERS[name]
    for mesh, spec in ((LINE, P("i")), (LINE, P(None, "i")), (SQUARE, P(("y", "x"))), (CUBE, P("z", ("x", "y")))):
        body = lambda key, spec=spec: draw(key, (4, 8), spec=spec)  # noqa: E731
        same(mapped(mode, body, mesh, P(), spec)(KEY), draw(KEY, (4, 8)))
    body = lambda key: draw(key, (8, 3), spec="(y b) d")  # noqa: E731
    same(mapped(mode, body, SQUARE, P(), P("y"))(KEY), draw(KEY, (8, 3)))
    same(mapped(mode, lambda key: draw(key, (4,), spec=P()), LINE, P(), P())(KEY), draw(KEY, (4,)))


@both_modes
def test_a_draw_with_spec_under_transforms(mode: str):
    w = torch.tensor([0.5, -1.0])
    block = lambda key: sp.random.normal(key, (4, 2), spec=P("i"))  # noqa: E731
    loss = lambda w, key=KEY: sp.psum((w * block(key)).sum(), "i")  # noqa: E731
    want = sp.random.normal(KEY, (4, 2)).sum(0)
    same(mapped(mode, grad(loss), LINE, P(), P())(w), want, 1e-6)
    same(whole(mode, grad(sp.shard_map(loss, mesh=LINE, in_specs=P(), out_specs=P())), LINE)(w), want, 1e-6)
    keys = sp.random.split(KEY, 3)
    same(mapped(mode, vmap(block), LINE, P(), P(None, "i"))(keys), vmap(lambda k: sp.random.normal(k, (4, 2)))(keys))
    draw = lambda low, **o: sp.random.uniform(KEY, (4, 2), torch.float32, low, 2.0, **o)  # noqa: E731
    bound = lambda low: sp.psum(draw(low, spec=P("i")).sum(), "i")  # noqa: E731
    same(mapped(mode, grad(bound), LINE, P(), P())(w), grad(lambda low: draw(low).sum())(w), 1e-6)


def test_a_draw_with_spec_in_a_map_over_some_axes():
    body = lambda key, x: x * sp.random.normal(key, (4, 2), spec=P("x"))  # noqa: E731
    f = sp.shard_map(body, mesh=SQUARE, in_specs=(P(), P("x")), out_specs=P("x"), axis_names={"x"})
    jitted = sp.spmd_jit(f, mesh=SQUARE, in_specs=(P(), P("x", "y")), out_specs=P("x", "y"))
    same(jitted(KEY, torch.ones(4, 2)).unshard(), sp.random.normal(KEY, (4, 2)))
    assert jitted.lower(KEY, torch.ones(4, 2)).collectives == ()


def test_a_traced_draw_with_spec_computes_this_devices_block_only():
    f = sp.shard_map(lambda k: sp.random.normal(k, (64,), spec=P("i")), mesh=LINE, in_specs=P(), out_specs=P("i"))
    text = sp.spmd_jit(f, mesh=LINE, out_specs=P("i")).lower(KEY).as_text()
    assert "64" not in text.replace("f64", "") and "16" in text, text
