"""convolution and its gradients: samples, groups and channels may be split, positions only where a kernel is a point.

An input has (g i) channels, an output (g o): g groups, each from i channels to o.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._dims import along, masked, names, op_of
from spmdfn.partition.rules._masking import is_empty

aten = torch.ops.aten
Splits = Mapping[str, int]


@register(aten.convolution.default)
def convolution(call: Call) -> Rule | None:
    """i is summed; with a bias, which must be added once, a split i leaves the fused op."""
    x, weight, bias = call.args[:3]
    if is_empty(call) or len(x.shape) != len(weight.shape):
        return None
    term, sizes, positions = _factors(call, x.shape, weight.shape, call.results[0].shape)

    def alternative(splits: Splits, input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return aten.convolution.default(input, weight, None, *rest) + along(bias, 1, input.dim())

    def local(ctx: Local, input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return aten.convolution.default(input, weight, bias, *rest[:-1], _local_groups(ctx, rest[-1]))

    terms = [term["input"], term["weight"], *([] if bias is None else ["(g o)"])]
    kinds = {"sum": "i", "whole": positions} if bias is None else {"whole": f"i {positions}"}
    return rule(
        call,
        f"{', '.join(terms)} -> {term['output']}",
        sizes=sizes,
        linear=[[0], [1]] if bias is None else [[0, 2], [1, 2]],
        local=local,
        alternative=None if bias is None else alternative,
        **kinds,
    )


@register(aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule | None:
    """The gradient by the input is summed over o, those by weight and bias over samples.

    A block of i has all of the bias's gradient, so where i is split that one is taken by itself.
    """
    grad, x, weight = call.args[:3]
    mask = call.arg("output_mask")
    if is_empty(call) or len(x.shape) != len(weight.shape) or not any(mask):
        return None
    term, sizes, positions = _factors(call, x.shape, weight.shape, grad.shape)
    by_input, by_weight, by_bias = mask

    def alternative(splits: Splits, grad: Any, input: Any, weight: Any, *rest: Any) -> tuple[Any, Any, Any]:
        first, second = None, None
        if by_input or by_weight:
            first, second, _ = aten.convolution_backward.default(
                grad, input, weight, None, *rest[1:-1], [by_input, by_weight, False]
            )
        bias = torch.sum(grad, [dim for dim in range(grad.dim()) if dim != 1])
        return (first if by_input else None), (second if by_weight else None), bias

    def local(ctx: Local, grad: Any, input: Any, weight: Any, bias_sizes: Any, *rest: Any) -> Any:
        groups = _local_groups(ctx, rest[-2])
        outer = ctx.size("o") if sizes["o"] > 1 else 1
        bias_sizes = [groups * outer] if bias_sizes else bias_sizes
        return op_of(call)(grad, input, weight, bias_sizes, *rest[:-2], groups, mask)

    # alone, a gradient is linear in what it multiplies, and of the tensor that it is for only the shape counts
    linear = {(True, False, False): [[0], [2]], (False, True, False): [[0], [1]], (False, False, True): [[0]]}
    unused = frozenset(index for index, wanted in ((1, by_weight), (2, by_input)) if not wanted)
    alone = "i" if by_bias else ""
    outs = masked([term["input"], term["weight"], "(g o)"], mask)
    return rule(
        call,
        f"{term['output']}, {term['input']}, {term['weight']} -> {', '.join(outs)}",
        sizes=sizes,
        sum="n o" if alone else "n o i",
        whole=f"{positions} {alone}",
        linear=linear.get(tuple(mask), []),
        shape_only=unused,
        local=local,
        alternative=alternative if by_bias else None,
    )


def _factors(
    call: Call, x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...]
) -> tuple[dict[str, str], dict[str, int], str]:
    """The patterns of input, weight and output; known sizes; the factors of positions."""
    groups, transposed = call.arg("groups"), call.arg("transposed")
    rank = len(x) - 2
    inputs, kernel, outputs = names(rank, "p"), names(rank, "k"), names(rank, "q")
    sizes = {"n": x[0], "g": groups, "i": x[1] // groups, "o": out[1] // groups}
    sizes |= dict(zip(inputs, x[2:], strict=True)) | dict(zip(outputs, out[2:], strict=True))
    sizes |= dict(zip(kernel, weight[2:], strict=True))
    term = {
        "input": " ".join(["n (g i)", *inputs]),
        "weight": " ".join(["(g i) o" if transposed else "(g o) i", *kernel]),
        "output": " ".join(["n (g o)", *outputs]),
    }
    return term, sizes, " ".join([*inputs, *kernel, *outputs])


def _local_groups(ctx: Local, groups: int) -> int:
    return ctx.size("g") if groups > 1 else 1
