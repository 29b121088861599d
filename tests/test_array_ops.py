"""torch on Arrays outside any transform, op by op: values, layouts, gradients, writes in place, and what is refused."""

from __future__ import annotations

import copy
import math
import operator
import random
from pathlib import Path

import gpt
import optree
import pytest
import torch
import torch.nn.functional as F
from laid_out import SQUARE, word
from sharded import difference
from table import CASES
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from versus import Case, Table, told

import spmdfn as sp
from spmdfn import P, dispatch, operators, optim
from spmdfn.errors import SpecError, SpmdError, TracingError

HERE = Path(__file__).name
MESH = sp.make_mesh((2, 4), ("dp", "tp"))
LINE = sp.make_mesh((4,), ("x",))
X = (torch.arange(32.0).reshape(8, 4) * 5 % 17 - 8) / 8
W = (torch.arange(16.0).reshape(4, 4) * 7 % 11 - 5) / 8
V = torch.tensor([0.5, -1.25, 2.0, 0.75])


def on(value, spec, mesh=MESH):
    return sp.shard(value, spec, mesh=mesh)


def same(got, want, atol=1e-5):
    got, want = optree.tree_leaves(got), optree.tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, sp.Array) and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a.unshard(), b, atol=atol, rtol=0)


# ---------------------------------------------------------------- values


def check_case(case: Case, specs, mesh):
    """The values of a case, its gradients and their layouts, op by op."""
    table = Table(case)
    arrays = table.arrays(specs, mesh)
    got = table._both(*arrays)
    if case.name != "constants":  # results that no Array went into stay plain
        told([_differs(case, specs, got, table)])
    for gradient, place in zip(got[2], case.diff, strict=bool(table.cotangents)):
        assert gradient.spec.entries == arrays[place].spec.entries and not gradient.spec.unreduced


def _differs(case, specs, got, table):
    from versus import _difference

    wrong = _difference(got, table.wanted, case.close)
    return f"{', '.join(map(word, specs))}: {wrong}" if wrong else None


@pytest.mark.parametrize("case", CASES[::7], ids=[case.name for case in CASES[::7]])
def test_cases_of_the_table(case: Case):
    choose = random.Random(case.name)
    check_case(case, choose.choice(list(Table(case).random(SQUARE, 4))), SQUARE)


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_of_the_table(case: Case):
    for mesh in (SQUARE, LINE):
        for specs in Table(case).random(mesh, 4):
            check_case(case, specs, mesh)


