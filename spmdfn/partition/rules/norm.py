"""layer_norm, rms_norm and group_norm: what is normalised is whole, or takes its means over the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Operand, Rule, register, rule
from spmdfn.partition.rules._dims import masked, names, op_of, wide
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten
Splits = Mapping[str, int]


def centred(value: Any, dims: list[int], eps: float) -> tuple[Any, Any, Any]:
    """The value minus its mean over `dims`, that mean, and the reciprocal deviation, both with dims of size 1."""
    mean = torch.mean(value, dims, True)
    rest = value - mean
    return rest, mean, torch.rsqrt(torch.mean(rest * rest, dims, True) + eps)


def through_norm(grad: Any, unit: Any, dims: list[int], centre: bool = True) -> Any:
    """The gradient by a normalised value's input, but for the deviation: what the means over `dims` take away."""
    rest = grad - unit * torch.mean(grad * unit, dims, True)
    return rest - torch.mean(grad, dims, True) if centre else rest


def _layer(call: Call, shape: Sequence[int]) -> tuple[list[str], list[str], list[str]]:
    """The factors of the input, of a row's statistics, and of the weight."""
    rank = len(call.arg("input").shape)
    batch, inside = names(rank - len(shape), "b"), names(len(shape), "d")
    return [*batch, *inside], [*batch, *inside], inside


@register(aten.native_layer_norm.default)
def layer_norm(call: Call) -> Rule | None:
    if is_empty(call):
        return None
    every, rows, inside = _layer(call, call.arg("normalized_shape"))
    dims = list(range(len(every) - len(inside), len(every)))
    dtypes = [result.dtype for result in call.results]

    def alternative(splits: Splits, input: Any, _: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
        rest, mean, rstd = centred(input.to(wide(input.dtype)), dims, eps)
        out = rest * rstd
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return out.to(dtypes[0]), mean.to(dtypes[1]), rstd.to(dtypes[2])

    ins = _present({call.arg("input"): every}, {"weight": inside, "bias": inside}, call)
    text = pattern(call, ins, every, _ones(rows, inside), _ones(rows, inside))
    return rule(call, text, whole=" ".join(inside), alternative=alternative)


@register(aten.native_layer_norm_backward.default)
def layer_norm_backward(call: Call) -> Rule | None:
    """The gradients of weight and bias are sums over the batch."""
    if is_empty(call):
        return None
    every, rows, inside = _layer(call, call.arg("normalized_shape"))
    batch = every[: len(every) - len(inside)]
    dims, mask, dtypes = list(range(len(batch), len(every))), call.arg("output_mask"), _by_mask(call)
    bias = call.arg("bias")

    def alternative(
        splits: Splits, grad: Any, input: Any, _: Any, mean: Any, rstd: Any, weight: Any, *rest: Any
    ) -> tuple[Any, ...]:
        acc = wide(grad.dtype)
        grad, unit = grad.to(acc), (input.to(acc) - mean) * rstd
        return _norm_gradients(grad, unit, rstd, weight, dims, True, mask, dtypes)

    def local(ctx: Local, grad: Any, input: Any, shape: Any, mean: Any, rstd: Any, *rest: Any) -> Any:
        # the kernel reads the statistics as if they were contiguous, and a slice of them is not
        return op_of(call)(grad, input, shape, mean.contiguous(), rstd.contiguous(), *rest)

    statistics = _ones(rows, inside)
    ins = {call.arg("grad_out"): every, call.arg("input"): every}
    ins |= {call.arg("mean"): statistics, call.arg("rstd"): statistics}
    outs = masked([every, inside, inside], mask)
    text = pattern(call, _present(ins, {"weight": inside, "bias": inside}, call), *outs)
    kinds: dict[str, Any] = {"sum": " ".join(batch), "whole": " ".join(inside)}
    unused = frozenset() if bias is None else frozenset([bias.index])
    return rule(call, text, shape_only=unused, local=local, alternative=alternative, **kinds)


@register(aten._fused_rms_norm.default)
def rms_norm(call: Call) -> Rule | None:
    if is_empty(call):
        return None
    every, rows, inside = _layer(call, call.arg("normalized_shape"))
    dims = list(range(len(every) - len(inside), len(every)))
    dtypes = [result.dtype for result in call.results]
    eps = call.arg("eps")

    def alternative(splits: Splits, input: Any, _: Any, weight: Any, __: Any) -> tuple[Any, Any]:
        value = input.to(wide(input.dtype))
        rstd = torch.rsqrt(
            torch.mean(value * value, dims, True) + (torch.finfo(value.dtype).eps if eps is None else eps)
        )
        out = value * rstd if weight is None else value * rstd * weight
        return out.to(dtypes[0]), rstd.to(dtypes[1])

    ins = _present({call.arg("input"): every}, {"weight": inside}, call)
    text = pattern(call, ins, every, _ones(rows, inside))
    return rule(call, text, whole=" ".join(inside), alternative=alternative)


@register(aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: Call) -> Rule | None:
    if is_empty(call):
        return None
    every, rows, inside = _layer(call, call.arg("normalized_shape"))
    batch = every[: len(every) - len(inside)]
    dims, mask, dtypes = list(range(len(batch), len(every))), call.arg("output_mask"), _by_mask(call)

    def alternative(
        splits: Splits, grad: Any, input: Any, _: Any, rstd: Any, weight: Any, *rest: Any
    ) -> tuple[Any, ...]:
        acc = wide(grad.dtype)
        grad, unit = grad.to(acc), input.to(acc) * rstd
        return _norm_gradients(grad, unit, rstd, weight, dims, False, mask, dtypes)

    ins = {call.arg("grad_out"): every, call.arg("input"): every, call.arg("rstd"): _ones(rows, inside)}
    text = pattern(call, _present(ins, {"weight": inside}, call), *masked([every, inside], mask))
    return rule(call, text, sum=" ".join(batch), whole=" ".join(inside), alternative=alternative)


def _norm_gradients(
    grad: Any, unit: Any, rstd: Any, weight: Any, dims: list[int], centre: bool, mask: Sequence[bool], dtypes: list[Any]
) -> tuple[Any, ...]:
    """The gradients by input, weight and, where the mask has three places, bias."""
    batch = list(range(dims[0]))
    parts: list[Any] = [None] * len(mask)
    if mask[0]:
        scaled = grad if weight is None else grad * weight
        parts[0] = through_norm(scaled, unit, dims, centre) * rstd
    for place, part in ((1, grad * unit), (2, grad)):
        if place < len(mask) and mask[place]:
            parts[place] = torch.sum(part, batch) if batch else part
    return tuple(None if part is None else part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))


def _by_mask(call: Call) -> list[torch.dtype | None]:
    """The dtype of every result, None in the places that the output mask leaves empty."""
    results = iter(call.results)
    return [next(results).dtype if wanted else None for wanted in call.arg("output_mask")]


def _ones(rows: Sequence[str], inside: Sequence[str]) -> list[str]:
    return ["1" if name in inside else name for name in rows]


def _present(ins: Mapping[Operand, Sequence[str]], more: Mapping[str, Sequence[str]], call: Call) -> dict[Operand, Any]:
    """`ins`, and those of the arguments named in `more` that were given."""
    return {**ins, **{call.arg(name): factors for name, factors in more.items() if call.arg(name) is not None}}
