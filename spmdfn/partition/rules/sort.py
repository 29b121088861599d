"""Sorting and selecting along a dim, which must be whole; topk also works from the largest of every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Rule, register, rule

aten = torch.ops.aten


def _names(call: Call) -> tuple[list[str], int]:
    rank = len(call.operands[0].shape)
    dim = call.arg("dim") % max(rank, 1)
    return ["n" if d == dim else f"s{d}" for d in range(rank)], dim


@register(aten.sort.default, aten.sort.stable)
def sort(call: Call) -> Rule:
    """Values and positions along the sorted dim, which is whole."""
    names, _ = _names(call)
    term = " ".join(names)
    return rule(call, f"{term} -> {term}, {term}", whole="n")


@register(aten.kthvalue.default, aten.mode.default, aten.median.dim, aten.nanmedian.dim)
def select(call: Call) -> Rule:
    """One value and its position along a dim, which is whole; the dim goes, or stays with size 1."""
    names, _ = _names(call)
    kept = " ".join("1" if name == "n" else name for name in names if name != "n" or call.arg("keepdim"))
    return rule(call, f"{' '.join(names)} -> {kept}, {kept}", whole="n")


@register(aten.median.default, aten.nanmedian.default)
def median(call: Call) -> Rule:
    """The median of everything: every dim is whole."""
    names = " ".join(f"n{d}" for d in range(len(call.operands[0].shape)))
    return rule(call, f"{names} ->", whole=names)


@register(aten.topk.default)
def topk(call: Call) -> Rule:
    """The k largest along a dim; where that is split, the k largest of every block's k largest."""
    names, dim = _names(call)
    kept = " ".join("k" if name == "n" else name for name in names)
    shape = call.operands[0].shape

    def blockwise(
        splits: Mapping[str, int], source: Any, k: int, _: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[Any, Any]:
        return topk_of_blocks(source, shape, splits.get("n", 1), k, dim, largest)

    return rule(
        call,
        f"{' '.join(names)} -> {kept}, {kept}",
        whole="n k",
        alternative=blockwise if names else None,
    )


def topk_of_blocks(
    source: Any, shape: Sequence[int], blocks: int, k: int, dim: int, largest: bool = True
) -> tuple[Any, Any]:
    """topk of a tensor of that shape by blocks: the best k of each block, then the best k of these few.

    >>> values, positions = topk_of_blocks(torch.tensor([3.0, 9.0, 7.0, 8.0]), (4,), 2, k=1, dim=0)
    >>> values.tolist(), positions.tolist()
    ([9.0], [1])
    """
    size = shape[dim] // blocks
    if blocks == 1 or k >= size:  # every block would keep all it has
        values, order = torch.sort(source, dim, largest)
        return torch.narrow(values, dim, 0, k), torch.narrow(order, dim, 0, k)
    before, behind = tuple(shape[:dim]), tuple(shape[dim + 1 :])
    values, inner = torch.topk(torch.reshape(source, (*before, blocks, size, *behind)), k, dim + 1, largest)
    starts = torch.arange(0, shape[dim], size, device=source.device)
    positions = inner + torch.reshape(starts, (blocks, 1, *(1 for _ in behind)))
    few = (*before, blocks * k, *behind)
    # then sort, not topk: its rule has no alternative, so this ends here; both take NaN as the largest
    values, order = torch.sort(torch.reshape(values, few), dim, largest)
    order = torch.narrow(order, dim, 0, k)
    return torch.narrow(values, dim, 0, k), torch.gather(torch.reshape(positions, few), dim, order)