OPERATORS = {
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "x @ x.T": lambda x: x @ x.T,
    "x ** 2": lambda x: x**2,
    "x > 0": lambda x: x > 0,
    "-abs": lambda x: -abs(x),
    "x[1]": lambda x: x[1],
    "x[1:3, 2]": lambda x: x[1:3, 2],
    "x[..., None]": lambda x: x[..., None],
    "x[tensor]": lambda x: x[torch.tensor([3, 0, 0])],
    "list": list,
    "cat": lambda x: torch.cat([x, x], 1),
    "plain tensor": lambda x: x + V,
    "0-d tensor": lambda x: x * torch.tensor(0.5),
    "split": lambda x: x.split(2),
    "topk": lambda x: x.topk(2),
    "softmax": lambda x: x.softmax(0),
    "to": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x.T.contiguous(),
    "view": lambda x: x.view(2, 16).reshape(4, -1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "linear": lambda x: F.linear(x, W, V),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda x: x.new_ones(3) + 0,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "conj": lambda x: torch.view_as_real((x * 1j).conj().resolve_conj()),
    "sort": lambda x: x.sort(0),
    "clone": lambda x: x.clone(),
    "as_strided": lambda x: x.as_strided((3, 2), (8, 1), 4),
}


@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", "tp"), P(None, "dp"), P(("tp", "dp"))], ids=repr)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name, spec):
    same(OPERATORS[name](on(X, spec)), OPERATORS[name](X))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_a_pending_sum(name):
    pending = sp.Array.from_shards([X - i for i in range(1, 8)] + [X * -6 + 28], P(unreduced={"dp", "tp"}), MESH)
    got, want = OPERATORS[name](pending), OPERATORS[name](X)
    same(got, want, atol=1e-4)
    assert not any(array.spec.unreduced for array in optree.tree_leaves(got))


def test_layouts_follow_the_rules():
    x, w = on(X, P("dp", "tp")), on(W, P("tp"))
    assert repr(x @ w) == "f32[8@dp, 4]" and repr(x.sum(0)) == "f32[4@tp]" and repr(x.T) == "f32[4@tp, 8@dp]"
    assert repr(x.reshape(2, 4, 4)) == "f32[2@dp, 4, 4@tp]" and repr(torch.ones_like(x)) == "f32[8@dp, 4@tp]"
    assert repr(sp.constrain(x * 2, P("tp"))) == "f32[8@tp, 4]"


def test_questions():
    x = on(X, P("dp", "tp"))
    assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and torch.allclose(x, on(X, P("tp")))
    assert bool((x == x).all()) and x.sum().item() == X.sum().item() and float(x[0, 0]) == X[0, 0]
    assert x.is_contiguous() and not x.T.is_contiguous() and x.T.stride() == X.T.stride()
    assert x.device == torch.device("cpu") and x.to("meta").device.type == "meta" and x.to("cpu") is x
    assert 1.0 in on(torch.ones(2), P()) and len(x) == 8 and [row.shape for row in x] == [(4,)] * 8


def test_modules_and_inference_mode():
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    with torch.no_grad():
        same(module(on(X, P("dp"))), module(X))
    with torch.inference_mode():
        same(module(on(X, P("dp"))), module(X))
    arrays = copy.deepcopy(module)
    specs = {"0.weight": P("tp"), "0.bias": P("tp"), "3.weight": P(None, "tp")}
    for name, value in module.named_parameters():
        owner, leaf = arrays.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(owner, leaf, torch.nn.Parameter(on(value, specs.get(name, P()))))
    again = copy.deepcopy(arrays)
    assert all(p.requires_grad and isinstance(p, torch.nn.Parameter) for p in again.parameters())
    for one in (module, again):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(3):
            loss = one(X if one is module else on(X, P("dp"))).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for got, want in zip(again.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(sp.unshard(got), want.detach(), atol=1e-5, rtol=0)


def test_batch_norm_updates_its_statistics():
    norm = torch.nn.BatchNorm1d(4)
    buffers = {name: on(value, P()) for name, value in norm.state_dict().items()}
    same(functional_call(norm, buffers, (on(X, P("dp")),)), norm(X).detach())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(buffers[name].unshard(), norm.state_dict()[name])


def test_programs_are_found_again():
    x = on(X, P("dp", "tp"))
    (x * 3).sum(1)
    before = len(operators.PROGRAMS._found)
    (x * 3).sum(1)
    assert len(operators.PROGRAMS._found) == before
    (x * 3.0).sum(1), (x * True).sum(1)  # 3, 3.0 and True are different arguments
    assert len(operators.PROGRAMS._found) == before + 2


def test_old_programs_are_dropped(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST", 3)
    cache = dispatch.Cache()
    for i in range(5):
        cache.put(i, -i)
    assert [cache.get(i) for i in range(5)] == [None, None, -2, -3, -4]


# ---------------------------------------------------------------- transforms


def energy(w, x):
    return torch.tanh(x @ w).pow(2).sum()


def wave(v):
    return (torch.sin(v) * v).sum() * v.prod()


def layer(w, x):
    return torch.tanh(x @ w).sum(0)


TRANSFORMS = {
    "grad": (grad(energy), (W, X)),
    "grad of both": (grad(energy, argnums=(0, 1)), (W, X)),
    "grad_and_value": (grad_and_value(energy), (W, X)),
    "grad of grad": (grad(lambda v: grad(wave)(v).pow(2).sum()), (V,)),
    "vjp": (lambda v: vjp(torch.sin, v)[1](v)[0], (V,)),
    "jvp": (lambda v: jvp(wave, (v,), (v * 2,)), (V,)),
    "jvp of a missing tangent": (lambda v: jvp(lambda v: v * v.detach(), (v,), (v,)), (V,)),
    "hessian": (hessian(wave), (V,)),
    "hessian of a loss": (hessian(energy), (W, X)),
    "jacrev": (jacrev(layer), (W, X)),
    "jacfwd": (jacfwd(layer), (W, X)),
    "jacrev of jacrev": (jacrev(jacrev(wave)), (V,)),
    "vmap": (vmap(torch.sin), (X,)),
    "vmap of a product": (vmap(lambda w, x: x @ w, (None, 0)), (W, X)),
    "vmap over dim 1": (vmap(lambda x: x.cumsum(0) * 2, 1, 1), (X,)),
    "vmap of grad": (vmap(grad(energy), (None, 0)), (W, X)),
    "grad of jvp": (grad(lambda v: jvp(wave, (v,), (v,))[1]), (V,)),
    "jvp of grad": (lambda v: jvp(grad(wave), (v,), (v,)), (V,)),
    "writes in place": (grad(lambda w: (z := w * 2)[1].add_(w[0]).sum() + (z * z).sum()), (W,)),
    "one_hot in grad": (grad(lambda w: (F.one_hot(w.detach().argmax(1), 4) * w).sum()), (W,)),
}


@pytest.mark.parametrize(
    "specs", [(P("dp"), P("dp", "tp")), (P("tp", "dp"), P("tp")), (P(), P(("dp", "tp")))], ids=repr
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, specs):
    function, values = TRANSFORMS[name]
    specs = [P(*spec.entries[: value.ndim]) for spec, value in zip(specs, values, strict=False)]
    arrays = [on(value, spec) for value, spec in zip(values, specs, strict=True)]
    got, want = optree.tree_leaves(function(*arrays)), optree.tree_leaves(function(*values))
    assert len(got) == len(want) and all(isinstance(g, sp.Array) for g in got)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.unshard(), b, atol=1e-5, rtol=1e-5)


LAYOUTS = [P(), P("dp"), P(None, "tp"), P("tp", "dp")]


@pytest.mark.parametrize("w_spec", [*LAYOUTS, None], ids=repr)
@pytest.mark.parametrize("x_spec", [*LAYOUTS, None], ids=repr)
def test_a_gradient_lies_like_its_primal(w_spec, x_spec):
    if w_spec is None and x_spec is None:
        return
    values = [value if spec is None else on(value, spec) for value, spec in ((W, w_spec), (X[:4], x_spec))]
    for loss in (energy, lambda w, x: (w + x).sum(), lambda w, x: (w * x + w).square().sum()):
        plain = grad(loss, argnums=(0, 1))(W, X[:4])
        leaves = [value.detach().clone().requires_grad_() for value in values]
        loss(*leaves).backward()
        loss(*leaves).backward()
        for found in (grad(loss, argnums=(0, 1))(*values), [leaf.grad / 2 for leaf in leaves]):
            for got, want, value in zip(found, plain, values, strict=True):
                assert type(got) is type(value) and sp.typeof(got) == sp.typeof(value)
                torch.testing.assert_close(sp.unshard(got), want)


def test_a_gradient_per_sample_keeps_the_batch_split():
    per_sample = vmap(grad(energy), (None, 0))
    assert repr(per_sample(on(W, P()), on(X, P("dp")))) == "f32[8@dp, 4, 4]"
    assert repr(per_sample(on(W, P("tp")), on(X, P("dp")))) == "f32[8@dp, 4@tp, 4]"
    assert repr(per_sample(on(W, P("dp")), on(X, P("dp")))) == "f32[8, 4@dp, 4]"
    assert type(per_sample(W, on(X, P("dp")))) is torch.Tensor
    assert repr(vmap(grad(lambda v: v.sin().sum()))(on(X, P("dp", "tp")))) == "f32[8@dp, 4@tp]"


def test_hooks_leave_no_trace():
    w, x = W.clone().requires_grad_(), on(X, P("dp"))
    loss = energy(w, x)
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert type(found) is torch.Tensor and not w._backward_hooks
    assert w.grad is None


def test_functional_call():
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    values = {name: value.detach() for name, value in module.named_parameters()}
    specs = sp.tree_specs(values, {"0.*": P("tp"), "2.weight": P(None, "tp")})
    arrays = on(values, specs)

    def loss(params, x):
        return functional_call(module, params, (x,)).square().sum()

    found, want = grad(loss)(arrays, on(X, P("dp"))), grad(loss)(values, X)
    for name in values:
        torch.testing.assert_close(found[name].unshard(), want[name], atol=1e-4, rtol=1e-4)
        assert found[name].spec is arrays[name].spec


def test_a_jitted_function_under_a_transform_of_arrays():
    f = sp.spmd_jit(lambda w, x: energy(w, x), mesh=MESH, in_specs=(P("tp"), P("dp")))
    w, x = on(W, P("dp")), on(X, P("dp"))
    assert repr(grad(f)(w, x)) == "f32[4@dp, 4]"
    torch.testing.assert_close(grad(f)(w, x).unshard(), grad(energy)(W, X))
    double = sp.spmd_jit(lambda x: x * 2, mesh=MESH)
    torch.testing.assert_close(grad(lambda w: (w * double(x)[:4]).sum())(W), X[:4] * 2)
    closes = grad(lambda w: sp.spmd_jit(lambda x: (x @ w).sum(), mesh=MESH)(x))(W)
    torch.testing.assert_close(closes, grad(lambda w: (X @ w).sum())(W))


def test_arrays_inside_someone_elses_trace_are_refused():
    with pytest.raises(TracingError, match=r"inside a make_fx trace[^$]*sp\.spmd_jit"):
        torch.func.linearize(wave, on(V, P("tp")))


def test_constrain_under_a_transform():
    w, x = on(W, P("dp")), on(X, P("dp"))

    def loss(w):
        y = sp.constrain(x @ w, P(None, "tp"))
        print(y)
        return y.square().sum()

    torch.testing.assert_close(grad(loss)(w).unshard(), grad(lambda w: (X @ w).square().sum())(W))
    torch.testing.assert_close(vmap(lambda r: sp.constrain(r * 2, P("tp")))(x).unshard(), X * 2)
    with pytest.raises(SpecError, match=r"shard of a value inside a transform[^$]*sp.constrain"):
        grad(lambda w: sp.shard(w, P("tp")).sum())(w)
    inside = grad(lambda w: (w * sp.shard(W, P("tp"), mesh=MESH)).sum())(w)
    torch.testing.assert_close(inside.unshard(), W)


# ---------------------------------------------------------------- writes in place, views


WRITES = {
    "add_": lambda x: x.add_(1.5),
    "mul_ by an Array": lambda x: x.mul_(x.sum(0)),
    "sub_ of a plain tensor": lambda x: x.sub_(V, alpha=2),
    "copy_": lambda x: x.copy_(x.flip(0)),
    "copy_ of another dtype": lambda x: x.copy_(torch.arange(4)),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "pow_": lambda x: x.pow_(2),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 7),
    "index_put_": lambda x: x.index_put_((torch.tensor([1, 6]),), torch.tensor(9.0)),
    "setitem of a mask": lambda x: operator.setitem(x, x > 0, 0.0),
    "setitem of a row": lambda x: operator.setitem(x, 3, V),
    "setitem of a column": lambda x: operator.setitem(x, (slice(None), 1), 4.0),
    "setitem of a block": lambda x: operator.setitem(x, (slice(2, 7), slice(1, 3)), 5.0),
    "setitem of a step": lambda x: operator.setitem(x, slice(1, None, 3), x[:3] * 2),
    "iadd": lambda x: operator.iadd(x, x),
    "iadd of a row": lambda x: operator.iadd(x[5], 1),
    "diagonal": lambda x: x.diagonal().fill_(9),
    "view of a view": lambda x: x.T[1:3].view(2, 2, 4)[:, 1].mul_(3),
    "flat": lambda x: x.view(-1)[::5].neg_(),
    "unbind": lambda x: x.unbind(0)[2].add_(1),
    "split": lambda x: x.split([1, 3], 1)[1].add_(1),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2.0),
}


