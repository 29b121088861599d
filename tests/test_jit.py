"""Calls of transformed functions: how arguments bind, which layouts they get, what is traced again, what comes back."""

from __future__ import annotations

import copy
import enum
import functools
import warnings
from typing import Annotated, NamedTuple

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

import spmdfn as sp
from spmdfn import P
from spmdfn.errors import SpmdError

MESH = sp.make_mesh((2, 4), ("dp", "tp"))
LINE = sp.make_mesh((4,), ("x",))
X = torch.arange(32.0).reshape(8, 4)
W = torch.arange(64.0).reshape(4, 16) / 7


def same(result, wanted):
    torch.testing.assert_close(sp.unshard(result), wanted)


def rows(jitted, *args, **kwargs):
    return [(row.op, row.axes, row.why) for row in jitted.lower(*args, **kwargs).collectives]


class Counted:
    """A function that counts how often Python runs it: once for each trace."""

    def __init__(self, function):
        self.function, self.count = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.function(*args, **kwargs)


# ---------------------------------------------------------------- in_specs


def test_specs_by_position_name_and_pattern():
    def f(x, w, scale=1.0):
        return x @ w * scale

    by_position = sp.spmd_jit(f, mesh=MESH, in_specs=(P("dp"), P(None, "tp")))
    by_name = sp.spmd_jit(f, mesh=MESH, in_specs={"w": "n (tp m)", "x": "(dp b) n"})
    for jitted in (by_position, by_name):
        for result in (jitted(X, W), jitted(X, w=W), jitted(w=W, x=X), jitted(X, W, scale=1.0)):
            assert repr(result) == "f32[8@dp, 16@tp]"
            same(result, X @ W)
    same(by_name(X, W, scale=3.0), X @ W * 3)


def test_one_spec_stands_for_every_argument_and_any_subtree():
    jitted = sp.spmd_jit(lambda a, b: (a, b), mesh=MESH, in_specs=P("dp"))
    first, second = jitted({"u": X, "n": None, "k": 3}, [X, (X,)])
    assert first["n"] is None and first["k"] == 3
    assert {repr(first["u"]), repr(second[0]), repr(second[1][0])} == {"f32[8@dp, 4]"}


def test_prefix_of_a_tree():
    specs = ({"w": P("dp"), "rest": None}, None)
    jitted = sp.spmd_jit(lambda tree, y: (tree, y), mesh=MESH, in_specs=specs)
    tree, y = jitted({"w": [X, X], "rest": {"b": X}}, X)
    assert [repr(tree["w"][1]), repr(tree["rest"]["b"]), repr(y)] == ["f32[8@dp, 4]", "f32[8, 4]", "f32[8, 4]"]


def test_a_none_leaf_keeps_the_layout_of_an_array():
    jitted = sp.spmd_jit(lambda x, y: (x * 2, y * 2), mesh=MESH, in_specs=(None, None))
    assert list(map(repr, jitted(sp.shard(X, P(None, "tp"), mesh=MESH), X))) == ["f32[8, 4@tp]", "f32[8, 4]"]


def test_variadic_arguments():
    def f(x, *rest, **named):
        return x, rest, named

    jitted = sp.spmd_jit(f, mesh=MESH, in_specs={"x": P("dp"), "rest": P(None, "tp"), "extra": P("dp", "tp")})
    x, rest, named = jitted(X, X, X, extra=X, other=X)
    assert list(map(repr, (x, *rest))) == ["f32[8@dp, 4]", "f32[8, 4@tp]", "f32[8, 4@tp]"]
    assert {key: repr(value) for key, value in named.items()} == {"extra": "f32[8@dp, 4@tp]", "other": "f32[8, 4]"}
    jitted = sp.spmd_jit(f, mesh=MESH, in_specs={"rest": (P("dp"), None)})
    assert list(map(repr, jitted(X, X, X)[1])) == ["f32[8@dp, 4]", "f32[8, 4]"]


