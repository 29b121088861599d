"""Scaled dot-product attention, fused, on every device type: batch and heads are independent of each other.

q has (g r) heads, k and v have g: query heads come in runs of r that share a head of k and v. Splitting r leaves k
and v as they are, and their gradients pending. Queries are independent too, unless a causal mask makes their places
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Operand, Rule, register, rule
from spmdfn.partition.rules._dims import op_of

aten = torch.ops.aten


QUERIES = "b (g r) s"
SEEDS = ("philox_seed", "philox_offset")
"""Operands that only a dropout reads, and with a dropout there is no rule."""


@register(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
def attention(call: Call) -> Rule | None:
    """Results are the output, one number or one row per query, and what only the same op's backward reads."""
    if not _applies(call):
        return None
    sizes = _sizes(call)
    outs = [f"{QUERIES} e"]
    for place, result in enumerate(call.results[1:]):
        outs.append(_statistics(result.shape, call) if place == 0 else _own(result.shape, f"y{place}"))
    # the results that lack a factor are the same in every block
    return _rule(call, outs, sizes, "max")


@register(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
def attention_backward(call: Call) -> Rule | None:
    """The gradients of k and v are sums over r and, where queries are independent, over s."""
    if not _applies(call):
        return None
    wanted = call.arg("grad_input_mask") or [True] * len(call.results)
    bias = _bias(call.results[-1].shape) if len(wanted) > 3 and wanted[3] else ""
    outs = [f"{QUERIES} d", "b g t d", "b g t e", bias]
    return _rule(call, [out for out, wants in zip(outs, wanted, strict=False) if wants], _sizes(call), "sum")


def _applies(call: Call) -> bool:
    """No dropout, which would draw other numbers in every block; four dims; heads that share evenly."""
    query, key, value = (call.arg(name) for name in ("query", "key", "value"))
    if call.arg("dropout_p") or call.arg("dropout_mask") is not None or len(query.shape) != 4:
        return False
    if any(0 in operand.shape for operand in (query, key, value)) or key.shape[1] != value.shape[1]:
        return False
    return query.shape[1] % key.shape[1] == 0


def _sizes(call: Call) -> dict[str, int]:
    b, heads, s, d = call.arg("query").shape
    g, t = call.arg("key").shape[1:3]
    return {"b": b, "g": g, "r": heads // g, "s": s, "t": t, "d": d, "e": call.arg("value").shape[3]}


def _rule(call: Call, outs: Sequence[str], sizes: dict[str, int], lacking: str) -> Rule:
    """The rule with these results, which are of kind `lacking` over the factors that they lack."""
    terms: list[str] = []
    unused: list[int] = []
    for argument in op_of(call)._schema.arguments:
        operand = call.arg(argument.name)
        if isinstance(operand, Operand):
            terms.append(_term(argument.name, operand, call))
            if argument.name in SEEDS:
                unused.append(operand.index)
    # on other devices the ops answer, and take, the greatest number of queries as a plain int
    queries = "" if call.arg("is_causal") or not _counts_itself(call) else "s"
    every = {name for term in [*terms, *outs] for name in term.replace("(", " ").replace(")", " ").split()} - {"1"}
    free = {"b", "g", "r", *queries}
    kinds: dict[str, Any] = {lacking: " ".join(sorted(free)), "whole": " ".join(sorted(every - free))}
    return rule(
        call,
        f"{', '.join(terms)} -> {', '.join(outs)}",
        sizes=sizes,
        shape_only=frozenset(unused),
        **kinds,
    )


def _counts_itself(call: Call) -> bool:
    name = str(call.op)
    return "for_cpu" in name or "math" in name


def _term(name: str, operand: Operand, call: Call) -> str:
    if name in ("attn_mask", "attn_bias"):
        return _bias(operand.shape)
    if name == "logsumexp":
        return _statistics(operand.shape, call)
    known = {"query": f"{QUERIES} d", "key": "b g t d", "value": "b g t e"}
    known |= dict.fromkeys(("out", "grad_out", "grad_out_"), f"{QUERIES} e")
    return known.get(name) or _own(operand.shape, f"z{operand.index}")


def _bias(shape: Sequence[int]) -> str:
    """A mask broadcasts to all pairs of queries and keys."""
    names = ["b", "(g r)", "s", "t"][4 - len(shape) :]
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))


def _statistics(shape: Sequence[int], call: Call) -> str:
    """One number per query (some kernels pad the queries), or a row."""
    queries = "s" if shape[2] == call.arg("query").shape[2] else "x"
    return f"b (g r) {queries}" + (" w" if len(shape) == 4 else "")


def _own(shape: Sequence[int], prefix: str) -> str:
    """Factors that nothing else has."""
    return " ".join(f"{prefix}_{dim}" for dim in range(len(shape)))