@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", "tp"), P(None, "dp"), P(unreduced={"tp"})], ids=repr)
@pytest.mark.parametrize("name", WRITES)
def test_writes_in_place(name, spec):
    array, value = on(X, spec).clone() if not spec.unreduced else on(X, spec), X.clone()
    before = array.spec, array.detach(), array[4], array.T, array.sum(), value.sum()
    WRITES[name](array), WRITES[name](value)
    torch.testing.assert_close(array.unshard(), value)
    assert array.spec.entries == before[0].entries
    for view, want in zip(before[1:4], (value, value[4], value.T), strict=True):
        torch.testing.assert_close(view.unshard(), want)  # whether it shares memory or is a copy
    torch.testing.assert_close(before[4].unshard(), before[5])
    if spec.unreduced:
        assert array.spec.unreduced == spec.unreduced


def test_views_share_memory_where_nothing_is_communicated():
    x = on(X, P("dp"))
    for view in (x.T, x[:, 1:], x.view(2, 4, 4), x[:, 0], x.unsqueeze(1), x.detach(), x.split(2, 1)[0]):
        ours = {block.untyped_storage().data_ptr() for block in x.shards}
        assert {block.untyped_storage().data_ptr() for block in view.shards} == ours
    x[:, 1:].T.mul_(0)
    torch.testing.assert_close(x.unshard(), torch.cat([X[:, :1], torch.zeros(8, 3)], 1))


