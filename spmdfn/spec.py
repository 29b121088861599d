"""Specs: `P` and patterns say how a tensor is laid out; `resolve` turns either into axes for each dim."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self, cast

from .errors import SpecError, message
from .mesh import Mesh, unknown_axis
from .pattern import fit, repeated_axis, undivided

Entry = str | tuple[str, ...] | None


class P:
    """How a tensor is split: for each dim None (whole), an axis, or a tuple of axes, major first.

    Dims beyond the entries are whole. `unreduced` names the axes over which the value is a pending sum. Equal specs are
    one object, immutable and hashable; a spec is neither a tuple nor a pytree node. Raises SpecError for an entry that
    is no axis and for an axis used twice.

    >>> P("dp", None, ("tp", "sp"))
    P('dp', None, ('tp', 'sp'))
    >>> P("dp", ()) is P(("dp",), None)
    True
    >>> P(unreduced={"tp"}).unreduced
    frozenset({'tp'})
    """

    __slots__ = ("__weakref__", "entries", "unreduced")
    _interned: ClassVar[dict[tuple[Any, ...], P]] = {}

    entries: tuple[tuple[str, ...], ...]
    """The axes of each dim, major first; () is whole."""
    unreduced: frozenset[str]
    """The axes over which the value is a pending sum."""

    def __new__(cls, *entries: Entry, unreduced: Iterable[str] = ()) -> Self:
        split = tuple(_axes_of(entry, entries) for entry in entries)
        # a lone string is one axis, not its letters
        alone = isinstance(unreduced, str) or not isinstance(unreduced, Iterable)
        pending = frozenset(_axes_of((unreduced,) if alone else tuple(unreduced), entries))
        used = [axis for axes in split for axis in axes]
        for axis in used:
            if used.count(axis) > 1:
                raise with_context(SpecError(repeated_axis(axis)), f"spec: {_text(entries)}")
            if axis in pending:
                raise SpecError(
                    message(
                        f"axis {axis!r} both splits a dim and is unreduced",
                        f"spec: {_text(entries, pending)}",
                        fix="an axis does one of the two: drop it from the entries or from unreduced",
                    )
                )
        found = cls._interned.get((split, pending))
        if found is not None:
            return cast(Self, found)
        spec = super().__new__(cls)
        object.__setattr__(spec, "entries", split)
        object.__setattr__(spec, "unreduced", pending)
        # setdefault is atomic: two threads that race still get one object
        return cast(Self, cls._interned.setdefault((split, pending), spec))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable; write another P")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self!r} is immutable; write another P")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.entries, tuple(sorted(self.unreduced)))

    def __repr__(self) -> str:
        short = [axes[0] if len(axes) == 1 else axes or None for axes in self.entries]
        return _text(short, self.unreduced)


Spec = P | str | None
"""What is taken wherever a layout is said: a P, a pattern, or None."""


class Resolved(NamedTuple):
    """A spec that fits a shape: the axes of every dim, and the axes over which the value is a pending sum."""

    entries: tuple[tuple[str, ...], ...]
    unreduced: frozenset[str]


def _rebuild(entries: tuple[tuple[str, ...], ...], unreduced: tuple[str, ...]) -> P:
    return P(*entries, unreduced=unreduced)


def _text(entries: Iterable[object], unreduced: Iterable[str] = ()) -> str:
    parts = [repr(entry) for entry in entries]
    if unreduced:
        parts.append(f"unreduced={{{', '.join(map(repr, sorted(unreduced)))}}}")
    return f"P({', '.join(parts)})"


def _axes_of(entry: object, entries: Sequence[object]) -> tuple[str, ...]:
    if entry is None:
        return ()
    axes = entry if isinstance(entry, tuple) else (entry,)
    for axis in axes:
        if isinstance(axis, str) and axis.isidentifier():
            continue
        if isinstance(axis, str):
            what, fix = "is not an axis name", "a pattern is given as a plain string, without P"
        else:
            what, fix = f"is a {type(axis).__name__}", "use None, an axis or a tuple of axes: P('dp', ('tp', 'sp'))"
        raise SpecError(message(f"the entry {axis!r} {what}", f"spec: {_text(entries)}", fix=fix))
    return axes


def resolve(spec: Spec, shape: Sequence[int], mesh: Mesh, *, bindings: dict[str, int] | None = None) -> Resolved:
    """The axes of every dim of a tensor of that shape.

    `spec` is a P, a pattern or None (all whole). `bindings` holds the sizes of a pattern's free names; share one dict
    across the arguments of a call and a name means one size there. Raises SpecError if the spec does not fit.

    >>> from spmdfn.mesh import make_mesh
    >>> mesh = make_mesh((2, 4), ("dp", "tp"))
    >>> resolve("(dp b) t", (8, 3), mesh).entries
    (('dp',), ())
    >>> resolve(P(None, ("dp", "tp")), (3, 8, 5), mesh).entries
    ((), ('dp', 'tp'), ())
    """
    if spec is not None and not isinstance(spec, P | str):
        raise SpecError(wrong_type(spec))
    shape = tuple(map(int, shape))
    try:
        resolved, bound = _resolve(spec, shape, mesh)
        _bind(bound, {} if bindings is None else bindings)
    except SpecError as error:
        kind = "pattern" if isinstance(spec, str) else "spec"
        quoted = f'"{spec}"' if isinstance(spec, str) else repr(spec)
        raise with_context(error, f"{kind}: {quoted}", f"shape: {shape}", f"mesh: {mesh!r}") from None
    return resolved


def wrong_type(spec: object) -> str:
    """The error text for something that is no spec."""
    return message(
        f"{spec!r} is a {type(spec).__name__}, not a spec",
        fix='give a P, a pattern such as "(dp b) t", or None',
    )


@lru_cache(maxsize=16384)
def _resolve(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> tuple[Resolved, tuple[tuple[str, int], ...]]:
    if spec is None:
        return Resolved(((),) * len(shape), frozenset()), ()
    if isinstance(spec, str):
        entries, bound = fit(spec, shape, mesh)
        return Resolved(entries, frozenset()), bound
    for axis in (*(axis for axes in spec.entries for axis in axes), *sorted(spec.unreduced)):
        if axis not in mesh.shape:
            raise SpecError(unknown_axis(axis, mesh))
    if len(spec.entries) > len(shape):
        raise SpecError(
            message(
                f"the spec is longer than the rank: {len(spec.entries)} entries for the shape {shape}",
                fix=f"give at most {len(shape)}; a dim without an entry is whole, a scalar's spec is P()",
            )
        )
    for dim, axes in enumerate(spec.entries):
        if shape[dim] % mesh.axis_size(axes):
            raise SpecError(undivided(dim, shape[dim], axes, mesh))
    return Resolved(spec.entries + ((),) * (len(shape) - len(spec.entries)), spec.unreduced), ()


def _bind(bound: tuple[tuple[str, int], ...], bindings: dict[str, int]) -> None:
    for name, size in bound:
        known = bindings.setdefault(name, size)
        if known != size:
            raise SpecError(
                message(
                    f"the name {name!r} binds two sizes: {known} and {size}",
                    fix='give the dims different names, or "_" for one that is not compared',
                )
            )


def with_context(error: SpecError, *details: str) -> SpecError:
    """The same error with more details, put before its fix: callers add the argument and the tree path.

    >>> print(with_context(SpecError(message("unknown axis 'x'", fix="use 'dp'")), "argument: params['w']"))
    unknown axis 'x'
      argument: params['w']
      fix: use 'dp'
    """
    lines = str(error).split("\n")
    fix = next((i for i, line in enumerate(lines) if line.startswith("  fix: ")), len(lines))
    lines[fix:fix] = [f"  {detail}" for detail in details]
    return SpecError("\n".join(lines))


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def dtype_name(dtype: str) -> str:
    """The short name of a dtype, given as its string.

    >>> dtype_name("torch.bfloat16"), dtype_name("torch.int64"), dtype_name("torch.bool")
    ('bf16', 'i64', 'bool')
    """
    name = dtype.removeprefix("torch.")
    found = re.fullmatch(r"(b?float|u?int|complex)(\d.*)", name)
    return _SHORT[found[1]] + found[2] if found else name


def describe(entries: Sequence[Sequence[str]], shape: Sequence[int], dtype: str, unreduced: Iterable[str] = ()) -> str:
    """A tensor's dtype, shape and layout in one line.

    >>> describe((("dp",), ("tp", "sp")), (64, 128, 3), "f32")
    'f32[64@dp, 128@(tp,sp), 3]'
    >>> describe((), (3,), "torch.float32", unreduced={"dp"})
    'f32[3]{+dp}'
    """
    dims = []
    for dim, size in enumerate(shape):
        axes = entries[dim] if dim < len(entries) else ()
        joined = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
        dims.append(f"{size}@{joined}" if axes else str(size))
    pending = f"{{+{','.join(sorted(unreduced))}}}" if unreduced else ""
    return f"{dtype_name(dtype)}[{', '.join(dims)}]{pending}"
