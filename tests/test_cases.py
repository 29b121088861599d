"""Wrong results that users of other systems reported, each with its family: the same kind of op, the same layout."""

# ruff: noqa: E501 (a family a block)
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from laid_out import lay_out, spec_of
from torch.func import grad, vjp
from versus import Table, case, told

import spmdfn as sp
from spmdfn import P

PAIR = sp.make_mesh((2,), ("x",))
FOUR = sp.make_mesh((4,), ("x",))
GRID = sp.make_mesh((2, 2), ("dp", "tp"))


def run(function, *inputs, mesh=PAIR):
    """The function over inputs given as (tensor, word of a layout)."""
    arrays = [lay_out(value, spec_of(word), mesh) for value, word in inputs]
    return sp.unshard(sp.spmd_jit(function)(*arrays))


def pending(*pieces):
    """A pending sum of these pieces on two devices."""
    shards = [torch.tensor(piece, dtype=torch.float64) for piece in pieces]
    return sp.Array.from_shards(shards, P(unreduced={"x"}), PAIR)


def agrees(function, *inputs, words, mesh=PAIR, **options):
    """Values and gradients of a function under several layouts of its inputs."""
    table = Table(case("", function, *inputs, **options))
    told(table.check([spec_of(word) for word in layout.split(",")], mesh) for layout in words.split())


# ---------------------------------------------------------------- pending sums


def test_pytorch_163193_a_scalar_is_added_once():
    x = torch.arange(10.0)
    assert run(lambda x: x.sum() + 10, (x, "x")).item() == 55


@pytest.mark.parametrize(
    "after",
    [
        lambda s: 10 + s, lambda s: s - 10, lambda s: 10 - s, lambda s: s.add(10, alpha=2), lambda s: s + torch.tensor(10.0),
        lambda s: torch.stack([s, s + 10]), lambda s: s * 2 + 10, lambda s: -(s + 10), lambda s: s.clone().add_(10),
        lambda s: s + s.new_ones(3), lambda s: torch.lerp(s, s.new_full((), 10), 0.5), lambda s: torch.where(s > 0, s + 10, s),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda x: x @ x, lambda x: (x * 2).sum()])
def test_pytorch_163193_family(reduce, after):
    x = torch.arange(10.0, dtype=torch.float64) - 3
    agrees(lambda x: after(reduce(x)), x, words="x +x")


def test_pytorch_162692_mean_divides_by_the_whole_count():
    x = torch.arange(12.0).reshape(3, 4)
    assert run(torch.mean, (x, "-x")).item() == 5.5
    assert run(torch.mean, (torch.arange(12.0).reshape(4, 3), "x-")).item() == 5.5


@pytest.mark.parametrize(
    "function", [torch.mean, torch.var, torch.std, torch.median, lambda x: x.mean(1), lambda x: x.var(0)]
)
def test_pytorch_162692_family(function):
    agrees(function, torch.arange(12.0, dtype=torch.float64).reshape(2, 6) ** 2, words="x- -x +x")


def test_pytorch_159856_norm_of_a_pending_sum():
    assert sp.spmd_jit(torch.linalg.vector_norm)(pending([1, 3], [2, 1])).item() == 5


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, float("inf"), -1])
def test_pytorch_159856_family(order):
    x = torch.tensor([3.0, -4.0, 1.0, 2.0], dtype=torch.float64)
    agrees(lambda x: torch.linalg.vector_norm(x, order), x, words="x +x")
    agrees(lambda x: F.normalize(x.reshape(2, 2), p=2), x, words="x +x")


