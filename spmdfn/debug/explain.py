"""`explain`: every collective of a function as a table: op, axes, bytes, the user's line, and why it is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..jit import Jitted, spmd_jit
from ..program import Program, Row


@dataclass(frozen=True)
class Explanation:
    """The collectives of a Program as a table.

    rows     one a collective, in program order
    totals   bytes moved per device and call, by the axes of the group
    unruled  ops that have no rule and run gathered and replicated, with their lines
    """

    rows: tuple[Row, ...]
    totals: dict[tuple[str, ...], int]
    unruled: tuple[tuple[str, str | None], ...]

    def __repr__(self) -> str:
        count = len(self.rows)
        return f"<Explanation of {count} collective{'s' * (count != 1)}, {sum(self.totals.values()):,} bytes>"

    def __str__(self) -> str:
        if not self.rows:
            lines = ["no communication"]
        else:
            header = ("op", "axes", "bytes", "where", "why")
            body = [(_op(row), ", ".join(row.axes), f"{row.bytes:,}", row.where or "", row.why) for row in self.rows]
            lines = _align([header, *body], right=(2,))
            lines.append("")
            count = len(self.rows)
            lines.append(f"{count} collective{'s' * (count != 1)}; bytes moved per device and call:")
            lines += [f"  {', '.join(axes)}: {total:,}" for axes, total in self.totals.items()]
        for op, where in self.unruled:
            lines.append(f"no rule for {op} at {where or 'an unknown line'}: gathered and run replicated")
        return "\n".join(lines)


def explain(f: Callable[..., Any]) -> Callable[..., Explanation]:
    """A function of f's arguments that prints and returns the table of f's collectives. Nothing runs.

    `f` is made by `spmd_jit`; a plain function is taken as `spmd_jit(f)`. Arguments may be meta tensors, and the mesh
    one of the backend "fake". Raises what a call would raise before it runs.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("tp",))
    >>> f = sp.spmd_jit(lambda x, w: x @ w, mesh=mesh, in_specs=(sp.P(None, "tp"), sp.P("tp")), out_specs=sp.P())
    >>> table = sp.explain(f)(torch.ones(8, 16), torch.ones(16, 4))  # doctest: +ELLIPSIS
    op                axes  bytes  where  why
    all_reduce (sum)  tp      192  ...  sum of mm
    <BLANKLINE>
    1 collective; bytes moved per device and call:
      tp: 192
    >>> table.totals
    {('tp',): 192}
    """
    jitted = f if isinstance(f, Jitted) else spmd_jit(f)

    @functools.wraps(f)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        explanation = explanation_of(jitted.lower(*args, **kwargs))
        print(explanation)
        return explanation

    return explained


def explanation_of(program: Program) -> Explanation:
    """The table of a Program."""
    totals: dict[tuple[str, ...], int] = {}
    for row in program.collectives:
        totals[row.axes] = totals.get(row.axes, 0) + row.bytes
    return Explanation(program.collectives, totals, program.unruled)


def _op(row: Row) -> str:
    return f"{row.op} ({row.reduce})" if row.reduce else row.op


def _align(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
