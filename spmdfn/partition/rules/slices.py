"""Rules for ops that cut a range or a row out of a dim: slice, select, narrow, their scatters and backwards.

A cut at multiples of g sees a dim as (parts g): the parts stay whole, g passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import UNSUMMABLE, Cut, Dim, Factors, linear_groups, normal_dim, with_cut

aten = torch.ops.aten


def clamped(start: int | None, end: int | None, size: int) -> int:
    """Where a slice of a dim of this size starts."""
    return slice(start, end).indices(size)[0]


def _sum_kind(dtype: torch.dtype) -> str:
    """How a dim that is selected from is joined again: every device but one has zeros."""
    if dtype == torch.bool:
        return "max"
    return "whole" if dtype in UNSUMMABLE else "sum"


def _place(index: Any, offset: Any, size: int) -> tuple[Any, Any]:
    """Where a global index is in a block, as the start of a slice of one row, and a 0 if it is there (else more).

    A start behind the block makes the slice empty. Offsets may be proxies, so this is arithmetic only.

    >>> _place(5, 4, 4), _place(5, 0, 4), _place(5, 8, 4)
    ((1, 0), (5, 1), (5, 1))
    """
    here = index - offset
    away = (here // size) * (here // size)
    return here % size + away * size, away


@register(aten.select.int, aten.select_copy.int)
def select(call: Call) -> Rule:
    """The dim that is selected from is a sum: one device has the row, the others have zeros."""
    factors = Factors()
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    kind = _sum_kind(call.operands[0].dtype)
    ins = with_cut(factors, shape, dim, factors.new("i", shape[dim], kind))
    return _picking(call, factors, ins, ins[:dim] + ins[dim + 1 :], dim, call.arg("index") % shape[dim])


def _picking(call: Call, factors: Factors, ins: Sequence[Dim], outs: Sequence[Dim], dim: int, index: int) -> Rule:
    """A rule for one row of a dim, with or without the dim in the result."""
    op: Any = call.op
    dtype = call.results[0].dtype
    keepdim = len(ins) == len(outs)

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        if "i" not in factors.sizes or not ctx.is_split("i"):
            return op(self, *args, **kwargs)
        start, _ = _place(index, ctx.offset("i"), ctx.size("i"))
        row = aten.slice.Tensor(self, dim, start, start + 1)
        if dtype == torch.bool:
            return torch.any(row, dim, keepdim)
        return torch.sum(row, dim, keepdim, dtype=dtype)

    split = "i" in factors.sizes and factors.kinds.get("i") != "whole"
    return factors.rule(
        [ins],
        [outs],
        linear=linear_groups(call, call.operands),
        elementwise=not split,
        contiguous=frozenset({"i"} if split else ()),
        local=local,
    )


class Slice:
    """A slice of one dim: `full` has the whole dim, `part` the range; both are (parts g) if the step is 1."""

    def __init__(self, call: Call, shape: Sequence[int], length: int) -> None:
        self.factors = Factors()
        self.dim = normal_dim(call.arg("dim"), len(shape))
        self.length = length
        self.step = 1 if length == shape[self.dim] else call.arg("step", 1)
        if call.op in (aten.narrow_copy.default, aten.narrow.default):
            self.start = call.arg("start") % max(shape[self.dim], 1)
        else:
            self.start = clamped(call.arg("start"), call.arg("end"), shape[self.dim])
        self.cut = Cut(self.factors, shape[self.dim], length, self.start if self.step == 1 else 1)
        self.full = with_cut(self.factors, shape, self.dim, self.cut.dim("parts", shape[self.dim]))
        name = "parts" if length == shape[self.dim] else "range"
        self.part = list(self.full)
        self.part[self.dim] = self.cut.dim(name, length)

    def bounds(self, ctx: Local) -> tuple[Any, Any, int]:
        """Start, end and step on this device."""
        if self.step != 1:  # the dim is whole
            return self.start, self.start + (self.length - 1) * self.step + 1, self.step
        first = self.cut.local(ctx, self.start)
        return first, first + self.cut.local(ctx, self.length), 1


@register(aten.slice.Tensor, aten.slice_copy.Tensor, aten.narrow_copy.default, aten.narrow.default)
def slice_(call: Call) -> Rule:
    """A full range passes, one row is a sum (as in select), a cut at multiples of g leaves g."""
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    cut = Slice(call, shape, call.results[0].shape[dim])
    kind = _sum_kind(call.operands[0].dtype)
    if cut.length == 1 and shape[dim] > 1 and kind != "whole":
        factors = Factors()
        ins = with_cut(factors, shape, dim, factors.new("i", shape[dim], kind))
        return _picking(call, factors, ins, with_cut(factors, shape, dim, ()), dim, cut.start)

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.slice.Tensor(self, dim, *cut.bounds(ctx))

    linear = linear_groups(call, call.operands)
    return cut.factors.rule([cut.full], [cut.part], linear=linear, elementwise=True, local=local)


@register(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Rule:
    """As slice: self and the result have the whole dim, src the range; linear in both together."""
    dim = normal_dim(call.arg("dim"), len(call.results[0].shape))
    cut = Slice(call, call.results[0].shape, call.operands[1].shape[dim])

    def local(ctx: Local, self: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.slice_scatter.default(self, src, dim, *cut.bounds(ctx))

    linear = linear_groups(call, call.operands)
    return cut.factors.rule([cut.full, cut.part], [cut.full], linear=linear, elementwise=True, local=local)


@register(aten.slice_backward.default)
def slice_backward(call: Call) -> Rule:
    """Zeros with the gradient in the range."""
    dim = normal_dim(call.arg("dim"), len(call.results[0].shape))
    cut = Slice(call, call.results[0].shape, call.operands[0].shape[dim])

    def local(ctx: Local, grad: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.slice_backward.default(grad, list(ctx.out_shape()), dim, *cut.bounds(ctx))

    linear = linear_groups(call, call.operands)
    return cut.factors.rule([cut.part], [cut.full], linear=linear, elementwise=True, local=local)


@register(aten.select_scatter.default)
def select_scatter(call: Call) -> Rule:
    """Every dim passes: the device that has the row writes it."""
    return _scatter(call, call.operands[0].shape, call.operands[-1].shape)


@register(aten.select_backward.default)
def select_backward(call: Call) -> Rule:
    """Zeros with the gradient in one row; every dim passes."""
    return _scatter(call, call.results[0].shape, call.operands[0].shape)


def _scatter(call: Call, shape: Sequence[int], source: Sequence[int]) -> Rule:
    factors = Factors()
    dim = normal_dim(call.arg("dim"), len(shape))
    dims = factors.dims("d", shape)
    row = dims[:dim] + dims[dim + 1 :]
    index = call.arg("index") % shape[dim]
    has_self = len(call.operands) == 2

    def local(ctx: Local, first: Any, *args: Any, **kwargs: Any) -> Any:
        src = args[0] if has_self else first
        target = first if has_self else src.new_zeros(ctx.out_shape())
        start, away = _place(index, ctx.offset(dims[dim][0]), ctx.size(dims[dim][0])) if dims[dim] else (index, 0)
        # where the row is elsewhere, both the slice and what is written into it are empty
        written = aten.slice.Tensor(torch.unsqueeze(src, dim), dim, away, 1)
        return aten.slice_scatter.default(target, written, dim, start, start + 1)

    return factors.rule(
        [dims, row] if has_self else [row],
        [dims],
        linear=linear_groups(call, call.operands),
        elementwise=True,
        contiguous=frozenset(dims[dim]),
        local=local,
    )