Tokens = Annotated[torch.Tensor, "(dp b) t"]


def annotated(x: Tokens, w: Annotated[torch.Tensor, P(None, "tp")], n: int) -> Annotated[torch.Tensor, "b (tp n)"]:
    return x @ w * n


def test_annotated_patterns():
    jitted = sp.spmd_jit(annotated, mesh=MESH)
    assert jitted.lower(X, W, 2).inputs[0] is jitted.lower(x=X, w=W, n=2).inputs[1]  # keywords go by name
    assert repr(jitted(X, W, 2)) == "f32[8, 16@tp]"
    same(jitted(X, W, 2), X @ W * 2)
    given = sp.spmd_jit(annotated, mesh=MESH, in_specs=(None, None, None), out_specs=P("dp"))
    assert repr(given(X, W, 2)) == "f32[8@dp, 16]"


def test_annotations_with_names_of_an_enclosing_function():
    pattern = "(dp b) t"

    def f(x: Annotated[torch.Tensor, pattern], other: NotThere = None):  # noqa: F821
        assert pattern
        return x + 1

    assert repr(sp.spmd_jit(f, mesh=MESH)(X)) == "f32[8@dp, 4]"


def test_free_names_of_whole_arguments_mean_one_size():
    specs = {"x": "(dp b) t", "y": "(dp b) s"}
    sp.spmd_jit(lambda x, y: x.sum() + y.sum(), mesh=MESH, in_specs=specs)(X, X[:, :3])
    trees = ({"a": "b t"}, {"a": "b t"})  # in a tree each leaf is for itself
    sp.spmd_jit(lambda x, y: x, mesh=MESH, in_specs=trees)({"a": X}, {"a": W})


# ---------------------------------------------------------------- static arguments


def test_static_arguments_by_number_and_name():
    @functools.partial(sp.spmd_jit, mesh=LINE, in_specs=(P("x"), None), static_argnums=1, static_argnames="how")
    def f(x, config, *, how="sum"):
        assert isinstance(config, tuple)
        return getattr(x * config[0], how)()

    same(f(X, (2, 3)), X.sum() * 2)
    same(f(X, config=(2, 3), how="mean"), (X * 2).mean())
    without = sp.spmd_jit(lambda n, x: x * n, mesh=LINE, in_specs=(P("x"),), static_argnums=(0,))
    assert repr(without(3, X)) == "f32[8@x, 4]"
    last = sp.spmd_jit(lambda x, n: x * n, mesh=LINE, static_argnums=-1)
    same(last(X, 3), X * 3)


