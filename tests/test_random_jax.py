"""The samplers against JAX itself, over many shapes, dtypes, seeds and bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmdfn import threefry as core

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

SEEDS = [0, 42, 2**32 - 1]
SHAPES = [(), (7,), (2, 0, 3), (33, 65), (4, 3, 2, 5)]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["bfloat16", "float16", "float32", "float64"]


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def words(value) -> np.ndarray:
    """The bits of a JAX or a torch array."""
    if isinstance(value, torch.Tensor):
        size = value.element_size()
        return value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy()
    value = np.asarray(value)
    return value.view(f"i{value.dtype.itemsize}")


def same(got, want):
    np.testing.assert_array_equal(words(got), words(want))


@pytest.mark.parametrize("seed", SEEDS)
def test_keys(seed):
    ours, theirs = core.key(seed), jax.random.key(seed)
    same(ours, jax.random.key_data(theirs))
    for num in (1, 2, 9, (2, 3), ()):
        same(core.split(ours, num), jax.random.key_data(jax.random.split(theirs, num)))
    for data in (0, 1, 7, 2**31, 2**32 - 1):
        same(core.fold_in(ours, data), jax.random.key_data(jax.random.fold_in(theirs, data)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_bits_and_uniform(seed, shape):
    ours, theirs = core.key(seed), jax.random.key(seed)
    for name in ("uint8", "uint16", "uint32", "uint64"):
        same(core.bits(ours, shape, getattr(torch, name)), jax.random.bits(theirs, shape, name))
    for name in FLOATS:
        same(core.uniform(ours, shape, getattr(torch, name)), jax.random.uniform(theirs, shape, name))


@pytest.mark.parametrize("bounds", [(-1, 1), (0, 3), (-2.7, 1.3), (1e-3, 1e3), (-1e4, -9.9e3), (0.1, 0.3), (2, -1)])
@pytest.mark.parametrize("name", FLOATS)
def test_uniform_bounds(name, bounds):
    got = core.uniform(core.key(5), (4096,), getattr(torch, name), *bounds)
    want = jax.random.uniform(jax.random.key(5), (4096,), name, *bounds)
    same(got, want)
    ends = [torch.full((4096,), end, dtype=getattr(torch, name)) for end in bounds]
    same(core.uniform(core.key(5), (4096,), getattr(torch, name), *ends), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_normal(seed):
    for name, share, ulps in (("bfloat16", 1, 0), ("float16", 0.999, 1), ("float32", 0.95, 3)):
        got = core.normal(core.key(seed), (50_000,), getattr(torch, name))
        want = words(jax.random.normal(jax.random.key(seed), (50_000,), name)).astype(np.int64)
        off = np.abs(words(got).astype(np.int64) - want)
        assert off.max() <= ulps and (off == 0).mean() >= share, (name, off.max(), (off == 0).mean())
    want = np.asarray(jax.random.normal(jax.random.key(seed), (50_000,), "float64"))
    np.testing.assert_allclose(core.normal(core.key(seed), (50_000,), torch.float64).numpy(), want, rtol=1e-13)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli(p):
    ours, theirs = core.key(8), jax.random.key(8)
    same(core.bernoulli(ours, p, (999,)), jax.random.bernoulli(theirs, np.float32(p), (999,)))
    for name in FLOATS:
        shared = np.linspace(0, 1, 60, dtype=np.float64).reshape(3, 1, 20)
        tensor = torch.from_numpy(shared).to(getattr(torch, name))
        want = jax.random.bernoulli(theirs, jnp.asarray(shared).astype(name), (3, 4, 20))
        same(core.bernoulli(ours, tensor, (3, 4, 20)), want)
        same(core.bernoulli(ours, tensor), jax.random.bernoulli(theirs, jnp.asarray(shared).astype(name)))


def spans(name):
    info = np.iinfo(name)
    low, high = int(info.min), int(info.max)
    return [(0, 10), (0, 1), (0, 64), (low, high), (low, high + 1), (high - 3, high + 1), (5, 5), (7, 2), (0, high)] + [
        (low // 3 - 1, high // 3 * 2) if low else (high // 5, high // 7 * 6)
    ]


@pytest.mark.parametrize("name", INTS)
def test_randint(name):
    ours, theirs = core.key(13), jax.random.key(13)
    dtype, info = getattr(torch, name), np.iinfo(name)
    for low, high in spans(name):
        low = max(low, int(info.min))
        if high > 2**63 - 1 and name in ("int64", "uint64") and high == int(info.max) + 1:
            continue  # no JAX integer holds that bound
        kind = np.uint64 if name == "uint64" else np.int64
        want = jax.random.randint(theirs, (5, 77), kind(low), kind(high), name)
        same(core.randint(ours, (5, 77), low, high, dtype), want)
        if high <= 2**63 - 1:
            ends = [torch.full((77,), end, dtype=torch.int64) for end in (low, high)]
            same(core.randint(ours, (5, 77), *ends, dtype), want)
            same(core.randint(ours, (5, 77), low, ends[1], dtype), want)


@pytest.mark.parametrize("count", [0, 1, 2, 17, 1625, 1626, 5000])
def test_permutation(count):
    ours, theirs = core.key(21), jax.random.key(21)
    same(core.permutation(ours, count), jax.random.permutation(theirs, count))
    rows = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    same(core.permutation(ours, torch.from_numpy(rows)), jax.random.permutation(theirs, rows))
    same(core.permutation(ours, torch.from_numpy(rows[:, 0])), jax.random.permutation(theirs, rows[:, 0]))


def test_vmap_over_keys():
    ours, theirs = core.split(core.key(4), 6), jax.random.split(jax.random.key(4), 6)
    same(
        torch.vmap(lambda key: core.uniform(key, (3, 4)))(ours),
        jax.vmap(lambda key: jax.random.uniform(key, (3, 4), "float32"))(theirs),
    )
    same(
        torch.vmap(lambda key: core.randint(key, (9,), 0, 1000))(ours),
        jax.vmap(lambda key: jax.random.randint(key, (9,), 0, 1000, "int32"))(theirs),
    )
    same(
        torch.vmap(lambda key: core.permutation(key, 40))(ours),
        jax.vmap(lambda key: jax.random.permutation(key, 40))(theirs),
    )
