"""What shard_map refuses: each error names the user's function, the value, the axis, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mapped import LINE, MODES, SQUARE, mapped, same
from torch.func import grad, vjp

import spmdfn as sp
from spmdfn import CollectiveError, P, SpecError, TracingError, VaryingError

X, W, KEY = torch.arange(4.0), torch.tensor(2.0), sp.random.key(0)


class Refusal(NamedTuple):
    """A body that must be refused, with words of the message."""

    body: Callable[..., Any]
    ins: Any
    outs: Any
    args: tuple[Any, ...]
    error: type[Exception]
    words: list[str]
    mesh: sp.Mesh = LINE
    options: dict[str, Any] | None = None


def upgrade(w, x):
    g = grad(lambda w: sp.psum((w * x).sum(), "i"))(w)
    return sp.psum(g, "i")


def accumulate(x):
    acc = torch.zeros(1)
    acc += x
    return acc


def fill(x):
    acc = torch.zeros(2)
    acc[0] = x.sum()
    return acc


def write_out(x):
    acc = torch.zeros(1)
    torch.add(x, 1, out=acc)
    return acc


def view_written(x):
    acc = torch.zeros(2, 1)
    acc[0].add_(x)
    return acc


def mutate(params):
    params["w"][0].view(-1).mul_(2)
    return params["w"][0]


SPLIT = sp.shard(X, P("i"), mesh=LINE)
OUTSIDE = torch.zeros(1)
ELSEWHERE = sp.shard(X, P("x"), mesh=SQUARE)
row, whole_row = P("i"), P()

REFUSALS: dict[str, Refusal] = {
    "psum of a gradient that is summed already": Refusal(
        upgrade,
        (P(), row),
        P(),
        (W, X),
        VaryingError,
        ["psum over i", "already equal", "in upgrade", "already summed", "sp.axis_size('i') * x", "sp.pcast(x, 'i')"],
    ),
    "pmean of an invariant value": Refusal(
        lambda x: sp.pmean(torch.ones(2), "i"), row, P(), (X,), VaryingError, ["pmean over i", "leave the pmean out"]
    ),
    "psum over one axis too many": Refusal(
        lambda x: sp.psum(x, ("x", "y")),
        P("x"),
        P(),
        (X,),
        VaryingError,
        ["psum over y", "varying over x", "axis_size('y')"],
        SQUARE,
    ),
    "a sample that is cast": Refusal(
        lambda key, x: x + sp.random.normal(key, (1,)),
        (P(), row),
        row,
        (KEY, X),
        VaryingError,
        ["same on every device of i", 'fold_in(key, sp.axis_index("i"))', "spec=", "pcast"],
    ),
    "a mask that is cast": Refusal(
        lambda key, x: torch.where(sp.random.bernoulli(key, 0.5, (1,)), x, 0.0),
        (P(), row),
        row,
        (KEY, X),
        VaryingError,
        ["a sample from an invariant key"],
    ),
    "a sample that leaves under an axis": Refusal(
        lambda key: sp.random.normal(key, (1,)) * 2, P(), row, (KEY,), VaryingError, ["same on every device of i"]
    ),
    "a sample of one axis that meets another": Refusal(
        lambda key, x: x + sp.random.normal(sp.random.fold_in(key, sp.axis_index("x")), (1,)),
        (P(), P(("x", "y"))),
        P(("x", "y")),
        (KEY, X),
        VaryingError,
        ["same on every device of y"],
        SQUARE,
    ),
    "a global draw from keys that differ": Refusal(
        lambda key: sp.random.normal(key[0], (4,), spec=P("i")),
        row,
        row,
        (sp.random.split(KEY, 4),),
        VaryingError,
        ["one global draw", "key varies over i", "u32[2]{V:i}"],
    ),
    "acc += x": Refusal(
        accumulate,
        row,
        row,
        (X,),
        VaryingError,
        ["varies over i into an invariant tensor", "acc += x", """sp.pcast(acc, 'i', to="varying")"""],
    ),
    "acc[0] = x": Refusal(fill, row, row, (X,), VaryingError, ["into an invariant tensor", "acc[0] = x.sum()"]),
    "out=acc": Refusal(write_out, row, row, (X,), VaryingError, ["into an invariant tensor", "out=acc"]),
    "a write to a view": Refusal(view_written, row, row, (X,), VaryingError, ["into an invariant tensor"]),
    "a write to a closed-over tensor": Refusal(
        lambda x: OUTSIDE.add_(1), row, row, (X,), VaryingError, ["from outside the map", "shape (1,)", "OUTSIDE"]
    ),
    "a varying write to a closed-over tensor": Refusal(
        lambda x: OUTSIDE.add_(x), row, row, (X,), VaryingError, ["from outside the map", "make the tensor inside"]
    ),
    "a write to an argument": Refusal(
        mutate,
        (row,),
        row,
        ({"w": [torch.ones(4, 2)]},),
        VaryingError,
        ["mutate", "the argument params['w'][0] was written to", "never mutated"],
    ),
    "a closed-over split Array": Refusal(
        lambda x: x * SPLIT, row, row, (X,), VaryingError, ["closes over an Array that is split over i", "in_specs"]
    ),
    "a split Array in a collective": Refusal(
        lambda x: sp.psum(SPLIT, "i"), row, P(), (X,), VaryingError, ["split over i", "f32[4@i]"]
    ),
    "a split Array as result": Refusal(lambda x: SPLIT, row, P(), (X,), VaryingError, ["split over i"]),
    "an out spec that is not proved": Refusal(
        lambda x: {"a": x, "b": sp.psum(x, "i")},
        row,
        P(),
        (X,),
        VaryingError,
        ["result['a'] varies over i", "shape (1,)", "name 'i' in the out spec", "sp.psum(x, 'i')"],
    ),
    "a varying scalar": Refusal(lambda x: x.sum(), row, P(), (X,), VaryingError, ["result varies over i"]),
    "a scalar under an axis": Refusal(lambda x: x.sum(), row, row, (X,), SpecError, ["is a scalar", "x[None]"]),
    "a cotangent of another type": Refusal(
        lambda w, x: vjp(torch.sin, w)[1](x.sum())[0],
        (P(), row),
        P(),
        (W, X),
        VaryingError,
        ["cotangent", "varies over i", "f32[]{V:i}", "sp.psum(cotangent, 'i')"],
    ),
    "an unknown axis": Refusal(
        lambda x: sp.psum(x, "dp"), row, P(), (X,), CollectiveError, ["psum", "'dp'", "i=4", "where: "]
    ),
    "an axis twice": Refusal(lambda x: sp.psum(x, ("i", "i")), row, P(), (X,), CollectiveError, ["'i' is named twice"]),
    "an unknown axis in an in spec": Refusal(
        lambda x: x, P("dp"), row, (X,), SpecError, ["'dp'", "i=4", "argument: x", "function: "]
    ),
    "an unknown axis in an out spec": Refusal(lambda x: x, row, P("dp"), (X,), SpecError, ["'dp'", "i=4", "result"]),
    "a block that does not divide": Refusal(
        lambda params: params["w"],
        (row,),
        row,
        ({"w": torch.ones(6)},),
        SpecError,
        ["dim 0 has size 6", "i=4", "argument: params['w']", "pad dim 0 to 8"],
    ),
    "a pattern that does not divide": Refusal(
        lambda x: x, "(i b) d", row, (torch.ones(6, 2),), SpecError, ["size 6", '"(i b) d"', "argument: x"]
    ),
    "a spec longer than the rank": Refusal(
        lambda x: x, P(None, "i"), row, (X,), SpecError, ["longer than the rank", "(4,)", "argument: x"]
    ),
    "an out spec longer than the rank": Refusal(
        lambda x: x, row, P(None, None, "i"), (X,), SpecError, ["longer than the rank", "result"]
    ),
    "a pending sum as spec": Refusal(
        lambda x: x, P(unreduced={"i"}), row, (X,), SpecError, ["pending sum", "no meaning in a map", "argument: x"]
    ),
    "specs that do not fit": Refusal(
        lambda t: t["a"], ({"b": row},), row, ({"a": X},), SpecError, ["lack 'a'", "argument: t"]
    ),
    "too few specs": Refusal(lambda x, y: x, (row,), row, (X, X), SpecError, ["1 entries for 2", "parameters: x, y"]),
    "out specs that do not fit": Refusal(lambda x: (x, x), row, (row,), (X,), SpecError, ["out_specs", "tuple of 2"]),
    "a pair out of range": Refusal(
        lambda x: sp.ppermute(x, "i", [(0, 1), (1, 7)]), row, row, (X,), CollectiveError, ["(1, 7)", "from 0 to 3"]
    ),
    "no pair": Refusal(lambda x: sp.ppermute(x, "i", [3]), row, row, (X,), CollectiveError, ["(3,)"]),
    "a destination twice": Refusal(
        lambda x: sp.ppermute(x, "i", [(0, 1), (2, 1)]), row, row, (X,), CollectiveError, ["(0, 1) and (2, 1)"]
    ),
    "no permutation": Refusal(
        lambda x: sp.pshuffle(x, "i", [0, 0, 1, 2]), row, row, (X,), CollectiveError, ["[0, 0, 1, 2]", "4 devices"]
    ),
    "no source": Refusal(lambda x: sp.pbroadcast(x, "i", 4), row, P(), (X,), CollectiveError, ["source 4", "0 to 3"]),
    "groups that do not fit": Refusal(
        lambda x: sp.psum(x, "i", axis_index_groups=[[0, 1], [2]]), row, row, (X,), CollectiveError, ["[[0, 1], [2]]"]
    ),
    "a dim that does not exist": Refusal(
        lambda x: sp.all_gather(x, "i", dim=3), row, row, (X,), CollectiveError, ["dim=3", "rank 2"]
    ),
    "a dim that cannot be scattered": Refusal(
        lambda x: sp.psum_scatter(x, "i", tiled=True), row, row, (X,), CollectiveError, ["size 1", "no multiple of 4"]
    ),
    "a dim that is not the axis's size": Refusal(
        lambda x: sp.all_to_all(x, "i", 0, 0), row, row, (X,), CollectiveError, ["size 1", "is not 4", "tiled=True"]
    ),
    "pcast to invariant": Refusal(
        lambda x: sp.pcast(x, "i", to="invariant"), row, P(), (X,), VaryingError, ["promise", "sp.pbroadcast"]
    ),
    "a wrong to=": Refusal(
        lambda x: sp.pcast(x, "i", to="vary"), row, P(), (X,), VaryingError, ["to='vary'", 'to="varying"']
    ),
    "another mesh": Refusal(lambda x: x, row, row, (ELSEWHERE,), SpecError, ["Mesh(x=2, y=2)", "Mesh(i=4)"]),
    "a nested map with no axis left": Refusal(
        lambda x: sp.shard_map(lambda x: x, in_specs=row, out_specs=row)(x),
        row,
        row,
        (X,),
        SpecError,
        ["all axes are manual", "axis_names="],
    ),
    "a nested map over the same axis": Refusal(
        lambda x: sp.shard_map(lambda x: x, in_specs=row, out_specs=row, axis_names={"i"})(x),
        row,
        row,
        (X,),
        SpecError,
        ["the axis 'i' is manual in the map around it", "disjoint"],
    ),
    "an unknown manual axis": Refusal(
        lambda x: x, row, row, (X,), SpecError, ["axis_names", "'j'", "i=4"], LINE, {"axis_names": {"j"}}
    ),
    "constrain over a manual axis": Refusal(
        lambda x: sp.constrain(x, row), row, row, (torch.ones(16),), SpecError, ["'i' is manual", "f32[4]{V:i}"]
    ),
    "a draw from the global generator": Refusal(
        lambda x: x + torch.rand(1), row, row, (X,), TracingError, ["global generator", "key", "torch.rand(1)"]
    ),
    "dropout": Refusal(lambda x: F.dropout(x), row, row, (X,), TracingError, ["global generator", "key"]),
    "a shape from data": Refusal(lambda x: x[x > 1], row, row, (X,), Exception, ["shape", "torch.where"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, mode: str):
    case = REFUSALS[name]
    with pytest.raises(case.error) as caught:
        mapped(mode, case.body, case.mesh, case.ins, case.outs, **(case.options or {}))(*case.args)
    text = str(caught.value)
    assert isinstance(caught.value, sp.SpmdError)
    assert not [word for word in case.words if word not in text], text
    assert "fix: " in text and "mapped" not in text, text
    same((X, OUTSIDE), (torch.arange(4.0), torch.zeros(1)))


def test_arguments_are_not_changed_before_the_error():
    x = torch.arange(4.0)

    def body(x):
        x += 1
        return x

    with pytest.raises(VaryingError, match="the argument x was written to") as caught:
        sp.shard_map(body, mesh=LINE, in_specs=P("i"), out_specs=P("i"))(x)
    assert "x += 1" in str(caught.value) and "x = x.clone()" in str(caught.value)
    same(x, torch.arange(4.0))


def test_the_traceback_has_the_users_line():
    def body(x):
        return x + sp.psum(torch.ones(1), "i")

    with pytest.raises(VaryingError) as caught:
        sp.shard_map(body, mesh=LINE, in_specs=P("i"), out_specs=P("i"))(X)
    assert any(entry.name == "body" for entry in caught.traceback)
    assert 'x + sp.psum(torch.ones(1), "i")' in str(caught.value)


@pytest.mark.parametrize("call", [lambda x: sp.psum(x, "i"), lambda x: x * sp.axis_index("i")])
def test_collectives_outside_a_map(call: Callable[..., Any]):
    for run in (call, sp.spmd_jit(call, mesh=LINE)):
        with pytest.raises(CollectiveError, match="outside a map(.|\n)*sp.shard_map"):
            run(X)


def test_maps_over_some_axes_are_traced_only():
    f = sp.shard_map(lambda x: x, mesh=SQUARE, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    with pytest.raises(CollectiveError, match="spmd_jit(.|\n)*global view: y"):
        f(X)


def test_an_axis_of_the_global_view_is_not_manual():
    bodies: list[tuple[Any, Any]] = [
        (lambda x: sp.psum(x, "y"), P("x")),
        (lambda x: x, P(("x", "y"))),
        (lambda x: sp.random.normal(sp.random.key(0), (4,), spec=P("y")), P("x")),
    ]
    for body, ins in bodies:
        with pytest.raises((CollectiveError, SpecError), match="'y'(.|\n)*not manual(.|\n)*manual axes: x"):
            mapped("traced", body, SQUARE, ins, P("x"), axis_names={"x"})(X)


def test_values_that_python_asks_for():
    def branch(x):
        if x.sum() > 1:
            return x * 2
        return x

    f = sp.shard_map(branch, mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(VaryingError, match="differs between devices") as caught:
        f(X)
    assert "bool[]{V:i}" in str(caught.value) and "if x.sum() > 1:" in str(caught.value)
    with pytest.raises(TracingError, match="if x.sum"):
        sp.spmd_jit(f, mesh=LINE)(X)
    for ask in (lambda x: x.tolist(), lambda x: x.numpy(), lambda x: float(x)):
        with pytest.raises(VaryingError, match="differs between devices"):
            sp.shard_map(lambda x, ask=ask: ask(x), mesh=LINE, in_specs=P("i"), out_specs=None)(X)


class Product(torch.autograd.Function):
    """One of a user's own, which knows nothing of devices."""

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


