"""Products that contract: mm, bmm, their fused forms with an addend, vectors, bilinear layers and distances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Operand, Rule, register, rule
from spmdfn.partition.rules._dims import names
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten


@register(aten.mm.default, aten.mm.dtype)
def mm(call: Call) -> Rule | None:
    return _product(call, "m k, k n -> m n")


@register(aten.bmm.default, aten.bmm.dtype)
def bmm(call: Call) -> Rule | None:
    return _product(call, "b m k, b k n -> b m n")


@register(aten.mv.default)
def mv(call: Call) -> Rule | None:
    return _product(call, "m k, k -> m")


@register(aten.dot.default, aten.vdot.default)
def dot(call: Call) -> Rule | None:
    return _product(call, "k, k ->")


@register(aten.outer.default, aten.ger.default)
def outer(call: Call) -> Rule | None:
    return rule(call, "m, n -> m n", linear=[[0], [1]])


def _product(call: Call, text: str) -> Rule | None:
    return None if is_empty(call) else rule(call, text, sum="k", linear=[[0], [1]])


@register(aten.addmm.default, aten.addmm.dtype)
def addmm(call: Call) -> Rule | None:
    """`beta * self + alpha * (mat1 @ mat2)`; a split k leaves the product pending, and `self` is added once, after."""
    return _plus_product(call, "m k, k n -> m n", torch.mm)


@register(aten.baddbmm.default, aten.baddbmm.dtype)
def baddbmm(call: Call) -> Rule | None:
    return _plus_product(call, "b m k, b k n -> b m n", torch.bmm)


@register(aten.addbmm.default)
def addbmm(call: Call) -> Rule | None:
    return _plus_product(call, "b m k, b k n -> m n", lambda left, right: torch.bmm(left, right).sum(0), "k b")


@register(aten.addmv.default)
def addmv(call: Call) -> Rule | None:
    return _plus_product(call, "m k, k -> m", torch.mv)


@register(aten.addr.default)
def addr(call: Call) -> Rule | None:
    return _plus_product(call, "m, n -> m n", torch.outer, "")


def _plus_product(call: Call, text: str, product: Any, contracted: str = "k") -> Rule | None:
    """The rule of `beta * self + alpha * product(left, right)`, where `self` broadcasts to the result."""
    if is_empty(call):
        return None
    addend = call.operands[0]
    left, right = text.split("->")
    terms = [term.split() for term in left.split(",")]
    out = right.split()
    dtype = call.results[0].dtype

    def alternative(
        splits: Mapping[str, int], self: Any, mat1: Any, mat2: Any, *out_dtype: Any, beta: Any = 1, alpha: Any = 1
    ) -> Any:
        value = product(mat1.to(dtype), mat2.to(dtype))
        value = value if alpha == 1 else value * alpha
        if beta == 0:  # then `self` is not read, and its NaNs do not spread
            return value.to(dtype)
        return (value + (self if beta == 1 else self * beta)).to(dtype)

    sizes = {
        name: size
        for term, operand in zip(terms, call.operands[1:], strict=True)
        for name, size in zip(term, operand.shape, strict=True)
    }
    start = len(out) - len(addend.shape)
    ins = dict(zip(call.operands[1:], terms, strict=True))
    return rule(
        call,
        pattern(call, {addend: out[start:], **ins}, out),
        sizes=sizes,
        whole=contracted,
        linear=[[0, 1], [0, 2]],
        shape_only=frozenset([0]) if call.arg("beta") == 0 else frozenset(),
        alternative=alternative if contracted else None,
    )


@register(aten._addmm_activation.default)
def addmm_activation(call: Call) -> Rule | None:
    """addmm and then relu or gelu, in one kernel: nothing pending gets through."""
    plain = addmm(call)
    if plain is None or plain.alternative is None:
        return None
    parts = plain.alternative

    def alternative(splits: Mapping[str, int], *args: Any, use_gelu: bool = False, **kwargs: Any) -> Any:
        return torch.relu(parts(splits, *args, **kwargs))

    # which gelu it is depends on the device, so that one has no other form
    other = None if call.arg("use_gelu") else alternative
    return Rule(plain.ins, plain.outs, plain.sizes, plain.kinds, alternative=other)


@register(aten.linear.default)
def linear(call: Call) -> Rule | None:
    """A linear layer that tracing did not take apart."""
    if is_empty(call):
        return None
    x, weight, bias = call.arg("input"), call.arg("weight"), call.arg("bias")
    batch = names(len(x.shape) - 1, "b")
    out = ["n"] if len(weight.shape) == 2 else []
    ins = {x: [*batch, "k"], weight: [*out, "k"]}
    if bias is not None:
        ins[bias] = out

    def alternative(splits: Mapping[str, int], input: Any, weight: Any, bias: Any) -> Any:
        return torch.matmul(input, weight.transpose(0, -1)) + bias

    return rule(
        call,
        pattern(call, ins, [*batch, *out]),
        linear=[[0], [1]] if bias is None else [[0, 2], [1, 2]],
        **({"sum": "k"} if bias is None else {"whole": "k", "alternative": alternative}),
    )


@register(aten.matmul.default)
def matmul(call: Call) -> Rule | None:
    """numpy's matmul, where tracing did not take it apart."""
    if is_empty(call):
        return None
    left, right = call.operands
    if not left.shape or not right.shape:
        return None
    batch = names(max(len(left.shape), len(right.shape), 2) - 2, "b")
    rows, columns = ["m"] * (len(left.shape) > 1), ["n"] * (len(right.shape) > 1)
    ins = {
        left: [*batch[len(batch) - max(len(left.shape) - 2, 0) :], *rows, "k"],
        right: [*batch[len(batch) - max(len(right.shape) - 2, 0) :], "k", *columns],
    }
    return rule(call, pattern(call, ins, [*batch, *rows, *columns]), sum="k", linear=[[0], [1]])


