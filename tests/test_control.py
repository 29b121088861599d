"""remat, scan and cond against plain torch on whole tensors: under every transform, in global code and in maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mapped import LINE, MODES, SQUARE, mapped, same, whole
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import spmdfn as sp
from spmdfn import P

Function = Callable[..., Any]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, X, KEY = drawn(3, 3, seed=1), drawn(8, 3, seed=2), sp.random.key(7)


# One function in two spellings: over whole tensors, and over this device's rows


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ w)
    return x + h - h.mean(0)


def rows_layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ w)
    return x + h - sp.pmean(h.mean(0), "i")


def stack_of(layer: Function, total: Function) -> Function:
    """Two layers with dropout and a loss."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            x = layer(w * (i + 1), x)
        return total(x.pow(2).sum())

    return loss


def looped(layer: Function, total: Function) -> Function:
    """The same by scan, the loss too, and a condition that holds in the second step."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        factors = torch.arange(1.0, 3, dtype=torch.float64)
        x, _ = sp.scan(lambda x, factor: (layer(w * factor, x), None), x, factors)
        kept, squares = sp.scan(lambda c, i: (c, c.pow(2).sum(-1)), x.T, length=1)
        return total(sp.cond(squares.sum() < 0, lambda x: x.exp().sum(), lambda x: x.pow(2).sum(), kept.T))

    return loss


KINDS: dict[str, Callable[[Function, Function], Function]] = {
    "remat": lambda layer, total: stack_of(sp.remat(layer), total),
    "remat of remat": lambda layer, total: sp.remat(stack_of(sp.remat(layer), total)),
    "scan and cond": looped,
    "scan of remat": lambda layer, total: looped(sp.remat(layer), total),
}

TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "value": lambda f: f,
    "grad": grad,
    "grad of grad": lambda f: grad(lambda w, x: (grad(f)(w, x) * W.cos()).sin().sum()),
    "grad_and_value": grad_and_value,
    "vjp": lambda f: lambda w, x: vjp(lambda w: f(w, x), w)[1](f(w, x) * 3)[0],
    "jvp": lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (w.cos(),)),
    "jvp of grad": lambda f: lambda w, x: jvp(lambda w: grad(f)(w, x), (w,), (w.cos(),)),
    "grad of jvp": lambda f: grad(lambda w, x: jvp(lambda w: f(w, x), (w,), (torch.ones_like(w),))[1]),
    "vmap": lambda f: lambda w, x: vmap(f, in_dims=(0, None))(torch.stack([w, w.cos()]), x),
    "vmap of grad": lambda f: lambda w, x: vmap(grad(f), in_dims=(1, None))(torch.stack([w, w.cos()], 1), x),
    "grad of vmap": lambda f: grad(lambda w, x: vmap(f, in_dims=(0, None))(torch.stack([w, w.cos()]), x).sin().sum()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
}


SPECS = (P(), P("i"))
INSIDE = ("global", "eager map", "traced map")
EVERYWHERE = ("plain", *INSIDE, "around an eager map", "around a traced map")


def run(way: str, kind: str, transform: Callable[[Function], Function]) -> torch.Tensor:
    """A transform of the loss, in one of the ways to run it."""
    rows = KINDS[kind](rows_layer, lambda x: sp.psum(x, "i"))
    plain = KINDS[kind](layer, lambda x: x)
    if way == "plain":
        return transform(plain)(W, X)
    if way == "global":
        return sp.unshard(sp.spmd_jit(transform(plain), mesh=LINE, in_specs=SPECS)(W, X))
    mode = "eager" if "eager" in way else "traced"
    if way in INSIDE:
        return mapped(mode, transform(rows), LINE, SPECS, P())(W, X)
    return whole(mode, transform(sp.shard_map(rows, mesh=LINE, in_specs=SPECS, out_specs=P())), LINE)(W, X)


CASES = [
    *[("remat", name, EVERYWHERE) for name in TRANSFORMS],
    *[("scan of remat", name, INSIDE) for name in TRANSFORMS],
    *[("scan and cond", name, INSIDE) for name in ("grad of grad", "vmap of grad", "jvp of grad")],
    *[("remat of remat", name, INSIDE) for name in ("grad of grad", "vmap of grad", "hessian")],
]


@pytest.mark.parametrize(("kind", "name", "ways"), CASES, ids=[f"{kind}: {name}" for kind, name, _ in CASES])
def test_transforms(kind: str, name: str, ways: Sequence[str]):
    want = TRANSFORMS[name](stack_of(layer, lambda x: x))(W, X)
    for way in ways:
        same(run(way, kind, TRANSFORMS[name]), want, 1e-12)


# remat


def dropped(w: dict[str, torch.Tensor], x: torch.Tensor, key: torch.Tensor, *, rate: float, name: str) -> Any:
    """A layer over pytrees, with a draw and a static argument."""
    h = torch.nn.functional.gelu(x @ w["up"])
    kept = sp.random.bernoulli(key, 1 - rate, h.shape)
    return {"x": x + torch.where(kept, h, 0.0) @ w["down"], "kept": kept.sum(), "name": name, "none": None}


def training(layer: Function, width: int = 4, layers: int = 2) -> tuple[Function, Any]:
    """The gradient of a loss over layers, and its parameters."""
    params = [
        {"up": drawn(width, 4 * width, seed=i).float() / 4, "down": drawn(4 * width, width, seed=50 + i).float() / 4}
        for i in range(layers)
    ]

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(params):
            result = layer(w, x, sp.random.fold_in(KEY, i), rate=0.5, name="a layer")
            assert result["name"] == "a layer" and result["none"] is None
            x = result["x"] + 0 * result["kept"]
        return x.pow(2).mean()

    return torch.func.grad_and_value(loss), params


def test_pytrees_static_arguments_and_the_same_random_numbers():
    x = drawn(8, 4, seed=3).float()
    step, params = training(dropped)
    again, _ = training(sp.remat(dropped))
    want = step(params, x)
    same(again(params, x), want)
    specs = (None, "(i b) d")
    same(sp.unshard(sp.spmd_jit(again, mesh=LINE, in_specs=specs)(params, x)), want, 1e-6)
    program = sp.spmd_jit(again, mesh=LINE, in_specs=specs).lower(params, x)
    once = sp.spmd_jit(step, mesh=LINE, in_specs=specs).lower(params, x)
    draws = [program.as_text().count("uniform(") for program in (once, program)]
    assert draws[0] and draws[1] > draws[0]


@pytest.mark.parametrize("mode", MODES)
def test_draws_in_a_map(mode: str):
    def body(layer: Function) -> Function:
        def loss(w: Any, x: torch.Tensor) -> torch.Tensor:
            key = sp.random.fold_in(KEY, sp.axis_index("i"))
            return sp.psum(layer(w, x, key, rate=0.5, name="")["x"].pow(2).sum(), "i")

        return grad(loss)

    params, x = training(dropped)[1][0], drawn(8, 4).float()
    same(
        mapped(mode, body(sp.remat(dropped)), LINE, (P(), P("i")), P())(params, x),
        mapped(mode, body(dropped), LINE, (P(), P("i")), P())(params, x),
        1e-6,
    )


def test_backward_of_plain_tensors_and_of_arrays():
    f = sp.remat(layer)
    want = grad(lambda w: layer(w, X).pow(2).sum())(W)
    w = W.clone().requires_grad_()
    f(w, X).pow(2).sum().backward()
    same(w.grad, want, 1e-12)
    arrays = sp.shard((W, X), SPECS, mesh=LINE)
    same(sp.unshard(grad(lambda w: f(w, arrays[1]).pow(2).sum())(arrays[0])), want, 1e-12)
    with sp.disable_jit():
        step = sp.spmd_jit(grad(lambda w, x: f(w, x).pow(2).sum()), mesh=LINE, in_specs=SPECS)
        same(sp.unshard(step(W, X)), want, 1e-12)


def test_a_decorated_method_a_module_and_results_that_are_inputs():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    params = {name: p.detach() for name, p in module.named_parameters()}

    class Model:
        @sp.remat
        def run(self, params: Any, x: torch.Tensor, *, twice: bool) -> Any:
            y = torch.func.functional_call(module, params, (x,))
            return (y, y, x, x.T) if twice else y

    def loss(params: Any) -> torch.Tensor:
        return sum(
            (part.sin().sum() for part in Model().run(params, X, twice=True)), Model().run(params, X, twice=0).sum()
        )

    def plain(params: Any) -> torch.Tensor:
        y = torch.func.functional_call(module, params, (X,))
        return 2 * y.sin().sum() + X.sin().sum() * 2 + y.sum()

    same(grad(loss)(params), grad(plain)(params), 1e-12)
    assert Model.run.__name__ == "run"


def test_closed_over_values_that_no_transform_acts_on():
    mask = torch.tensor([1.0, 0, 2], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        made = torch.arange(3.0, dtype=torch.float64) + mask  # made under the transforms around
        return sp.remat(lambda x: (x * made).pow(2).sum() + (x.detach() * mask).sum())(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x * (torch.arange(3.0, dtype=torch.float64) + mask)).pow(2).sum() + (x.detach() * mask).sum()

    for transform in (grad, hessian, jacfwd, lambda f: vmap(grad(f)), lambda f: grad(lambda xs: vmap(f)(xs).sum())):
        x = X[0] if transform in (grad, hessian, jacfwd) else X
        same(transform(loss)(x), transform(plain)(x), 1e-12)
    rows = mapped("eager", lambda x: grad(lambda x: sp.psum(loss(x.sum(0)), "i"))(x), LINE, P("i"), P("i"))(X)
    same(rows, torch.cat([grad(lambda x: plain(x.sum(0)))(part) for part in X.chunk(4)]), 1e-12)


def times(w: torch.Tensor) -> Function:
    def product(x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum()

    return sp.remat(product)


LOST: dict[str, Callable[[], Any]] = {
    "grad": lambda: grad(lambda w: times(w)(X))(W),
    "jvp": lambda: jvp(lambda w: times(w)(X), (W,), (W,)),
    "vmap": lambda: vmap(lambda w: times(w)(X))(W[None]),
    "backward": lambda: times(W.clone().requires_grad_())(X),
    "a transform inside": lambda: grad(lambda w: sp.remat(lambda x: grad(lambda x: (x @ w).sum())(x).sum())(X))(W),
    "spmd_jit": lambda: sp.spmd_jit(grad(lambda w, x: times(w)(x)), mesh=LINE, in_specs=SPECS)(W, X),
    "in a map": lambda: mapped("eager", grad(lambda w, x: sp.psum(times(w)(x), "i")), LINE, SPECS, P())(W, X),
    "in a traced map": lambda: mapped("traced", grad(lambda w, x: sp.psum(times(w)(x), "i")), LINE, SPECS, P())(W, X),
    "around a map": lambda: grad(
        lambda w: sp.unshard(mapped("eager", lambda x: sp.psum(times(w)(x), "i"), LINE, P("i"), P())(X))
    )(W),
}


@pytest.mark.parametrize("name", LOST)
def test_a_closed_over_tensor_whose_gradient_would_be_lost(name: str):
    with pytest.raises(sp.SpmdError, match=r"remat of times\.product|remat of <lambda>") as caught:
        LOST[name]()
    text = str(caught.value)
    assert "closes over a tensor" in text and "shape" in text and "pass it to the function as an argument" in text


def test_an_error_in_the_function_is_the_function_s():
    with pytest.raises(sp.VaryingError, match="already equal there"):
        mapped("eager", sp.remat(lambda x: sp.psum(sp.psum(x, "i"), "i")), LINE, P("i"), P())(X)


# what a traced program holds, and what it communicates

ZERO = [{"up": "(i n) m", "down": "(i n) m"}] * 8


def test_recomputation_saves_memory_and_gathers_weights_again():
    x = drawn(256, 32).float()
    programs, results = [], []
    for kind in (dropped, sp.remat(dropped)):
        step, params = training(kind, width=32, layers=8)
        jitted = sp.spmd_jit(step, mesh=LINE, in_specs=(ZERO, "(i b) d"), out_specs=(ZERO, P()))
        programs.append(jitted.lower(params, x))
        results.append(sp.unshard(jitted(params, x)))
    same(results[1], results[0], 1e-6)
    plain, again = [sp.debug.peak_memory(program) for program in programs]
    assert again.bytes - again.inputs < (plain.bytes - plain.inputs) / 2
    gathers = [[row.op for row in program.collectives].count("all_gather") for program in programs]
    assert gathers[1] >= gathers[0] + 8
    scatters = [[row.op for row in program.collectives].count("reduce_scatter") for program in programs]
    assert scatters[0] == scatters[1] == 16


def test_recomputation_in_a_map_gathers_again():
    x = drawn(256, 32).float()

    def layer(w: Any, x: torch.Tensor, key: torch.Tensor, **options: Any) -> Any:
        whole = {name: sp.all_gather(v, "i", tiled=True) for name, v in w.items()}
        return dropped(whole, x, sp.random.fold_in(key, sp.axis_index("i")), **options)

    programs = []
    for kind in (layer, sp.remat(layer)):
        step, params = training(kind, width=32, layers=8)

        def body(params: Any, x: torch.Tensor, step: Function = step) -> Any:
            gradient, loss = step(params, x)
            return gradient, sp.pmean(loss, "i")

        specs = [{"up": P("i"), "down": P("i")}] * 8
        mapping = sp.shard_map(body, mesh=LINE, in_specs=(specs, P("i")), out_specs=(specs, P()))
        programs.append(sp.spmd_jit(mapping, mesh=LINE).lower(sp.shard(params, specs, mesh=LINE), x))
    plain, again = [sp.debug.peak_memory(program) for program in programs]
    assert again.bytes < plain.bytes / 2
    gathers = [[row.op for row in program.collectives].count("all_gather") for program in programs]
    assert gathers == [16, 32]


def test_what_is_computed_again_is_moved_again():
    """A conversion of the forward is not kept for the recomputation."""

    def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (sp.constrain(x, P(None, "i")).sin() * w).exp().sum()

    def program(turned: Function) -> sp.Program:
        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return turned(x, w).log()

        return sp.spmd_jit(grad(loss, argnums=(0, 1)), mesh=LINE, in_specs=(P("i"), P())).lower(X @ X.T, W[0, 0])

    counts = [[row.op for row in program(f).collectives].count("all_to_all") for f in (turned, sp.remat(turned))]
    assert counts == [1, 2]


def test_scan_of_remat_keeps_the_carry_only():
    x, ws = drawn(512, 16).float(), drawn(8, 16, 16).float()

    def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (x @ w).sin().exp().cos().tanh(), None

    def peak(layer: Function) -> float:
        step = grad(lambda ws, x: sp.scan(layer, x, ws)[0].sum())
        found = sp.debug.peak_memory(sp.spmd_jit(step, mesh=LINE, in_specs=(P(), P("i"))).lower(ws, x))
        return (found.bytes - found.inputs) / (x.numel() * 4 / 4)  # in carries of one device

    assert peak(layer) > 8 * 3
    assert peak(sp.remat(layer)) < 8 + 5


# scan


def test_scan_is_the_loop():
    xs = {"a": drawn(5, 3), "b": torch.arange(5)}

    def f(carry: Any, x: Any) -> Any:
        return (carry[0] * x["a"].mean() + x["b"], carry[1] + 1), {"y": carry[0], "n": carry[1], "none": None}

    carry, n, ys = drawn(3), 0, []
    want = carry
    for i in range(5):
        ys.append(want)
        want = want * xs["a"][i].mean() + xs["b"][i]
    (last, n), stacked = sp.scan(f, (carry, 0), xs)
    assert n == 5 and stacked["none"] is None
    same((last, stacked["y"], stacked["n"]), (want, torch.stack(ys), torch.arange(5)))
    backwards = sp.scan(lambda c, x: (c + x, c), torch.tensor(0), xs["b"], reverse=True)
    same(backwards, (torch.tensor(10), torch.tensor([10, 9, 7, 4, 0])))
    same(sp.scan(lambda c, _: (c * 2, None), torch.tensor(1), length=4)[0], torch.tensor(16))
    same(sp.scan(lambda c, x: (c + x, c), 0.0, torch.arange(3.0))[0], torch.tensor(3.0))
    empty = sp.scan(lambda c, x: (c + x.sum(), x.double()), torch.zeros(()), torch.ones(0, 4))
    same(empty, (torch.zeros(()), torch.zeros(0, 4, dtype=torch.float64)))


@pytest.mark.parametrize("mode", MODES)
def test_a_carry_may_become_varying(mode: str):
    x = torch.arange(4.0)
    body = lambda x: sp.scan(lambda c, _: (c + x, c), torch.zeros(1), length=3)  # noqa: E731
    got = mapped(mode, body, LINE, P("i"), (P("i"), P(None, "i")))(x)
    same(got, (3 * x, torch.stack([0 * x, x, 2 * x])))
    calls = []

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def step(c: Any, i: torch.Tensor) -> Any:
            calls.append(i)
            return (c[1], c[0] * x.sum() + w), None  # which leaf varies changes from step to step

        return sp.psum(sum(sp.scan(step, (w, w), torch.arange(3))[0]), "i")

    def plain(w: torch.Tensor) -> torch.Tensor:
        a, b = w, w
        for _ in range(3):
            a, b = b, a * x + w
        return (a + b).sum()

    same(mapped(mode, grad(loss), LINE, (P(), P("i")), P())(torch.tensor(2.0), x), grad(plain)(torch.tensor(2.0)))
    assert len(calls) == 3  # no step runs twice


def test_scan_errors():
    def step(c: Any, x: Any) -> Any:
        return {"a": c["a"].double()}, None

    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: sp.scan(step, {"a": torch.ones(2)}, torch.ones(3)), ["carry", "step", "['a']", "float32", "float64"]),
        (lambda: sp.scan(lambda c, x: (c[None], x), torch.ones(2), X), ["carry", "(2,)", "(1, 2)", "itself"]),
        (lambda: sp.scan(lambda c, x: ({}, x), {"b": X}, X), ["carry", "structure", "['b']"]),
        (lambda: sp.scan(lambda c, x: (c + 1, x[: c + 1]), 0, X), ["y", "step 0", "step 1", "(1,)", "(2,)"]),
        (lambda: sp.scan(lambda c, x: c, 0, X), ["returns the int 0", "return (carry, y)"]),
        (lambda: sp.scan(lambda c, x: (c, x), 0, (X, W)), ["xs[0] 8", "xs[1] 3"]),
        (lambda: sp.scan(lambda c, x: (c, x), 0, X, length=3), ["length= 3", "xs 8"]),
        (lambda: sp.scan(lambda c, x: (c, x), 0), ["no tensors", "length=n"]),
        (lambda: sp.scan(lambda c, x: (c, x), 0, {"s": X[0, 0]}), ["xs['s']", "shape ()", "leading dim"]),
        (lambda: sp.scan(lambda c, x: (c, "y"), 0, X), ["a y holds the str 'y'"]),
    ]
    for run_it, words in cases:
        with pytest.raises(sp.SpmdError) as caught:
            run_it()
        assert all(word in str(caught.value) for word in ["scan", *words]), str(caught.value)


# cond


def test_cond_runs_one_branch_where_the_predicate_is_known():
    ran = []

    def branch(name: str) -> Function:
        def taken(x: torch.Tensor) -> Any:
            ran.append(name)
            return {"y": x * 2 if name == "true" else x - 1}

        return taken

    def choose(pred: Any, x: torch.Tensor) -> Any:
        return sp.cond(pred, branch("true"), branch("false"), x)["y"]

    same(choose(torch.tensor(True), X), X * 2)
    same(choose(False, X), X - 1)
    same(grad(lambda x: choose(x.sum() > 1e9, x).sum())(X), torch.ones_like(X))
    array = sp.shard(X, P("i"), mesh=LINE)
    same(choose(array.sum() > 1e9, array).unshard(), X - 1)
    total = mapped("eager", lambda x: sp.psum(choose(sp.psum(x.sum(), "i") > 1e9, x), "i"), LINE, P("i"), P())
    same(total(X), (X - 1).view(4, 2, 3).sum(0))
    assert ran == ["true", "false", "false", "false", "false"]

    def reduced(x: torch.Tensor) -> torch.Tensor:
        total = sp.psum(x.sum(), "i")
        return sp.cond(total < 1e9, lambda x: sp.psum(x, "i"), lambda x: sp.psum(x, "i") * 0, x)

    same(mapped("eager", reduced, LINE, P("i"), P())(X), X.view(4, 2, 3).sum(0))


@pytest.mark.parametrize("mode", MODES)
def test_cond_selects_by_a_varying_predicate(mode: str):
    def body(x: torch.Tensor) -> Any:
        chosen = lambda x: sp.cond(  # noqa: E731
            sp.axis_index("i") % 2 == 0,
            lambda x: (x * 2, {"n": 1, "s": "s"}),
            lambda x: (x.sin(), {"n": 2, "s": "s"}),
            x,
        )
        value, rest = chosen(x)
        assert rest["s"] == "s"
        return value, rest["n"][None], grad(lambda x: sp.psum(chosen(x)[0].sum(), "i"))(x)

    value, n, gradient = mapped(mode, body, LINE, P("i"), P("i"))(X)
    even = (torch.arange(8) // 2 % 2 == 0)[:, None]
    same(value, torch.where(even, X * 2, X.sin()))
    same(gradient, torch.where(even, torch.tensor(2.0, dtype=torch.float64), X.cos()))
    same(n, torch.tensor([1, 2, 1, 2]))


def test_cond_in_the_global_view_and_under_vmap():
    f = lambda x: sp.cond(x.sum() > 0, lambda x: x * 2, torch.sin, x)  # noqa: E731
    same(sp.spmd_jit(f, mesh=LINE, in_specs=P("i"))(X).unshard(), f(X))
    rows = torch.stack([f(x) for x in X])
    same(vmap(f)(X), rows)
    same(vmap(grad(lambda x: f(x).sum()))(X), torch.stack([grad(lambda x: f(x).sum())(x) for x in X]))
    inner = sp.shard_map(lambda x: sp.psum(x, "i"), mesh=LINE, in_specs=P("i"), out_specs=P())
    g = sp.spmd_jit(lambda x: sp.cond(x.sum() > 0, lambda x: inner(x), lambda x: inner(-x), x), mesh=LINE)
    total = X.view(4, 2, 3).sum(0)
    same(g(X).unshard(), total if X.sum() > 0 else -total, 1e-12)


def first_branch(x: torch.Tensor) -> torch.Tensor:
    return sp.psum(x, "i")


def test_cond_errors():
    varying = lambda x: sp.cond(sp.axis_index("i") == 0, first_branch, lambda x: x, x)  # noqa: E731
    invariant = lambda x: sp.cond(sp.psum(x.sum(), "i") > 0, first_branch, lambda x: x[0], x)  # noqa: E731
    for mode, body, why in [
        ("eager", varying, "the predicate varies over i"),
        ("traced", varying, "both branches run"),
        ("traced", invariant, "in a trace both branches run"),
    ]:
        with pytest.raises(sp.CollectiveError, match="psum over i in the branch first_branch of a cond") as caught:
            mapped(mode, body, LINE, P("i"), P("i"))(X)
        assert why in str(caught.value) and "before the cond" in str(caught.value)
    select = lambda a, b: vmap(lambda p: sp.cond(p, a, b))(torch.tensor([True]))  # noqa: E731
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: select(lambda: {"a": X}, lambda: {"a": W}), ["differ", "['a']", "(8, 3)", "(3, 3)"]),
        (lambda: select(lambda: (X, X), lambda: (X, X.float())), ["[1]", "float64", "float32", "test_cond_errors"]),
        (lambda: select(lambda: (X, X), lambda: X), ["structure"]),
        (lambda: select(lambda: (X, "a"), lambda: (X, "b")), ["[1]", "'a'", "'b'"]),
        (lambda: sp.cond(X > 0, first_branch, torch.sin, X), ["first_branch", "sin", "shape (8, 3)", "torch.where"]),
    ]
    for run_it, words in cases:
        with pytest.raises(sp.TracingError) as refused:
            run_it()
        assert all(word in str(refused.value) for word in ["cond", *words]), str(refused.value)


@pytest.mark.parametrize("mode", MODES)
def test_axes_of_which_the_predicate_does_not_vary(mode: str):
    """On two axes: the carry of a scan grows over one, a recomputed psum runs over the other."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def step(c: torch.Tensor, _: None) -> Any:
            return sp.remat(lambda c, w: torch.tanh(c + sp.psum(x.sum() * w, "x")))(c, w), None

        loss = sp.scan(step, torch.zeros((), dtype=x.dtype), length=2)[0]
        return sp.pmean(loss, "y")

    def plain(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(2, dtype=x.dtype)
        for _ in range(2):
            c = torch.tanh(c + x.sum(0) * w)
        return c.mean()

    x = drawn(2, 2)
    got = mapped(mode, grad(body), SQUARE, (P(), P("x", "y")), P())(W[0, 0], x)
    same(got, grad(plain)(W[0, 0], x), 1e-12)
