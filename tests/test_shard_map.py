"""shard_map: the answers of every collective on every mesh and dtype, and those known of JAX; eager and traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from collective_table import TABLE, numbers, placed, reference
from mapped import LINE, MESHES, MODES, SQUARE, mapped, same, whole
from torch.func import grad, hessian, vjp, vmap

import spmdfn as sp
from spmdfn import P

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
FLOATS = [torch.float64, torch.float32, torch.bfloat16]
all_meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
both_modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("name", TABLE)
@all_meshes
def test_collectives_of_every_dtype(name: str, mesh: sp.Mesh):
    f = placed(TABLE[name], mesh)
    inputs = [numbers((mesh.size * mesh.size * 2, 3), dtype) for dtype in DTYPES]
    want = [reference(TABLE[name], mesh)(x) for x in inputs]
    for mode in MODES:
        same(whole(mode, lambda *xs: [f(x) for x in xs], mesh)(*inputs), want)


# ---------------------------------------------------------------- gradients, inside and outside


@all_meshes
@both_modes
def test_the_gradient_of_a_shared_weight(mode: str, mesh: sp.Mesh):
    """One x a device and w = 2: of the summed loss 14 on four devices, of the mean 3.5; the local ones [0, 1, 4, 9]."""
    a, n = mesh.axis_names, mesh.size
    for dtype in FLOATS:
        x, w = torch.arange(n).to(dtype), torch.tensor(2, dtype=dtype)
        for reduce, want in ((sp.psum, (x * x).sum()), (sp.pmean, (x * x).sum() / n)):
            loss = lambda w, x, reduce=reduce: reduce((w * x * x).sum(), a)  # noqa: E731
            same(mapped(mode, grad(loss), mesh, (P(), P(a)), P())(w, x), want)
            outside = grad(sp.shard_map(loss, mesh=mesh, in_specs=(P(), P(a)), out_specs=P()))
            same(whole(mode, outside, mesh)(w, x), want)
        local = lambda w, x: grad(lambda w: (w * x * x).sum())(sp.pcast(w, a, to="varying"))[None]  # noqa: E731
        same(mapped(mode, local, mesh, (P(), P(a)), P(a))(w, x), x * x)


@all_meshes
@both_modes
def test_without_types_psum_is_its_own_transpose(mode: str, mesh: sp.Mesh):
    """Four devices: inside, local [0, 1, 4, 9], summed [0, 4, 16, 36]; outside, local with P() 3.5, summed 14."""
    a, n = mesh.axis_names, mesh.size
    x, w = torch.arange(float(n)), torch.tensor(2.0)
    local = lambda w, x: (w * x * x).sum()  # noqa: E731
    summed = lambda w, x: sp.psum(local(w, x), a)  # noqa: E731
    for loss, inside, outside in (
        (local, x * x, (x * x).sum() / n),
        (summed, n * x * x, (x * x).sum()),
    ):
        one = lambda w, x, loss=loss: grad(loss)(w, x)[None]  # noqa: E731
        same(mapped(mode, one, mesh, (P(), P(a)), P(a), check_vma=False)(w, x), inside)
        f = sp.shard_map(loss, mesh=mesh, in_specs=(P(), P(a)), out_specs=P(), check_vma=False)
        same(whole(mode, grad(f), mesh)(w, x), outside)


@all_meshes
@both_modes
def test_the_gradient_through_a_gather_depends_on_its_type(mode: str, mesh: sp.Mesh):
    """Four devices: varying [10] * 4, invariant [1, 2, 3, 4]."""
    a, n = mesh.axis_names, mesh.size
    x, c = torch.zeros(n), torch.arange(1.0, n + 1)
    varying = lambda x: sp.psum((sp.all_gather(x, a) * (sp.axis_index(a) + 1)).sum(), a)  # noqa: E731
    equal = lambda x: (sp.all_gather(x, a, tiled=True, to="invariant") * c).sum()  # noqa: E731
    for loss, want in ((varying, c.sum().expand(n)), (equal, c)):
        same(mapped(mode, grad(loss), mesh, P(a), P(a))(x), want)
        same(whole(mode, grad(sp.shard_map(loss, mesh=mesh, in_specs=P(a), out_specs=P())), mesh)(x), want)


@both_modes
def test_cotangents_of_permutes_and_broadcasts(mode: str):
    x, ct = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 10, 100, 1000])
    send = lambda x: sp.ppermute(x, "i", [(0, 1), (1, 2)])  # noqa: E731
    back = lambda x, ct: vjp(send, x)[1](ct)[0]  # noqa: E731
    same(mapped(mode, send, LINE, P("i"), P("i"))(x), torch.tensor([0.0, 1, 2, 0]))
    same(mapped(mode, back, LINE, (P("i"), P("i")), P("i"))(x, ct), torch.tensor([10.0, 100, 0, 0]))
    spread = lambda x, ct: vjp(lambda x: sp.pcast(sp.pbroadcast(x, "i", 0), "i"), x)[1](ct)[0]  # noqa: E731
    same(mapped(mode, spread, LINE, (P("i"), P("i")), P("i"))(x, ct), torch.tensor([1111.0, 0, 0, 0]))


@all_meshes
@both_modes
def test_second_order_and_a_square_of_a_sum(mode: str, mesh: sp.Mesh):
    a, w = mesh.axis_names, torch.tensor(2.0, dtype=torch.float64)
    x = torch.arange(4.0 * mesh.size, dtype=torch.float64)[: mesh.size]
    cube = lambda w, x: sp.psum((w**3 * x).sum(), a)  # noqa: E731
    want = 12 * x.sum()  # 72 on four devices
    same(mapped(mode, hessian(cube), mesh, (P(), P(a)), P())(w, x), want, 1e-12)
    outside = hessian(sp.shard_map(cube, mesh=mesh, in_specs=(P(), P(a)), out_specs=P()))
    same(whole(mode, outside, mesh)(w, x), want, 1e-12)
    x, w = torch.arange(8.0), torch.tensor(3.0)
    square = lambda w, x: sp.psum(((w * x) ** 2).sum(), a)  # noqa: E731
    same(mapped(mode, grad(square), mesh, (P(), P(a)), P())(w, x), torch.tensor(840.0))


@both_modes
def test_ties_of_an_extremum_share_the_gradient(mode: str):
    x = torch.tensor([3.0, 7, 7, 1])
    for f, want in ((sp.pmax, [0, 0.5, 0.5, 0]), (sp.pmin, [0.0, 0, 0, 1])):
        inside = lambda x, f=f: grad(lambda x: f(x, "i").sum())(x)  # noqa: E731
        same(mapped(mode, inside, LINE, P("i"), P("i"))(x), torch.tensor(want))


# ---------------------------------------------------------------- shapes, orders, groups


@both_modes
def test_orders_of_axes(mode: str):
    x = torch.arange(4)
    same(mapped(mode, lambda x: x, SQUARE, P(("y", "x")), P(("x", "y")))(x), torch.tensor([0, 2, 1, 3]))
    gather = lambda x: sp.all_gather(x, ("y", "x"), tiled=True, to="invariant")  # noqa: E731
    same(mapped(mode, gather, SQUARE, P(("x", "y")), P())(x), torch.tensor([0, 2, 1, 3]))
    place = lambda x: sp.axis_index(("y", "x"))[None]  # noqa: E731
    same(mapped(mode, place, SQUARE, P(("x", "y")), P(("x", "y")))(x), torch.tensor([0, 2, 1, 3], dtype=torch.int32))
    send = lambda x: sp.ppermute(x, ("y", "x"), [(0, 1), (1, 2), (2, 3)])  # noqa: E731
    same(mapped(mode, send, SQUARE, P(("y", "x")), P(("y", "x")))(x + 1), torch.tensor([0, 1, 2, 3]))


@both_modes
def test_all_to_all_by_groups(mode: str):
    x = torch.arange(8).reshape(4, 2)
    for tiled in (False, True):
        swap = lambda x, tiled=tiled: sp.all_to_all(  # noqa: E731
            x, "i", 1, 1, axis_index_groups=[[0, 2], [1, 3]], tiled=tiled
        )
        same(mapped(mode, swap, LINE, P("i"), P("i"))(x), torch.tensor([[0, 4], [2, 6], [1, 5], [3, 7]]))


@both_modes
def test_vmap_of_a_map(mode: str):
    total = sp.shard_map(lambda x: sp.psum(x.sum(), "i"), mesh=LINE, in_specs=P("i"), out_specs=P())
    same(whole(mode, vmap(total), LINE)(torch.arange(8).reshape(2, 4)), torch.tensor([6, 22]))


@both_modes
def test_half_precision_sums_in_float32(mode: str):
    x = torch.tensor([256, 1, 1, 1], dtype=torch.bfloat16)
    same(mapped(mode, lambda x: sp.psum(x, "i"), LINE, P("i"), P())(x), torch.tensor([260], dtype=torch.bfloat16))


@both_modes
def test_zero_sizes_scalars_and_numbers(mode: str):
    empty = torch.zeros(0, 3)
    same(mapped(mode, lambda x: sp.psum(x, "i"), LINE, P("i"), P())(empty), empty)
    gather = lambda x: sp.all_gather(x, "i", dim=1, tiled=True, to="invariant")  # noqa: E731
    same(mapped(mode, gather, LINE, P(None, "i"), P())(torch.zeros(0, 4)), torch.zeros(0, 4))
    swap = lambda x: sp.all_to_all(x, "i", 1, 0, tiled=True)  # noqa: E731
    same(mapped(mode, swap, LINE, P("i"), P(None, "i"))(empty[:, :0]), empty[:, :0])
    same(mapped(mode, lambda x: sp.psum(x.sum(), "i"), LINE, P("i"), P())(torch.arange(4)), torch.tensor(6))
    same(mapped(mode, lambda x: x.sum()[None], LINE, P("i"), P("i"))(torch.arange(8)), torch.tensor([1, 5, 9, 13]))
    constants = lambda x: (sp.psum(2, "i"), sp.psum(1.5, "i"), sp.pmean(3.0, "i"), sp.pmax(3, "i"))  # noqa: E731
    assert mapped(mode, constants, LINE, P("i"), None)(torch.arange(4)) == (8, 6.0, 3.0, 3)
    assert mapped(mode, lambda x: sp.axis_size("i"), LINE, P("i"), None)(torch.arange(4)) == 4


# ---------------------------------------------------------------- arguments and results


@both_modes
def test_trees_with_none_and_keywords(mode: str):
    x = torch.arange(4.0)
    tree = {"a": x, "b": [None, x * 2]}
    want = {"a": x.sum()[None], "b": [None, x.sum()[None] * 2]}
    same(mapped(mode, lambda t: sp.psum(t, "i"), LINE, P("i"), P())(tree), want)
    same(mapped(mode, lambda x: (x, None, {}), LINE, P("i"), (P("i"), None, P()))(x), (x, None, {}))
    scaled = lambda x, *, scale=1: x * scale  # noqa: E731
    f = sp.shard_map(scaled, mesh=LINE, in_specs={"x": P("i"), "scale": P()}, out_specs=P("i"))
    same(whole(mode, lambda x, s: f(x, scale=s), LINE)(x, torch.tensor(3.0)), x * 3)
    same(whole(mode, f, LINE)(x), x)
    by_name = sp.shard_map(lambda x, scale: x * scale, mesh=LINE, in_specs=(P("i"), P()), out_specs=P("i"))
    same(whole(mode, lambda x, s: by_name(scale=s, x=x), LINE)(x, torch.tensor(3.0)), x * 3)


@both_modes
def test_a_none_spec_passes_a_static_argument(mode: str):
    repeat = lambda x, how: x * how["times"] if how["on"] else x  # noqa: E731
    f = sp.shard_map(repeat, mesh=LINE, in_specs=(P("i"), None), out_specs=P("i"))
    x = torch.arange(4.0)
    same(whole(mode, lambda x: f(x, {"times": 3, "on": True}), LINE)(x), x * 3)


@both_modes
def test_arrays_in_any_layout(mode: str):
    x = torch.arange(16.0).view(4, 4)
    for spec in (P("x", "y"), P(None, ("y", "x")), P(), P("y")):
        array = sp.shard(x, spec, mesh=SQUARE)
        same(mapped(mode, lambda x: x * 2, SQUARE, P("y", "x"), P("y", "x"))(array), x * 2)
    pieces = sp.Array.from_shards([x] * 4, P(unreduced={"x"}), SQUARE)
    same(mapped(mode, lambda x: x, SQUARE, P("y"), P("y"))(pieces), x * 2)
    (result,) = [sp.shard_map(lambda x: x, mesh=SQUARE, in_specs=P("y"), out_specs=P("y"))(x)]
    assert isinstance(result, sp.Array) and result.spec == P("y", None)


@both_modes
def test_an_invariant_value_is_tiled_by_an_axis_of_its_out_spec(mode: str):
    same(mapped(mode, lambda w: w * 2, LINE, P(), P("i"))(torch.arange(2)), torch.arange(2).repeat(4) * 2)


@both_modes
def test_closures_count_as_arguments(mode: str):
    x, plain = torch.arange(8.0), torch.tensor([1.0, 2.0])
    array = sp.shard(plain, P(), mesh=LINE)
    for c in (plain, array):
        same(mapped(mode, lambda x, c=c: x * c, LINE, P("i"), P("i"))(x), (x.view(-1, 2) * plain).flatten())
        same(mapped(mode, lambda x, c=c: c, LINE, P("i"), P())(x), plain)
        outside = lambda c: sp.shard_map(  # noqa: E731
            lambda x: sp.psum((x * c).sum(), "i"), mesh=LINE, in_specs=P("i"), out_specs=P()
        )(x)
        same(whole(mode, grad(outside), LINE)(c), x.view(-1, 2).sum(0))


@both_modes
def test_tensors_made_in_the_body(mode: str):
    def count(x):
        acc = torch.zeros(1)  # invariant
        for _ in range(3):
            acc += 1
        total = sp.pcast(torch.zeros(1), "i", to="varying")
        for _ in range(3):
            total += x
        like = torch.zeros_like(x)
        like[0] = x[0] * acc[0]
        return acc, total, like, torch.arange(2), torch.tensor(5)

    x = torch.arange(4.0)
    want = torch.tensor([3.0]), x * 3, x * 3, torch.arange(2), torch.tensor(5)
    same(mapped(mode, count, LINE, P("i"), (P(), P("i"), P("i"), P(), P()))(x), want)


@both_modes
def test_results_of_collectives_have_memory_of_their_own(mode: str):
    def write(x):
        total = sp.psum(x, "i")
        total += 1
        sent = sp.ppermute(x, "i", [(0, 1), (1, 0), (2, 2)])
        sent += 1
        wide = sp.pcast(total, "i")
        wide *= 2
        return total, sent, wide, x

    x = torch.arange(4.0)
    want = torch.tensor([7.0]), torch.tensor([2.0, 1, 3, 1]), torch.full((4,), 14.0), x
    same(mapped(mode, write, LINE, P("i"), (P(), P("i"), P("i"), P("i")))(x), want)
    same(x, torch.arange(4.0))


def test_results_share_no_memory_with_arguments():
    x = torch.arange(4.0)
    one, other = sp.shard_map(lambda x: (x, x), mesh=LINE, in_specs=P("i"), out_specs=P("i"))(x)
    one += 1
    same((x, other.unshard()), (torch.arange(4.0), torch.arange(4.0)))


# ---------------------------------------------------------------- torch in a body


def prefilled(x: torch.Tensor) -> torch.Tensor:
    filled = torch.empty_like(x)
    filled.copy_(x)
    filled[0] = 0
    return filled.masked_fill_(x > 1, 5.0)


LABELS = torch.tensor([0, 2, 1, 1])
LOCAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "factories": lambda x: x.new_zeros(4) + x.new_tensor([1, 2, 3, 4]) + torch.arange(4) + torch.zeros_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3, is_causal=True)[0, 0],
    "cross entropy": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "embedding": lambda x: F.embedding(LABELS, x) + x[LABELS],
    "one_hot": lambda x: F.one_hot(x.argmax(1), 4),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "module": torch.nn.Linear(4, 2, dtype=torch.float64),
    "convolution": torch.nn.Conv1d(1, 2, 3, dtype=torch.float64).__call__,
    "lists": lambda x: torch.cat([*x.split(2)[::-1], torch.stack([x[0], x[1]])]) + sum(row for row in x),
    "indices": lambda x: torch.zeros_like(x).index_add(0, LABELS, x).scatter(1, LABELS[:, None], x[:, :1]),
    "order": lambda x: torch.sort(x, 1, descending=True).values + x.topk(2, 1).indices.sum(1, keepdim=True),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x) - torch.eye(4),
    "linalg": lambda x: torch.linalg.norm(x, dim=1) + torch.logsumexp(x, 1),
    "complex": lambda x: torch.fft.fft(x).real + (x + 1j).abs(),
    "writes": prefilled,
    "python": lambda x: 2.0**x + (1 - x) // 2 + len(x),
    "no grad": torch.no_grad()(lambda x: x * 2),
    "detach": lambda x: x.detach() * x,
}


@pytest.mark.parametrize("name", LOCAL)
def test_torch_in_a_body_is_torch_on_each_block(name: str):
    x = numbers((16, 4), torch.float64)
    f = LOCAL[name]
    blocks = [(b[:, None] if name == "convolution" else b) for b in x.chunk(4)]
    want = torch.cat([f(block) for block in blocks]).detach()
    body = lambda x: f(x[:, None] if name == "convolution" else x)  # noqa: E731
    for mode in MODES:
        same(mapped(mode, body, LINE, P("i"), P("i"))(x), want, 1e-12)


# ---------------------------------------------------------------- looking at values


def test_print_shows_every_device():
    seen = []

    def look(x, w):
        seen.extend([repr(x), f"{x}", sp.typeof(x), sp.typeof(w), sp.typeof(sp.psum(x, ("x", "y"))), f"{w:.1f}"])
        return vmap(lambda row: row * 1)(x)

    sp.shard_map(look, mesh=SQUARE, in_specs=(P("x", "y"), P()), out_specs=P("x", "y"))(
        torch.arange(4.0).view(2, 2), torch.tensor(2.5)
    )
    text = "f32[1, 1]{V:x,y}\n  x=0, y=0: tensor([[0.]])\n  x=0, y=1: tensor([[1.]])\n"
    text += "  x=1, y=0: tensor([[2.]])\n  x=1, y=1: tensor([[3.]])"
    assert seen == [text, text, "f32[1, 1]{V:x,y}", "f32[]", "f32[1, 1]", "2.5"]


@both_modes
def test_typeof_in_transforms(mode: str):
    seen = []

    def body(w, x):
        def loss(w):
            seen.extend([sp.typeof(w), sp.typeof(w * x), sp.typeof(sp.psum(w * x, "i"))])
            return sp.psum((w * x).sum(), "i")

        seen.append(sp.typeof(grad(loss)(w)))
        seen.append(sp.typeof(grad(lambda x: sp.psum((w * x).sum(), "i"))(x)))
        return w

    mapped(mode, body, LINE, (P(), P("i")), P())(torch.tensor([2.0]), torch.arange(4.0))
    assert seen == ["f32[1]", "f32[1]{V:i}", "f32[1]", "f32[1]", "f32[1]{V:i}"]


def test_python_values_of_blocks():
    def branch(w, x):
        assert w.tolist() == [2.0] and w.numpy()[0] == 2 and w.item() == 2 and float(w) == 2
        assert (x > -1).item()  # varying, but all agree
        return x * 2 if w > 1 else x

    f = sp.shard_map(branch, mesh=LINE, in_specs=(P(), P("i")), out_specs=P("i"))
    same(f(torch.tensor([2.0]), torch.arange(4.0)).unshard(), torch.arange(4.0) * 2)


# ---------------------------------------------------------------- maps amid global-view code


def test_nested_maps():
    def outer(x):
        def inner(x):
            return sp.psum(x, "y") + sp.axis_index("x")

        return sp.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})(x)

    f = sp.shard_map(outer, mesh=SQUARE, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    same(whole("traced", f, SQUARE)(torch.arange(8).reshape(2, 4)), torch.tensor([[2, 4], [11, 13]]))
    # what is free is the default
    free = lambda x: sp.shard_map(lambda x: sp.psum(x, "y"), in_specs=P(None, "y"), out_specs=P())(x)  # noqa: E731
    f = sp.shard_map(free, mesh=SQUARE, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    same(whole("traced", f, SQUARE)(torch.arange(8).reshape(2, 4)), torch.tensor([[2, 4], [10, 12]]))


def test_gradients_through_nested_maps():
    w, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).view(2, 4)

    def loss(w, x):
        def outer(w, x):
            inner = lambda w, x: sp.psum((w.sum() * x).square().sum(), "y")  # noqa: E731
            part = sp.shard_map(inner, in_specs=(P(), P(None, "y")), out_specs=P())(w, x)
            return sp.psum(part, "x")

        return sp.shard_map(outer, mesh=SQUARE, in_specs=(P(), P("x")), out_specs=P(), axis_names={"x"})(w, x)

    want = grad(lambda w, x: (w.sum() * x).square().sum(), argnums=(0, 1))(w, x)
    same(whole("traced", grad(loss, argnums=(0, 1)), SQUARE)(w, x), want, 1e-6)


def test_a_map_over_some_axes_leaves_the_others_to_the_global_view():
    """Megatron's row-parallel layer by hand over tp, its batch laid out over dp by propagation."""
    mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    x, w = numbers((4, 6), torch.float64), numbers((6, 2), torch.float64)
    ins = P(None, "tp"), P("tp")
    row = sp.shard_map(lambda x, w: sp.psum(x @ w, "tp"), mesh=mesh, in_specs=ins, out_specs=P(), axis_names={"tp"})
    loss = lambda w, x: (row(x.tanh(), w) ** 2).sum()  # noqa: E731
    f = sp.spmd_jit(grad(loss), mesh=mesh, in_specs=(P("tp"), P("dp")), out_specs=P("tp"))
    same(f(w, x).unshard(), grad(lambda w, x: ((x.tanh() @ w) ** 2).sum())(w, x), 1e-12)
    rows = [(row.op, row.axes) for row in f.lower(w, x).collectives]
    assert rows == [("all_reduce", ("tp",)), ("all_reduce", ("dp",))]


def test_a_map_amid_global_view_code():
    mesh, x = sp.make_mesh((4,), ("dp",)), torch.arange(8.0)
    local = sp.shard_map(lambda x: x - sp.pmean(x.mean(), "dp"), mesh=mesh, in_specs="(dp b)", out_specs="(dp b)")
    f = sp.spmd_jit(lambda x: local(x.sin()).square().sum(), mesh=mesh, in_specs="(dp b)", out_specs=P())
    s = x.sin()
    same(f(x).unshard(), (s - s.mean()).square().sum(), 1e-6)
