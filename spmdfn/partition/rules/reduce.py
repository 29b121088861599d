"""Reductions that combine by a sum, a maximum or a minimum, and those whose blocks combine by a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._dims import blocks, is_linear, names, op_of, share, wide, wrap
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten
Splits = Mapping[str, int]


def reduced_dims(call: Call) -> list[int]:
    """The dims that this call reduces; with an empty list, some ops mean none: then the result is of the same shape."""
    shape = call.operands[0].shape
    dims = call.arg("dim")
    if isinstance(dims, (list, tuple)) and not dims and call.results[0].shape == shape:
        return []
    return wrap(dims, len(shape))


def reduction(call: Call, dims: Sequence[int], kind: str, **options: Any) -> Rule | None:
    """The rule of a reduction of the first operand over `dims`, all of them of this kind; the other dims pass."""
    if is_empty(call):
        return None
    every = names(len(call.operands[0].shape))
    kept = [name for dim, name in enumerate(every) if dim not in dims]
    if len(call.results[0].shape) == len(every):  # keepdim
        kept = every
    shape = call.results[0].shape
    out = ["1" if size == 1 else name for name, size in zip(kept, shape, strict=True)]
    text = pattern(call, {call.operands[0]: every}, *[out] * len(call.results))
    options[kind] = " ".join(every[dim] for dim in dims)
    return rule(call, text, **options)


@register(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: Call) -> Rule | None:
    return reduction(call, reduced_dims(call), "sum", linear=[[0]] if is_linear(call) else [])


@register(aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def sum_of_some(call: Call) -> Rule | None:
    """Sums of a function that is not linear: which values count depends on the whole value."""
    return reduction(call, reduced_dims(call), "sum")


@register(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Rule | None:
    """A block's mean, scaled to its part of all elements, is a summand of the mean."""
    dims = reduced_dims(call)
    sizes = dict(zip(names(len(call.operands[0].shape)), call.operands[0].shape, strict=True))

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        part = op_of(call)(*args, **kwargs)
        factors = [name for name in names(len(sizes)) if int(name[1:]) in dims and sizes[name] > 1]
        ratio = share(ctx, sizes, factors)
        return part if ratio == 1 else torch.mul(part, ratio)

    return reduction(call, dims, "sum", linear=[[0]] if is_linear(call) else [], local=local)


@register(aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims)
def maximum(call: Call) -> Rule | None:
    return reduction(call, reduced_dims(call), "max")


@register(aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims)
def minimum(call: Call) -> Rule | None:
    return reduction(call, reduced_dims(call), "min")


