"""How values cross into a map and out of it: its frame, its borders, and what may cross."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import collectives as c
from ._compat import innermost, no_function_modes, no_functorch, tracing
from .array import Array, layout_of
from .block import Block, device_places, memories
from .border import Border, enter, leave
from .device_types import NONE, Frame, Stamp, current_frame, running, stamp, typed, varying
from .errors import SpecError, VaryingError, message
from .layout import Layout
from .mesh import Mesh
from .movers import shard
from .moves import Cast, apply
from .spec import P, Resolved, Spec, resolve, with_context


class Crossing:
    """What one running map lets in and out: `manual` are its axes, `outer` the map around it."""

    def __init__(self, mesh: Mesh, manual: tuple[str, ...], outer: Frame | None, checked: bool, label: str):
        self.mesh, self.manual, self.outer, self.checked, self.label = mesh, manual, outer, checked, label

    def frame(self) -> Frame:
        """The frame of the running map."""

        def place(axes: tuple[str, ...]) -> torch.Tensor:
            if tracing():
                return c.axis_index(torch.zeros((), dtype=torch.int32), list(axes))
            places = device_places(self.mesh, axes)
            with no_function_modes(), no_functorch():
                return Block([torch.tensor(i, dtype=torch.int32) for i in places], self.mesh, Stamp(frozenset(axes)))

        def made(x: torch.Tensor) -> torch.Tensor:
            if tracing():
                return stamp(x, Stamp(NONE))
            with no_function_modes(), no_functorch():
                x = innermost(x)
                return Block([x, *(x.clone() for _ in range(self.mesh.size - 1))], self.mesh, Stamp(NONE))

        return Frame(
            self.mesh,
            frozenset(self.manual),
            self.outer,
            self.checked,
            self.label,
            self.close_over,
            made,
            place,
            self._globally,
        )

    def _globally(self, function: Callable[..., torch.Tensor], values: dict[str, Any], spec: Spec) -> torch.Tensor:
        """Call a function in the view around the map, on values that all devices share; this device's block of it."""
        frame = current_frame()
        assert frame is not None
        outside = dict(values)
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            value = frame.inside(value)
            if self.checked and (extra := sorted(varying(value).intersection(self.manual))):
                raise VaryingError(
                    message(
                        f"{self.label}: a draw with spec= is this device's block of one global draw, but {name} varies "
                        f"over {', '.join(extra)}",
                        f"{name}: {typed(value)}, spec: {spec!r}",
                        fix=f"give the {name} that all devices have, or draw a block of its own without spec=",
                    )
                )
            outside[name] = leave(value, self.border(Resolved(((),) * value.ndim, NONE), plain=True))
        with running(self.outer):
            result = function(**outside)
        return enter(
            result, self.border(self.resolve(spec, result.shape, None, "spec of a draw"), plain=is_plain(result))
        )

    def close_over(self, x: torch.Tensor) -> torch.Tensor:
        """A value from outside, closed over, counts as an argument with P()."""
        array = innermost(x)
        if isinstance(array, Array) and (split := layout_of(array).axes.intersection(self.manual)):
            raise VaryingError(
                message(
                    f"{self.label} closes over an Array that is split over {', '.join(sorted(split))}",
                    f"array: {array!r}",
                    fix="pass it as an argument, with its spec in in_specs",
                )
            )
        entered = enter(x, self.border(Resolved(((),) * x.ndim, NONE), plain=is_plain(x)))
        frame = current_frame()
        assert frame is not None
        borrow(frame, entered, f"a closed-over tensor of shape {tuple(x.shape)}")
        return entered

    def border(self, resolved: Resolved, *, plain: bool) -> Border:
        """The border of one value; `plain`: outside the map it is a plain tensor."""
        return Border(self.mesh, self.manual, resolved.entries, _reshard, plain, self.checked)

    def resolve(self, spec: Spec, shape: Sequence[int], bindings: dict[str, int] | None, where: str) -> Resolved:
        """A spec over a global shape: manual axes only, and blocks divide. SpecError, with `where` and the function."""
        try:
            if isinstance(spec, P):
                self._check_manual(spec, *spec.entries)
            resolved = resolve(spec, shape, self.mesh, bindings=bindings)
            self._check_manual(spec, *resolved.entries, tuple(resolved.unreduced))
            if resolved.unreduced:
                raise SpecError(
                    message(
                        f"the spec {spec!r} asks for a pending sum, which has no meaning in a map",
                        fix="leave out unreduced=: an Array that is a pending sum is summed when it enters",
                    )
                )
        except SpecError as error:
            raise with_context(error, where, f"function: {self.label}") from None
        return resolved

    def _check_manual(self, spec: Spec, *entries: tuple[str, ...]) -> None:
        taken = self.outer.manual if self.outer is not None else NONE
        for axis in (axis for axes in entries for axis in axes if axis in self.mesh.shape):
            if axis not in self.manual:
                why = "manual in the map around it already" if axis in taken else "not manual in this map"
                raise SpecError(
                    message(
                        f"the spec {spec!r} names {axis!r}, which is {why}",
                        f"manual axes: {', '.join(self.manual)}",
                        fix="name manual axes only; other axes stay as they are",
                    )
                )


def is_plain(x: torch.Tensor) -> bool:
    """Whether a value outside a map is a plain tensor, neither an Array nor a block of a map around it."""
    return not isinstance(innermost(x), (Array, Block))


def borrow(frame: Frame, x: torch.Tensor, name: str) -> None:
    """Note that the memory of a block is not the body's to write to."""
    if isinstance(block := innermost(x), Block):
        frame.borrowed.update(dict.fromkeys(memories(block), name))


def cast(x: torch.Tensor, axes: frozenset[str]) -> torch.Tensor:
    """A value as one that varies over more axes."""
    return apply(x, Cast(tuple(sorted(axes))))


def _reshard(array: Array, layout: Layout) -> Array:
    if layout_of(array) is layout:
        return array
    entries = layout.entries
    assert entries is not None
    return shard(array, P(*entries))
