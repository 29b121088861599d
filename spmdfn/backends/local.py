"""All devices of the mesh in this process, in lock-step: each runs to the next collective, then all meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program import Program, axes_and_rest
from .base import Blocks
from .meet import meet


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
            for node in program.meets:
                values = [device.send(answer)[1] for device, answer in zip(devices, answers, strict=True)]
                op, axes, rest = node.target, *axes_and_rest(node)
                answers = meet(op, values, axes, rest, mesh)
            results = [_finish(device, answer) for device, answer in zip(devices, answers, strict=True)]
        return [list(blocks) for blocks in zip(*results, strict=True)]


def _finish(device: Any, answer: Any) -> list[Any]:
    try:
        device.send(answer)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a device stopped at a collective that the program does not have")
