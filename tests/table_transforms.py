"""The table's transforms: gradients of gradients, vmap, jvp, Jacobians, and autograd.Functions of the user's own."""

# ruff: noqa: E501 (one line a case)
from __future__ import annotations

import torch
import torch.nn.functional as F
from laid_out import ints, n, unit
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from versus import case

from spmdfn import optim


class Clip(torch.autograd.Function):
    """The identity with a clipped gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, most):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.most = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.clamp(-ctx.most, ctx.most), None


class Swish(torch.autograd.Function):
    """x sigmoid(x), which saves only x."""

    @staticmethod
    def forward(x):
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return cotangent * s * (1 + x * (1 - s))


def loss(w, x):
    return torch.tanh(x @ w).square().sum()


def energy(x):
    return (x.square().sum(-1) * x.sum(-1).sin()).sum()


def adam(p, g, m, v):
    m = m.lerp(g, 0.1)
    v = 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (v.sqrt() + 1e-3), m, v


def foreach(p, q, g, h):
    parameters, gradients = [p, q], [g, h]
    scaled = torch._foreach_mul(gradients, 0.5)
    torch._foreach_add_(scaled, parameters, alpha=0.1)
    norms = torch._foreach_norm(scaled)
    total = torch.linalg.vector_norm(torch.stack(norms))
    return torch._foreach_addcdiv(
        parameters, scaled, torch._foreach_add(torch._foreach_abs(gradients), total), value=-0.1
    )


def fused(name, **options):
    def step(p, q, g, h):
        zeros = [torch.zeros_like(p), torch.zeros_like(q)]
        steps = [torch.ones(()), torch.ones(())]
        rest = (zeros, zeros, [], steps) if "adam" in name else (zeros,)
        shared = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
        return getattr(torch.ops.aten, name)([p, q], [g, h], *rest, **shared, **options)[0]

    return step


ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
SGD = {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}


def optimized(p, q, g, h):
    chain = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.1))
    parameters = {"p": p, "q": q}
    updates, _ = chain.update({"p": g, "q": h}, chain.init(parameters), parameters)
    return optim.apply_updates(parameters, updates)


def clip_by_norm(g, h):
    total = torch.stack([g.norm(), h.norm()]).norm()
    return [t * (1 / total).clamp(max=1) for t in (g, h)]


MODULE = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
).double()


def module(x, a, b):
    frozen = {name: p.detach() for name, p in MODULE.named_parameters()}
    return functional_call(MODULE, {**frozen, "0.weight": a, "3.weight": b}, (x,))


def maml(w, x, y):
    inner = w - 0.1 * grad(loss)(w, x)
    return loss(inner, y)


P4 = (n(8, 4), n(4, 4), n(8, 4), n(4, 4))

TRANSFORMS = [
    case("grad", grad(loss), n(4, 4), n(8, 4)),
    case("grad of both", grad(loss, argnums=(0, 1)), n(4, 4), n(8, 4)),
    case("grad of grad", lambda x: grad(lambda y: grad(lambda z: (z**4).sum())(y).sin().sum())(x), unit(8, 4), free="each"),
    case("gradient penalty", lambda w, x: loss(w, x) + grad(loss, argnums=1)(w, x).square().sum(), n(4, 4), n(8, 4)),
    case("maml", maml, unit(4, 4), unit(8, 4), unit(8, 4)),
    case("vmap", lambda x, w: vmap(lambda r: torch.tanh(w @ r))(x), n(8, 4), n(4, 4), free="x-,"),
    case("vmap of another dim", lambda x: vmap(lambda c: c.softmax(0).cumsum(0), 1, 1)(x), n(8, 4), free="-x"),
    case("vmap of grad", lambda w, x: vmap(grad(loss), (None, 0))(w, x), n(4, 4), n(8, 4), free=",x-"),
    case("vmap of vmap", lambda x, y: vmap(vmap(torch.dot, (None, 0)), (0, None))(x, y), n(8, 4), n(4, 4), free="x-, ,x-"),
    case("vmap of an index", lambda x, i: vmap(lambda r, j: r.gather(0, j))(x, i), n(8, 4), ints(4, 8, 2), free="x-,x-"),
    case("jvp", lambda x, t: jvp(lambda y: (y.exp() @ y.t()).softmax(1), (x,), (t,)), unit(8, 4), unit(8, 4)),
    case("vjp", lambda x, t: vjp(lambda y: y.sin().sum(1), x)[1](t)[0], n(8, 4), n(8), free="x-,x"),
    case("jacrev", lambda x: jacrev(lambda y: (y.sin() @ y))(x), n(8)),
    case("jacrev of rows", lambda x, w: vmap(jacrev(lambda r: torch.tanh(w @ r)))(x), n(8, 4), n(4, 4), free="x-,"),
    case("jacfwd", lambda x, w: jacfwd(lambda y: torch.tanh(w @ y))(x), n(4), n(8, 4)),
    case("hessian", lambda x: hessian(energy)(x), unit(4, 2)),
    case("hessian vector product", lambda x, v: jvp(grad(energy), (x,), (v,))[1], unit(8, 4), unit(8, 4), free="x-,x-"),
    case("laplacian", lambda x: vmap(lambda r: hessian(energy)(r[None]).diagonal().sum())(x), unit(8, 2)),
    case("a clipped gradient", lambda x: Clip.apply(x * 3, 0.5).square(), n(8, 4), free="each"),
    case("a swish of one's own", lambda x: Swish.apply(x.cumsum(1)), n(8, 4), free="x-"),
    case("adam by hand", adam, n(8, 4), n(8, 4), unit(8, 4), n(8, 4).abs() + 1, free="each"),
    case("foreach ops", foreach, *P4, diff=()),
    *[
        case(name, fused(name, **options), *P4, diff=(), free="x-,x-,x-,x- -x,-x,-x,-x x-,-y,x-,-y")
        for name, options in [("_fused_adamw", ADAM), ("_fused_adam", ADAM), ("_fused_sgd", SGD)]
    ],
    case("optim", optimized, *P4, diff=()),
    case("clipping", clip_by_norm, n(8, 4), n(4, 4)),
    case("a module", module, n(8, 4), n(8, 4), n(4, 8), free="x-,,"),
    case("checkpointed by hand", lambda x, w: F.gelu(F.gelu(x @ w) @ w).sum(0), n(8, 4), n(4, 4)),
]  # fmt: skip
