"""Indexing by a traced scalar, `x[i]` and `x[i, j] = v`: torch asks for its value, a trace gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._compat import is_traced

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def by_traced_scalar(function: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any] | None:
    """What to call instead of this `__getitem__` or `__setitem__`; None if its index has no traced scalar.

    Handles an index of scalars only: `x[i]`, `x[i, j]`, `x[i, 3]`.
    """
    if function is not torch.Tensor.__getitem__ and function is not torch.Tensor.__setitem__:
        return None
    x, index = args[0], args[1]
    items = index if isinstance(index, tuple) else (index,)
    if not any(_is_traced_scalar(item) for item in items):
        return None
    if not all(_is_traced_scalar(item) or type(item) is int for item in items):
        return None
    scalar = next(item for item in items if _is_traced_scalar(item))
    places = [torch.full_like(scalar, item) if type(item) is int else item for item in items]
    places = [place.long() for place in places]
    if function is torch.Tensor.__getitem__:
        return lambda: torch.ops.aten.index.Tensor(x, places)
    return lambda: _write(x, places, args[2])


def _write(x: torch.Tensor, places: list[torch.Tensor], value: Any) -> None:
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else x.new_full((), value)
    x.index_put_(tuple(places), value)


def _is_traced_scalar(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INTEGERS and is_traced(item)