@pytest.mark.parametrize("mode", MODES)
def test_operands_of_a_foreign_function_are_cast(mode: str):
    loss = lambda w, x: sp.psum(Product.apply(w, x).sum(), "i")  # noqa: E731
    gradients = mapped(mode, lambda w, x: grad(loss, argnums=(0, 1))(w, x), LINE, (P(), P("i")), (P(), P("i")))
    same(gradients(torch.tensor([2.0]), X), (torch.tensor([6.0]), torch.full((4,), 2.0)))


def test_a_gradient_has_the_type_of_its_input():
    """A Function that gives a varying gradient to an operand that it took as it was."""

    class Own(Product):
        spmd_own = True  # so its operands are not cast

    with pytest.raises(VaryingError, match=r"gradient in .*body is f32\[1\]\{V:i\}, its input f32\[1\]"):

        def body(w, x):
            return grad(lambda w: sp.psum(Own.apply(w, x).sum(), "i"))(w)

        sp.shard_map(body, mesh=LINE, in_specs=(P(), P("i")), out_specs=P())(torch.tensor([2.0]), X)


def test_what_is_no_function():
    with pytest.raises(SpecError, match="shard_map: 3 is a int"):
        sp.shard_map(3, mesh=LINE, in_specs=P(), out_specs=P())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no mesh"):
        sp.shard_map(lambda x: x, in_specs=P(), out_specs=P())(X)
