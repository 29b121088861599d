"""batch_norm: channels are independent; in training, samples and positions are not, and evaluation is pointwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Rule, register, rule
from spmdfn.partition.rules._dims import along, masked, names, wide
from spmdfn.partition.rules._masking import pattern
from spmdfn.partition.rules.norm import centred

aten = torch.ops.aten
Splits = Mapping[str, int]
EMPTY = ["e"]
"""The dims of what the kernel leaves empty: statistics that were not taken, and the reserve of other devices."""


def _every(call: Call) -> list[str]:
    return ["n", "c", *names(len(call.arg("input").shape) - 2, "p")]


def _no_values(call: Call) -> bool:
    return 0 in call.arg("input").shape


@register(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update_functional.default,
    aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default,
)  # fmt: skip
def batch_norm(call: Call) -> Rule | None:
    """In training the statistics are means over samples and positions; otherwise those given are used."""
    training = _trains(call)
    running = call.arg("running_mean") is not None
    reserve = call.results[3:4] if "update" in str(call.op) else ()
    if _no_values(call) or any(0 not in result.shape for result in reserve):
        return None  # a reserve that is not empty belongs to another device's kernel, which alone can read it
    if training and running and call.op == aten.native_batch_norm.default:
        return None  # that op writes to its running statistics, which no rule can say: it must not be taken apart
    every = _every(call)
    ins = {operand: ["c"] if operand != call.arg("input") else every for operand in call.operands}
    outs = [every, *[EMPTY if 0 in result.shape else ["c"] for result in call.results[1:]]]
    text = pattern(call, ins, *outs)
    if not training:
        # results that lack a factor are empty, or copies of what was given: a maximum of equal things is one of them
        return rule(call, text, sizes={"e": 0}, max=" ".join(every), whole="e")
    rest = " ".join(factor for factor in every if factor != "c")
    alternative = _training(call, len(every))
    return rule(call, text, sizes={"e": 0}, max="c", whole=f"{rest} e", alternative=alternative)


def _trains(call: Call) -> bool:
    if call.op == aten._batch_norm_with_update_functional.default:
        return True
    if call.op in (aten._batch_norm_no_update.default, aten._native_batch_norm_legit_no_training.default):
        return False
    return bool(call.arg("training"))


def _training(call: Call, rank: int) -> Any:
    momentum, eps = call.arg("momentum"), call.arg("eps")
    dims = [dim for dim in range(rank) if dim != 1]
    count = math.prod(call.arg("input").shape[dim] for dim in dims)
    dtypes = [result.dtype for result in call.results]
    updates = call.arg("running_mean") is not None

    def alternative(splits: Splits, input: Any, weight: Any, bias: Any, *others: Any) -> tuple[Any, ...]:
        rest, mean, rstd = centred(input.to(wide(input.dtype)), dims, eps)
        out = rest * rstd
        out = out if weight is None else out * along(weight, 1, rank)
        out = out if bias is None else out + along(bias, 1, rank)
        mean, rstd = mean.reshape(-1), rstd.reshape(-1)
        results = [out, mean, rstd, *[mean[:0]] * (len(dtypes) - 3 - 2 * updates)]
        if updates:
            spread = (1 / (rstd * rstd) - eps) * (count / max(count - 1, 1))
            old_mean, old_spread = others[:2]
            results += [old_mean + momentum * (mean - old_mean), old_spread + momentum * (spread - old_spread)]
        return tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True))

    return alternative


@register(aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
def batch_norm_backward(call: Call) -> Rule | None:
    """In evaluation, weight and bias sum over samples and positions; in training, so does the input's gradient."""
    reserve = call.arg("reserve")
    if _no_values(call) or (reserve is not None and 0 not in reserve.shape):
        return None
    every, train = _every(call), call.arg("train" if reserve is None else "update")
    ins = {operand: every if len(operand.shape) == len(every) else ["c"] for operand in call.operands}
    ins |= {operand: EMPTY for operand in call.operands if 0 in operand.shape}
    mask = call.arg("output_mask")
    rest = [factor for factor in every if factor != "c"]
    dims = [dim for dim, factor in enumerate(every) if factor != "c"]
    found = iter([result.dtype for result in call.results])
    dtypes = [next(found) if wanted else None for wanted in mask]

    def alternative(
        splits: Splits, grad: Any, input: Any, weight: Any, _: Any, __: Any, mean: Any, rstd: Any, *others: Any
    ) -> tuple[Any, ...]:
        rank, acc = len(every), wide(grad.dtype)
        grad = grad.to(acc)
        unit = (input.to(acc) - along(mean, 1, rank)) * along(rstd, 1, rank)
        scale = along(rstd if weight is None else rstd * weight, 1, rank)
        # the sums are the gradients of weight and bias too: each is reduced over devices once
        along_unit, total = torch.sum(grad * unit, dims), torch.sum(grad, dims)
        count = math.prod(input.shape[dim] for dim in dims)
        centre = grad - along(total / count, 1, rank) - unit * along(along_unit / count, 1, rank)
        parts = [centre * scale, along_unit, total]
        return tuple(None if dtype is None else part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))

    text = pattern(call, ins, *masked([every, ["c"], ["c"]], mask))
    kinds: dict[str, Any] = {"whole": " ".join(["e", *rest])} if train else {"sum": " ".join(rest), "whole": "e"}
    unused = ("running_mean", "running_var") if train else ("save_mean", "save_invstd", "save_var")
    return rule(
        call,
        text,
        sizes={"e": 0},
        shape_only=frozenset(call.arg(name).index for name in unused if call.arg(name) is not None),
        alternative=alternative if train else None,
        **kinds,
    )