def test_pytorch_157340_functions_of_a_pending_sum():
    x = pending([1, 2], [3, 4])
    assert sp.spmd_jit(torch.square)(x).unshard().tolist() == [16, 36]
    assert sp.spmd_jit(lambda x: x * 10)(x).unshard().tolist() == [40, 60]
    assert sp.spmd_jit(lambda x: 10 / x)(x).unshard().tolist() == pytest.approx([2.5, 10 / 6])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x, lambda x: x / 4, lambda x: x.reciprocal(), lambda x: x**2, lambda x: x.exp(), lambda x: x.abs(),
        lambda x: x.clamp(-1, 5), lambda x: x.relu(), lambda x: x.int(), lambda x: x > 4, lambda x: x == 4, lambda x: x.max(),
        lambda x: x.amin(), lambda x: torch.maximum(x, -x), lambda x: x.sign(), lambda x: x.sqrt(), lambda x: x // 3,
        lambda x: x % 3, lambda x: x * x.sum(), lambda x: x @ x, lambda x: torch.outer(x, x), lambda x: x.prod(),
        lambda x: x.cumsum(0), lambda x: x.sort()[0], lambda x: x.softmax(0), lambda x: x.bool(), lambda x: -x, lambda x: x + x,
        lambda x: torch.addcmul(x, x, x), lambda x: x.float().double(), lambda x: F.pad(x, (1, 1), value=3.0),
        lambda x: F.linear(x, x.new_ones(3, 2), x.new_ones(3)), lambda x: torch.cat([x, x.new_ones(2)]),
    ],
)  # fmt: skip
def test_pytorch_157340_family(function):
    x = pending([1, -2], [3, 9])
    want = function(torch.tensor([4.0, 7.0], dtype=torch.float64))
    torch.testing.assert_close(sp.spmd_jit(function)(x).unshard(), want, rtol=1e-12, atol=1e-12)


def test_a_sum_that_stays_linear_is_reduced_once():
    x = pending([1, 2], [3, 4])
    for function in (lambda x: x * 10, lambda x: (x / 4).reshape(1, 2), lambda x: -x + 2 * x, lambda x: x[1:].flip(0)):
        assert [row.op for row in sp.spmd_jit(function).lower(x).collectives] == ["all_reduce"]


# ---------------------------------------------------------------- reductions of a split dim


def test_pytorch_168940_indices_are_global():
    x = torch.tensor([[1.0, 5, 2, 9], [7, 0, 3, 4]])
    values, indices = run(lambda x: x.max(1), (x, "-x"))
    assert values.tolist() == [9, 7] and indices.tolist() == [3, 0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.max(1), lambda x: x.min(1), lambda x: x.argmax(1), lambda x: x.argmin(1), lambda x: x.argmax(),
        lambda x: x.argmin(), lambda x: x.topk(2, 1), lambda x: x.sort(1), lambda x: x.argsort(1), lambda x: x.kthvalue(3, 1),
        lambda x: x.median(1), lambda x: x.cummax(1), lambda x: x.max(0, keepdim=True), lambda x: x.argmax(0),
        lambda x: torch.searchsorted(x.sort(1)[0], x),
    ],
)  # fmt: skip
def test_pytorch_168940_family(function):
    x = torch.tensor([[1.0, 5, 2, 9, -3, 4.5, 8, 0], [7, 0.5, 3, 4, 11, -2, 6, 5.5]], dtype=torch.float64)
    agrees(function, x, words="-x x- --+x", diff=())
    agrees(function, x, words="-x", mesh=FOUR, diff=())


@pytest.mark.parametrize(
    "function", [torch.argmax, torch.argmin, lambda x, dim: x.max(dim)[1], lambda x, dim: x.min(dim)[1]]
)
def test_among_equals_the_first_index_is_taken(function):
    x = torch.tensor([[2.0, 1, 2, 1, 2, 1, 2, 1]])
    for mesh in (PAIR, FOUR):
        assert run(lambda x: function(x, 1), (x, "-x"), mesh=mesh).item() == function(x, 1).item()


def test_pytorch_165923_all_of_a_split_tensor():
    assert run(torch.all, (torch.tensor([True, True, False, True]), "x")).item() is False


@pytest.mark.parametrize("values", [[True] * 4, [False] * 4, [True, True, False, True], [False, False, True, False]])
@pytest.mark.parametrize(
    "function", [torch.all, torch.any, torch.sum, torch.count_nonzero, lambda x: x.all(0), lambda x: ~x.any()]
)
def test_pytorch_165923_family(function, values):
    agrees(function, torch.tensor(values), words="x", diff=())
    agrees(function, torch.tensor(values), words="x", mesh=FOUR, diff=())


# ---------------------------------------------------------------- views and shapes


def test_pytorch_143372_a_flat_view():
    x = torch.arange(24).reshape(12, 2)
    assert run(lambda x: x.view(-1), (x, "x-"), mesh=FOUR).tolist() == list(range(24))


