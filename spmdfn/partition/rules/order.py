"""Reductions that say where: max and argmax with indices; and running sums and products along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Rule, register, rule
from spmdfn.partition.rules._dims import along, blocks, is_linear, names, wide
from spmdfn.partition.rules._masking import is_empty, pattern
from spmdfn.partition.rules.reduce import reduced_dims, reduction

aten = torch.ops.aten
Splits = Mapping[str, int]


@register(aten.max.dim, aten.min.dim)
def extremum(call: Call) -> Rule | None:
    """Each block's extremum and its index, then the lowest index among those that have the extremum of all."""
    dims = reduced_dims(call)
    largest = call.op == aten.max.dim

    def alternative(splits: Splits, self: Any, dim: int, keepdim: bool = False) -> Any:
        value, index = first_extremum(self, dim % self.dim(), splits, largest)
        return value.reshape(call.results[0].shape), index.reshape(call.results[1].shape)

    return reduction(call, dims, "whole", alternative=alternative if dims else None)


@register(aten.argmax.default, aten.argmin.default)
def arg_extremum(call: Call) -> Rule | None:
    """The first index of the extremum, along a dim or in the flattened tensor."""
    dims = reduced_dims(call)
    largest = call.op == aten.argmax.default

    def alternative(splits: Splits, self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        find = (
            first_in_all(self, largest) if dim is None else first_extremum(self, dim % self.dim(), splits, largest)[1]
        )
        return find.reshape(call.results[0].shape)

    return reduction(call, dims, "whole", alternative=alternative if dims else None)


def first_extremum(tensor: Any, dim: int, splits: Splits, largest: bool) -> tuple[Any, Any]:
    """The extremum along a dim and its first index, both with that dim of size 1; NaN is larger and smaller than all.

    >>> value, index = first_extremum(torch.tensor([3, 9, 1, 9]), 0, {"d0": 2}, True)
    >>> value.tolist(), index.tolist()
    ([9], [1])
    """
    cut, outer, inner = blocks(tensor, [dim], splits)
    find, reduce = (torch.max, torch.amax) if largest else (torch.min, torch.amin)
    value, index = find(cut, inner[0], True)
    if not outer:
        return value, index
    index = index + along(torch.arange(cut.shape[dim], device=tensor.device) * cut.shape[inner[0]], dim, cut.dim())
    best = reduce(value, dim, True)
    index = torch.where(_reaches(value, best), index, tensor.shape[dim])
    return best.squeeze(inner[0]), torch.amin(index, dim, True).squeeze(inner[0])


def first_in_all(tensor: Any, largest: bool) -> Any:
    """The first index of the extremum in the flattened tensor, which is never flattened."""
    dims = list(range(tensor.dim()))
    best = torch.amax(tensor, dims, True) if largest else torch.amin(tensor, dims, True)
    index: Any = 0
    for dim in dims:
        stride = math.prod(tensor.shape[dim + 1 :])
        index = index + along(torch.arange(tensor.shape[dim], device=tensor.device) * stride, dim, tensor.dim())
    return torch.amin(torch.where(_reaches(tensor, best), index, tensor.numel()), dims)


def _reaches(value: Any, best: Any) -> Any:
    equal = value == best
    return equal | torch.isnan(value) if value.is_floating_point() else equal


@register(aten.cumsum.default)
def cumsum(call: Call) -> Rule | None:
    """Each block's running sum, plus the sum of the blocks before it."""

    def before(totals: Any, earlier: Any, dim: int) -> Any:
        return torch.sum(torch.where(earlier, totals, 0), dim, dtype=totals.dtype)

    return _running(call, torch.cumsum, before, torch.add, linear=[[0]] if is_linear(call) else [])


@register(aten.cumprod.default)
def cumprod(call: Call) -> Rule | None:
    def before(totals: Any, earlier: Any, dim: int) -> Any:
        return torch.prod(torch.where(earlier, totals, 1), dim, dtype=totals.dtype)

    return _running(call, torch.cumprod, before, torch.mul)


@register(aten.logcumsumexp.default)
def logcumsumexp(call: Call) -> Rule | None:
    def before(totals: Any, earlier: Any, dim: int) -> Any:
        return torch.logsumexp(torch.where(earlier, totals, -math.inf), dim)

    return _running(call, torch.logcumsumexp, before, torch.logaddexp)


def _running(
    call: Call,
    scan: Callable[[Any, int], Any],
    before: Callable[[Any, Any, int], Any],
    combine: Callable[[Any, Any], Any],
    **options: Any,
) -> Rule | None:
    """The rule of a scan: `before(totals, earlier, dim)` reduces the totals of the earlier blocks over `dim`."""
    rank, dtype = len(call.operands[0].shape), call.results[0].dtype
    if is_empty(call) or not rank:
        return None
    every = names(rank)
    dim = call.arg("dim") % rank

    def alternative(splits: Splits, self: Any, *args: Any, **kwargs: Any) -> Any:
        n = splits[every[dim]]
        cut, _, inner = blocks(self.to(wide(dtype)), [dim], splits)
        scanned = scan(cut, inner[0])
        totals = scanned.select(inner[0], -1).unsqueeze(dim)  # a row for each block, a column for each block before it
        order = torch.arange(n, device=self.device)
        earlier = (along(order, dim + 1, rank + 1) < along(order, dim, rank + 1)).expand(
            *totals.shape[:dim], n, *totals.shape[dim + 1 :]
        )
        prefix = before(totals, earlier, dim + 1)
        return combine(scanned, prefix.unsqueeze(inner[0])).reshape(self.shape).to(dtype)

    text = pattern(call, {call.operands[0]: every}, every)
    return rule(call, text, whole=every[dim], alternative=alternative, **options)


@register(aten.cummax.default, aten.cummin.default)
def running_extremum(call: Call) -> Rule | None:
    """A running extremum and where it was; other dims pass."""
    rank = len(call.operands[0].shape)
    if is_empty(call) or not rank:
        return None
    every = names(rank)
    text = pattern(call, {call.operands[0]: every}, every, every)
    return rule(call, text, whole=every[call.arg("dim") % rank])