def test_metadata_in_place():
    x, value = on(X, P("dp", "tp")), X.clone()
    base = x.detach()
    for op in (lambda t: t.t_(), lambda t: t.unsqueeze_(1), lambda t: t.squeeze_(), lambda t: t.transpose_(0, 1)):
        assert op(x) is x
        op(value)
        assert x.shape == value.shape and x.stride() == value.stride()
        torch.testing.assert_close(x.unshard(), value)
    x.t_().add_(1)
    assert repr(x) == "f32[4@tp, 8@dp]" and repr(base) == "f32[8@dp, 4@tp]"
    torch.testing.assert_close(base.unshard(), X + 1)
    y = on(X, P("dp")).requires_grad_() * 2
    assert y.detach_() is y and not y.requires_grad


def test_shared_blocks_do_not_mix():
    block = torch.ones(2)
    x = sp.Array.from_shards([block] * 4, P("x"), LINE)
    x.copy_(torch.arange(8.0))
    assert x.tolist() == list(range(8))
    pending = sp.shard(torch.zeros(2), P(unreduced={"x"}), mesh=LINE)
    pending.copy_(sp.from_local(torch.arange(8.0).reshape(4, 2), P(unreduced={"x"}), mesh=LINE))
    assert pending.tolist() == [12, 16] and repr(pending) == "f32[2]{+x}"


