"""What torch would ask a value for: `x[i]` and `x[i, j] = v` by a traced scalar, `one_hot`, `_foreach_add` of a scalar.

A trace gathers, scatters and compares instead. And a closed-over mask, whose values are known, is the integers that it
stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._compat import is_traced, no_dispatch_modes, no_functorch
from ..scalar_index import by_scalar, one_hot


def without_value(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any] | None:
    """What to call instead of this function; None where it asks for no value."""
    if function is torch.Tensor.__getitem__ or function is torch.Tensor.__setitem__:
        return by_scalar(function, args, is_traced) or _by_constant_mask(function, args)
    if function is torch._foreach_add or function is torch._foreach_add_:
        return _foreach_add(function, *args, **kwargs)
    return one_hot(function, args, kwargs)


def _foreach_add(function: Callable[..., Any], tensors: Any, other: Any, **options: Any) -> Callable[[], Any] | None:
    if not isinstance(other, torch.Tensor):
        return None
    return lambda: function(tensors, [other] * len(tensors), **options)


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
