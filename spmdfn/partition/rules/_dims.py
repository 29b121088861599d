"""What the reducing rules share: names of dims, which dims an op reduces, and tensors cut into blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from spmdfn.partition.rule import Call, Local

Out = TypeVar("Out")


def names(rank: int, letter: str = "d") -> list[str]:
    """One factor name per dim.

    >>> names(3)
    ['d0', 'd1', 'd2']
    """
    return [f"{letter}{dim}" for dim in range(rank)]


def wrap(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """The dims that a `dim` argument means, sorted and from 0 on; None and an empty list mean all.

    >>> wrap([-1, 0], 3), wrap(None, 2), wrap(0, 0)
    ([0, 2], [0, 1], [])
    """
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted({dim % rank for dim in listed}) if rank else []


def share(ctx: Local, sizes: Mapping[str, int], factors: Iterable[str]) -> float:
    """Which part of the elements along these factors a block has: what turns its mean into a summand of the whole's."""
    known = [factor for factor in factors if factor in sizes]
    return math.prod(ctx.size(factor) for factor in known) / math.prod(sizes[factor] for factor in known)


def blocks(tensor: Any, dims: Sequence[int], splits: Mapping[str, int]) -> tuple[Any, list[int], list[int]]:
    """Reshape each of these dims that is split into (blocks, rows); answer also the places of the two kinds of dim.

    >>> cut, outer, inner = blocks(torch.zeros(3, 8), [0, 1], {"d1": 2})
    >>> tuple(cut.shape), outer, inner
    ((3, 2, 4), [1], [0, 2])
    """
    shape: list[int] = []
    outer: list[int] = []
    inner: list[int] = []
    for dim, size in enumerate(tensor.shape):
        n = splits.get(f"d{dim}", 1) if dim in dims else 1
        if n > 1:
            outer.append(len(shape))
            shape.append(n)
        if dim in dims:
            inner.append(len(shape))
        shape.append(size // n)
    return tensor.reshape(shape), outer, inner


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels accumulate: float32 for the half precisions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def along(values: Any, dim: int, rank: int) -> Any:
    """View a vector so that it lies along `dim` of a tensor of that rank."""
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


def is_linear(call: Call) -> bool:
    """Whether a sum of `call`'s only operand may wait until after it: its result is not of a coarser kind of number."""
    source, result = call.operands[0].dtype, call.results[0].dtype
    return source == result or (source.is_floating_point and result.is_floating_point)


def masked(outs: Sequence[Out], mask: Sequence[bool]) -> list[Out]:
    """Those of an op's results that its output mask leaves."""
    return [out for out, wanted in zip(outs, mask, strict=True) if wanted]


def op_of(call: Call) -> Any:
    """The op, as something to call."""
    return call.op
