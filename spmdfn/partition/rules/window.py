"""Pooling, resizing, sampling and patches: samples and channels pass, positions are whole."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._dims import names, op_of
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten


def _planes(call: Call, rank: int, **options: Any) -> Rule | None:
    """All tensors have the same leading dims, which pass, and `rank` dims of positions of their own."""
    if is_empty(call):
        return None
    lead = names(len(call.operands[0].shape) - rank, "n")
    inner = {operand: names(rank, f"p{operand.index}_") for operand in call.operands}
    outer = [names(rank, f"q{place}_") for place in range(len(call.results))]
    ins = {operand: [*lead, *positions] for operand, positions in inner.items()}
    text = pattern(call, ins, *[[*lead, *positions] for positions in outer])
    whole = " ".join(name for positions in [*inner.values(), *outer] for name in positions)
    return rule(call, text, whole=whole, **options)


_RANKS: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
_LINEAR_RANKS: dict[Any, int] = {
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten.upsample_nearest1d.default: 1,
    aten.upsample_nearest2d.default: 2,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact1d.default: 1,
    aten._upsample_nearest_exact2d.default: 2,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_linear1d.default: 1,
    aten.upsample_bilinear2d.default: 2,
    aten.upsample_trilinear3d.default: 3,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
}
# gradients by an input of which only the shape counts: what was picked, if anything, stands in the indices
_GRADIENT_RANKS: dict[Any, int] = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
}
# these take the input's global size as an argument
_RESIZING_RANKS: dict[Any, int] = {
    aten.upsample_nearest1d_backward.default: 1,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_nearest3d_backward.default: 3,
    aten._upsample_nearest_exact1d_backward.default: 1,
    aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 3,
    aten.upsample_linear1d_backward.default: 1,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_trilinear3d_backward.default: 3,
    aten.upsample_bicubic2d_backward.default: 2,
    aten._upsample_bilinear2d_aa_backward.default: 2,
    aten._upsample_bicubic2d_aa_backward.default: 2,
}


@register(*_RANKS)
def pool(call: Call) -> Rule | None:
    """Maxima in windows, and their indices within a plane."""
    return _planes(call, _RANKS[call.op])


@register(*_LINEAR_RANKS)
def window(call: Call) -> Rule | None:
    return _planes(call, _LINEAR_RANKS[call.op], linear=[[0]])


@register(*_GRADIENT_RANKS)
def window_backward(call: Call) -> Rule | None:
    """The gradients of these; where there are indices, one kernel reads them as if they were contiguous."""

    def local(ctx: Local, *args: Any) -> Any:
        return op_of(call)(*args[:-1], args[-1].contiguous())

    picks = call.arg("indices") is not None
    local_form = local if picks else None
    return _planes(call, _GRADIENT_RANKS[call.op], linear=[[0]], shape_only=frozenset([1]), local=local_form)


@register(*_RESIZING_RANKS)
def resize_backward(call: Call) -> Rule | None:
    def local(ctx: Local, grad: Any, output_size: Any, input_size: Any, *rest: Any, **kwargs: Any) -> Any:
        lead = ctx.in_shape(0)[:2]
        return op_of(call)(grad, output_size, [*lead, *input_size[2:]], *rest, **kwargs)

    return _planes(call, _RESIZING_RANKS[call.op], linear=[[0]], local=local)


@register(aten.im2col.default)
def im2col(call: Call) -> Rule | None:
    """Patches as columns: kernel positions are the minor part of the channels."""
    if is_empty(call):
        return None
    shape = call.operands[0].shape
    lead = "n " * (len(shape) - 3)
    return rule(call, f"{lead}c h w -> {lead}(c k) l", sizes={"c": shape[-3]}, whole="h w k l", linear=[[0]])


@register(aten.col2im.default)
def col2im(call: Call) -> Rule | None:
    """Overlapping patches are added up."""
    if is_empty(call):
        return None
    shape = call.results[0].shape
    lead = "n " * (len(shape) - 3)
    return rule(call, f"{lead}(c k) l -> {lead}c h w", sizes={"c": shape[-3]}, whole="h w k l", linear=[[0]])


@register(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Rule | None:
    """Reads a plane at any points: the points are independent of each other."""
    if is_empty(call):
        return None
    planes, points = _grid(call)
    return rule(call, f"n c {planes}, n {points} x -> n c {points}", whole=f"{planes} x", linear=[[0]])


@register(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: Call) -> Rule | None:
    """The planes' gradient is a sum over points, the points' gradient a sum over channels."""
    if is_empty(call):
        return None
    planes, points = _grid(call)
    outs = [f"n c {planes}"] * call.arg("output_mask")[0] + [f"n {points} x"]  # the latter is there, asked for or not
    text = f"n c {points}, n c {planes}, n {points} x -> {', '.join(outs)}"
    return rule(call, text, whole=f"{planes} x", sum=f"c {points}")


def _grid(call: Call) -> tuple[str, str]:
    rank = 2 if "2d" in str(call.op) else 3
    return " ".join(names(rank, "p")), " ".join(names(rank, "q"))


@register(aten.affine_grid_generator.default)
def affine_grid(call: Call) -> Rule | None:
    """A grid for every sample; the samples' number is an argument."""
    positions = " ".join(names(len(call.results[0].shape) - 2, "p"))

    def local(ctx: Local, theta: Any, size: Any, *rest: Any) -> Any:
        return op_of(call)(theta, [ctx.in_shape(0)[0], *size[1:]], *rest)

    text = f"n i j -> n {positions} i"
    return None if is_empty(call) else rule(call, text, whole=f"i j {positions}", linear=[[0]], local=local)
