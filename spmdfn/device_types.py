"""Device types in a map: over each manual axis a value is *varying* (devices may differ) or *invariant* (all equal).

Types are computed below autograd, where ops are dispatched; casts are inserted above it, where torch functions are
called. A cotangent has the type of its primal, so gradients are right without the user thinking about it.
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
from .scalar_index import by_scalar, one_hot

NONE: frozenset[str] = frozenset()


@dataclass(eq=False)
class Frame:
    """One running map: its mesh, the axes that are manual in it and in the maps around it, and whether types are kept.

    `enter` makes a value from outside the map invariant inside; `made` does so with a tensor made in the body;
    `place` is the index of each device along some axes.
    """

    mesh: Mesh
    axes: frozenset[str]
    outer: Frame | None
    checked: bool
    label: str
    enter: Callable[[torch.Tensor], torch.Tensor]
    made: Callable[[torch.Tensor], torch.Tensor]
    place: Callable[[tuple[str, ...]], torch.Tensor]
    entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def manual(self) -> frozenset[str]:
        return self.axes | (self.outer.manual if self.outer is not None else NONE)


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
    return frame, axes


# types on tensors


@dataclass(frozen=True)
class Stamp:
    """The type of a value in a map: the axes over which it varies. `sample`: drawn from an invariant key."""

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
    sample = not axes and (
        (getattr(op, "namespace", "") == "spmdfn" and "random" in str(op)) or (len(stamps) == 1 and stamps[0].sample)
    )
    return Stamp(axes, sample)


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
    """Carries a VaryingError out of an operator: Python takes a TypeError there as a reason to try another one."""


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


# casts above autograd


class Casts(_compat.TorchFunctionMode):
    """Active in a body: brings in values from outside, and casts the operands of a call to one type."""

    def __init__(self, frame: Frame, pcast: Callable[[torch.Tensor, frozenset[str]], torch.Tensor]) -> None:
        super().__init__()
        self.frame, self.pcast = frame, pcast

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._call(function, args, kwargs or {})
        except VaryingError as error:
            if getattr(function, "__name__", "").startswith("__"):
                raise Refused(error) from error
            raise

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function in _EXEMPT or getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        if _compat.is_function_apply(function):
            if getattr(args[0] if args else None, "spmd_own", False):
                return function(*args, **kwargs)
        elif function is torch.autograd.grad:
            return self._grad(function, args, kwargs)
        tensors = tensors_in((args, kwargs))
        stamps = [stamp_of(x) for x in tensors]
        inside = [found for found in stamps if found is not None]
        if not inside:
            result = function(*args, **kwargs)
            return result if tensors else self._made(result)
        axes = frozenset().union(*(found.varying for found in inside)) if self.frame.checked else NONE
        if by_scalar(function, args, _has_no_value) is not None:
            instead = by_scalar(function, self._cast(function, args, axes), _has_no_value)
            assert instead is not None
            return instead()
        if not _compat.tracing() and (instead := one_hot(function, args, kwargs)) is not None:
            return instead()
        if all(found is not None and found.varying == axes for found in stamps) or not (
            None in stamps or self.frame.checked
        ):
            return function(*args, **kwargs)
        return function(*self._cast(function, args, axes), **self._cast(None, kwargs, axes))

    def _cast(self, function: Any, structure: Any, axes: frozenset[str]) -> Any:
        if isinstance(structure, torch.Tensor):
            return self._cast_one(structure, axes)
        if isinstance(structure, dict):
            return {key: self._cast(None, item, axes) for key, item in structure.items()}
        if isinstance(structure, (list, tuple)):
            items = [self._cast(None, item, axes) for item in structure]
            if function is not None and structure and isinstance(structure[0], torch.Tensor) and _writes(function):
                items[0] = self._destination(function, structure[0], axes)
            return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
        return structure

    def _destination(self, function: Any, x: torch.Tensor, axes: frozenset[str]) -> torch.Tensor:
        """The target of an in-place call is never cast: a cast would write into a copy."""
        found = stamp_of(x)
        if found is None:
            raise VaryingError(
                message(
                    f"{getattr(function, '__name__', function)} writes a value of the map {self.frame.label} into a "
                    "tensor from outside it",
                    f"target: shape {tuple(x.shape)}",
                    fix="make the tensor inside the body, or pass it as an argument and return the new value",
                )
            )
        refuse_write(getattr(function, "__name__", function), found, Stamp(axes), None)
        return x

    def _cast_one(self, x: torch.Tensor, axes: frozenset[str]) -> torch.Tensor:
        found = stamp_of(x)
        if found is None:
            x = self.enter(x)
            found = stamp_of(x)
        missing = axes - (found.varying if found is not None else NONE)
        if not missing or not self.frame.checked:
            return x
        if found is not None and found.sample:
            raise VaryingError(equal_sample(self.frame, missing))
        return self.pcast(x, missing)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """A value closed over counts as an argument with P(); one object enters once."""
        known = self.frame.entered.get(id(x))
        if known is None or known[0] is not x:
            known = self.frame.entered[id(x)] = (x, self.frame.enter(x))
        return known[1]

    def _made(self, result: Any) -> Any:
        if type(result) is torch.Tensor:
            return self.frame.made(result)
        if type(result) in (list, tuple):
            return type(result)(self._made(item) for item in result)
        return result

    def _grad(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Never cast here (the gradients would be zero); a free check instead: a gradient has its input's type."""
        result = function(*args, **kwargs)
        if self.frame.checked:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for x, g in zip(tensors_in(inputs), result, strict=False):
                if isinstance(g, torch.Tensor) and stamp_of(g) is not None and varying(g) != varying(x):
                    raise VaryingError(
                        message(
                            f"a gradient in {self.frame.label} varies over {sorted(varying(g))}, its input over "
                            f"{sorted(varying(x))}",
                            fix="this is a fault of a backward that mixes types: write the function with sp.psum and "
                            "sp.pcast, which have the right transposes",
                        )
                    )
        return result


def equal_sample(frame: Frame, axes: frozenset[str]) -> str:
    """The error text for a sample from an invariant key where devices should differ."""
    axis = sorted(axes)[0]
    return message(
        f"{frame.label}: a sample from an invariant key is the same on every device of {', '.join(sorted(axes))}",
        fix=f'for other numbers on each device draw with sp.random.fold_in(key, sp.axis_index("{axis}")), for this '
        f'device\'s block of one global draw with spec=; sp.pcast(sample, "{axis}", to="varying") if that is meant',
    )


def _has_no_value(x: torch.Tensor) -> bool:
    """Whether an index may differ between devices; while tracing, the trace sees to it."""
    return stamp_of(x) is not None and not _compat.is_traced(x)


def _writes(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("__setitem__", "set_"):
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__", "__init__")
    return name.endswith("_") and not name.endswith("__")


_EXEMPT: frozenset[Any] = frozenset(
    [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.__repr__, torch.Tensor.__len__]
    + [torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__hash__]
)
