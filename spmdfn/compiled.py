"""A Program with what a call of it needs: where arguments go in, and how results come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree

from .aliases import memory, suspects, unshared
from .array import Array, blocks_of, donate
from .backends.base import backend_of
from .blocks import take
from .errors import SpmdError, message
from .layout import Layout
from .program import Program
from .spec import P
from .tree import unflatten


@dataclass(frozen=True)
class Entry:
    """A tensor argument: its place among the leaves, and for a plain tensor how it is cut."""

    place: int
    layout: Layout | None
    copy: bool = False


@dataclass(frozen=True)
class Exit:
    """A result: the spec that a tensor was asked to have (None: as it comes out), or a value that is no tensor."""

    spec: P | None = None
    value: Any = None


@dataclass(frozen=True)
class Compiled:
    """A Program, ready to be called with the leaves of arguments.

    label     the function's name, for errors
    names     the arguments' names, one a leaf
    captured  closed-over Arrays: the inputs after the arguments
    donated   the places of leaves whose Arrays are used up
    dataless  the name of an argument that has a shape but no data
    """

    program: Program
    label: str
    names: tuple[str, ...]
    entries: tuple[Entry, ...]
    captured: tuple[Array, ...]
    exits: tuple[Exit, ...]
    treedef: optree.PyTreeSpec
    donated: tuple[int, ...] = ()
    dataless: str | None = None

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program over the arguments' blocks; SpmdError if there are none or they were donated before."""
        backend = backend_of(self.program.mesh)
        if self.dataless is not None:
            raise SpmdError(
                message(
                    f"{self.label}: the argument {self.dataless} is a meta or fake tensor and holds no data",
                    fix="use .lower(*args) for the program alone, or pass tensors with data",
                )
            )
        inputs = [
            blocks_of(leaves[entry.place])
            if entry.layout is None
            else take(leaves[entry.place].detach(), entry.layout, copy=entry.copy)
            for entry in self.entries
        ]
        inputs += [blocks_of(array) for array in self.captured]
        if self.donated:
            self._donate(leaves)
        owned = self._owned(leaves) if self._suspects else set()
        results = backend.run(self.program, inputs)
        for place in self._suspects:
            results[place] = unshared(results[place], owned)
            owned.update(map(memory, results[place]))
        found = [
            Array(blocks, layout, end.spec) if layout is not None else end.value
            for blocks, layout, end in zip(results, self.program.outputs, self.exits, strict=True)
        ]
        return unflatten(self.treedef, found)

    @cached_property
    def _suspects(self) -> tuple[int, ...]:
        """The results that may look at the memory of an Array, of a constant or of another result."""
        return suspects(self.program.graph)

    def _owned(self, leaves: Sequence[Any]) -> set[int]:
        """The memory that belongs to others: that of Arrays which are still in use, and of constants."""
        arrays = [leaf for leaf in leaves if isinstance(leaf, Array) and leaf._blocks is not None]
        blocks = [block for array in (*arrays, *self.captured) for block in blocks_of(array)]
        return {memory(block) for block in (*blocks, *self.program.constants.values())}

    def _donate(self, leaves: Sequence[Any]) -> None:
        """Empty the donated Arrays; SpmdError if one of them is used twice in the call."""
        uses: dict[int, list[str]] = {}
        for name, leaf in zip(self.names, leaves, strict=True):
            if isinstance(leaf, Array):
                uses.setdefault(id(leaf), []).append(name)
        for array in self.captured:
            uses.setdefault(id(array), []).append("a closed-over variable")
        arrays = [leaves[place] for place in self.donated if isinstance(leaves[place], Array)]
        for array in arrays:
            if len(uses[id(array)]) > 1:
                raise SpmdError(
                    message(
                        f"{self.label}: the same Array is donated and used twice",
                        f"uses: {', '.join(uses[id(array)])}",
                        f"array: {array!r}",
                        fix="donate an Array that nothing else in the call uses, or pass a copy (copy.deepcopy)",
                    )
                )
        for array in arrays:
            donate(array)
