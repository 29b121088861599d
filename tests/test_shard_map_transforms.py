"""Every transform over every collective, taken outside the map and in its body, eager and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_table import TABLE, numbers, placed, reference
from mapped import MESHES, MODES, SQUARE, mapped, same, whole
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

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


@pytest.mark.parametrize("how", OUTSIDE)
@pytest.mark.parametrize("name", TABLE)
def test_transforms_outside_the_map(name: str, how: str):
    mesh = SQUARE if how in ("grad", "jvp", "vmap") else MESHES["2"]
    x = numbers((mesh.size * mesh.size, 2), torch.float64)
    want = OUTSIDE[how](reference(TABLE[name], mesh))(x)
    got = [whole(mode, OUTSIDE[how](placed(TABLE[name], mesh)), mesh)(x) for mode in MODES]
    same(got[0], want, 1e-12)
    same(got[1], got[0])


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
