"""All devices of the mesh in this process, in lock-step: each runs to the next collective, then all meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from .. import collectives
from ..mesh import Mesh
from ..program import Program
from .base import Blocks


class LocalBackend:
    """Runs one generator per device; between collectives a device's segment is plain torch code."""

    def run(self, program: Program, inputs: Sequence[Blocks]) -> list[Blocks]:
        mesh = program.mesh
        columns = [[blocks[device] for blocks in inputs] for device in range(mesh.size)]
        for blocks in inputs:
            blocks.clear()
        with torch.no_grad():
            devices = [program.function(*mesh.coordinates(i), columns[i]) for i in range(mesh.size)]
            answers: list[Any] = [None] * mesh.size
            for meet in program.meets:
                values = [device.send(answer)[1] for device, answer in zip(devices, answers, strict=True)]
                answers = meet_all(meet, values, mesh)
            results = [_finish(device, answer) for device, answer in zip(devices, answers, strict=True)]
        return [list(blocks) for blocks in zip(*results, strict=True)]


def _finish(device: Any, answer: Any) -> list[Any]:
    try:
        device.send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a device stopped at a collective that the program does not have")


@cache
def groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The devices of every group over `axes`, in the order of the axes given (first is major)."""
    found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for device in mesh.devices:
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        rest = tuple(place[axis] for axis in mesh.axis_names if axis not in axes)
        found.setdefault(rest, []).append((tuple(place[axis] for axis in axes), device))
    return tuple(tuple(device for _, device in sorted(members)) for members in found.values())


def meet_all(meet: fx.Node, values: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    """Answer one collective for every device."""
    results: list[Any] = [None] * mesh.size
    function = _FUNCTIONS[meet.target]
    _, axes, *rest = meet.args
    for group in groups(mesh, tuple(axes)):  # type: ignore[arg-type]
        answers = function([values[device] for device in group], *rest)
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
    pieces = [value.chunk(size, split_dim) for value in values]
    return [torch.cat([piece[i] for piece in pieces], concat_dim) for i in range(size)]


def _permute(values: list[torch.Tensor], sources: list[int]) -> list[torch.Tensor]:
    return [values[source] for source in sources]


_FUNCTIONS: dict[Any, Callable[..., list[torch.Tensor]]] = {
    collectives.all_reduce: _all_reduce,
    collectives.all_gather: _all_gather,
    collectives.reduce_scatter: _reduce_scatter,
    collectives.all_to_all: _all_to_all,
    collectives.permute: _permute,
}
