"""`x[i]`, `x[:, i] = v` by a scalar whose value Python cannot have: traced, or different on each device of a map.

torch asks for the value of such an index, and selects. Here the tensor itself is the index, of a gather or a scatter.
And `one_hot` compares, where torch scatters into a tensor of its own, which belongs to no map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)  # uint8 is a mask
_WHOLE = slice(None)


def by_scalar(
    function: Callable[..., Any], args: Sequence[Any], unknown: Callable[[torch.Tensor], bool]
) -> Callable[[], Any] | None:
    """What to call in place of an indexing call; None where no scalar of its index is `unknown`."""
    if function is not torch.Tensor.__getitem__ and function is not torch.Tensor.__setitem__:
        return None

    def is_scalar(item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INTEGERS and unknown(item)

    x, index = args[0], args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if not any(map(is_scalar, items)):
        return None
    items = _spell_out(items, x.dim())
    items = [item.long() if is_scalar(item) else item for item in items]
    scalars = {place: item for place, item in enumerate(items) if is_scalar(item)}
    if all(type(item) is int or getattr(item, "dtype", None) in _INTEGERS for item in items):  # one gather or scatter
        scalars = dict(enumerate(_together(items, next(iter(scalars.values())))))
    if function is torch.Tensor.__getitem__:
        return lambda: _read(x, items, scalars)
    if all(place in scalars or item is None or type(item) in (int, slice) for place, item in enumerate(items)):
        return lambda: _write(x, items, scalars, args[2])
    return None


def _together(items: list[Any], like: torch.Tensor) -> list[torch.Tensor]:
    """Numbers and index tensors as tensors. Scalars beside wider ones get a dim: torch infers 0-d for (0-d, 1-d)."""
    tensors = [torch.full_like(like, item) if type(item) is int else item for item in items]
    wide = any(tensor.dim() for tensor in tensors)
    return [tensor.reshape(1) if wide and not tensor.dim() else tensor for tensor in tensors]


def _spell_out(items: list[Any], rank: int) -> list[Any]:
    """The index without `...`."""
    place = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if place is None:
        return items
    missing = rank - sum(_takes(item) for item in items if item is not Ellipsis)
    return [*items[:place], *[_WHOLE] * missing, *items[place + 1 :]]


def _takes(item: Any) -> int:
    """How many dims an entry of an index is about."""
    if item is None or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


def _read(x: torch.Tensor, items: list[Any], scalars: dict[int, torch.Tensor]) -> torch.Tensor:
    """Select along the dims of the scalars, then index by the rest: the order that torch has."""
    places: list[torch.Tensor | None] = []
    for place, item in enumerate(items):
        places.extend([scalars[place]] if place in scalars else [None] * _takes(item))
    while places[-1] is None:
        places.pop()
    selected = torch.ops.aten.index.Tensor(x, places)
    rest = tuple(item for place, item in enumerate(items) if place not in scalars)
    return selected[rest] if any(item != _WHOLE if isinstance(item, slice) else True for item in rest) else selected


def _write(x: torch.Tensor, items: list[Any], scalars: dict[int, torch.Tensor], value: Any) -> None:
    """Write through a view by the other entries, which are basic ones."""
    view = x[tuple(_WHOLE if place in scalars else item for place, item in enumerate(items))]
    places = [scalars.get(place) for place, item in enumerate(items) if place in scalars or type(item) is not int]
    value = value.to(x.dtype) if isinstance(value, torch.Tensor) else x.new_full((), value)
    torch.ops.aten.index_put_.default(view, places, value)


def one_hot(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What to call in place of a call of `one_hot`; None for other calls, and where the classes depend on the data."""
    if function is not torch.nn.functional.one_hot:
        return None
    x, classes = _one_hot_arguments(*args, **kwargs)
    if classes <= 0 or x.dtype != torch.int64:
        return None
    return lambda: (x.unsqueeze(-1) == torch.arange(classes, device=x.device)).long()


def _one_hot_arguments(tensor: torch.Tensor, num_classes: int = -1) -> tuple[torch.Tensor, int]:
    return tensor, num_classes
