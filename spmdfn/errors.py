"""The error classes: one base, one class a kind of fault. Messages say what failed, where, the values, and the fix."""

from __future__ import annotations


class SpmdError(Exception):
    """The base of every error that spmdfn raises on purpose.

    >>> import spmdfn as sp
    >>> try:
    ...     sp.make_mesh((2,), ("dp", "tp"))
    ... except sp.SpmdError as error:
    ...     print(type(error).__name__, str(error).splitlines()[0], sep=": ")
    SpecError: make_mesh: 1 axis_shapes for 2 axis_names
    """


class SpecError(SpmdError, ValueError):
    """A spec or pattern that is malformed, or does not fit the shape, the mesh or the tree it is given for."""


class ShardingError(SpmdError, ValueError):
    """A layout that cannot be had, or communication that `reshard="error"` forbids."""


class VaryingError(SpmdError, TypeError):
    """A value that varies over a mesh axis where an invariant one is needed, or the reverse."""


class CollectiveError(SpmdError, RuntimeError):
    """A collective that cannot run: outside a map, over a wrong axis, or with ranks that disagree."""


class TracingError(SpmdError, TypeError):
    """A function that cannot be traced: it branches on values, mutates an input, or draws from global state."""


def message(what: str, *details: str, fix: str | None = None) -> str:
    """Lay out an error: the fault in one line, a line per detail, and what to write instead.

    >>> print(message("dim 0 does not divide", "shape: (3,)", fix="pad to 4"))
    dim 0 does not divide
      shape: (3,)
      fix: pad to 4
    """
    lines = [what, *(f"  {detail}" for detail in details if detail)]
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)
