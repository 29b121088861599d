"""Rules for ops that regroup, permute or repeat dims: view, permute, expand, repeat, unfold, bit casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import Dim, Factors, linear_groups, normal_dim

aten = torch.ops.aten
prims = torch.ops.prims


def _strides(shape: Sequence[int]) -> list[int]:
    return [*accumulate(reversed(shape), lambda a, b: a * b, initial=1)][-2::-1] if shape else []


def regroup(factors: Factors, before: Sequence[int], after: Sequence[int]) -> tuple[list[Dim], list[Dim]]:
    """The factors of a reshape: what one dim of `before` has in common with one of `after` passes, the rest is whole.

    A factor is a digit of the element's linear index: (index // low) % (high // low). A dim of size n and stride s
    has all digits with s | low and high | s * n, so two dims share lcm(s, s') up to gcd(s * n, s' * n').

    >>> factors = Factors()
    >>> regroup(factors, (4, 6), (2, 12))
    ([('a0', 'a1'), ('a2',)], [('a0',), ('a1', 'a2')])
    >>> regroup(Factors(), (4, 6), (3, 8))     # only the last factor of 2 is common
    ([('b0',), ('b1', 'a0')], [('c0',), ('c1', 'a0')])
    """
    if 0 in before or 0 in after:
        return factors.dims("b", before, range(len(before))), factors.dims("c", after, range(len(after)))
    ours, theirs = _strides(before), _strides(after)
    count = 0
    inside: list[list[tuple[int, int, Dim]]] = [[] for _ in before]
    outside: list[list[tuple[int, int, Dim]]] = [[] for _ in after]
    for i, (n, s) in enumerate(zip(before, ours, strict=True)):
        for j, (m, t) in enumerate(zip(after, theirs, strict=True)):
            low, high = math.lcm(s, t), math.gcd(s * n, t * m)
            if high > low and high % low == 0:
                factor = factors.new(f"a{count}", high // low)
                inside[i].append((low, high, factor))
                outside[j].append((low, high, factor))
                count += 1
    return _fill(factors, before, ours, inside, "b"), _fill(factors, after, theirs, outside, "c")


def _fill(
    factors: Factors,
    shape: Sequence[int],
    strides: Sequence[int],
    shared: Sequence[Sequence[tuple[int, int, Dim]]],
    prefix: str,
) -> list[Dim]:
    """Dims from their shared factors (major first), and whole factors for what lies between."""
    count = 0
    dims: list[Dim] = []
    for size, stride, found in zip(shape, strides, shared, strict=True):
        dim: Dim = ()
        top = size * stride
        for low, high, factor in [*found, (stride, stride, ())]:
            if top != high:
                dim += factors.whole(f"{prefix}{count}", top // high)
                count += 1
            dim += factor
            top = low
        dims.append(dim)
    return dims


def reshaping(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The block in its local result shape; a view could be illegal on its strides."""
    return torch.reshape(self, ctx.out_shape())


RESHAPE_NAMES = """
    view view_copy _unsafe_view reshape _reshape_copy _reshape_alias _reshape_alias_copy unsqueeze unsqueeze_copy
    squeeze squeeze_copy flatten unflatten
"""
RESHAPES = [
    getattr(packet, overload)
    for packet in (getattr(aten, name) for name in RESHAPE_NAMES.split())
    for overload in packet.overloads()
    if overload in ("default", "dim", "dims", "using_ints", "int")
]
STRIDED = [aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default]
PRIM_RESHAPES = [prims.reshape.default, prims.squeeze.default, prims.split_dim.default]
PRIM_RESHAPES += [prims.collapse.default, prims.collapse_view.default]


@register(*RESHAPES, *PRIM_RESHAPES)
def reshape(call: Call) -> Rule:
    """Dims are split and merged along their common factors."""
    factors = Factors()
    before, after = regroup(factors, call.operands[0].shape, call.results[0].shape)
    options: dict[str, Any] = {"linear": linear_groups(call, call.operands), "strided": call.op in STRIDED}
    return factors.rule([before], [after], elementwise=True, local=reshaping, **options)


@register(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(call: Call) -> Rule | None:
    """Only where it is a reshape of a contiguous operand: other strides say nothing about a block."""
    return reshape(call) if _is_plain(call, call.results[0].shape) else None


@register(aten.as_strided_scatter.default)
def as_strided_scatter(call: Call) -> Rule | None:
    """Only where `src` replaces everything."""
    if not _is_plain(call, call.operands[1].shape):
        return None
    factors = Factors()
    source, result = regroup(factors, call.operands[1].shape, call.results[0].shape)

    def local(ctx: Local, self: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.reshape(src, ctx.out_shape())

    linear = linear_groups(call, [call.operands[1]])
    options: dict[str, Any] = {"linear": linear, "elementwise": True, "local": local}
    return factors.rule([result, source], [result], shape_only=frozenset({0}), **options)


def _is_plain(call: Call, shape: Sequence[int]) -> bool:
    plain = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(shape, call.arg("stride"), _strides(shape), strict=True)
    )
    return plain and math.prod(shape) == math.prod(call.operands[0].shape) and not call.arg("storage_offset")


PERMUTES = [aten.permute.default, aten.permute_copy.default, prims.transpose.default]
TRANSPOSES = [aten.transpose.int, aten.transpose_copy.int, aten.t.default, aten.t_copy.default]
TRANSPOSES += [aten.swapaxes.default, aten.numpy_T.default]


@register(*PERMUTES, *TRANSPOSES)
def permute(call: Call) -> Rule:
    """Every dim passes, in another place."""
    factors = Factors()
    dims = factors.dims("d", call.operands[0].shape)
    rank = len(dims)
    order = list(range(rank))
    if call.op in PERMUTES:
        order = [normal_dim(dim, rank) for dim in call.args[1]]
    elif call.op in (aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default) and rank:
        a, b = (normal_dim(dim, rank) for dim in call.args[1:3])
        order[a], order[b] = b, a
    else:
        order.reverse()
    linear = linear_groups(call, call.operands)
    return factors.rule([dims], [[dims[i] for i in order]], linear=linear, elementwise=True)


@register(aten.expand.default, aten.expand_copy.default, aten.broadcast_to.default, prims.broadcast_in_dim.default)
def expand(call: Call) -> Rule:
    """New and broadcast dims are the result's own."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    outs = factors.dims("d", after)
    lead = len(after) - len(before)
    places = call.args[2] if call.op is prims.broadcast_in_dim.default else range(lead, len(after))
    ins = [() if size == 1 else outs[place] for size, place in zip(before, places, strict=True)]

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        shape = [1] * len(after)
        for place, size in zip(places, ctx.in_shape(0), strict=True):
            shape[place] = size
        return torch.broadcast_to(torch.reshape(self, shape), ctx.out_shape())

    linear = linear_groups(call, call.operands)
    return factors.rule([ins], [outs], linear=linear, elementwise=True, local=local)


@register(aten.repeat.default, aten.tile.default)
def repeat(call: Call) -> Rule:
    """A repeated dim is (r d): both may be split, r by repeating less often."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    padded = (1,) * (len(after) - len(before)) + tuple(before)
    dims = factors.dims("d", padded)
    times = [factors.new(f"r{i}", n // d) if d else () for i, (n, d) in enumerate(zip(after, padded, strict=True))]
    outs = [r + d for r, d in zip(times, dims, strict=True)]

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.repeat([ctx.size(r[0]) if r else 1 for r in times])

    linear = linear_groups(call, call.operands)
    ins = dims[len(after) - len(before) :]
    return factors.rule([ins], [outs], linear=linear, elementwise=True, local=local)


@register(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Rule:
    """A repeated dim is (d r); without a dim, all dims are merged into it."""
    factors = Factors()
    dims = factors.dims("d", call.operands[0].shape)
    times = factors.new("r", call.arg("repeats"))
    dim = call.arg("dim")
    if dim is None:
        outs = [sum(dims, ()) + times]
    else:
        dim = normal_dim(dim, len(dims))
        outs = [d + times if i == dim else d for i, d in enumerate(dims)]

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.repeat_interleave(self, ctx.size(times[0]) if times else 1, dim)

    linear = linear_groups(call, call.operands)
    return factors.rule([dims], [outs], linear=linear, elementwise=True, local=local)


@register(aten.unfold.default, aten.unfold_copy.default)
def unfold(call: Call) -> Rule:
    """Windows that do not overlap are a reshape to (n s); others keep the dim whole."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    dim = normal_dim(call.arg("dimension"), len(before)) if before else 0
    outs = factors.dims("d", after)
    ins = outs[:-1]
    if not before:
        return factors.rule([[]], [outs], linear=linear_groups(call, call.operands), elementwise=True)
    step, size = call.arg("step"), call.arg("size")
    if step == size and before[dim] == after[dim] * size:
        ins[dim] = outs[dim] + outs[-1]
    else:
        factors = Factors()
        outs = factors.dims("d", after, whole=(dim, len(after) - 1))
        ins = outs[:-1]
        ins[dim] = factors.whole("whole", before[dim])

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        window = ctx.out_shape()[-1]
        return self.unfold(dim, window, window if step == size else step)

    linear = linear_groups(call, call.operands)
    return factors.rule([ins], [outs], linear=linear, elementwise=True, local=local)


@register(aten.unfold_backward.default)
def unfold_backward(call: Call) -> Rule:
    """Windows may overlap: their dims stay whole."""
    factors = Factors()
    grad, shape = call.operands[0].shape, call.results[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    ins = factors.dims("d", grad, whole=(dim, len(grad) - 1))
    outs = ins[:-1]
    outs[dim] = factors.whole("whole", shape[dim])

    def local(ctx: Local, grad: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.unfold_backward.default(grad, list(ctx.out_shape()), *args, **kwargs)

    return factors.rule([ins], [outs], linear=linear_groups(call, call.operands), local=local)


@register(aten.view.dtype, aten.view_copy.dtype, prims.view_of_dtype.default)
def view_dtype(call: Call) -> Rule:
    """A bit cast; the bytes of one element stay together."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    op: Any = call.op
    smaller = after if before[-1:] >= after[-1:] else before
    dims = factors.dims("d", smaller)
    ins, outs = list(dims), list(dims)
    if before != after:
        parts = max(before[-1], after[-1]) // max(1, min(before[-1], after[-1]))
        larger = outs if smaller is before else ins
        larger[-1] = larger[-1] + factors.whole("parts", parts)

    def local(ctx: Local, self: Any, dtype: torch.dtype) -> Any:
        return op(self.contiguous(), dtype)

    return factors.rule([ins], [outs], elementwise=smaller is before or before == after, local=local, strided=True)
