"""Rules for ops that split, join and pad dims: split, unbind, cat, stack, pad, pixel_shuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import Cut, Dim, Factors, linear_groups, normal_dim, with_cut

aten = torch.ops.aten
prims = torch.ops.prims

SPLITS = [
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.chunk.default,
    aten.unsafe_chunk.default,
]


@register(*SPLITS)
def split(call: Call) -> Rule:
    """The dim is (parts g) in every piece, g the greatest common divisor of their sizes."""
    factors = Factors()
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    lengths = [result.shape[dim] for result in call.results]
    cut = Cut(factors, *lengths)
    ins = with_cut(factors, shape, dim, cut.dim("parts", shape[dim]))
    outs = [with_cut(factors, shape, dim, cut.dim(f"parts{i}", length)) for i, length in enumerate(lengths)]

    def local(ctx: Local, self: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.split_with_sizes.default(self, [cut.local(ctx, length) for length in lengths], dim)

    return factors.rule([ins], outs, linear=linear_groups(call, call.operands), elementwise=True, local=local)


@register(aten.unbind.int, aten.unbind_copy.int)
def unbind(call: Call) -> Rule:
    factors = Factors()
    shape = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    dims = factors.dims("d", shape, whole=[dim])
    outs = [dims[:dim] + dims[dim + 1 :]] * len(call.results)
    return factors.rule([dims], outs, linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.cat.default, aten.concat.default, prims.cat.default)
def cat(call: Call) -> Rule:
    """The dim is (parts g) in every piece and in the result; linear in all pieces together."""
    factors = Factors()
    shape = call.results[0].shape
    dim = normal_dim(call.arg("dim"), len(shape))
    shapes = [operand.shape for operand in call.operands]
    # an empty vector may be joined to tensors of any rank
    cut = Cut(factors, *(piece[dim] for piece in shapes if len(piece) == len(shape)))
    ins = [
        with_cut(factors, piece, dim, cut.dim(f"parts{i}", piece[dim]))
        if len(piece) == len(shape)
        else factors.dims(f"empty{i}", piece, whole=[0])
        for i, piece in enumerate(shapes)
    ]
    outs = [with_cut(factors, shape, dim, cut.dim("parts", shape[dim]))]
    linear = linear_groups(call, [operand for operand in call.operands if 0 not in operand.shape])
    return factors.rule(ins, outs, linear=linear, elementwise=True)


@register(aten.stack.default)
def stack(call: Call) -> Rule:
    """The new dim is whole, the others pass; linear in all pieces together."""
    factors = Factors()
    piece = call.operands[0].shape
    dim = normal_dim(call.arg("dim"), len(piece) + 1)
    dims = factors.dims("d", piece)
    outs = [*dims[:dim], factors.whole("stacked", len(call.operands)), *dims[dim:]]
    linear = linear_groups(call, call.operands)
    return factors.rule([dims] * len(call.operands), [outs], linear=linear, elementwise=True)


@register(aten.constant_pad_nd.default)
def constant_pad(call: Call) -> Rule:
    """A padded dim is (parts g); linear when the pad is zero."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    op: Any = call.op
    pad = list(call.arg("pad"))
    ins: list[Dim] = []
    outs: list[Dim] = []
    units: list[tuple[int, Dim]] = []  # innermost dim first, as pad has it
    for i in reversed(range(len(before))):
        at = 2 * (len(before) - 1 - i)
        left, right = (*pad[at : at + 2], 0, 0)[:2]
        unit = math.gcd(left, right, before[i]) or 1
        minor = factors.new(f"d{i}", unit)
        padded = bool(left or right)
        ins.insert(0, (factors.whole(f"in{i}", before[i] // unit) if padded else ()) + minor)
        outs.insert(0, (factors.whole(f"out{i}", after[i] // unit) if padded else ()) + minor)
        units.append((unit, minor))

    def local(ctx: Local, self: Any, pad: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        scaled = [
            amount // unit * (ctx.size(minor[0]) if minor else 1)
            for i, amount in enumerate(pad)
            for unit, minor in [units[i // 2]]
        ]
        return op(self, scaled, *args, **kwargs)

    linear = linear_groups(call, call.operands) if call.arg("value") == 0 else ()
    return factors.rule([ins], [outs], linear=linear, elementwise=True, local=local)


# how many trailing dims these pad by copying elements
COPYING_PADS = {f"{kind}_pad{n}d": n for kind in ("reflection", "replication") for n in (1, 2, 3)}


@register(*(getattr(aten, name).default for name in COPYING_PADS))
def copying_pad(call: Call) -> Rule:
    """The padded dims are whole."""
    return _trailing_whole(call, COPYING_PADS[call.op.__name__.partition(".")[0]], elementwise=True)


@register(*(getattr(aten, f"{name}_backward").default for name in COPYING_PADS))
def copying_pad_backward(call: Call) -> Rule:
    """The padded dims are whole, and of the padded tensor only the shape matters."""
    count = COPYING_PADS[call.op.__name__.partition("_backward")[0]]
    return _trailing_whole(call, count, shape_only=frozenset({1}))


def _trailing_whole(call: Call, count: int, **options: Any) -> Rule:
    factors = Factors()
    shapes = [operand.shape for operand in call.operands] + [result.shape for result in call.results]
    terms = [
        [factors.whole(f"x{k}_{i}", size) if i >= len(shape) - count else factors.new(f"d{i}", size)]
        for k, shape in enumerate(shapes)
        for i, size in enumerate(shape)
    ]
    rank = len(call.results[0].shape)
    grouped = [[dim for (dim,) in terms[k : k + rank]] for k in range(0, len(terms), rank)]
    linear = linear_groups(call, call.operands[:1])
    return factors.rule(grouped[:-1], grouped[-1:], linear=linear, **options)


@register(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> Rule:
    """`(c r s) h w` and `c (h r) (w s)`, with r and s whole."""
    factors = Factors()
    shuffles = call.op is aten.pixel_shuffle.default
    deep, wide = (call.operands[0].shape, call.results[0].shape)[:: 1 if shuffles else -1]
    scale = call.args[1]
    lead = factors.dims("d", deep[:-3])
    c, h, w = factors.new("c", wide[-3]), factors.new("h", deep[-2]), factors.new("w", deep[-1])
    r, s = factors.whole("r", scale), factors.whole("s", scale)
    terms = [[*lead, c + r + s, h, w], [*lead, c, h + r, w + s]][:: 1 if shuffles else -1]
    return factors.rule(terms[:1], terms[1:], linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.channel_shuffle.default)
def channel_shuffle(call: Call) -> Rule:
    """`b (g c) .. -> b (c g) ..`, with g whole."""
    factors = Factors()
    shape, count = call.operands[0].shape, call.args[1]
    groups, channels = factors.whole("g", count), factors.new("c", shape[1] // count)
    ins = with_cut(factors, shape, 1, groups + channels)
    outs = with_cut(factors, shape, 1, channels + groups)
    return factors.rule([ins], [outs], linear=linear_groups(call, call.operands), elementwise=True)
