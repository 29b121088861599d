"""Every transform over every collective, taken outside the map and in its body, eager and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_table import TABLE, numbers, placed, reference
from mapped import LINE, MESHES, MODES, SQUARE, mapped, same, whole
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import spmdfn as sp
from spmdfn import P

Transform = Callable[[Any], Any]


def loss_of(f: Any) -> Any:
    return lambda x: (f(x).sin() * 2).pow(2).sum()


def steps(x: torch.Tensor) -> torch.Tensor:
    """A direction: any fixed tensor will do."""
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)


OUTSIDE: dict[str, Transform] = {
    "grad": lambda f: grad(loss_of(f)),
    "grad of grad": lambda f: grad(lambda x: (grad(loss_of(f))(x) * steps(x)).cos().sum()),
    "grad_and_value": lambda f: grad_and_value(loss_of(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](steps(f(x)))[0],
    "jvp": lambda f: lambda x: jvp(f, (x,), (steps(x),)),
    "jvp of grad": lambda f: lambda x: jvp(grad(loss_of(f)), (x,), (steps(x),)),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x.cos()])),
    "vmap of grad": lambda f: lambda x: vmap(grad(loss_of(f)), in_dims=1)(torch.stack([x, x.cos()], 1)),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(loss_of(f)),
}


def check_outside(name: str, how: str, *, traced: bool) -> None:
    mesh = SQUARE if how in ("grad", "jvp", "vmap") else MESHES["2"]
    x = numbers((mesh.size * mesh.size, 2), torch.float64)
    f = OUTSIDE[how](placed(TABLE[name], mesh))
    eager = whole("eager", f, mesh)(x)
    same(eager, OUTSIDE[how](reference(TABLE[name], mesh))(x), 1e-12)
    if traced:
        same(whole("traced", f, mesh)(x), eager)


@pytest.mark.parametrize("how", OUTSIDE)
@pytest.mark.parametrize("name", TABLE)
def test_transforms_outside_the_map(name: str, how: str):
    check_outside(name, how, traced=(list(TABLE).index(name) + list(OUTSIDE).index(how)) % 4 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("how", OUTSIDE)
@pytest.mark.parametrize("name", TABLE)
def test_traced_transforms_outside_the_map(name: str, how: str):
    check_outside(name, how, traced=True)


class Inside:
    """A collective in a body with a block x, an invariant w that scales it, and a loss that is equal on all devices."""

    def __init__(self, name: str, mesh: sp.Mesh):
        self.row, self.mesh, self.axes = TABLE[name], mesh, mesh.axis_names
        self.out = P() if self.row.equal else P(self.axes)
        self.reference = reference(self.row, mesh)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.row.body(x, self.axes)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        local = loss_of(self.block)(x)
        return local if self.row.equal else sp.psum(local, self.axes)

    def summed(self, jacobian: torch.Tensor) -> torch.Tensor:
        """What devices hold of a Jacobian in reverse: all of them start from the same cotangent."""
        return jacobian if self.row.equal else sum(jacobian.chunk(self.mesh.size))  # type: ignore[return-value]

    def check(self, body: Any, ins: Any, outs: Any, want: Any, *args: torch.Tensor) -> None:
        got = [mapped(mode, body, self.mesh, ins, outs)(*args) for mode in MODES]
        same(got[0], want, 1e-12)
        same(got[1], got[0])


@pytest.mark.parametrize("name", TABLE)
def test_transforms_in_the_body(name: str):
    mesh = MESHES["2"]
    c = Inside(name, mesh)
    f, ref, whole_loss, split = c.block, c.reference, loss_of(c.reference), P(c.axes)
    x = numbers((mesh.size * mesh.size, 2), torch.float64)
    t, ct = steps(x), steps(ref(x))
    c.check(lambda x: grad_and_value(c.loss)(x), split, (split, P()), grad_and_value(whole_loss)(x), x)
    c.check(lambda x, ct: vjp(f, x)[1](ct)[0], (split, c.out), split, vjp(ref, x)[1](ct)[0], x, ct)
    c.check(lambda x, t: jvp(f, (x,), (t,)), (split, split), c.out, jvp(ref, (x,), (t,)), x, t)
    many = torch.stack([x, x.cos()])
    c.check(lambda x: vmap(f)(x), P(None, c.axes), P(None, *c.out.entries), vmap(ref)(many), many)
    c.check(lambda x: vmap(grad(c.loss))(x), P(None, c.axes), P(None, c.axes), vmap(grad(whole_loss))(many), many)
    twice = lambda loss: lambda x, t: jvp(grad(loss), (x,), (t,))[1]  # noqa: E731
    c.check(twice(c.loss), (split, split), split, twice(whole_loss)(x, t), x, t)


@pytest.mark.parametrize("name", TABLE)
def test_derivatives_of_an_invariant_value_in_the_body(name: str):
    """The gradient of an invariant value is summed over the devices, in every order."""
    mesh = MESHES["2"]
    c = Inside(name, mesh)
    f, ref, whole_loss, split = c.block, c.reference, loss_of(c.reference), P(c.axes)
    x, w = numbers((mesh.size * mesh.size, 2), torch.float64), torch.tensor([0.5, -1.5], dtype=torch.float64)
    both = (P(), split)
    at = lambda g, x: lambda w: g(x * w)  # noqa: E731
    c.check(lambda w, x: grad(at(c.loss, x))(w), both, P(), grad(at(whole_loss, x))(w), w, x)
    c.check(lambda w, x: hessian(at(c.loss, x))(w), both, P(), hessian(at(whole_loss, x))(w), w, x)
    c.check(lambda w, x: jacfwd(at(f, x))(w), both, c.out, jacfwd(at(ref, x))(w), w, x)
    c.check(lambda w, x: jacrev(at(f, x))(w), both, P(), c.summed(jacrev(at(ref, x))(w)), w, x)
    second = lambda loss: lambda w, x: grad(lambda w: (grad(at(loss, x))(w) * w.exp()).sum())(w)  # noqa: E731
    c.check(second(c.loss), both, P(), second(whole_loss)(w, x), w, x)


# ---------------------------------------------------------------- modules, and transforms of transforms


class Block(torch.nn.Module):
    """A norm and a two-layer perceptron with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def module() -> tuple[Block, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = Block().double()
    params = {name: value.detach() for name, value in model.named_parameters()}
    return model, params, numbers((8, 8), torch.float64)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_under_functional_call(mode: str):
    model, params, x = module()
    mesh = SQUARE
    apply = lambda params, x: functional_call(model, params, (x,)).square().mean()  # noqa: E731
    mean = lambda params, x: sp.pmean(apply(params, x), ("x", "y"))  # noqa: E731
    ins = P(), P(("x", "y"))
    want = grad_and_value(apply)(params, x)
    same(mapped(mode, grad_and_value(mean), mesh, ins, (P(), P()))(params, x), want, 1e-12)
    f = sp.shard_map(mean, mesh=mesh, in_specs=ins, out_specs=P())
    same(whole(mode, grad_and_value(f), mesh)(params, x), want, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_for_each_example(mode: str):
    model, params, x = module()
    one = lambda params, row: functional_call(model, params, (row[None],)).square().sum()  # noqa: E731
    each = vmap(grad(one), in_dims=(None, 0))
    # from an invariant value each example's gradient would be summed over the devices: it is made varying first
    body = lambda params, x: each(sp.pcast(params, "i"), x)  # noqa: E731
    same(mapped(mode, body, LINE, (P(), P("i")), P("i"))(params, x), each(params, x), 1e-12)
    summed = lambda params, x: each(params, x)  # noqa: E731
    want = {k: g.view(4, 2, *g.shape[1:]).sum(0) for k, g in each(params, x).items()}
    same(mapped(mode, summed, LINE, (P(), P("i")), P())(params, x), want, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_hessian_vector_product_of_a_module(mode: str):
    model, params, x = module()
    t = {name: steps(value) for name, value in params.items()}
    loss = lambda params, x: functional_call(model, params, (x,)).square().mean()  # noqa: E731
    product = lambda loss: lambda params, t, x: jvp(lambda p: grad(loss)(p, x), (params,), (t,))[1]  # noqa: E731
    mean = lambda params, x: sp.pmean(loss(params, x), "i")  # noqa: E731
    want = product(loss)(params, t, x)
    same(mapped(mode, product(mean), LINE, (P(), P(), P("i")), P())(params, t, x), want, 1e-12)
    f = sp.shard_map(mean, mesh=LINE, in_specs=(P(), P("i")), out_specs=P())
    same(whole(mode, product(f), LINE)(params, t, x), want, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_split_weights_by_hand(mode: str):
    """Megatron's column and row: the input's gradient needs a sum, which the cast of the input brings."""
    x, up, down = (numbers(shape, torch.float64) for shape in ((5, 4), (4, 8), (8, 4)))
    mlp = lambda x, up, down: torch.tanh(x @ up) @ down  # noqa: E731
    f = sp.shard_map(
        lambda x, up, down: sp.psum(mlp(x, up, down), "i"),
        mesh=LINE,
        in_specs=(P(), P(None, "i"), P("i")),
        out_specs=P(),
    )
    want = grad(loss_of(lambda args: mlp(*args)))((x, up, down))
    same(whole(mode, grad(loss_of(lambda args: f(*args))), LINE)((x, up, down)), want, 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_transforms_on_both_sides_of_the_border(mode: str):
    """A gradient in the body, of which a gradient, a Jacobian and a map over a batch are taken outside."""
    x, w = numbers((4, 2), torch.float64), torch.tensor([0.5, -1.5], dtype=torch.float64)
    inner = lambda w, x: grad(lambda w: sp.psum((x * w).sin().prod(-1).sum(), "i"))(w)  # noqa: E731
    f = sp.shard_map(inner, mesh=LINE, in_specs=(P(), P("i")), out_specs=P())
    plain = lambda w, x: grad(lambda w: (x * w).sin().prod(-1).sum())(w)  # noqa: E731
    for transform in (
        lambda f: grad(lambda w: f(w, x).square().sum()),
        lambda f: jacrev(lambda w: f(w, x)),
        lambda f: jacfwd(lambda w: f(w, x)),
        lambda f: lambda w: vmap(lambda w: f(w, x))(torch.stack([w, w.exp()])),
        lambda f: (
            lambda w: vmap(grad(lambda w, x: f(w, x).sum(), argnums=1), in_dims=(0, None))(torch.stack([w, -w]), x)
        ),
    ):
        same(whole(mode, transform(f), LINE)(w), transform(plain)(w), 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_cotangent_gets_the_type_of_its_output(mode: str):
    x = numbers((4, 2), torch.float64)
    swap = lambda x: sp.ppermute(x, "i", [(0, 1), (1, 0), (2, 3), (3, 2)])  # noqa: E731
    pull = lambda x: vjp(swap, x)[1](torch.ones(1, 2, dtype=torch.float64))[0]  # noqa: E731
    same(mapped(mode, pull, LINE, P("i"), P("i"))(x), torch.ones_like(x))
    jacobian = lambda x: jacrev(lambda x: sp.psum_scatter(x, "i"))(x)  # noqa: E731
    rows = numbers((16, 2), torch.float64)
    want = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 16, 2)
    same(mapped(mode, jacobian, LINE, P("i"), P(None, "i"))(rows), want)


@pytest.mark.parametrize("mode", MODES)
def test_a_tangent_made_in_the_trace_may_be_sliced(mode: str):
    x = numbers((8, 2), torch.float64)
    f = sp.shard_map(lambda x: x[:1] * 2, mesh=SQUARE, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    push = lambda x: jvp(f, (x,), (torch.ones(8, 2, dtype=torch.float64),))  # noqa: E731
    same(whole(mode, push, SQUARE)(x), (x[::2] * 2, torch.full((4, 2), 2.0, dtype=torch.float64)))
