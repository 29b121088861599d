"""Embedding lookup and its gradient: the vocabulary may be split, each block then serves the indices that it has."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._masking import is_empty, kind_of, linear_in, mine, pattern, summed

aten = torch.ops.aten


@register(aten.embedding.default)
def embedding(call: Call) -> Rule | None:
    """weight (v, d), indices (..) -> (.., d): a split v leaves a pending sum of rows, zeros from the other blocks."""
    if is_empty(call):
        return None
    weight, indices = call.operands
    batch = [f"b{k}" for k in range(len(indices.shape))]

    def local(ctx: Local, weight: Any, indices: Any, *options: Any, **kwargs: Any) -> Any:
        if not ctx.is_split("v"):
            return call.op(weight, indices, *options, **kwargs)
        rows, inside = mine(indices, ctx.offset("v"), ctx.size("v"))
        # padding_idx matters to autograd only, and its row number means nothing within a block
        out = aten.embedding.default(weight, torch.where(inside, rows, 0))
        return torch.masked_fill(out, torch.logical_not(inside).unsqueeze(-1), 0)

    return rule(
        call,
        pattern(call, {weight: ["v", "d"], indices: batch}, [*batch, "d"]),
        linear=linear_in(weight),
        follow=frozenset([indices.index]),
        contiguous="v",
        local=local,
        **summed(weight.dtype, "v"),
    )


@register(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: Call) -> Rule | None:
    """grad (.., d), indices (..) -> (v, d): a split batch leaves a pending sum, a split v drops what is not its own."""
    if is_empty(call):
        return None
    grad, indices = call.operands
    batch = [f"b{k}" for k in range(len(indices.shape))]
    by_frequency = bool(call.arg("scale_grad_by_freq"))

    def local(ctx: Local, grad: Any, indices: Any, count: int, padding: int, by_frequency: bool) -> Any:
        if not ctx.is_split("v"):
            return aten.embedding_dense_backward.default(grad, indices, count, padding, by_frequency)
        size = ctx.size("v")
        rows, inside = mine(indices, ctx.offset("v"), size)
        inside = inside & (indices != padding)
        # one spare row for the others, which is the padding row too, so nothing is added to it
        rows = torch.where(inside, rows, size)
        out = aten.embedding_dense_backward.default(grad, rows, size + 1, size, by_frequency)
        return torch.narrow(out, 0, 0, size)

    return rule(
        call,
        pattern(call, {grad: [*batch, "d"], indices: batch}, ["v", "d"]),
        linear=linear_in(grad),
        contiguous="v",
        local=local,
        # a frequency counts the whole batch
        **kind_of("whole" if by_frequency else "sum", *batch),
    )