@pytest.mark.parametrize("shape", [(-1,), (4, 12), (2, 4, 6), (8, 6), (16, 3), (3, 16), (48, 1), (1, 6, 8)])
@pytest.mark.parametrize("start", [(12, 4), (4, 12), (2, 4, 6)])
def test_pytorch_143372_family(start, shape):
    x = torch.arange(48.0, dtype=torch.float64).reshape(start)
    words = " ".join("-" * dim + "x" for dim in range(len(start)) if start[dim] % 4 == 0)
    agrees(lambda x: x.view(shape) * 2, x, words=words, mesh=FOUR)
    agrees(lambda x: x.view(shape).view(start), x, words=words, mesh=FOUR)


def test_pytorch_172102_linear_with_a_bias_over_a_split_dim():
    x = torch.arange(64.0).reshape(2, 8, 4)
    w, b = torch.ones(4, 4), torch.ones(4)
    assert run(F.linear, (x, "-x-"), (w, ""), (b, ""))[1, 7].tolist() == [247] * 4
    gradient = run(grad(lambda b, x, w: F.linear(x, w, b).sum()), (b, ""), (x, "-x-"), (w, ""))
    assert gradient.tolist() == [16] * 4


@pytest.mark.parametrize(
    "words", ["-x-,, x--,, --x,-x, --x,, ,x-,x ,-x, -x-,x-,x --+x,, ,--+x, ,,+x -x-,--+x,+x", "---,--,+x"]
)
def test_pytorch_172102_family(words):
    x = torch.arange(64.0, dtype=torch.float64).reshape(2, 8, 4) - 30
    agrees(F.linear, x, x[0, :4] / 7, x[1, 0], words=words)


def test_torchtitan_2106_the_bias_of_a_pending_product_is_added_once():
    x, w, b = torch.ones(2, 4), torch.ones(4, 3), torch.ones(3)
    layouts = (x, "-x"), (w, "x-"), (b, "")
    assert run(lambda x, w, b: x @ w + b, *layouts).tolist() == [[5, 5, 5]] * 2
    assert run(grad(lambda x, w, b: (x @ w + b).sum(), argnums=2), *layouts).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: F.linear(x, w.t(), b), lambda x, w, b: (x @ w) * b,
        lambda x, w, b: (x @ w).relu() + b, lambda x, w, b: torch.baddbmm(b, x[None], w[None]), lambda x, w, b: x @ w - 2 * b,
        lambda x, w, b: torch.cat([x @ w, b[None]]), lambda x, w, b: torch.einsum("ik,kj->ij", x, w) / b,
    ],
)  # fmt: skip
def test_torchtitan_2106_family(function):
    x = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) - 3
    w, b = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 4 - 1, torch.tensor([1.0, -2, 3]).double()
    agrees(function, x, w, b, words="-x,x-, -x,, ,x-, -x,x-,+x --+x,,+x")


def test_pytorch_115310_gather_has_the_shape_of_its_index():
    x = torch.arange(80.0).reshape(8, 10)
    index = torch.tensor([2, 2, 1, 0])[:, None].expand(4, 10)
    for words in ("x-", ""), ("", "x-"), ("x-", "x-"):
        got = run(lambda x, i: x.gather(0, i), *zip((x, index), words, strict=True), mesh=FOUR)
        assert torch.equal(got, x.gather(0, index))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.gather(0, i[:, None].expand(4, 12)), lambda x, i: x[i], lambda x, i: x.index_select(0, i),
        lambda x, i: x[:, i], lambda x, i: x[i, i], lambda x, i: torch.take_along_dim(x, i[:, None], 0),
        lambda x, i: F.embedding(i, x), lambda x, i: x.index_add(0, i, x[:4]), lambda x, i: x.scatter_add(0, i[:, None], x[:4, :1]),
    ],
)  # fmt: skip
def test_pytorch_115310_family(function):
    x = torch.arange(96.0, dtype=torch.float64).reshape(8, 12) % 17 - 5
    agrees(function, x, torch.tensor([2, 2, 1, 0]), words="x-, -x, ,x x-,x -x,x --+x,x", mesh=FOUR)


# ---------------------------------------------------------------- layouts


def test_pytorch_129206_axes_of_a_dim_are_major_first():
    x = sp.shard(torch.arange(8), P(("tp", "dp")), mesh=GRID)
    blocks = dict(zip([(0, 0), (0, 1), (1, 0), (1, 1)], x.shards, strict=True))  # (dp, tp)
    assert blocks[0, 0].tolist() == [0, 1] and blocks[1, 0].tolist() == [2, 3] and blocks[0, 1].tolist() == [4, 5]


