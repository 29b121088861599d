"""What a backend does: run a Program over this process's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import SpmdError, message
from ..mesh import Mesh
from ..program import Program

Blocks = list[Any]
"""The blocks of one value in this process, row-major by mesh coordinate."""


class Backend(Protocol):
    def run(self, program: Program, inputs: Sequence[Blocks]) -> list[Blocks]:
        """Run a program; every input and result is the list of this process's blocks. The input lists are emptied."""


def backend_of(mesh: Mesh) -> Backend:
    """The backend of a mesh; SpmdError for one that holds no data."""
    from .local import LocalBackend

    if mesh.backend == "local":
        return LocalBackend()
    raise SpmdError(
        message(
            f"the backend {mesh.backend!r} holds no data: a program can be lowered and explained, not run",
            f"mesh: {mesh!r}",
            fix='use .lower(*args), or make the mesh with backend="local"',
        )
    )