@register(aten.einsum.default)
def einsum(call: Call) -> Rule | None:
    """An einsum that tracing did not take apart; letters are its factors."""
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    # a letter twice in one term is a diagonal, whose blocks are not blocks of the operand
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in terms) or is_empty(call):
        return None
    ins = {operand: list(term) for operand, term in zip(call.operands, terms, strict=True)}
    text = pattern(call, ins, list(right))
    summed = sorted({letter for letter in "".join(terms) if letter not in right})
    return rule(call, text, sum=" ".join(summed), linear=[[i] for i in range(len(terms))])


@register(aten._trilinear.default)
def trilinear(call: Call) -> Rule | None:
    """The product of three tensors, each with dims of size 1 put in, summed over some dims."""
    if is_empty(call):
        return None
    expands, summed = [call.args[place] for place in (3, 4, 5)], call.args[6]
    every = names(len(call.operands[0].shape) + len(expands[0]))
    ins: dict[Operand, list[str]] = {}
    for operand, expand in zip(call.operands, expands, strict=True):
        ins[operand] = [name for dim, name in enumerate(every) if dim not in expand]
    out = [name for dim, name in enumerate(every) if dim not in summed]
    return rule(call, pattern(call, ins, out), sum=" ".join(every[dim] for dim in summed), linear=[[0], [1], [2]])


@register(aten._cdist_forward.default)
def cdist(call: Call) -> Rule | None:
    """Distances between rows: pairs of rows are independent of each other."""
    if is_empty(call):
        return None
    batch = names(len(call.results[0].shape) - 2, "b")
    left, right = call.operands
    ins = {
        left: [*batch[len(batch) + 2 - len(left.shape) :], "m", "k"],
        right: [*batch[len(batch) + 2 - len(right.shape) :], "n", "k"],
    }
    return rule(call, pattern(call, ins, [*batch, "m", "n"]), whole="k")


@register(aten._cdist_backward.default)
def cdist_backward(call: Call) -> Rule | None:
    """The gradient by the first operand: a sum over the rows of the second."""
    if is_empty(call):
        return None
    grad, left, right, distances = call.operands
    batch = names(len(grad.shape) - 2, "b")
    ins = {grad: [*batch, "m", "n"], left: [*batch, "m", "k"], right: [*batch, "n", "k"], distances: [*batch, "m", "n"]}
    if any(len(names) != len(operand.shape) for operand, names in ins.items()):
        return None
    return rule(call, pattern(call, ins, [*batch, "m", "k"]), sum="n", linear=[[grad.index]])
