"""Losses against a class index, and losses between two tensors of one shape, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._dims import along, names, op_of, share
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten
Splits = Mapping[str, int]
NONE, MEAN, SUM = 0, 1, 2
"""The values of an op's `reduction` argument."""


def _class_factors(call: Call) -> tuple[list[str], list[str]]:
    """The factors of the scores (n, c, then positions) and those of the target, which lacks c."""
    rank = len(call.arg("self").shape)
    if rank == 1:
        return ["c"], []
    positions = names(rank - 2, "p")
    return ["n", "c", *positions], ["n", *positions]


@register(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(call: Call) -> Rule | None:
    """Sums over a split batch; a mean divides two sums; a split class dim is picked from by `gather`."""
    if is_empty(call):
        return None
    scores, target, weight = call.arg("self"), call.arg("target"), call.arg("weight")
    factors, rows = _class_factors(call)
    reduction, ignored = call.arg("reduction"), call.arg("ignore_index")

    def alternative(splits: Splits, self: Any, target: Any, weight: Any, *_: Any) -> tuple[Any, Any]:
        if "c" in splits:
            losses, weights = _picked(self, target, weight, ignored)
            if reduction == NONE and rows:  # a single row also counts as a sum
                return losses, torch.zeros((), dtype=self.dtype, device=self.device)
            output, total = losses.sum(), weights.sum()
        else:
            output, total = op_of(call)(self, target, weight, SUM, ignored)
        return (output / total if reduction == MEAN else output), total

    ins = {scores: factors, target: rows} if weight is None else {scores: factors, target: rows, weight: ["c"]}
    text = pattern(call, ins, rows if call.results[0].shape else [], [])
    summed = " ".join(rows)
    if reduction == MEAN:
        return rule(call, text, whole=f"c {summed}", alternative=alternative)
    return rule(call, text, sum=summed, whole="c", alternative=alternative)


def _picked(scores: Any, target: Any, weight: Any, ignored: int) -> tuple[Any, Any]:
    """Each row's loss and its weight, both 0 where the target is to be ignored."""
    dim = min(scores.dim() - 1, 1)
    valid = target != ignored
    index = torch.where(valid, target, 0).unsqueeze(dim)
    loss = -torch.gather(scores, dim, index).squeeze(dim)
    if weight is None:
        return torch.where(valid, loss, 0.0), valid.to(scores.dtype)
    # as wide as the scores, so that the weights are picked in the layout of the scores
    spread = along(weight, dim, scores.dim()).expand(scores.shape)
    part = torch.where(valid, torch.gather(spread, dim, index).squeeze(dim), 0.0)
    return torch.where(valid, loss * part, 0.0), part


@register(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: Call) -> Rule | None:
    """Every dim but that of classes passes; where that is split, each block compares its classes with the target."""
    if is_empty(call):
        return None
    grad, scores, target, weight, *_, total = (call.arg(argument.name) for argument in op_of(call)._schema.arguments)
    factors, rows = _class_factors(call)
    dim = factors.index("c")

    def alternative(
        splits: Splits, grad: Any, self: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
    ) -> Any:
        classes = along(torch.arange(self.shape[dim], device=self.device), dim, self.dim())
        hit = (classes == target.unsqueeze(dim)) & (target != ignored).unsqueeze(dim)
        value = -(grad / total if reduction == MEAN else grad)
        value = value.unsqueeze(dim) if value.dim() else value
        if weight is not None:
            value = value * along(weight, dim, self.dim())
        return torch.where(hit, value, 0.0)

    ins = {grad: rows if grad.shape else [], scores: factors, target: rows, total: []}
    if weight is not None:
        ins[weight] = ["c"]
    return rule(
        call,
        pattern(call, ins, factors),
        whole="c",
        linear=[[grad.index]],
        shape_only=frozenset([scores.index]),
        alternative=alternative,
    )


@register(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip
def pair_loss(call: Call) -> Rule | None:
    """A pointwise loss, then none, a mean or a sum: a block's mean is scaled to a summand of the whole's."""
    if is_empty(call):
        return None
    shape = torch.broadcast_shapes(*(operand.shape for operand in call.operands))
    every = names(len(shape))
    reduced = call.arg("reduction") != NONE
    ins = {operand: every[len(every) - len(operand.shape) :] for operand in call.operands}
    text = pattern(call, ins, [] if reduced else every)
    options: dict[str, Any] = {"sum": " ".join(every)} if reduced else {"elementwise": True}
    return rule(call, text, sizes=dict(zip(every, shape, strict=True)), local=_scaled(call, every), **options)


@register(
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
)  # fmt: skip
def pair_loss_backward(call: Call) -> Rule | None:
    """Pointwise; the kernel divides by the number of elements that it sees."""
    if is_empty(call):
        return None
    every = names(len(call.results[0].shape))
    sizes = dict(zip(every, call.results[0].shape, strict=True))
    if any(len(operand.shape) > len(every) for operand in call.operands):
        return None
    ins = {operand: every[len(every) - len(operand.shape) :] for operand in call.operands}
    text = pattern(call, ins, every)
    return rule(call, text, sizes=sizes, linear=[[0]], elementwise=True, local=_scaled(call, every))


def _scaled(call: Call, factors: list[str]) -> Callable[..., Any]:
    """`local` for an op that divides by how many elements these factors have: scale by the block's share of them."""
    sizes = {}
    for operand in call.operands:
        sizes.update(dict(zip(factors[len(factors) - len(operand.shape) :], operand.shape, strict=True)))
    shape = torch.broadcast_shapes(*(operand.shape for operand in call.operands))
    sizes = {factor: size for factor, size in zip(factors, shape, strict=True) if size != 1}
    divides = call.arg("reduction") == MEAN

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        part = op_of(call)(*args, **kwargs)
        ratio = share(ctx, sizes, factors) if divides else 1
        return part if ratio == 1 else torch.mul(part, ratio)

    return local


@register(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)
def margin_loss(call: Call) -> Rule | None:
    """Margins between all classes of a row; rows are summed, or averaged."""
    scores = call.operands[0]
    if is_empty(call) or len(scores.shape) != 2:
        return None
    ins = {operand: ["n", "c"][: len(operand.shape)] for operand in call.operands}
    if call.arg("weight") is not None:
        ins[call.arg("weight")] = ["c"]
    reduced = call.arg("reduction") != NONE
    text = pattern(call, ins, [] if reduced else ["n"], *[["n", "c"]] * (len(call.results) - 1))
    return rule(call, text, whole="c", local=_margin_local(call), sum="n" if reduced else "")


@register(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def margin_loss_backward(call: Call) -> Rule | None:
    """Rows pass; the kernel divides by the number of rows that it sees."""
    if is_empty(call) or len(call.results[0].shape) != 2:
        return None
    ins = {operand: ["n", "c"][: len(operand.shape)] for operand in call.operands}
    if call.arg("weight") is not None:
        ins[call.arg("weight")] = ["c"]
    return rule(call, pattern(call, ins, ["n", "c"]), whole="c", linear=[[0]], local=_margin_local(call))


def _margin_local(call: Call) -> Callable[..., Any]:
    divides = call.arg("reduction") == MEAN
    rows = call.arg("self").shape[0]

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        part = op_of(call)(*args, **kwargs)
        if not divides or not ctx.is_split("n"):
            return part
        ratio = ctx.size("n") / rows
        if len(call.results) == 1:
            return torch.mul(part, ratio)
        return torch.mul(part[0], ratio), part[1]

    return local
