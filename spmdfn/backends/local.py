"""All devices of the mesh in this process, in lock-step: each runs to the next collective, then all meet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .._compat import set_grad_enabled
from ..mesh import Mesh
from ..program import Program, axes_and_rest
from .base import Blocks
from .meet import meet


class LocalBackend:
    """Runs one generator per device; between collectives a device's segment is plain torch code."""

    def run(self, program: Program, inputs: Sequence[Blocks]) -> list[Blocks]:
        mesh = program.mesh
        columns = [list(column) for column in zip(*inputs, strict=True)] or [[] for _ in mesh.devices]
        for blocks in inputs:
            blocks.clear()
        run = _each_once if program.is_uniform else _in_lock_step
        before = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            results = run(program, columns)
        finally:
            set_grad_enabled(before)
        return [list(blocks) for blocks in zip(*results, strict=True)]


def _in_lock_step(program: Program, columns: list[list[torch.Tensor]]) -> list[list[Any]]:
    mesh = program.mesh
    devices = [program.function(*place, column) for place, column in zip(_places(mesh), columns, strict=True)]
    answers: list[Any] = [None] * mesh.size
    for node in program.meets:
        values = [device.send(answer)[1] for device, answer in zip(devices, answers, strict=True)]
        op, axes, rest = node.target, *axes_and_rest(node)
        answers = meet(op, values, axes, rest, mesh)
    return [_finish(device, answer) for device, answer in zip(devices, answers, strict=True)]


def _each_once(program: Program, columns: list[list[torch.Tensor]]) -> list[list[Any]]:
    """Devices that have the very same blocks have the same results: one of them runs."""
    keys = [tuple(map(id, column)) for column in columns]
    place, made = _places(program.mesh)[0], dict[tuple[int, ...], list[Any]]()
    for key, column in zip(keys, columns, strict=True):
        if key not in made:
            made[key] = _finish(program.function(*place, column), None)
    return [made[key] for key in keys]


@cache
def _places(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    return tuple(mesh.coordinates(device) for device in mesh.devices)


def _finish(device: Any, answer: Any) -> list[Any]:
    try:
        device.send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a device stopped at a collective that the program does not have")
