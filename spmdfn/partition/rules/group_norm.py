"""group_norm: samples and groups are independent of each other; channels and positions within a group are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register, rule
from spmdfn.partition.rules._dims import along, masked, names, op_of, wide
from spmdfn.partition.rules._masking import is_empty
from spmdfn.partition.rules.norm import centred, through_norm

aten = torch.ops.aten
Splits = Mapping[str, int]


@register(aten.native_group_norm.default)
def group_norm(call: Call) -> Rule | None:
    if is_empty(call):
        return None
    text, sizes, positions = _factors(call)
    given = [text["channels"] for name in ("weight", "bias") if call.arg(name) is not None]
    dtypes = [result.dtype for result in call.results]

    def alternative(splits: Splits, input: Any, weight: Any, bias: Any, *rest: Any) -> tuple[Any, Any, Any]:
        n, _, _, group, eps = rest
        cut = _cut(input, group).to(wide(input.dtype))
        rest, mean, rstd = centred(cut, list(range(2, cut.dim())), eps)
        out = (rest * rstd).reshape(input.shape)
        out = out if weight is None else out * along(weight, 1, input.dim())
        out = out if bias is None else out + along(bias, 1, input.dim())
        return out.to(dtypes[0]), mean.reshape(n, group).to(dtypes[1]), rstd.reshape(n, group).to(dtypes[2])

    def local(ctx: Local, input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        return op_of(call)(input.contiguous(), weight, bias, *_local_sizes(ctx, *rest[:4]), *rest[4:])

    sides = f"{', '.join([text['input'], *given])} -> {text['input']}, {text['rows']}, {text['rows']}"
    return rule(call, sides, sizes=sizes, whole=f"c {positions}", local=local, alternative=alternative)


@register(aten.native_group_norm_backward.default)
def group_norm_backward(call: Call) -> Rule | None:
    """The gradients of weight and bias are sums over samples and positions."""
    if is_empty(call):
        return None
    text, sizes, positions = _factors(call)
    weight, mask = call.arg("weight"), call.arg("output_mask")
    dtypes = iter([result.dtype for result in call.results])
    kept = [next(dtypes) if wanted else None for wanted in mask]

    def alternative(
        splits: Splits, grad: Any, input: Any, mean: Any, rstd: Any, weight: Any, *ints: Any
    ) -> tuple[Any, ...]:
        group, rank, acc = mean.shape[1], input.dim(), wide(grad.dtype)
        cut = _cut(input, group).to(acc)
        statistic = (*mean.shape, *[1] * (cut.dim() - 2))
        unit = (cut - mean.reshape(statistic)) * rstd.reshape(statistic)
        grad = grad.to(acc)
        scaled = grad if weight is None else grad * along(weight, 1, rank)
        inner = list(range(2, cut.dim()))
        through = through_norm(_cut(scaled, group), unit, inner) * rstd.reshape(statistic)
        batch = [dim for dim in range(rank) if dim != 1]
        parts = [
            through.reshape(input.shape),
            torch.sum(grad * unit.reshape(input.shape), batch),
            torch.sum(grad, batch),
        ]
        return tuple(None if dtype is None else part.to(dtype) for part, dtype in zip(parts, kept, strict=True))

    def local(ctx: Local, grad: Any, input: Any, mean: Any, rstd: Any, weight: Any, *rest: Any) -> Any:
        # the kernel refuses a slice of the values, and reads one of the statistics as if it were contiguous
        values = [tensor.contiguous() for tensor in (grad, input, mean, rstd)]
        return op_of(call)(*values, weight, *_local_sizes(ctx, *rest[:4]), *rest[4:])

    channels = text["channels"]
    left = [text["input"], text["input"], text["rows"], text["rows"], *([] if weight is None else [channels])]
    right = masked([text["input"], channels, channels], mask)
    sides = f"{', '.join(left)} -> {', '.join(right)}"
    return rule(call, sides, sizes=sizes, sum="n", whole=f"c {positions}", local=local, alternative=alternative)


def _factors(call: Call) -> tuple[dict[str, str], dict[str, int], str]:
    """Patterns of the input, of a channel vector and of the statistics; known sizes; the names of the positions."""
    shape, group = call.arg("input").shape, call.arg("group")
    positions = names(len(shape) - 2, "p")
    sizes = {"g": group, "c": shape[1] // group, "n": shape[0], **dict(zip(positions, shape[2:], strict=True))}
    inside = " ".join(positions)
    return {"input": f"n (g c) {inside}", "channels": "(g c)", "rows": "n g"}, sizes, inside


def _local_sizes(ctx: Local, n: int, channels: int, positions: int, group: int) -> tuple[int, int, int, int]:
    groups = ctx.size("g") if group > 1 else 1
    return ctx.size("n") if n > 1 else 1, channels // group * groups, positions, groups


def _cut(tensor: Any, group: int) -> Any:
    return tensor.reshape(tensor.shape[0], group, tensor.shape[1] // group, *tensor.shape[2:])
