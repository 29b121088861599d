"""gather and the scatters: an index tensor of the operand's rank picks or writes along one dim."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Operand, Rule, register, rule
from spmdfn.partition.rules._masking import is_empty, kind_of, linear_in, mine, only_first, pattern, summed, with_spare

aten = torch.ops.aten


@register(aten.gather.default)
def gather(call: Call) -> Rule | None:
    """A split gathered dim leaves a pending sum of what each block has; the index's own dims pass."""
    source, dim, index = call.args[:3]
    rank = len(source.shape)
    if is_empty(call) or len(index.shape) != rank:
        return None
    dim = dim % max(rank, 1)
    # an index that is smaller than the source reads the source's first rows
    smaller = [d for d in range(rank) if d != dim and index.shape[d] != source.shape[d]]
    rows = ["i" if d == dim else f"i{d}" if d in smaller else f"s{d}" for d in range(rank)]
    columns = ["n" if d == dim else f"u{d}" if d in smaller else f"s{d}" for d in range(rank)]

    def local(ctx: Local, source: Any, dim: int, index: Any, **kwargs: Any) -> Any:
        for d in smaller:
            if ctx.is_split(f"i{d}"):
                source = torch.narrow(source, d, ctx.offset(f"i{d}"), ctx.size(f"i{d}"))
        if not ctx.is_split("n"):
            return aten.gather.default(source, dim, index, **kwargs)
        rows, inside = mine(index, ctx.offset("n"), ctx.size("n"))
        out = aten.gather.default(source, dim, torch.where(inside, rows, 0), **kwargs)
        return torch.masked_fill(out, torch.logical_not(inside), 0)

    return rule(
        call,
        pattern(call, {source: columns, index: rows}, rows),
        linear=linear_in(source),
        whole=" ".join(f"u{d}" for d in smaller),
        contiguous=" ".join(["n", *(f"i{d}" for d in smaller)]),
        local=local,
        **summed(source.dtype, "n"),
    )


@register(aten.scatter_add.default, aten.scatter.reduce, aten.scatter_reduce.two)
def scatter_reduce(call: Call) -> Rule | None:
    """Scatters that combine what meets: a sum (max, min) may be split over the index's positions too."""
    source, dtype = call.args[3], call.args[0].dtype
    reduce = "sum" if call.op == aten.scatter_add.default else call.arg("reduce")
    kind = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min"}.get(reduce, "whole")
    if not call.arg("include_self", True):
        kind = "whole"  # a row that no index of this block names keeps its own value, which another block drops
    # the mean of integers rounds
    linear = call.arg("include_self", True) and (kind == "sum" or (reduce == "mean" and dtype.is_floating_point))
    if kind == "sum" and dtype == torch.bool:
        kind = "max"  # "or"
    return _scatter(call, kind, linear_in(call.args[0], source) if linear else [])


@register(aten.scatter.src, aten.scatter.value, aten.scatter.value_reduce)
def scatter(call: Call) -> Rule | None:
    """Scatters that overwrite: linear in what is written and what it is written over, together."""
    source = call.args[3]
    if call.op == aten.scatter.src:
        return _scatter(call, "whole", linear_in(call.args[0], source))
    zeroes = call.op == aten.scatter.value and source == 0
    return _scatter(call, "whole", linear_in(call.args[0]) if zeroes else [])


def _scatter(call: Call, kind: str, linear: list[list[int]]) -> Rule | None:
    """The rule of every scatter; `kind` is that of the index's positions along the written dim."""
    target, dim, index = call.args[:3]
    source = call.args[3] if isinstance(call.args[3], Operand) else None
    rank = len(target.shape)
    if is_empty(call) or rank == 0 or len(index.shape) != rank or (source and len(source.shape) != rank):
        return None
    dim = dim % rank
    names = ["n" if d == dim else f"s{d}" for d in range(rank)]
    rows = ["i" if d == dim else f"s{d}" for d in range(rank)]
    whole = ["i"] if kind == "whole" else []
    for d in range(rank):  # an index smaller than the target or the source leaves their last rows alone
        if d != dim and index.shape[d] != target.shape[d]:
            rows[d] = f"i{d}"
            whole += [names[d], rows[d]]
    columns = list(rows)
    longer = [d for d in range(rank) if source and source.shape[d] != index.shape[d]]
    for d in longer:
        columns[d] = f"r{d}"
        whole += [rows[d], columns[d]]
    adds = kind == "sum" and "i" not in whole

    def local(ctx: Local, target: Any, dim: int, index: Any, source: Any, *options: Any, **kwargs: Any) -> Any:
        op: Any = call.op
        if adds:
            target = only_first(ctx, target, "i")
        if not ctx.is_split("n"):
            return op(target, dim, index, source, *options, **kwargs)
        size = ctx.size("n")
        rows, inside = mine(index, ctx.offset("n"), size)
        if kind == "sum" and not longer:
            source = torch.masked_fill(source, torch.logical_not(inside), 0)
            return op(target, dim, torch.where(inside, rows, 0), source, *options, **kwargs)
        rows = torch.where(inside, rows, size)
        return torch.narrow(op(with_spare(target, dim), dim, rows, source, *options, **kwargs), dim, 0, size)

    ins = {target: names, index: rows} | ({source: columns} if source else {})
    return rule(
        call,
        pattern(call, ins, names),
        linear=linear,
        contiguous="n i",
        local=local,
        whole=" ".join(dict.fromkeys(whole)),
        **({} if "i" in whole else kind_of(kind, "i")),
    )
