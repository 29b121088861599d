"""Indexing with tensors, `x[i, :, j]` and `x[i, :, j] = v`, and take and put, which index the flattened tensor.

Every indexed dim may be split: a block reads or writes what all of its split dims have, others get zeros or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
MASKS = (torch.bool, torch.uint8)


class Plan(NamedTuple):
    """Where index tensors stand: the dims that they index, and where their broadcast dims go in the result."""

    sizes: dict[int, int]
    """The global size of every indexed dim."""
    names: list[str]
    """Factors of the indexed tensor: "n" and the dim where it is indexed, "s" and the dim elsewhere."""
    batch: list[str]
    """Factors of the indices' common shape."""
    result: list[str]
    """Factors of what is read, or of the values written."""
    behind: int
    """How many dims of the result come after the batch."""

    def of_index(self, index: Operand) -> list[str]:
        return self.batch[len(self.batch) - len(index.shape) :]

    @property
    def split(self) -> list[str]:
        return [f"n{d}" for d in self.sizes]


def plan(shape: Sequence[int], indices: Sequence[Operand | None]) -> Plan | None:
    """The plan for a tensor of that shape; None for masks, whose result's shape depends on data."""
    tensors = {d: index for d, index in enumerate(indices) if index is not None}
    if not tensors or any(index.dtype in MASKS for index in tensors.values()):
        return None
    rank = max(len(index.shape) for index in tensors.values())
    batch = [f"b{k}" for k in range(rank)]
    kept = [f"s{d}" for d in range(len(shape)) if d not in tensors]
    first, last = min(tensors), max(tensors)
    # torch's rule: the indices' dims stand where the indexed dims stood if those are neighbours, else in front
    place = first if last - first + 1 == len(tensors) else 0
    names = [f"n{d}" if d in tensors else f"s{d}" for d in range(len(shape))]
    sizes = {d: shape[d] for d in tensors}
    return Plan(sizes, names, batch, kept[:place] + batch + kept[place:], len(kept) - place)