def test_results_share_no_memory_with_arguments_or_each_other():
    x = on(X, P())
    f = sp.spmd_jit(lambda x: (x, x.T, sp.constrain(x, P("dp")), x * 2, (y := x + 1), y[1:3]), mesh=MESH)
    results = [*f(x), sp.shard(x, P("tp")), x.clone(), x + 0, sp.constrain(x, P("dp"))]
    before = [result.unshard() for result in results]
    x.zero_()
    for place, result in enumerate(results):
        assert torch.equal(result.unshard(), before[place])
        result.fill_(7)
        assert all(torch.equal(other.unshard(), before[i]) for i, other in enumerate(results) if i > place)
    assert torch.equal(x.unshard(), X * 0)


# ---------------------------------------------------------------- errors


ERRORS = {
    "two meshes": (lambda x: x + on(X, P("x"), LINE), SpecError, ["two meshes", "f32[8@x, 4]", "sp.shard"]),
    "nonzero": (lambda x: x.nonzero(), TracingError, ["shape", "nonzero", HERE, "torch.where"]),
    "boolean mask": (lambda x: x[x > 0], TracingError, ["shape", "boolean mask", HERE]),
    "masked_select": (lambda x: x.masked_select(x > 0), TracingError, ["shape", "masked_select"]),
    "rand_like": (torch.rand_like, TracingError, ["key", "rand_like", HERE, "sp.random"]),
    "dropout": (lambda x: F.dropout(x, 0.5), TracingError, ["key", "bernoulli"]),
    "normal_": (lambda x: x.normal_(), TracingError, ["key", "normal_"]),
    "plain += Array": (
        lambda x: operator.iadd(X.clone(), x),
        SpmdError,
        ["plain tensor", "sp.unshard", "(8, 4)", HERE],
    ),
    "out=": (lambda x: torch.add(x, 1, out=x), SpmdError, ["out=", "x.copy_(result)"]),
    "resize_": (lambda x: x.resize_(4), SpmdError, ["resize_", "f32[8@dp, 4@tp]"]),
    "another device": (lambda x: torch.ops.aten._to_copy(x, device="cuda"), SpmdError, ["cuda", "sp.unshard(x).to("]),
    "wrong shapes": (lambda x: x @ x, RuntimeError, ["[8, 4] X [8, 4]"]),
    "wrong write": (lambda x: x.copy_(torch.ones(3)), RuntimeError, ["(3)"]),
    "wrong dtype": (lambda x: (x > 0).add_(0.5), RuntimeError, ["in-place ops are not possible"]),
    "expanded view": (lambda x: x[:1].expand(2, 4).add_(1), RuntimeError, ["single memory location"]),
    "copied view": (lambda x: x.unfold(0, 3, 2).add_(1), SpmdError, ["a view that is a copy", "f32[3", "clone()"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    function, kind, words = ERRORS[name]
    with pytest.raises(kind) as caught:
        function(on(X, P("dp", "tp")))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_draws_that_draw_nothing():
    x = on(X, P("dp"))
    same(F.dropout(x, 0.5, training=False), X)
    same(
        F.scaled_dot_product_attention(x[None], x[None], x[None]),
        F.scaled_dot_product_attention(X[None], X[None], X[None]),
    )


# ---------------------------------------------------------------- disable_jit


CONFIG = gpt.Config(layers=1, width=16, heads=4, context=8, vocabulary=32, dropout=0.1)
CUBE = sp.make_mesh((2, 2, 2), gpt.AXES)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_train_step_op_by_op_equals_the_jitted_one(sequence_parallel):
    config = gpt.Config(**{**vars(CONFIG), "sequence_parallel": sequence_parallel})
    specs = sp.tree_specs(gpt.shapes(config), gpt.LAYOUT)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))

    @sp.spmd_jit(mesh=CUBE, out_specs=specs)
    def init(key):
        return gpt.init(key, config)

    @sp.spmd_jit(mesh=CUBE, in_specs=(specs, None, gpt.TOKENS, P()), out_specs=(specs, None, P()))
    def step(params, state, tokens, key):
        grads, loss = grad_and_value(lambda p: gpt.loss(p, tokens, config, key))(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    tokens = torch.arange(8 * 9).reshape(8, 9) * 7 % 32
    params = init(sp.random.key(1))
    state = optimizer.init(params)
    jitted = step(params, state, tokens, sp.random.key(2))
    with sp.disable_jit():
        again = init(sp.random.key(1))
        stepped = step(again, state, tokens, sp.random.key(2))
    assert all(
        torch.equal(a.unshard(), b.unshard()) for a, b in zip(*map(optree.tree_leaves, (params, again)), strict=True)
    )
    assert difference(stepped, sp.unshard(jitted)) < 2e-6
    assert [a.spec for a in optree.tree_leaves(stepped[0])] == [a.spec for a in optree.tree_leaves(jitted[0])]


def test_disable_jit_shows_values(capsys):
    @sp.spmd_jit(mesh=MESH, in_specs=("(dp b) t", None), out_specs=(P(None, "tp"), None))
    def f(x, scale, flip=False):
        if x.sum() > 0:  # a branch, which a trace refuses
            scale = -scale
        print(x, x[0].tolist(), grad(lambda x: print(x) or (x * scale).sum())(x))
        return x * scale, {"flip": flip, "scale": scale}

    with sp.disable_jit():
        y, rest = f(X, 2.0, flip=True)
    assert repr(y) == "f32[8, 4@tp]" and rest == {"flip": True, "scale": 2.0 if X.sum() <= 0 else -2.0}
    out = capsys.readouterr().out
    assert "f32[8@dp, 4]" in out and str(X[0].tolist()) in out and "GradTrackingTensor" in out
    with pytest.raises(TracingError, match="torch.where"):
        f(X, 2.0)


def test_disable_jit_tells_what_is_wrong():
    mutates = sp.spmd_jit(lambda p: p["w"][0].add_(1), mesh=MESH)
    whole = on(X, P("dp"))
    with sp.disable_jit():
        for argument in (X, whole, on(X, P(None, "tp"))):
            with pytest.raises(SpmdError, match=rf"the input p\['w'\] is mutated in place[^$]*{HERE}[^$]*clone"):
                mutates({"w": argument})
        assert torch.equal(whole.unshard(), X)
        with pytest.raises(SpecError, match=r"size 3[^$]*argument: x"):
            sp.spmd_jit(lambda x: x, mesh=MESH, in_specs=P("dp"))(torch.ones(3))
        with pytest.raises(SpecError, match=r"result: out_specs"):
            sp.spmd_jit(lambda x: x[:3], mesh=MESH, out_specs=P("dp"))(X)
        with pytest.raises(SpecError, match=r"out_specs"):
            sp.spmd_jit(lambda x: x, mesh=MESH, out_specs=(P(), P()))(X)
        with pytest.raises(SpmdError, match=r"argument x is a meta or fake tensor"):
            sp.spmd_jit(lambda x: x, mesh=MESH)(X.to("meta"))


def test_disable_jit_nests_and_ends():
    traced = []
    inner = sp.spmd_jit(lambda x: traced.append(type(x)) or x * 2, mesh=MESH, in_specs=P("tp"))
    outer = sp.spmd_jit(lambda x: inner(x) + inner(x).sum(), mesh=MESH, in_specs=P("dp"))
    with sp.disable_jit():
        with sp.set_mesh(MESH):
            same(outer(X), X * 2 + (X * 2).sum())
        same(outer(X), X * 2 + (X * 2).sum())
    assert set(traced) == {sp.Array}
    traced.clear()
    same(outer(X), X * 2 + (X * 2).sum())
    assert sp.Array not in traced


def test_disable_jit_returns_what_is_its_own():
    x = on(X, P("dp", unreduced={"tp"}))
    f = sp.spmd_jit(lambda x: (x, (y := x * 2), y, W, 3), mesh=MESH)
    with sp.disable_jit():
        results = f(x)
    assert [repr(r) for r in results] == [*["f32[8@dp, 4]"] * 3, "f32[4, 4]", "3"]
    results[0].zero_(), results[1].zero_(), results[3].zero_()
    assert torch.equal(x.unshard(), X) and torch.equal(results[2].unshard(), X * 2) and W.any()


def test_samplers_op_by_op():
    @sp.spmd_jit(mesh=MESH, in_specs=(P(), P("dp")), out_specs=P("dp"))
    def draw(key, x):
        one, two = sp.random.split(key)
        noise = vmap(lambda k: sp.random.uniform(k, (4,)))(sp.random.split(one, 8))
        return x + noise + sp.random.normal(two, (8, 4), spec=P("dp", "tp")) + sp.random.permutation(key, 4)

    with sp.disable_jit():
        got = draw(sp.random.key(3), X)
    assert torch.equal(got.unshard(), draw(sp.random.key(3), X).unshard())
    key = on(sp.random.key(3), P())
    assert torch.equal(sp.random.normal(key, (8,)).unshard(), sp.random.normal(sp.random.key(3), (8,)))
    with pytest.raises(SpecError, match="key"):
        sp.random.normal(on(X, P("dp")), (3,))


def test_numbers_agree_with_a_plain_run_to_the_bit_where_no_sum_is_split():
    x = on(X, P("dp"))
    y = torch.sin(x).mul(math.pi).softmax(1)
    assert torch.equal(y.unshard(), torch.sin(X).mul(math.pi).softmax(1))
