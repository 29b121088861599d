"""What torch would ask a value for: `x[i]` and `x[i, j] = v` by a traced scalar, `one_hot`, `_foreach_add` of a scalar.

A trace gathers, scatters and compares instead. And a closed-over mask, whose values are known, is the integers that it
stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._compat import is_traced, no_dispatch_modes, no_functorch

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def without_value(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any] | None:
    """What to call instead of this function; None where it asks for no value."""
    if function is torch.Tensor.__getitem__ or function is torch.Tensor.__setitem__:
        return _by_traced_scalar(function, args) or _by_constant_mask(function, args)
    if function is torch.nn.functional.one_hot:
        return _one_hot(*args, **kwargs)
    if function is torch._foreach_add or function is torch._foreach_add_:
        return _foreach_add(function, *args, **kwargs)
    return None


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> Callable[[], Any] | None:
    if num_classes <= 0 or x.dtype != torch.int64:
        return None  # as many classes as the data have, or an error
    return lambda: (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def _foreach_add(function: Callable[..., Any], tensors: Any, other: Any, **options: Any) -> Callable[[], Any] | None:
    if not isinstance(other, torch.Tensor):
        return None
    return lambda: function(tensors, [other] * len(tensors), **options)


def _by_traced_scalar(function: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any] | None:
    """Handles an index of scalars only: `x[i]`, `x[i, j]`, `x[i, 3]`."""
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


def _by_constant_mask(function: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any] | None:
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(_is_constant_mask(item) for item in items):
        return None
    index: list[Any] = []
    for item in items:
        if _is_constant_mask(item):
            with no_functorch(), no_dispatch_modes():
                index.extend(item.nonzero(as_tuple=True))
        else:
            index.append(item)
    return lambda: function(args[0], tuple(index), *args[2:])


def _is_constant_mask(item: Any) -> bool:
    known = type(item) in (torch.Tensor, torch.nn.Parameter) and not is_traced(item)
    return known and item.dtype in (torch.bool, torch.uint8) and item.dim() > 0


def _write(x: torch.Tensor, places: list[torch.Tensor], value: Any) -> None:
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else x.new_full((), value)
    x.index_put_(tuple(places), value)


def _is_traced_scalar(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INTEGERS and is_traced(item)
