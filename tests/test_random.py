"""The random core: values, blocks, keys, transforms, errors."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import numba
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from spmdfn import threefry as core
from spmdfn.errors import SpecError
from spmdfn.threefry import blocks, floats, hash, kernel, ops

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "jax_prng.json").read_text())
BITS = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BLOCKS = [
    *((blocks.block_bits, dtype) for dtype in BITS),
    *((blocks.block_uniform, dtype) for dtype in FLOATS),
    *((blocks.block_normal, dtype) for dtype in FLOATS),
]


def name_of(value):
    return getattr(value, "__name__", str(value).removeprefix("torch."))


def bits_of(tensor):
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def ulps(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    return (bits_of(got).to(torch.int64) - bits_of(want).to(torch.int64)).abs()


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("seed", [0, 42])
def test_goldens(seed):
    key = core.key(seed)

    def golden(name, rest):
        return GOLDENS[f"{name}({seed},{rest})"]

    assert key.tolist() == GOLDENS[f"key({seed})"]
    assert core.split(key, 3).tolist() == golden("split", "3")
    assert core.fold_in(key, 7).tolist() == golden("fold_in", "7")
    for width in (8, 16, 32):
        assert core.bits(key, (2, 3), getattr(torch, f"uint{width}")).tolist() == golden(f"bits{width}", "(2,3)")
    assert core.uniform(key, (2, 3)).tolist() == golden("uniform", "(2,3)")
    assert core.uniform(key, (4,), torch.bfloat16).tolist() == golden("uniform", "(4,),bf16")
    assert core.uniform(key, (4,), torch.float16).tolist() == golden("uniform", "(4,),f16")
    assert core.normal(key, (4,), torch.bfloat16).tolist() == golden("normal", "(4,),bf16")
    assert ulps(core.normal(key, (4,)), torch.tensor(golden("normal", "(4,)"))).max() <= 3
    assert core.bernoulli(key, 0.3, (6,)).int().tolist() == golden("bernoulli", "0.3,(6,)")
    assert core.randint(key, (6,), -5, 12).tolist() == golden("randint", "(6,),-5,12")
    assert core.randint(key, (6,), 0, 256, torch.uint8).tolist() == golden("randint", "(6,),0,256,uint8")
    assert core.permutation(key, 7).tolist() == golden("permutation", "7")


@pytest.mark.parametrize("seed", [0, 42, 1099511627779])
def test_goldens_of_64_bits(seed):
    key = core.key(seed)
    assert key.tolist() == GOLDENS[f"x64 key({seed})"]
    words = core.bits(key, (3,), torch.uint64)
    assert [str(word) for word in words.tolist()] == GOLDENS[f"x64 bits64({seed},(3,))"]
    assert core.uniform(key, (3,), torch.float64).tolist() == GOLDENS[f"x64 uniform({seed},(3,),f64)"]
    want = GOLDENS[f"x64 normal({seed},(3,),f64)"]
    torch.testing.assert_close(core.normal(key, (3,), torch.float64).tolist(), want, rtol=1e-14, atol=0)
    got = core.randint(key, (3,), 0, 10**12, torch.int64)
    assert got.tolist() == GOLDENS[f"x64 randint({seed},(3,),0,10**12,i64)"]


@pytest.mark.parametrize(
    ("key", "counter", "want"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_the_hash(key, counter, want):
    words = [torch.tensor(word, dtype=torch.int64) for word in (*key, *counter)]
    got = hash.threefry(*map(hash.low_word, words))
    assert tuple(int(word) & hash.LOW for word in got) == want
    if counter[0] < 1 << 31:  # counters are int64
        counter = counter[0] << 32 | counter[1]
        assert tuple(blocks.block_threefry(torch.tensor(key, dtype=torch.uint32), (), (), counter).tolist()) == want


def test_signed_bits_are_the_unsigned_ones():
    for width in (8, 16, 32, 64):
        signed, unsigned = getattr(torch, f"int{width}"), getattr(torch, f"uint{width}")
        key = core.key(5)
        assert torch.equal(core.bits(key, (99,), signed), core.bits(key, (99,), unsigned).view(signed))


def test_statistics():
    key, n = core.key(11), 200_000
    for dtype in (torch.float32, torch.float64):
        u, z = core.uniform(key, (n,), dtype), core.normal(key, (n,), dtype)
        assert u.min() >= 0 and u.max() < 1
        assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * n) and abs(u.var() - 1 / 12) < 1e-3
        assert abs(z.mean()) < 4 / math.sqrt(n) and abs(z.var() - 1) < 4 * math.sqrt(2 / n)
        assert abs((z**4).mean() - 3) < 0.15
    assert abs(core.bernoulli(key, 0.3, (n,)).double().mean() - 0.3) < 4 * math.sqrt(0.21 / n)
    counts = torch.bincount(core.randint(key, (n,), 0, 7))
    assert len(counts) == 7 and (counts - n / 7).abs().max() < 4 * math.sqrt(n / 7)
    assert core.permutation(key, 5000).sort().values.equal(torch.arange(5000))


# ------------------------------------------------------------------------------------------------ blocks


BOXES = [
    ((), (), 0),
    ((5,), (1,), 3),
    ((3000,), (1,), 0),
    ((7, 5), (5, 1), 0),
    ((2, 3, 4, 5), (600, 7, 40, 1), 13),
    ((3, 1, 700), (10_000, 1, 3), 2**32 - 1500),  # the counter's high word changes inside a run
    ((2, 40), (2**31, 2**27), 2**33 - 2**30),
    ((0, 4), (4, 1), 0),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=name_of)
def test_kernels_are_the_torch_form_to_the_bit(block, dtype, box, monkeypatch):
    for key in (core.key(3), core.split(core.key(4), (2, 3)), core.split(core.key(4), (2, 3))[:, 1]):
        got = block(key, *box, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "kernels", lambda: None)
            want = block(key, *box, dtype)
        assert got.shape == want.shape == (*key.shape[:-1], *box[0]) and got.is_contiguous()
        assert got.dtype == want.dtype == dtype and torch.equal(bits_of(got), bits_of(want))


def test_tails_of_normal_are_the_torch_form_to_the_bit():
    for dtype, run in ((torch.float32, "normal32"), (torch.float64, "normal64")):
        step = torch.finfo(dtype).eps
        small = torch.arange(3000, dtype=dtype) * step
        u = torch.cat([small, 1 - step - small, torch.linspace(0, 1 - step, 100_001, dtype=dtype), 0.5 + small])
        want = floats.normal_from_uniform(u)
        getattr(blocks.kernels().floats, run)(u.numpy())
        assert torch.equal(u, want) and u.isfinite().all()


def test_new_keys_of_kernels_are_the_torch_form(monkeypatch):
    keys, data = core.split(core.key(1), 6), torch.tensor([0, 1, -1, 2**31, 2**32 - 1, 2**40 + 3])
    got = blocks.block_threefry(keys, (3, 2), (9, 4), 2**32 - 10), blocks.fold(keys, data)
    monkeypatch.setattr(blocks, "kernels", lambda: None)
    want = blocks.block_threefry(keys, (3, 2), (9, 4), 2**32 - 10), blocks.fold(keys, data)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=name_of)
def test_a_block_is_the_slice_of_the_whole(block, dtype):
    key, shape = core.key(6), (6, 10, 8)
    whole = block(key, shape, ops.row_major(shape), 0, dtype)
    for splits in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 8)):
        sizes = [n // k for n, k in zip(shape, splits, strict=True)]
        for at in itertools.product(*map(range, splits)):
            offsets = [place * size for place, size in zip(at, sizes, strict=True)]
            base = sum(offset * stride for offset, stride in zip(offsets, (80, 8, 1), strict=True))
            got = block(key, sizes, (80, 8, 1), base, dtype)
            want = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert torch.equal(bits_of(got), bits_of(want.contiguous()))


@pytest.mark.parametrize(("block", "dtype"), BLOCKS, ids=name_of)
def test_a_block_of_several_factors(block, dtype):
    """Dims (2 3 4) and (4 2), the outer and inner pieces split and the middle whole."""
    key = core.key(6)
    whole = block(key, (24, 8), (8, 1), 0, dtype).reshape(2, 3, 4, 4, 2)
    for a, c, e in itertools.product(range(2), range(2), range(2)):
        got = block(key, (1, 3, 2, 4, 1), (96, 32, 8, 2, 1), a * 96 + c * 2 * 8 + e, dtype)
        assert torch.equal(bits_of(got), bits_of(whole[a : a + 1, :, 2 * c : 2 * c + 2, :, e : e + 1].contiguous()))


def test_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmdfn.threefry.kernel", None)
    monkeypatch.delattr(sys.modules["spmdfn.threefry"], "kernel")
    assert blocks.kernels.__wrapped__() is None


def test_without_a_place_for_the_cache(monkeypatch):
    compile_ = numba.njit

    def njit(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(**options)

    monkeypatch.setattr(numba, "njit", njit)
    assert kernel.jit(lambda x: x + 1)(1) == 2


# ------------------------------------------------------------------------------------------------ keys


def test_keys_from_seeds():
    assert core.key(2**32 + 5).tolist() == [1, 5]
    assert core.key(2**64 - 1).tolist() == core.key(-1).tolist() == [2**32 - 1, 2**32 - 1]
    assert torch.equal(core.key(torch.tensor(2**40 + 7)), core.key(2**40 + 7))
    assert torch.equal(core.key(torch.tensor(-3)), core.key(-3))


def test_split_and_fold_in():
    key = core.key(8)
    assert torch.equal(core.split(key, 8)[:4], core.split(key, 4))
    assert torch.equal(core.split(key, (2, 4)), core.split(key, 8).reshape(2, 4, 2))
    assert torch.equal(core.split(key), core.split(key, 2)) and core.split(key, ()).shape == (2,)
    assert torch.equal(torch.stack([core.fold_in(key, i) for i in range(5)]), core.split(key, 5))
    assert torch.equal(core.fold_in(key, torch.arange(5)), core.split(key, 5))
    assert torch.equal(core.fold_in(key, torch.tensor(2**32 - 1)), core.fold_in(key, 2**32 - 1))
    assert torch.equal(core.fold_in(key, torch.tensor(3, dtype=torch.uint8)), core.fold_in(key, 3))
    keys = core.split(key, (3, 1))
    grid = core.fold_in(keys, torch.arange(4))
    assert grid.shape == (3, 4, 2) and torch.equal(grid[2, 1], core.fold_in(keys[2, 0], 1))
    words = core.bits(key, (5,), torch.uint64).view(torch.uint32).reshape(5, 2)  # low word first in memory
    assert core.split(key, 5).tolist() == [[high, low] for low, high in words.tolist()]


def test_a_batch_of_keys():
    keys = core.split(core.key(2), (2, 3))
    for draw in (
        lambda key: core.normal(key, (4, 5)),
        lambda key: core.uniform(key, 6, minval=-1),
        lambda key: core.randint(key, (7,), 0, 11),
        lambda key: core.bernoulli(key, torch.tensor([0.2, 0.8])),
        lambda key: core.permutation(key, 9),
        lambda key: core.permutation(key, torch.arange(12).reshape(6, 2)),
        lambda key: core.split(key, 3),
        lambda key: core.fold_in(key, 3),
    ):
        rows = torch.stack([torch.stack([draw(key) for key in row]) for row in keys])
        assert torch.equal(draw(keys), rows)
        assert torch.equal(torch.vmap(torch.vmap(draw))(keys), rows)
        assert torch.equal(torch.vmap(draw, in_dims=1, out_dims=1)(keys), rows)


# ------------------------------------------------------------------------------------------------ parameters


def test_uniform_bounds():
    key = core.key(3)
    x = core.uniform(key, (1000,), minval=-2, maxval=5)
    assert -2 <= x.min() < -1.9 and 4.9 < x.max() < 5
    ends = torch.tensor([[0.0], [10.0]]), torch.tensor([[1.0], [30.0]])
    y = core.uniform(key, (2, 500), torch.float32, *ends)
    assert y[0].max() < 1 and y[1].min() >= 10 and y[1].max() < 30
    assert torch.equal(
        core.uniform(key, (9,), torch.float32, torch.tensor(-2.0), 5), core.uniform(key, (9,), minval=-2, maxval=5)
    )
    assert torch.equal(core.uniform(key, (9,), maxval=1.0), core.uniform(key, (9,)))


def test_bernoulli_and_randint_parameters():
    key = core.key(3)
    assert core.bernoulli(key).shape == () and core.bernoulli(key, torch.rand(3, 1), (3, 4)).shape == (3, 4)
    assert core.bernoulli(key, 0.0, (99,)).sum() == 0 and core.bernoulli(key, 1.0, (99,)).all()
    assert core.randint(key, (5,), 3, 3).tolist() == core.randint(key, (5,), 3, -3).tolist() == [3] * 5
    for dtype in BITS:
        info = torch.iinfo(dtype)
        top = int(info.max) if dtype != torch.uint64 else 2**64 - 1
        draws = core.randint(key, (500,), top - 1, top + 1, dtype)
        assert draws.dtype == dtype and set(draws.tolist()) == {top - 1, top}
    low, high = torch.tensor([0, 10, -7]), torch.tensor([5, 20, -6])
    draws = core.randint(key, (400, 3), low, high)
    assert (draws >= low).all() and (draws < high).all() and draws[:, 2].eq(-7).all()
    assert torch.equal(core.randint(key, (9,), 0, torch.tensor(1000)), core.randint(key, (9,), 0, 1000))
    wide = core.randint(key, (9,), -(2**62), 2**62 + 5, torch.int64)
    ends = torch.tensor(-(2**62)), torch.tensor(2**62 + 5)
    assert torch.equal(core.randint(key, (9,), *ends, torch.int64), wide)


def test_permutation_of_rows():
    key, x = core.key(3), torch.randn(50, 2)
    assert torch.equal(core.permutation(key, x), x[core.permutation(key, 50)])
    assert core.permutation(key, 0).tolist() == [] and core.permutation(key, 1).tolist() == [0]
    assert core.permutation(key, 4).dtype == torch.int64
    assert core.permutation(key, core.split(key, 4)).dtype == torch.uint32


# ------------------------------------------------------------------------------------------------ transforms


def targets(f, *args):
    graph = make_fx(f, tracing_mode="fake")(*args)
    assert torch.equal(graph(*args), f(*args))
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("draw", "count"),
    [
        (lambda key: core.uniform(key, (3, 4)), 1),
        (lambda key: core.uniform(key, (3, 4), torch.bfloat16, -1, 2), 4),
        (lambda key: core.uniform(key, (3, 4), minval=-1), 4),
        (lambda key: core.uniform(key, (3, 4), minval=-1, maxval=2), 6),
        (lambda key: core.normal(key, (3, 4)), 1),
        (lambda key: core.bits(key, (3, 4)), 1),
        (lambda key: core.bernoulli(key, 0.3, (3, 4)), 2),
        (lambda key: core.split(key, 3), 1),
        (lambda key: core.fold_in(key, 3), 1),
        (lambda key: core.randint(key, (3, 4), 0, 256), 8),
        (lambda key: core.randint(key, (3, 4), 0, 10), 18),
        (lambda key: core.permutation(key, 12), 8),
    ],
)
def test_traces_are_short_and_stay_so_under_vmap(draw, count):
    assert len(targets(draw, core.key(3))) == count
    assert len(targets(torch.vmap(draw), core.split(core.key(3), 4))) == count


def test_vmap_over_other_things():
    key = core.key(3)
    xs = torch.arange(4.0)
    same = torch.vmap(lambda x, key: core.normal(key, (3,)) * x, (0, None))
    assert torch.equal(same(xs, key), core.normal(key, (3,)) * xs[:, None])
    assert targets(same, xs, key).count("spmdfn.random_normal.default") == 1
    assert torch.equal(torch.vmap(lambda i: core.fold_in(key, i))(torch.arange(4)), core.split(key, 4))
    keys = core.split(key, 4)
    paired = torch.vmap(core.fold_in)(keys, torch.arange(4))
    assert torch.equal(paired[2], core.fold_in(keys[2], 2))
    bounds = torch.vmap(lambda high: core.uniform(key, (3,), maxval=high))(1 + xs)
    assert torch.equal(bounds[1], core.uniform(key, (3,), maxval=torch.tensor(2.0)))
    shuffled = torch.vmap(lambda key, x: core.permutation(key, x))(keys, torch.arange(20).reshape(4, 5))
    assert torch.equal(shuffled[3], core.permutation(keys[3], torch.arange(15, 20)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # from torch's own jvp
def test_grad():
    key = core.key(3)
    w = torch.tensor([1.0, 2.0, 3.0])
    noise = torch.func.grad(lambda w, key: (w * core.normal(key, (3,))).sum())
    assert torch.equal(noise(w, key), core.normal(key, (3,)))
    keys = core.split(key, 4)
    mean = torch.func.grad(lambda w, keys: torch.vmap(lambda key: w * core.bernoulli(key, 0.5, (3,)))(keys).sum())
    want = torch.stack([core.bernoulli(key, 0.5, (3,)) for key in keys]).sum(0).float()
    assert torch.equal(mean(w, keys), want)
    assert torch.equal(torch.vmap(noise, (None, 0))(w, keys), torch.vmap(lambda key: core.normal(key, (3,)))(keys))
    for dtype in FLOATS:
        ends = torch.tensor([-1.0, 3.0], dtype=dtype)
        slope = torch.func.grad(lambda e, key: core.uniform(key, (9,), e.dtype, e[0], e[1]).sum())(ends, key)
        u = core.uniform(key, (9,), dtype)
        assert slope.dtype == dtype
        torch.testing.assert_close(slope.double(), torch.stack([(1 - u).sum(), u.sum()]).double(), rtol=0.02, atol=1e-2)
    _, tangent = torch.func.jvp(lambda a: a * core.uniform(key, (3,)), (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert torch.equal(tangent, core.uniform(key, (3,)))
    assert torch.func.hessian(lambda a: (core.normal(key, ()) * a**2).sum())(torch.tensor(2.0)) == 2 * core.normal(key)


def test_fake_and_meta_keys_have_shapes():
    with torch.device("meta"):
        key = torch.empty(4, 2, dtype=torch.uint32)
    assert core.normal(key, (3,)).shape == (4, 3) and core.split(key, 5).shape == (4, 5, 2)
    assert blocks.block_uniform(key, (3, 2), (2, 1), 5, torch.bfloat16).shape == (4, 3, 2)


def test_draws_ignore_the_default_device():
    key = core.key(3)
    with torch.device("meta"):
        assert core.normal(key, (3,)).device.type == core.bits(key, (3,), torch.uint8).device.type == "cpu"
        assert core.uniform(key, (3,), torch.float16).device.type == core.split(key).device.type == "cpu"


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: core.key(0.5), ["seed must be an integer", "float 0.5", "sp.random.key(0)"]),
        (lambda: core.key(torch.tensor(0.5)), ["seed must be an integer", "torch.float32"]),
        (lambda: core.key(2**64), ["seed", str(2**64), "64 bits"]),
        (lambda: core.normal(7, (3,)), ["random.normal", "not a key", "the int 7", "sp.random.key(7)"]),
        (lambda: core.uniform(torch.zeros(2), (3,)), ["random.uniform", "key", "torch.float32", "sp.random.key(seed)"]),
        (lambda: core.split(torch.zeros(3, dtype=torch.uint32)), ["random.split", "key", "(3,)", "(..., 2)"]),
        (lambda: core.bits("a"), ["random.bits", "key", "str 'a'", "sp.random.key(seed)"]),
        (lambda: core.fold_in(core.key(0), -1), ["random.fold_in", "-1", "negative", "2**32 - 1"]),
        (lambda: core.fold_in(core.key(0), 2**32), ["random.fold_in", str(2**32), "fold in twice"]),
        (lambda: core.fold_in(core.key(0), 1.5), ["random.fold_in", "float 1.5", "integer"]),
        (lambda: core.fold_in(core.key(0), torch.tensor(1.5)), ["random.fold_in", "torch.float32", "integer"]),
        (lambda: core.normal(core.key(0), (2, -3)), ["random.normal", "(2, -3)", "negative"]),
        (lambda: core.normal(core.key(0), (2.5,)), ["random.normal", "(2.5,)", "ints"]),
        (lambda: core.normal(core.key(0), (2,), torch.int32), ["random.normal", "torch.int32", "torch.float32"]),
        (lambda: core.bits(core.key(0), (2,), torch.float32), ["random.bits", "torch.float32", "torch.uint32"]),
        (lambda: core.randint(core.key(0), (2,), 0, 5, torch.float32), ["random.randint", "torch.float32"]),
        (lambda: core.randint(core.key(0), (2,), 0, 5.5), ["random.randint", "5.5", "int"]),
        (lambda: core.randint(core.key(0), (2,), 0, torch.tensor(5.5)), ["random.randint", "torch.float32"]),
        (lambda: core.bernoulli(core.key(0), torch.tensor(1)), ["random.bernoulli", "torch.int64"]),
        (lambda: core.bernoulli(core.key(0), torch.rand(3), (2,)), ["random.bernoulli", "(3,)", "(2,)", "broadcast"]),
        (lambda: core.uniform(core.key(0), (2,), maxval=torch.rand(3)), ["random.uniform", "(3,)", "(2,)"]),
        (lambda: core.permutation(core.key(0), torch.tensor(3)), ["random.permutation", "()"]),
        (lambda: core.permutation(core.key(0), [1, 2]), ["random.permutation", "[1, 2]", "tensor"]),
        (lambda: core.permutation(core.key(0), -1), ["random.permutation", "-1", "negative"]),
    ],
)
def test_errors(call, words):
    with pytest.raises(SpecError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