@register(aten.aminmax.default)
def aminmax(call: Call) -> Rule | None:
    """Two results of two kinds."""
    dims = reduced_dims(call)

    def alternative(splits: Splits, self: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
        return torch.amin(self, dims, keepdim), torch.amax(self, dims, keepdim)

    return reduction(call, dims, "whole", alternative=alternative)


@register(
    aten.var.default, aten.var.dim, aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction,
    aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction,
    aten.std_mean.default, aten.std_mean.dim, aten.std_mean.correction,
)  # fmt: skip
def variance(call: Call) -> Rule | None:
    """Each block's variance and mean, and then the variance of the means on top."""
    dims = reduced_dims(call)
    count = math.prod(call.operands[0].shape[dim] for dim in dims)
    correction = call.arg("correction")
    if correction is None:
        correction = 1 if call.arg("unbiased", True) else 0
    shape, dtype = call.results[0].shape, call.results[0].dtype
    root, both = "std" in str(call.op), "mean" in str(call.op)

    def alternative(splits: Splits, self: Any, *args: Any, **kwargs: Any) -> Any:
        cut, outer, inner = blocks(self.to(torch.promote_types(wide(dtype), self.dtype)), dims, splits)
        spread, centre = torch.var_mean(cut, inner, correction=0, keepdim=True)
        average = centre.mean(outer, keepdim=True)
        distance = (centre - average).abs()
        value = (spread + distance * distance).mean(outer, keepdim=True)
        value = value * (count / (count - correction) if count > correction else math.inf)
        value = (torch.sqrt(value) if root else value).reshape(shape).to(dtype)
        return (value, average.reshape(shape).to(self.dtype)) if both else value

    return reduction(call, dims, "whole", alternative=alternative)


@register(
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype,
)  # fmt: skip
def norm(call: Call) -> Rule | None:
    """Each block's norm, and then the norm of the norms."""
    dims = reduced_dims(call)
    order = call.arg("ord") if call.op == aten.linalg_vector_norm.default else call.arg("p")
    p = 2.0 if order is None else float(order)
    result = call.results[0]

    def alternative(splits: Splits, self: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        cut, outer, inner = blocks(self if dtype is None else self.to(dtype), dims, splits)
        fine = torch.promote_types(torch.float32, cut.dtype)
        norms = torch.linalg.vector_norm(cut, p, inner, True, dtype=fine)
        return _norm_of_norms(norms, p, outer).reshape(result.shape).to(result.dtype)

    return reduction(call, dims, "whole", alternative=alternative)


def _norm_of_norms(norms: Any, p: float, dims: list[int]) -> Any:
    if p == math.inf:
        return torch.amax(norms, dims, True)
    if p == -math.inf:
        return torch.amin(norms, dims, True)
    if p in (0, 1):  # a block's 0-norm counts what is not zero
        return torch.sum(norms, dims, True)
    if p == 2:
        return torch.sqrt(torch.sum(norms * norms, dims, True))
    return torch.pow(torch.sum(torch.pow(norms, p), dims, True), 1 / p)


@register(aten.dist.default)
def dist(call: Call) -> Rule | None:
    """The norm of a difference."""
    if is_empty(call):
        return None
    left, right = call.operands
    every = names(max(len(left.shape), len(right.shape)))
    sizes = dict(zip(every, torch.broadcast_shapes(left.shape, right.shape), strict=True))
    ins = {operand: every[len(every) - len(operand.shape) :] for operand in (left, right)}

    def alternative(splits: Splits, self: Any, other: Any, p: float = 2) -> Any:
        return torch.linalg.vector_norm(self - other, p)

    return rule(call, pattern(call, ins, []), sizes=sizes, whole=" ".join(every), alternative=alternative)


@register(aten.logsumexp.default)
def logsumexp(call: Call) -> Rule | None:
    dims = reduced_dims(call)
    shape, dtype = call.results[0].shape, call.results[0].dtype

    def alternative(splits: Splits, self: Any, dim: Any, keepdim: bool = False) -> Any:
        value = self.to(wide(dtype))
        top = torch.amax(value, dims, True)
        top = torch.where(torch.isinf(top), 0.0, top)  # inf - inf would be NaN
        total = torch.sum(torch.exp(value - top), dims, True)
        return (torch.log(total) + top).reshape(shape).to(dtype)

    return reduction(call, dims, "whole", alternative=alternative)


@register(aten.prod.default, aten.prod.dim_int)
def prod(call: Call) -> Rule | None:
    """Each block's product, and then the product of the few that are left."""
    dims = reduced_dims(call)
    shape, dtype = call.results[0].shape, call.results[0].dtype

    def alternative(splits: Splits, self: Any, *args: Any, **kwargs: Any) -> Any:
        value, outer, inner = blocks(self.to(dtype), dims, splits)
        for place in inner:
            value = torch.prod(value, place, keepdim=True)
        for place in outer:
            value = fold(value, place, torch.mul)
        return value.reshape(shape)

    return reduction(call, dims, "whole", alternative=alternative)


def fold(value: Any, dim: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all rows along `dim` by halving; `dim` is left with size 1.

    >>> fold(torch.tensor([1, 2, 3, 4, 5]), 0, torch.mul)
    tensor([120])
    """
    size = value.shape[dim]
    while size > 1:
        half = size // 2
        pairs = combine(value.narrow(dim, 0, half), value.narrow(dim, half, half))
        value = torch.cat([pairs, value.narrow(dim, 2 * half, 1)], dim) if size % 2 else pairs
        size = value.shape[dim]
    return value


@register(aten.renorm.default)
def renorm(call: Call) -> Rule | None:
    """Scales slices along one dim by their norms: the slices are independent of each other."""
    every = names(len(call.operands[0].shape))
    dim = call.arg("dim") % len(every)
    text = pattern(call, {call.operands[0]: every}, every)
    return None if is_empty(call) else rule(call, text, whole=" ".join(n for d, n in enumerate(every) if d != dim))