@pytest.mark.parametrize("source", ["(xy)", "(yx)", "x", "y", "+x", "+xy", "x+y", ""])
@pytest.mark.parametrize("target", ["(xy)", "(yx)", "x", "y", ""])
def test_pytorch_129206_family(source, target):
    mesh = sp.make_mesh((2, 2), ("x", "y"))
    x = torch.arange(8.0)
    moved = sp.shard(lay_out(x, spec_of(source), mesh), spec_of(target), mesh=mesh)
    right = sp.shard(x, spec_of(target), mesh=mesh)
    assert all(torch.equal(a, b) for a, b in zip(moved.shards, right.shards, strict=True))
    made = sp.spmd_jit(lambda: torch.arange(8.0), mesh=mesh, out_specs=spec_of(target))()
    assert all(torch.equal(a, b) for a, b in zip(made.shards, right.shards, strict=True))


def test_jax_22043_none_is_an_empty_subtree():
    tree = {"a": torch.arange(4.0), "n": None}
    doubled = sp.spmd_jit(lambda t: {"a": t["a"] * 2, "n": t["n"]}, mesh=PAIR, in_specs=P("x"), out_specs=P("x"))(tree)
    assert doubled["n"] is None and doubled["a"].spec == P("x") and doubled["a"].unshard().tolist() == [0, 2, 4, 6]


def test_pytorch_162338_a_mean_is_a_sum_that_is_divided():
    rows = sp.spmd_jit(torch.mean, mesh=PAIR, in_specs=P("x")).lower(torch.arange(4.0)).collectives
    assert [(row.op, row.reduce) for row in rows] == [("all_reduce", "sum")]


# ---------------------------------------------------------------- gradients


def test_torchtitan_1805_the_gradient_of_a_replicated_weight():
    w, x = torch.tensor(3.0), torch.tensor([1.0, 2, 3, 4])
    assert run(grad(lambda w, x: (w * x).sum()), (w, ""), (x, "x")).item() == 10


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: (w * x).mean(), lambda w, x: (x - w).square().sum(), lambda w, x: (w.exp() * x).sum() + w,
        lambda w, x: torch.where(x > 2, x * w, w).sum(), lambda w, x: w.expand(4) @ x, lambda w, x: (x**w).logsumexp(0),
        lambda w, x: torch.stack([w, w * w]).sum() * x.sum(), lambda w, x: (x.cumsum(0) * w).amax(),
    ],
)  # fmt: skip
def test_torchtitan_1805_family(function):
    w, x = torch.tensor(3.0, dtype=torch.float64), torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    agrees(function, w, x, words=",x +x,x ,+x")
    agrees(function, w, x, words=",x", mesh=FOUR)


def test_torchtitan_4637_padding_in_a_split_vocabulary():
    table, ids = torch.arange(16.0, dtype=torch.float64).reshape(8, 2), torch.tensor([0, 7, 3, 4, 7])

    def both(w, i):
        rows, pull = vjp(lambda w: F.embedding(i, w, padding_idx=3), w)
        return rows, pull(torch.ones_like(rows))[0]

    rows, counts = run(both, (table, "x-"), (ids, ""))
    assert torch.equal(rows, table[ids])
    assert counts[:, 0].tolist() == [1, 0, 0, 0, 1, 0, 0, 2]


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
@pytest.mark.parametrize("words", ["x-, -x, ,x x-,x --+x,", ",+x"])
def test_torchtitan_4637_family(padding, words):
    table = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) - 5
    ids = torch.tensor([0, 7, 3, 4, 7, 3])
    agrees(lambda w, i: F.embedding(i, w, padding_idx=padding), table, ids, words=words)
    agrees(lambda w, i: F.embedding(i, w, padding_idx=padding) @ w.t(), table, ids, words=words)


@pytest.mark.parametrize("words", ["x,y", "x,", "x,+y", "+x,y", "+xy,x", "(yx),y", "+x,+y"])
def test_pytorch_180346_the_global_norm_over_different_axes(words):
    mesh = sp.make_mesh((2, 2), ("x", "y"))
    g, h = torch.tensor([3.0, 0, 0, 0], dtype=torch.float64), torch.tensor([0.0, 4, 0, 0], dtype=torch.float64)
    agrees(lambda g, h: torch.stack([g.norm(), h.norm()]).norm(), g, h, words=words, mesh=mesh)
    layouts = zip((g, h), words.split(","), strict=True)
    assert run(lambda g, h: torch.stack([g.norm(), h.norm()]).norm(), *layouts, mesh=mesh).item() == 5

    def clipped(*tensors):
        clip = sp.optim.clip_by_global_norm(1.0)
        return clip.update(list(tensors), clip.init(list(tensors)), None)[0]

    got = run(clipped, *zip((g, h), words.split(","), strict=True), mesh=mesh)
    torch.testing.assert_close(got, [g / 5, h / 5])


