"""index_select, index_add, index_copy, index_fill: a one-dimensional index picks or writes whole rows along one dim."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Operand, Rule, register, rule
from spmdfn.partition.rules._masking import (
    is_empty,
    kind_of,
    linear_in,
    mine,
    only_first,
    pattern,
    summed,
    trailing,
    with_spare,
)

aten = torch.ops.aten


@register(aten.index_select.default)
def index_select(call: Call) -> Rule | None:
    """A split dim leaves a pending sum of the rows that each block has; the index's positions pass."""
    source, dim, index = call.args[:3]
    rank = len(source.shape)
    if is_empty(call) or rank == 0:
        return None
    dim = dim % rank
    names = ["n" if d == dim else f"s{d}" for d in range(rank)]

    def local(ctx: Local, source: Any, dim: int, index: Any) -> Any:
        if not ctx.is_split("n"):
            return aten.index_select.default(source, dim, index)
        rows, inside = mine(index, ctx.offset("n"), ctx.size("n"))
        out = aten.index_select.default(source, dim, torch.where(inside, rows, 0))
        return torch.masked_fill(out, torch.logical_not(trailing(inside, rank - 1 - dim % rank)), 0)

    out = ["i" if d == dim else f"s{d}" for d in range(rank)]
    return rule(
        call,
        pattern(call, {source: names, index: ["i"] * len(index.shape)}, out),
        linear=linear_in(source),
        contiguous="n",
        local=local,
        **summed(source.dtype, "n"),
    )


@register(aten.index_add.default, aten.index_copy.default, aten.index_reduce.default)
def index_write(call: Call) -> Rule | None:
    """A split dim drops the rows of other blocks; index_add may be split over the index's positions as well."""
    target, dim, index, source = call.args[:4]
    rank = len(target.shape)
    if is_empty(call) or rank == 0 or len(source.shape) != rank:
        return None
    dim = dim % rank
    adds = call.op == aten.index_add.default

    def local(ctx: Local, target: Any, dim: int, index: Any, source: Any, *options: Any, **kwargs: Any) -> Any:
        op: Any = call.op
        dim = dim % rank
        if adds:
            target = only_first(ctx, target, "i")
        if not ctx.is_split("n"):
            return op(target, dim, index, source, *options, **kwargs)
        size = ctx.size("n")
        rows, inside = mine(index, ctx.offset("n"), size)
        if adds:
            source = torch.masked_fill(source, torch.logical_not(trailing(inside, rank - 1 - dim)), 0)
            return op(target, dim, torch.where(inside, rows, 0), source, *options, **kwargs)
        rows = torch.where(inside, rows, size)
        return torch.narrow(op(with_spare(target, dim), dim, rows, source, *options, **kwargs), dim, 0, size)

    names = ["n" if d == dim else f"s{d}" for d in range(rank)]
    columns = ["i" if d == dim else f"s{d}" for d in range(rank)]
    linear = call.op != aten.index_reduce.default
    return rule(
        call,
        pattern(call, {target: names, index: ["i"] * len(index.shape), source: columns}, names),
        linear=linear_in(target, source) if linear else [],
        contiguous="n i",
        local=local,
        **(summed(target.dtype, "i") if adds else kind_of("whole", "i")),
    )


@register(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(call: Call) -> Rule | None:
    """A split dim fills the rows that it has; zeroing rows is linear."""
    target, dim, index, value = call.args[:4]
    rank = len(target.shape)
    if is_empty(call) or rank == 0:
        return None
    dim = dim % rank
    ins = {target: ["n" if d == dim else f"s{d}" for d in range(rank)], index: ["i"] * len(index.shape)}

    def local(ctx: Local, target: Any, dim: int, index: Any, value: Any) -> Any:
        op: Any = call.op
        if not ctx.is_split("n"):
            return op(target, dim, index, value)
        size, dim = ctx.size("n"), dim % rank
        index = torch.where(index < 0, index + call.args[0].shape[dim], index)
        rows, inside = mine(index, ctx.offset("n"), size)
        return torch.narrow(op(with_spare(target, dim), dim, torch.where(inside, rows, size), value), dim, 0, size)

    if isinstance(value, Operand):
        ins[value] = []
        linear = linear_in(target, value)
    else:
        linear = linear_in(target) if value == 0 else []
    return rule(call, pattern(call, ins, ins[target]), linear=linear, whole="i", contiguous="n", local=local)


@register(aten.masked_scatter.default)
def masked_scatter(call: Call) -> Rule | None:
    """Which element of the source goes where depends on the whole mask: nothing may be split."""
    target, mask, source = call.args[:3]
    rank = len(target.shape)
    if is_empty(call) or rank < len(mask.shape) or call.results[0].shape != target.shape:
        return None
    names = [f"s{d}" for d in range(rank)]
    columns = [f"r{d}" for d in range(len(source.shape))]
    ins = {target: names, mask: names[rank - len(mask.shape) :], source: columns}
    return rule(call, pattern(call, ins, names), linear=linear_in(target, source), whole=" ".join(names + columns))


@register(aten.masked_scatter_backward.default)
def masked_scatter_backward(call: Call) -> Rule | None:
    """The gradient of masked_scatter's source: the selected elements in order, so nothing may be split."""
    grad, mask = call.args[:2]
    rank = len(grad.shape)
    if is_empty(call) or len(mask.shape) != rank:
        return None
    names = [f"s{d}" for d in range(rank)]
    out = [f"r{d}" for d in range(len(call.results[0].shape))]
    return rule(
        call, pattern(call, {grad: names, mask: names}, out), linear=linear_in(grad), whole=" ".join(names + out)
    )
