"""What the indexing rules share: patterns from names, and indices of which only some fall into this device's block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Operand, Result


def pattern(call: Call, ins: Mapping[Operand, Sequence[str]], *outs: Sequence[str]) -> str:
    """The einops pattern of a call from factor names per dim; a dim of size 1 is written "1", whatever its name."""
    left = [_term(ins[operand], operand.shape) for operand in call.operands]
    right = [_term(names, result.shape) for names, result in zip(outs, call.results, strict=True)]
    return f"{', '.join(left)} -> {', '.join(right)}"


def _term(names: Sequence[str], shape: Sequence[int]) -> str:
    return " ".join("1" if size == 1 else name for name, size in zip(names, shape, strict=True))


def is_empty(call: Call) -> bool:
    """Whether a tensor of the call has no elements: there is nothing to split, and no row to clamp an index to."""
    tensors: list[Operand | Result] = [*call.operands, *call.results]
    return any(0 in tensor.shape for tensor in tensors)


def kind_of(kind: str, *factors: str) -> dict[str, Any]:
    """Options for `rule`: these factors are of that kind, which is "sum", "max", "min" or "whole"."""
    return {kind: " ".join(factors)}


def summed(dtype: torch.dtype, *factors: str) -> dict[str, Any]:
    """Options for `rule`: over these factors one block has the value, the others have zeros; bools have no sum."""
    return kind_of("max" if dtype == torch.bool else "sum", *factors)


def linear_in(target: Operand, *others: Any) -> list[list[int]]:
    """The one linear group: the target, and what is written into it; bools have no sums, so none may pass."""
    if target.dtype == torch.bool:
        return []
    return [[target.index, *(other.index for other in others)]]


def mine(index: Any, offset: Any, size: int) -> tuple[Any, Any]:
    """Global indices as rows of the block [offset, offset + size), and which of them fall into it.

    >>> rows, inside = mine(torch.tensor([0, 5, 7]), 4, 2)
    >>> rows.tolist(), inside.tolist()
    ([-4, 1, 3], [False, True, False])
    """
    rows = index - offset
    return rows, (rows >= 0) & (rows < size)


def only_first(ctx: Local, tensor: Any, *factors: str) -> Any:
    """The tensor in the first block of these contiguous factors, zeros in all others, so that a sum counts it once."""
    split = [factor for factor in factors if ctx.is_split(factor)]
    if not split:
        return tensor
    start: Any = 0
    for factor in split:
        start = start + ctx.offset(factor)
    first = 1 // (1 + start)  # 1 where every offset is 0; offsets may be proxies, so there is no comparing them
    return torch.masked_fill(tensor, torch.logical_not(tensor.new_full((), first, dtype=torch.bool)), 0)


def trailing(mask: Any, count: int) -> Any:
    """The mask with `count` dims of size 1 behind."""
    for _ in range(count):
        mask = torch.unsqueeze(mask, -1)
    return mask


def with_spare(tensor: Any, dim: int) -> Any:
    """The tensor with one more row along `dim`, which takes what is written for rows of other blocks."""
    return torch.cat([tensor, torch.narrow(tensor, dim, 0, 1)], dim)
