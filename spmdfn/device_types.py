"""Device types in a map: over each manual axis a value is *varying* (devices may differ) or *invariant* (all equal).

Types are computed below autograd, where ops are dispatched. A cotangent has the type of its primal, so gradients are
right without the user thinking about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _compat
from . import collectives as c
from .errors import CollectiveError, VaryingError, message
from .mesh import Mesh, unknown_axis
from .spec import dtype_name

NONE: frozenset[str] = frozenset()


@dataclass(eq=False)
class Frame:
    """One running map: its mesh, the axes that are manual in it and in the maps around it, and whether types are kept.

    `enter` makes a value from outside the map invariant inside; `made` does so with a tensor made in the body.
    `place` is the index of each device along some axes. `globally(function, values, spec)` calls a function outside
    the map, on invariant values, and brings this device's block of its result in. `borrowed` is memory that belongs to
    the caller, and what it is.
    """

    mesh: Mesh
    axes: frozenset[str]
    outer: Frame | None
    checked: bool
    label: str
    enter: Callable[[torch.Tensor], torch.Tensor]
    made: Callable[[torch.Tensor], torch.Tensor]
    place: Callable[[tuple[str, ...]], torch.Tensor]
    globally: Callable[..., torch.Tensor]
    entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    borrowed: dict[int, str] = field(default_factory=dict)

    @property
    def manual(self) -> frozenset[str]:
        return self.axes | (self.outer.manual if self.outer is not None else NONE)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        """A value closed over counts as an argument with P(); one object enters once."""
        if stamp_of(x) is not None:
            return x
        known = self.entered.get(id(x))
        if known is None or known[0] is not x:
            known = self.entered[id(x)] = (x, self.enter(x))
        return known[1]


_FRAME: ContextVar[Frame | None] = ContextVar("spmdfn_map", default=None)


def current_frame() -> Frame | None:
    """The innermost running map."""
    return _FRAME.get()


@contextmanager
def running(frame: Frame | None) -> Iterator[None]:
    token = _FRAME.set(frame)
    try:
        yield
    finally:
        _FRAME.reset(token)


_BRANCH: ContextVar[tuple[str, frozenset[str]] | None] = ContextVar("spmdfn_branch", default=None)
_LOCAL = ("axis_index", "axis_size", "pcast")


@contextmanager
def selected_branch(label: str) -> Iterator[None]:
    """Inside, one of two branches runs of which each device takes its own: a collective of the running map raises."""
    frame = current_frame()
    token = _BRANCH.set((label, frame.manual if frame is not None else NONE))
    try:
        yield
    finally:
        _BRANCH.reset(token)


def _refuse_in_branch(what: str, axes: tuple[str, ...]) -> None:
    branch = _BRANCH.get()
    if branch is not None and what not in _LOCAL and branch[1].intersection(axes):
        raise CollectiveError(
            message(
                f"{what} over {', '.join(axes)} in {branch[0]}",
                "a collective in a branch needs all devices to take it",
                fix="call the collective before the cond and pass its result as an operand",
            )
        )


def frame_for(axis_name: Any, what: str) -> tuple[Frame, tuple[str, ...]]:
    """The running map and the axes that a collective names; CollectiveError outside a map or for a wrong axis."""
    frame = current_frame()
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if frame is None:
        raise CollectiveError(
            message(
                f"{what} over {', '.join(map(repr, axes))} outside a map",
                fix="collectives by axis name work in a function under sp.shard_map; global-view code writes x.sum()",
            )
        )
    for i, axis in enumerate(axes):
        if axis not in frame.mesh.shape:
            raise CollectiveError(f"{what} in {frame.label}: {unknown_axis(axis, frame.mesh)}")
        if axis not in frame.manual:
            raise CollectiveError(
                message(
                    f"{what} in {frame.label}: the axis {axis!r} is not manual in this map",
                    f"manual axes: {', '.join(sorted(frame.manual))}",
                    fix="add it to axis_names=, or leave it to the global view",
                )
            )
        if axis in axes[:i]:
            raise CollectiveError(
                message(f"{what} in {frame.label}: the axis {axis!r} is named twice", fix="name each axis once")
            )
    _refuse_in_branch(what, axes)
    return frame, axes


# types on tensors


@dataclass(frozen=True)
class Stamp:
    """The type of a value in a map: the axes over which it varies. `sample`: drawn from a key, which is equal over the
    other axes."""

    varying: frozenset[str]
    sample: bool = False


def stamp_of(x: Any) -> Stamp | None:
    """The type of a value, looking through functorch levels and functionalization; None outside maps."""
    return getattr(_compat.innermost(x), "_spmd_stamp", None)


def stamp(x: torch.Tensor, value: Stamp) -> torch.Tensor:
    _compat.innermost(x)._spmd_stamp = value
    return x


def varying(x: Any) -> frozenset[str]:
    found = stamp_of(x)
    return found.varying if found is not None else NONE


def typed(x: torch.Tensor) -> str:
    """Dtype, shape, and for a value in a map the axes over which it varies, like `f32[3]{V:dp}`."""
    frame, axes = current_frame(), varying(x)
    order = list(frame.mesh.axis_names) if frame is not None else sorted(axes)
    kind = f"{{V:{','.join(axis for axis in order if axis in axes)}}}" if axes else ""
    return f"{dtype_name(str(x.dtype))}[{', '.join(map(str, x.shape))}]{kind}"


def result_stamp(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Stamp | None:
    """The type of an op's results from those of its operands; None if no operand has one."""
    stamps = [found for x in tensors_in((args, kwargs)) if (found := getattr(x, "_spmd_stamp", None)) is not None]
    if op is c.axis_index:
        return Stamp(frozenset(args[1]))
    if op is c.leave:  # the result is outside this map, but may be inside one around it
        outer = frozenset().union(*(s.varying for s in stamps)).difference(args[3]) if stamps else NONE
        return Stamp(outer) if outer or current_frame() is not None else None
    if op is c.enter:
        inner = [axis for entry in args[1] if entry for axis in entry.split(",")]
        return Stamp(frozenset(inner).union(*(s.varying for s in stamps)))
    if not stamps:
        return None
    axes = frozenset().union(*(s.varying for s in stamps))
    if op in _GROUPED and len(args) > _GROUPED[op] and args[_GROUPED[op]]:
        return Stamp(axes)
    if op in (c.all_reduce, c.broadcast):
        return Stamp(axes.difference(args[1]))
    if op in (c.pcast, c.own_slice, c.keep_source):
        return Stamp(axes.union(args[1]))
    if op is c.all_gather and len(args) > 5 and args[5]:
        return Stamp(axes.difference(args[1]))
    drawn = getattr(op, "namespace", "") == "spmdfn" and "random" in str(op)
    return Stamp(axes, drawn or (len(stamps) == 1 and stamps[0].sample))


