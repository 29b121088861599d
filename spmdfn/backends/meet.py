"""What each collective does when all its devices are in this process: one list of blocks in, one out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import collectives
from ..mesh import Mesh

Group = tuple[int, ...]


@cache
def groups_over(mesh: Mesh, axes: tuple[str, ...], cut: tuple[int, ...] = (), size: int = 0) -> tuple[Group, ...]:
    """The devices of every group over `axes`, in the order of the axes given (first is major).

    `cut` lists indices along the axes, `size` to a group, where each group is further cut.
    """
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for device in mesh.devices:
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        rest = tuple(place[axis] for axis in mesh.axis_names if axis not in axes)
        found.setdefault(rest, []).append((tuple(place[axis] for axis in axes), device))
    whole = [tuple(device for _, device in sorted(members)) for members in found.values()]
    if not cut:
        return tuple(whole)
    parts = [cut[i : i + size] for i in range(0, len(cut), size)]
    return tuple(tuple(group[index] for index in part) for group in whole for part in parts)


def meet(op: Any, values: Sequence[Any], axes: Sequence[str], rest: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Answer one collective for every device; `values` has each device's tensor (or tuple of them).

    `rest` are the op's arguments after `axes`.
    """
    function, arguments = _FUNCTIONS[op]
    cut = tuple(rest[arguments]) if len(rest) > arguments else ()
    results: list[Any] = [None] * mesh.size
    for group in groups_over(mesh, tuple(axes), cut[1:], *cut[:1]):
        answers = function([values[device] for device in group], *rest[:arguments])
        for device, answer in zip(group, answers, strict=True):
            results[device] = answer
    return results


def _reduce(values: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Reduce in rank order; half-precision sums accumulate in float32."""
    first = values[0]
    if how == "sum":
        wide = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else first.dtype
        total = first.to(wide, copy=True)
        for value in values[1:]:
            total += value
        return total.to(first.dtype)
    combine = torch.maximum if how == "max" else torch.minimum
    for value in values[1:]:
        first = combine(first, value)
    return first


def _all_reduce(values: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    return [_reduce(values, how)] * len(values)


def _all_gather(values: list[torch.Tensor], size: int, dim: int) -> list[torch.Tensor]:
    return [torch.cat(values, dim)] * size


def _reduce_scatter(values: list[torch.Tensor], size: int, dim: int, how: str) -> list[torch.Tensor]:
    pieces = [value.chunk(size, dim) for value in values]
    return [_reduce([piece[i] for piece in pieces], how) for i in range(size)]


def _all_to_all(values: list[torch.Tensor], size: int, split_dim: int, concat_dim: int) -> list[torch.Tensor]:
    pieces = [value.tensor_split(size, split_dim) for value in values]
    return [torch.cat([piece[i] for piece in pieces], concat_dim) for i in range(size)]


def _permute(values: list[torch.Tensor], sources: list[int]) -> list[torch.Tensor]:
    return [torch.zeros_like(values[0]) if source < 0 else values[source] for source in sources]


def _broadcast(values: list[torch.Tensor], source: int) -> list[torch.Tensor]:
    return [values[source]] * len(values)


def _ragged_all_to_all(values: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Rows [input_offset, + send_size) of a device go to a peer's output, at the offset that the sender names."""
    results = [value[1].clone() for value in values]
    for x, _, input_offsets, send_sizes, output_offsets, _ in values:
        plan = zip(input_offsets.tolist(), send_sizes.tolist(), output_offsets.tolist(), strict=True)
        for result, (start, count, target) in zip(results, plan, strict=True):
            result[target : target + count] = x[start : start + count]
    return results


_FUNCTIONS: dict[Any, tuple[Callable[..., list[torch.Tensor]], int]] = {  # and the number of arguments after the axes
    collectives.all_reduce: (_all_reduce, 1),
    collectives.all_gather: (_all_gather, 2),
    collectives.reduce_scatter: (_reduce_scatter, 3),
    collectives.all_to_all: (_all_to_all, 3),
    collectives.permute: (_permute, 1),
    collectives.broadcast: (_broadcast, 1),
    collectives.ragged_all_to_all: (_ragged_all_to_all, 0),
}
