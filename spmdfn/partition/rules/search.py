"""Looking values up in a sorted sequence or in a set."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Operand, Rule, register, rule
from spmdfn.partition.rules._masking import is_empty, kind_of, pattern

aten = torch.ops.aten


@register(aten.searchsorted.Tensor, aten.searchsorted.Scalar, aten.bucketize.Tensor, aten.bucketize.Scalar)
def searchsorted(call: Call) -> Rule | None:
    """The position is a count of smaller boundaries, so blocks of a sorted sequence give a pending sum."""
    if is_empty(call):
        return None
    first, second = call.args[:2]
    values, bounds = (first, second) if call.op in (aten.bucketize.Tensor, aten.bucketize.Scalar) else (second, first)
    sorter = call.arg("sorter")
    rank = len(bounds.shape)
    names = [f"s{d}" for d in range(rank - 1)] + ["n"]
    out = [f"v{d}" for d in range(len(call.results[0].shape))]
    if rank > 1:  # one sequence for every row of values
        out = [*names[:-1], "v"]
    ins = {bounds: names}
    if isinstance(values, Operand):
        ins[values] = out
    if sorter is not None:
        ins[sorter] = names
    op: Any = call.op

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        """Blocks are slices, and torch warns of those."""
        dense = [arg.contiguous() if isinstance(arg, (torch.Tensor, torch.fx.Proxy)) else arg for arg in args]
        return op(*dense, **kwargs)

    # a sorter holds positions within the whole sequence
    kinds = kind_of("sum" if sorter is None else "whole", "n")
    return rule(call, pattern(call, ins, out), local=local, strided=True, **kinds)


@register(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(call: Call) -> Rule | None:
    """In the set if in any block of it; not in it if in none."""
    if is_empty(call):
        return None
    elements, tests = call.args[:2]
    out = [f"e{d}" for d in range(len(call.results[0].shape))]
    ins = {elements: out} if isinstance(elements, Operand) else {}
    kind = "min" if call.arg("invert") else "max"
    if not isinstance(tests, Operand):
        return rule(call, pattern(call, ins, out), elementwise=True)
    ins[tests] = [f"t{d}" for d in range(len(tests.shape))]
    return rule(call, pattern(call, ins, out), **kind_of(kind, *ins[tests]))