_GROUPED = {c.all_reduce: 3}


def tensors_in(structure: Any) -> list[torch.Tensor]:
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, (list, tuple)):
        return [tensor for item in structure for tensor in tensors_in(item)]
    if isinstance(structure, dict):
        return [tensor for item in structure.values() for tensor in tensors_in(item)]
    return []


def refuse_write(op: Any, target: Stamp, written: Stamp, where: str | None) -> None:
    """A varying value written into an invariant tensor would make it vary."""
    extra = sorted(written.varying - target.varying)
    if extra:
        axes = extra[0] if len(extra) == 1 else tuple(extra)
        raise VaryingError(
            message(
                f"{op} writes a value that varies over {', '.join(extra)} into an invariant tensor",
                f"where: {where}" if where else "",
                fix=f'make the tensor varying first: acc = sp.pcast(acc, {axes!r}, to="varying")',
            )
        )


class Refused(Exception):
    """Carries a TypeError of ours out of an operator: Python takes one there as a reason to try another operator."""


class Types(_compat.TorchDispatchMode):
    """Computes the types of fake tensors while a function is traced; it stands inside functionalization."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        found = result_stamp(op, args, kwargs)
        if found is not None:
            for tensor in tensors_in(result):
                tensor._spmd_stamp = found  # type: ignore[attr-defined]
        return result