def localise(ctx: Local, plan: Plan, indices: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """For every split indexed dim the rows within this block and which are inside; and where all of them are."""
    rows: dict[int, Any] = {}
    insides: dict[int, Any] = {}
    everywhere: Any = None
    for d, size in plan.sizes.items():
        if not ctx.is_split(f"n{d}"):
            continue
        index = torch.where(indices[d] < 0, indices[d] + size, indices[d])
        rows[d], insides[d] = mine(index, ctx.offset(f"n{d}"), ctx.size(f"n{d}"))
        everywhere = insides[d] if everywhere is None else torch.logical_and(everywhere, insides[d])
    return rows, insides, everywhere


def read(ctx: Local, op: Any, plan: Plan, source: Any, indices: Sequence[Any]) -> Any:
    """Read what this block has, zeros elsewhere."""
    rows, insides, everywhere = localise(ctx, plan, indices)
    if not rows:
        return op(source, indices)
    clamped = [torch.where(insides[d], rows[d], 0) if d in rows else index for d, index in enumerate(indices)]
    return torch.masked_fill(op(source, clamped), torch.logical_not(trailing(everywhere, plan.behind)), 0)


def write(ctx: Local, op: Any, plan: Plan, target: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """Write what falls into this block: others add zeros, or overwrite a spare row."""
    if accumulate:
        target = only_first(ctx, target, *plan.batch)
    rows, insides, everywhere = localise(ctx, plan, indices)
    if not rows:
        return op(target, indices, values, accumulate)
    clamped = [torch.where(insides[d], rows[d], 0) if d in rows else index for d, index in enumerate(indices)]
    if accumulate:
        zero = values.new_zeros(())
        return op(target, clamped, torch.where(trailing(everywhere, plan.behind), values, zero), True)
    spare = next(iter(rows))
    size = ctx.size(f"n{spare}")
    clamped[spare] = torch.where(everywhere, rows[spare], size)
    return torch.narrow(op(with_spare(target, spare), clamped, values, False), spare, 0, size)


@register(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule | None:
    """Split indexed dims leave a pending sum of what each block has; the indices' dims and all others pass."""
    source, indices = call.args[:2]
    where = None if is_empty(call) else plan(source.shape, indices)
    if where is None:
        return None

    def local(ctx: Local, source: Any, indices: Sequence[Any]) -> Any:
        return read(ctx, call.op, where, source, indices)

    ins = {source: where.names} | {index: where.of_index(index) for index in indices if index is not None}
    return rule(
        call,
        pattern(call, ins, where.result),
        linear=linear_in(source),
        contiguous=" ".join(where.split),
        local=local,
        **summed(source.dtype, *where.split),
    )


@register(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule | None:
    """Split indexed dims drop what is not theirs; an accumulating write may be split over the indices as well."""
    target, indices, values = call.args[:3]
    accumulate = bool(call.arg("accumulate"))
    if is_empty(call):
        return None
    where = plan(target.shape, indices)
    if where is None:
        return _masked_put(call)

    def local(ctx: Local, target: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
        return write(ctx, call.op, where, target, indices, values, accumulate)

    ins = {target: where.names} | {index: where.of_index(index) for index in indices if index is not None}
    ins[values] = where.result[len(where.result) - len(values.shape) :]
    return rule(
        call,
        pattern(call, ins, where.names),
        linear=linear_in(target, values),
        contiguous=" ".join(where.split + where.batch),
        local=local,
        **(summed(target.dtype, *where.batch) if accumulate else kind_of("whole", *where.batch)),
    )


def _masked_put(call: Call) -> Rule | None:
    """`x[mask] = scalar`: the one write through a mask in which no position depends on data."""
    target, indices, values = call.args[:3]
    tensors = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(tensors) != 1 or tensors[0][1].dtype != torch.bool or math.prod(values.shape) != 1:
        return None
    place, mask = tensors[0]
    names = [f"s{d}" for d in range(len(target.shape))]
    ins = {target: names, mask: names[place : place + len(mask.shape)], values: ["1"] * len(values.shape)}
    return rule(call, pattern(call, ins, names), linear=linear_in(target, values), elementwise=True)


@register(aten.take.default)
def take(call: Call) -> Rule | None:
    """`x.flatten()[index]`: every dim of x may be split and leaves a pending sum."""
    source, index = call.args[:2]
    if is_empty(call) or not source.shape:
        return None
    where = _flat(source.shape, index)

    def local(ctx: Local, source: Any, index: Any) -> Any:
        if not any(ctx.is_split(name) for name in where.split):
            return aten.take.default(source, index)
        return read(ctx, aten.index.Tensor, where, source, _unravel(index, where))

    return rule(
        call,
        pattern(call, {source: where.names, index: where.batch}, where.batch),
        linear=linear_in(source),
        contiguous=" ".join(where.split),
        local=local,
        **summed(source.dtype, *where.split),
    )


@register(aten.put.default)
def put(call: Call) -> Rule | None:
    """`x.flatten()[index] = values`, take's transpose when it accumulates."""
    target, index, values = call.args[:3]
    accumulate = bool(call.arg("accumulate"))
    if is_empty(call) or not target.shape or index.shape != values.shape:
        return None
    where = _flat(target.shape, index)

    def local(ctx: Local, target: Any, index: Any, values: Any, accumulate: bool = False) -> Any:
        if any(ctx.is_split(name) for name in where.split):
            return write(ctx, aten.index_put.default, where, target, _unravel(index, where), values, accumulate)
        if accumulate:
            target = only_first(ctx, target, *where.batch)
        return aten.put.default(target, index, values, accumulate)

    return rule(
        call,
        pattern(call, {target: where.names, index: where.batch, values: where.batch}, where.names),
        linear=linear_in(target, values),
        contiguous=" ".join(where.split + where.batch),
        local=local,
        **(summed(target.dtype, *where.batch) if accumulate else kind_of("whole", *where.batch)),
    )


def _flat(shape: Sequence[int], index: Operand) -> Plan:
    names = [f"n{d}" for d in range(len(shape))]
    batch = [f"b{k}" for k in range(len(index.shape))]
    return Plan(dict(enumerate(shape)), names, batch, batch, 0)


def _unravel(index: Any, where: Plan) -> list[Any]:
    """The coordinates of indices into the flattened tensor, by its global sizes."""
    sizes = list(where.sizes.values())
    index = torch.where(index < 0, index + math.prod(sizes), index)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return [index // stride % size for stride, size in zip(strides, sizes, strict=True)]