def test_equal_statics_of_different_types_are_different():
    f = sp.spmd_jit(lambda n, x: x.sum() + (1 if isinstance(n[0], bool) else 2.5), mesh=LINE, static_argnums=0)
    x = torch.zeros(4, dtype=torch.int64)
    assert [f((n,), x).item() for n in (1, True, 1.0)] == [2.5, 1, 2.5]
    g = sp.spmd_jit(lambda x, n: x * n, mesh=LINE)
    assert [g(x, n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    h = sp.spmd_jit(Counted(lambda x, n: x * n), mesh=LINE, static_argnums=1)
    h(X, float("nan")), h(X, float("nan")), h(X, -0.0), h(X, 0.0)
    assert h.__wrapped__.count == 3


def test_static_arguments_are_part_of_the_key():
    f = sp.spmd_jit(lambda x, shape: torch.layer_norm(x, shape), mesh=LINE, in_specs=(P("x"), None))
    x = torch.randn(4, 4, 8)
    for shape in ((8,), (4, 8), (8,)):
        same(f(x, shape), torch.layer_norm(x, shape))


def test_a_third_number_warns():
    f = sp.spmd_jit(lambda x, o: x * o["lr"] + o["n"], mesh=LINE)
    f(X, {"lr": 0.1, "n": 1})
    f(X, {"lr": 0.2, "n": 1})
    with pytest.warns(UserWarning, match=r"third time.*o\['lr'\]") as found:
        f(X, {"lr": 0.3, "n": 1})
    text = str(found[0].message)
    assert "o['n']" not in text and "0.1, 0.2, 0.3" in text and "0-d tensor" in text
    assert found[0].filename == __file__
    f(X, {"lr": 0.4, "n": 1})  # once
    same(f(X, {"lr": 0.1, "n": 1}), X * 0.1 + 1)


def test_declared_statics_and_other_shapes_do_not_warn():
    f = sp.spmd_jit(lambda x, n: x * n, mesh=LINE, static_argnames="n")
    g = sp.spmd_jit(lambda x, n: x * n, mesh=LINE)
    for n in range(5):
        f(X, n)
        g(torch.ones(4, n + 1), n)


# ---------------------------------------------------------------- what is traced again


def test_a_second_call_does_not_trace():
    function = Counted(lambda x, w: x @ w)
    f = sp.spmd_jit(function, mesh=MESH, in_specs=(P("dp"), None))
    f(X, W), f(X + 1, W), f.lower(X, W), f(X.requires_grad_(False), torch.nn.Parameter(W))
    assert function.count == 1
    f(X[:4], W)
    assert function.count == 2
    f(X.double(), W.double())
    assert function.count == 3


def test_traces_are_kept_apart_from_partitions():
    function = Counted(lambda x: x.sum(0))
    f = sp.spmd_jit(function, mesh=MESH)
    programs = {f.lower(sp.shard(X, spec, mesh=MESH)) for spec in (P(), P("dp"), P("tp"), P(None, "tp"))}
    assert function.count == 1 and len(programs) == 4


@pytest.mark.parametrize(
    "setting",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
)
def test_settings_are_part_of_the_key(setting):
    function = Counted(lambda x: x * 2)
    f = sp.spmd_jit(function, mesh=LINE)
    f(X)
    with setting():
        f(X), f(X)
    f(X)
    assert function.count == 2


def test_default_dtype_and_deterministic_are_part_of_the_key():
    f = sp.spmd_jit(lambda x: x + torch.ones(4), mesh=LINE)
    x = torch.ones(4, dtype=torch.int64)
    assert f(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert f(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    function = Counted(lambda x: x * 2)
    g = sp.spmd_jit(function, mesh=LINE)
    g(X)
    torch.use_deterministic_algorithms(True)
    try:
        g(X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert function.count == 2


def test_autocast_around_the_call():
    f = sp.spmd_jit(lambda x, w: x @ w, mesh=MESH, in_specs=(P("dp"), None))
    with torch.autocast("cpu", torch.bfloat16):
        assert f(X, W).dtype is torch.bfloat16
    assert f(X, W).dtype is torch.float32


def test_inference_mode_and_no_grad():
    f = sp.spmd_jit(lambda x, w: grad(lambda w: (x @ w).square().sum())(w), mesh=MESH, in_specs=(P("dp"), None))
    wanted = grad(lambda w: (X @ w).square().sum())(W)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            result = f(X, W)
        same(result, wanted)


# ---------------------------------------------------------------- closures


def test_closed_over_tensors_are_constants_and_arrays_inputs():
    array = sp.shard(W, P(None, "tp"), mesh=MESH)
    f = sp.spmd_jit(lambda x: (x @ W, x @ array, x @ array + 1), mesh=MESH, in_specs=P("dp"))
    plain, once, twice = f(X)
    assert [repr(plain), repr(once)] == ["f32[8@dp, 16]", "f32[8@dp, 16@tp]"]
    same((plain, once, twice), (X @ W, X @ W, X @ W + 1))
    inputs = f.lower(X).inputs
    assert len(inputs) == 2 and inputs[1].entries == ((), ("tp",))


def test_a_rebound_closure_keeps_the_array_that_was_traced():
    state = {"w": sp.shard(W, P(None, "tp"), mesh=MESH)}
    f = sp.spmd_jit(lambda x: x @ state["w"], mesh=MESH)
    f(X)
    state["w"] = sp.shard(W * 0, P(None, "tp"), mesh=MESH)
    same(f(X), X @ W)


def test_closed_over_values_returned_and_read():
    array, scalar = sp.shard(X, P("dp"), mesh=MESH), sp.shard(torch.tensor(3.0), P(), mesh=MESH)
    f = sp.spmd_jit(lambda x: (array, W, x * float(scalar)), mesh=MESH)
    same(f(X), (X, W, X * 3))
    assert repr(f(X)[0]) == "f32[8@dp, 4]"


def test_gradient_with_respect_to_a_closed_over_array():
    array = sp.shard(W, P(None, "tp"), mesh=MESH)
    f = sp.spmd_jit(lambda x: grad(lambda w: (x @ w).square().sum())(array), mesh=MESH, in_specs=P("dp"))
    same(f(X), grad(lambda w: (X @ w).square().sum())(W))


def test_a_module_called_functionally_and_as_a_closure():
    module = torch.nn.Linear(4, 16)
    f = sp.spmd_jit(lambda p, x: functional_call(module, p, (x,)), mesh=MESH, in_specs=(None, P("dp")))
    parameters = dict(module.named_parameters())
    same(f(parameters, X), module(X).detach())
    g = sp.spmd_jit(lambda x: module(x), mesh=MESH, in_specs=P("dp"))
    same(g(X), module(X).detach())
    assert not g(X).requires_grad


# ---------------------------------------------------------------- results


class Pair(NamedTuple):
    first: object
    second: object


class Color(enum.IntEnum):
    RED = 1


def test_results_of_any_structure():
    values = {
        "number": 3,
        "nan": float("nan"),
        "text": "t",
        "numpy": np.float64(1.5),
        "color": Color.RED,
        "o": object(),
    }

    def f(x):
        return Pair([x, (x * 2, None)], {**values, "kind": torch.float32, "none": None})

    first, second = sp.spmd_jit(f, mesh=MESH, in_specs=P("dp"))(X)
    assert isinstance(first[1], tuple) and first[1][1] is None
    same(first[1][0], X * 2)
    for name, value in values.items():
        assert second[name] is value
    assert second["kind"] is torch.float32 and second["none"] is None


def test_a_function_of_nothing_that_matters():
    assert sp.spmd_jit(lambda x: None, mesh=MESH)(X) is None
    assert sp.spmd_jit(lambda: 3, mesh=MESH)() == 3
    same(sp.spmd_jit(lambda: torch.ones(8), mesh=MESH, out_specs=P("tp"))(), torch.ones(8))
    same(sp.spmd_jit(lambda x: (x, x, x), mesh=MESH)(X), (X, X, X))


def test_out_specs_prefix_and_scalars():
    f = sp.spmd_jit(
        lambda x: ({"a": x, "b": [x, x.sum()]}, x.sum()),
        mesh=MESH,
        in_specs=P("dp"),
        out_specs=({"a": P("dp", "tp"), "b": [None, ""]}, P()),
    )
    tree, total = f(X)
    assert [repr(v) for v in (tree["a"], *tree["b"], total)] == ["f32[8@dp, 4@tp]", "f32[8@dp, 4]", "f32[]", "f32[]"]
    assert total.item() == X.sum()


def test_results_do_not_share_memory_with_plain_arguments():
    x = X.clone()
    f = sp.spmd_jit(lambda x: (x, x.reshape(4, 8), x.t(), x[2], x * 1), mesh=MESH, in_specs=P("dp"))
    results = f(x)
    x.zero_()
    same(results, (X, X.reshape(4, 8), X.t(), X[2], X))


def test_specs_of_results_are_as_asked_for():
    mesh = sp.make_mesh((2, 1), ("dp", "one"))
    f = sp.spmd_jit(lambda x: x + 1, mesh=mesh, in_specs=P("dp"), out_specs=P(("dp", "one"), None))
    assert f(X).spec is P(("dp", "one"), None)
    assert sp.shard(X, P("one", "dp"), mesh=mesh).spec is P("one", "dp")
    assert sp.shard(f(X), P("dp", "one")).spec is P("dp", "one")
    assert sp.spmd_jit(lambda x: x + 1, mesh=mesh, in_specs=P("dp"))(X).spec is P("dp", None)


def test_unreduced_in_and_out():
    blocks = [torch.full((3,), float(i)) for i in range(4)]
    pending = sp.Array.from_shards(blocks, P(unreduced={"x"}), LINE)
    keep = sp.spmd_jit(lambda v: v * 2, mesh=LINE, in_specs=P(unreduced={"x"}), out_specs=P(unreduced={"x"}))
    result = keep(pending)
    assert repr(result) == "f32[3]{+x}" and rows(keep, pending) == []
    assert [block.tolist() for block in result.shards] == [[2.0 * i] * 3 for i in range(4)]
    same(result, torch.full((3,), 12.0))
    same(keep(torch.ones(3)), torch.full((3,), 2.0))
    square = sp.spmd_jit(lambda v: v**2, mesh=LINE)
    same(square(pending), torch.full((3,), 36.0))
    assert [row[0] for row in rows(square, pending)] == ["all_reduce"]
    left = sp.spmd_jit(lambda a: a.sum(0), mesh=LINE, in_specs=P("x"), out_specs=P(unreduced={"x"}))
    assert left(X).spec.unreduced == {"x"} and rows(left, X) == []
    same(left(X), X.sum(0))
    assert not sp.spmd_jit(lambda v: v, mesh=LINE)(pending).spec.unreduced  # never pending unasked


# ---------------------------------------------------------------- resharding


def test_an_array_in_another_layout_is_resharded_inside():
    f = sp.spmd_jit(lambda x: x * 2, mesh=MESH, in_specs=P("dp"))
    array = sp.shard(X, P(None, "tp"), mesh=MESH)
    assert rows(f, array) == [("all_gather", ("tp",), "input")]
    same(f(array), X * 2)
    assert rows(f, sp.shard(X, P("dp"), mesh=MESH)) == rows(f, sp.shard(X, P(), mesh=MESH)) == []


def test_strict_allows_reductions_and_what_specs_ask_for():
    f = sp.spmd_jit(lambda x, w: x @ w, mesh=MESH, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), reshard="error")
    same(f(X, W), X @ W)
    pending = sp.Array.from_shards([X] * 8, P(unreduced={"dp"}), MESH)
    g = sp.spmd_jit(lambda x: x + 1, mesh=MESH, in_specs=P(), out_specs=P("dp"), reshard="error")
    same(g(pending), X * 2 + 1)
    gathers = sp.spmd_jit(lambda x: x + 1, mesh=MESH, in_specs=P("dp"), out_specs=P(), reshard="error")
    same(gathers(X), X + 1)


# ---------------------------------------------------------------- meshes


def test_the_mesh_comes_from_the_function_the_arrays_or_the_context():
    f = sp.spmd_jit(lambda x: x + 1, in_specs=P("x"))
    assert f(sp.shard(X, P(), mesh=LINE)).mesh is LINE
    with sp.set_mesh(LINE):
        assert f(X).mesh is LINE
    two = sp.make_mesh((2,), ("x",))
    with sp.set_mesh(two):
        assert f(X).mesh is two
        assert f(sp.shard(X, P(), mesh=LINE)).mesh is LINE
        assert sp.spmd_jit(lambda x: x, mesh=LINE)(X).mesh is LINE


def test_a_mesh_without_data_lowers_only():
    mesh = sp.make_mesh((128, 128), ("dp", "tp"), backend="fake")
    f = sp.spmd_jit(lambda x, w: x @ w, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp"))
    shapes = torch.empty(1024, 1024, device="meta"), torch.empty(1024, 256, device="meta")
    assert [(row.op, row.axes) for row in f.lower(*shapes).collectives] == [("all_reduce", ("tp",))]
    for call in (
        lambda: f(torch.ones(1024, 1024), torch.ones(1024, 256)),
        lambda: sp.shard(X, P(), mesh=mesh),
        lambda: sp.make_array((4,), P(), lambda index: torch.ones(4), mesh=mesh),
    ):
        with pytest.raises(SpmdError, match="holds no data"):
            call()


def test_shapes_lower_and_do_not_run():
    f = sp.spmd_jit(lambda x: x * 2, mesh=LINE, in_specs=P("x"))
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(8)
    for shape in (torch.empty(8, device="meta"), fake):
        assert f.lower(shape).as_text() == f.lower(torch.ones(8)).as_text()
        with pytest.raises(SpmdError, match=r"the argument x is a meta or fake tensor and holds no data[^$]*lower"):
            f(shape)
    same(f(torch.ones(8)), torch.full((8,), 2.0))


# ---------------------------------------------------------------- donation


def test_donated_arrays_are_used_up():
    f = sp.spmd_jit(lambda p, x: {k: v + x for k, v in p.items()}, mesh=MESH, donate_argnums=0)
    old = sp.shard({"w": X, "b": X}, P("dp"), mesh=MESH)
    new = f(old, 1.0)
    same(new, {"w": X + 1, "b": X + 1})
    for use in (lambda: old["w"].unshard(), lambda: old["w"].shards, lambda: f(old, 1.0)):
        with pytest.raises(SpmdError, match="was donated"):
            use()
    assert repr(old["w"]) == "f32[8@dp, 4]"
    same(f({"w": X, "b": X}, 1.0), {"w": X + 1, "b": X + 1})  # plain tensors stay
    by_name = sp.shard({"w": X}, P("dp"), mesh=MESH)
    f(p=by_name, x=1.0)
    with pytest.raises(SpmdError, match="was donated"):
        by_name["w"].item()


def test_a_refused_donation_leaves_the_arrays():
    f = sp.spmd_jit(lambda p, q: p + q, mesh=MESH, donate_argnums=(0,))
    array, gone = sp.shard((X, X), P("dp"), mesh=MESH)
    f(gone, X)
    with pytest.raises(SpmdError):
        f(array, array)
    with pytest.raises(SpmdError):
        f(array, gone)
    same(array, X)


# ---------------------------------------------------------------- nesting


def test_a_nested_call_is_part_of_the_outer_program():
    inner = sp.spmd_jit(Counted(lambda x, w: x @ w), mesh=MESH, in_specs=(P(), P()))
    outer = sp.spmd_jit(lambda x, w: inner(x, w).relu(), mesh=MESH, in_specs=(P("dp"), P(None, "tp")))
    assert repr(outer(X, W)) == "f32[8@dp, 16@tp]" and rows(outer, X, W) == []
    assert inner.__wrapped__.count == 1
    array = sp.shard(W, P(None, "tp"), mesh=MESH)
    closes = sp.spmd_jit(lambda x: x @ inner(array, torch.ones(16, 16)), mesh=MESH, in_specs=P("dp"))
    same(closes(X), X @ (W @ torch.ones(16, 16)))


def test_transforms_outside_see_the_function_itself():
    f = sp.spmd_jit(lambda w, x: (x @ w).square().sum(), mesh=MESH, in_specs=(P(), P("dp")))
    plain = f.__wrapped__
    torch.testing.assert_close(grad(f)(W, X), grad(plain)(W, X))
    torch.testing.assert_close(vmap(f, (None, 0))(W, X[:, None]), vmap(plain, (None, 0))(W, X[:, None]))
    scaled = grad(lambda s: (s * f(W, X)).sum())(torch.tensor(2.0))
    torch.testing.assert_close(scaled, plain(W, X))


def test_transforming_a_transformed_function():
    twice = sp.spmd_jit(sp.spmd_jit(lambda x: x + 1, mesh=MESH, in_specs=P("dp")), mesh=MESH, in_specs=P("tp"))
    assert repr(twice(X)) == "f32[8@tp, 4]"
    assert twice.__name__ == "<lambda>" and "spmd_jit of" in repr(twice)


def test_methods_partials_and_decorators():
    class Scale:
        def __init__(self, by):
            self.by = by

        @sp.spmd_jit(mesh=LINE, in_specs={"x": P("x")})
        def apply(self, x):
            return x * self.by

        def __call__(self, x: Annotated[torch.Tensor, "(x n) ..."]):
            return x * self.by

    same(Scale(3).apply(X), X * 3)
    same(Scale(4).apply(x=X), X * 4)
    assert repr(sp.spmd_jit(Scale(3), mesh=LINE)(X)) == "f32[8@x, 4]"
    partial = sp.spmd_jit(functools.partial(annotated, n=2), mesh=MESH)
    assert repr(partial(X, W)) == "f32[8, 16@tp]"


def test_modules_and_builtins_as_functions():
    class Scale(torch.nn.Module):
        def forward(self, x: Tokens, by: torch.Tensor):
            return x * by

    f = sp.spmd_jit(Scale(), mesh=MESH)
    assert repr(f(X, by=X)) == "f32[8@dp, 4]"
    matmul = sp.spmd_jit(torch.matmul, mesh=MESH, in_specs=(P("dp"), P(None, "tp")))
    assert repr(matmul(X, W)) == "f32[8@dp, 16@tp]"


def test_annotations_do_not_speak_of_what_torch_func_makes():
    def loss(x: Annotated[torch.Tensor, "(dp b)"]) -> Annotated[torch.Tensor, ""]:
        return x.square().sum()

    @functools.wraps(loss)
    def logged(x):
        return loss(x)

    assert repr(sp.spmd_jit(grad(loss), mesh=MESH)(X[:, 0])) == "f32[8]"
    assert repr(sp.spmd_jit(vmap(loss), mesh=MESH)(X)) == "f32[8]"
    assert sp.spmd_jit(logged, mesh=MESH).lower(X[:, 0]).inputs[0].entries == (("dp",),)


# ---------------------------------------------------------------- constrain


def test_constrain_inside_and_outside():
    f = sp.spmd_jit(lambda x: grad(lambda y: sp.constrain(y * y, P(None, "tp")).sum())(x), mesh=MESH, in_specs=P("dp"))
    same(f(X), 2 * X)
    array = sp.shard(X, P("dp"), mesh=MESH)
    closed = sp.spmd_jit(lambda: sp.constrain(array, P(None, "tp")), mesh=MESH)
    assert repr(closed()) == "f32[8, 4@tp]"
    same(closed(), X)
    constant = sp.spmd_jit(lambda: sp.constrain(X, P(None, "tp")), mesh=MESH)
    assert repr(constant()) == "f32[8, 4]"  # a closed-over plain tensor is whole on every device
    assert repr(sp.constrain(array, "(tp a) b")) == "f32[8@tp, 4]"
    assert sp.constrain(X, P("dp")) is X
    with sp.set_mesh(MESH):
        assert sp.constrain(X, P("dp")) is X
        torch.testing.assert_close(grad(lambda x: sp.constrain(x, P("dp")).sum())(X), torch.ones_like(X))
    mapped = sp.spmd_jit(lambda x: vmap(lambda row: sp.constrain(row, P("tp")) * 2)(x), mesh=MESH)
    assert repr(mapped(X)) == "f32[8, 4@tp]"


def test_plain_tensors_that_require_grad():
    x = X.clone().requires_grad_()
    f = sp.spmd_jit(lambda x: x * 2, mesh=LINE, in_specs=P("x"))
    assert not f(x).requires_grad and not f(x).shards[0].requires_grad
    same(f(x), X * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(f(x))