def test_torchtitan_267_the_gradient_through_complex_numbers():
    def total(x):
        return torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)).sum()

    assert run(grad(total), (torch.ones(2), "")).tolist() == [3, -1]
    assert run(grad(total), (torch.ones(4, 2), "x-"), mesh=FOUR).tolist() == [[3, -1]] * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z.abs().square(), lambda z: z.conj() * (2 - 1j), lambda z: torch.view_as_real(z * z), lambda z: z.real * z.imag,
        lambda z: torch.view_as_real(z.conj() * 1j).flip(-1), lambda z: (z @ z.conj()).real, lambda z: z.angle(),
        lambda z: torch.polar(z.abs() + 1, z.real), lambda z: z.sum() * z, lambda z: z / (1 + 2j), lambda z: z.mean().abs(),
        lambda z: torch.view_as_complex(torch.view_as_real(z).roll(1, -1)), lambda z: z.reshape(2, 2).mH.reshape(-1),
    ],
)  # fmt: skip
def test_torchtitan_267_family(function):
    z = torch.complex(torch.tensor([1.0, -2, 3, 0.5]), torch.tensor([2.0, 1, -1, 4])).to(torch.complex128)
    agrees(function, z, words="x +x")
    agrees(function, z, words="x", mesh=FOUR)


# ---------------------------------------------------------------- keys, caches, donation


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_pytorch_168058_one_key_gives_one_array(devices):
    mesh = sp.make_mesh((devices,), ("x",))
    key = sp.random.key(7)
    whole = {name: draw(key) for name, draw in DRAWS.items()}
    for name, draw in DRAWS.items():
        for spec in (P(), P("x"), P(None, "x")):
            got = sp.spmd_jit(draw, mesh=mesh, out_specs=spec)(key)
            assert torch.equal(got.unshard(), whole[name]), (name, spec)


DRAWS = {
    "normal": lambda key: sp.random.normal(key, (16, 8)),
    "uniform": lambda key: sp.random.uniform(key, (8, 16), torch.float64),
    "bernoulli": lambda key: sp.random.bernoulli(key, 0.3, (8, 8)),
    "randint": lambda key: sp.random.randint(key, (8, 8), 0, 100),
    "a mask times a view": lambda key: sp.random.normal(key, (64,)).view(8, 8) * sp.random.bernoulli(key, 0.5, (8, 8)),
}


def test_pytorch_115250_static_arguments_are_part_of_every_key():
    x = torch.arange(64.0, dtype=torch.float64).reshape(2, 4, 8).sin()
    norm = sp.spmd_jit(lambda x, shape: F.layer_norm(x, shape), mesh=PAIR, in_specs=(P("x"), None), static_argnums=1)
    for shape in ((8,), (4, 8), (8,)):
        torch.testing.assert_close(norm(x, shape).unshard(), F.layer_norm(x, shape))


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), (2, 2.0), ("sum", "mean"), (None, 0), ((1,), (1.0,))])
def test_pytorch_115250_family(values):
    seen = []

    def function(x, static):
        seen.append(static)
        return x * 2

    jitted = sp.spmd_jit(function, mesh=PAIR, static_argnames="static")
    for _ in range(2):
        for value in values:
            jitted(torch.ones(4), static=value)
    assert [(type(value), repr(value)) for value in seen] == [(type(value), repr(value)) for value in values]


def test_jax_9635_the_same_array_donated_twice():
    x = sp.shard(torch.arange(4.0), P("x"), mesh=PAIR)
    add = sp.spmd_jit(lambda a, b: a + b, donate_argnums=(0, 1))
    with pytest.raises(sp.SpmdError, match="donated and used twice") as caught:
        add(x, x)
    assert "uses: a, b" in str(caught.value)
    assert add(x, sp.shard(torch.ones(4), P("x"), mesh=PAIR)).unshard().tolist() == [1, 2, 3, 4]
