"""Meshes: named axes over numbered devices, row-major; and the one context variable, with the default mesh."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

from .errors import SpecError, SpmdError, message

BACKENDS = ("local", "fake", "gloo", "nccl")


class Mesh:
    """A grid of devices with a name for each axis. Equal meshes are one object; make one with `make_mesh`.

    >>> mesh = make_mesh((2, 4), ("dp", "tp"))
    >>> mesh, mesh.size, mesh.coordinates(6)
    (Mesh(dp=2, tp=4), 8, (1, 2))
    >>> mesh is make_mesh([2, 4], ["dp", "tp"])
    True
    """

    __slots__ = ("__weakref__", "axis_names", "backend", "shape", "size")
    _interned: ClassVar[dict[tuple[Any, ...], Mesh]] = {}

    axis_names: tuple[str, ...]
    """The axes, major first."""
    shape: Mapping[str, int]
    """Axis to size, in the order of `axis_names`; read-only."""
    size: int
    """The number of devices."""
    backend: str
    """`"local"`: virtual devices in this process. `"fake"`: shapes and costs only, no data."""

    def __new__(cls, axis_names: tuple[str, ...], sizes: tuple[int, ...], backend: str) -> Self:
        key = (axis_names, sizes, backend)
        found = cls._interned.get(key)
        if found is not None:
            return cast(Self, found)
        mesh = super().__new__(cls)
        values = {
            "axis_names": axis_names,
            "shape": MappingProxyType(dict(zip(axis_names, sizes, strict=True))),
            "size": math.prod(sizes),
            "backend": backend,
        }
        for name, value in values.items():
            object.__setattr__(mesh, name, value)
        # setdefault is atomic: two threads that race still get one object
        return cast(Self, cls._interned.setdefault(key, mesh))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable; make another with make_mesh")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self!r} is immutable; make another with make_mesh")

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.axis_names, tuple(self.shape.values()), self.backend)

    def __repr__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.shape.items()]
        if self.backend != "local":
            parts.append(f"backend={self.backend!r}")
        return f"Mesh({', '.join(parts)})"

    @property
    def devices(self) -> Sequence[int]:
        """The device numbers, row-major by coordinate: a range, so that a simulated world costs nothing."""
        return range(self.size)

    def coordinates(self, index: int) -> tuple[int, ...]:
        """The coordinates of a device number, one for each axis; SpecError if there is no such device.

        >>> make_mesh((2, 4), ("dp", "tp")).coordinates(5)
        (1, 1)
        """
        if not 0 <= index < self.size:
            raise SpecError(message(f"no device {index}", f"mesh: {self!r}", fix=f"use 0 to {self.size - 1}"))
        found = []
        for size in reversed(tuple(self.shape.values())):
            index, coordinate = divmod(index, size)
            found.append(coordinate)
        return tuple(reversed(found))

    def index(self, coordinates: Sequence[int]) -> int:
        """The device number at the coordinates, one for each axis; SpecError if there is no such device.

        >>> make_mesh((2, 4), ("dp", "tp")).index((1, 1))
        5
        """
        sizes = tuple(self.shape.values())
        if len(coordinates) != len(sizes) or not all(0 <= c < n for c, n in zip(coordinates, sizes, strict=False)):
            raise SpecError(
                message(
                    f"no device at coordinates {tuple(coordinates)}",
                    f"mesh: {self!r}",
                    fix=f"give one coordinate for each axis, each below its size {sizes}",
                )
            )
        index = 0
        for coordinate, size in zip(coordinates, sizes, strict=True):
            index = index * size + coordinate
        return index

    def axis_size(self, axis: str | tuple[str, ...]) -> int:
        """The size of an axis, or the product for a tuple of axes; SpecError if the mesh lacks one.

        >>> mesh = make_mesh((2, 4), ("dp", "tp"))
        >>> mesh.axis_size("tp"), mesh.axis_size(("dp", "tp")), mesh.axis_size(())
        (4, 8, 1)
        """
        size = 1
        for name in (axis,) if isinstance(axis, str) else axis:
            if name not in self.shape:
                raise SpecError(unknown_axis(name, self))
            size *= self.shape[name]
        return size


def make_mesh(
    axis_shapes: Iterable[int],
    axis_names: Iterable[str],
    *,
    backend: str | None = None,
    device_mesh: object = None,
    timeout: timedelta | None = None,
    check: bool | None = None,
) -> Mesh:
    """Make a mesh: a size and a name for each axis, major first.

    `backend` is `"local"` (virtual devices in this process, the default) or `"fake"` (no data). `device_mesh`,
    `timeout` and `check` belong to process groups, which this version lacks: a `device_mesh` is refused, the other two
    change nothing. Raises SpecError for sizes and names that do not fit, SpmdError for a backend not available yet.

    >>> make_mesh((2, 4), ("dp", "tp")).shape["tp"]
    4
    >>> make_mesh((128, 128), ("dp", "tp"), backend="fake")
    Mesh(dp=128, tp=128, backend='fake')
    """
    names = _checked_names(axis_names)
    sizes = _checked_sizes(axis_shapes)
    if len(sizes) != len(names):
        raise SpecError(
            message(
                f"make_mesh: {len(sizes)} axis_shapes for {len(names)} axis_names",
                f"axis_shapes: {sizes}",
                f"axis_names: {names}",
                fix="give one size for each name, e.g. make_mesh((2, 4), ('dp', 'tp'))",
            )
        )
    return Mesh(names, sizes, _checked_backend(backend, device_mesh))


def _as_tuple(value: object, argument: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        example = "make_mesh((8,), ('dp',))"
        raise SpecError(message(f"make_mesh: {argument} is {value!r}, not a tuple", fix=f"write one, as in {example}"))
    return tuple(value)


def _checked_names(axis_names: Iterable[str]) -> tuple[str, ...]:
    names = _as_tuple(axis_names, "axis_names")
    for name in names:
        # `_` is the anonymous name of a pattern, so no axis may have it
        if not isinstance(name, str) or not name.isidentifier() or name == "_":
            raise SpecError(
                message(
                    f"make_mesh: axis name {name!r} is not an identifier",
                    f"axis_names: {names}",
                    fix="use letters, digits and underscores, e.g. 'dp'",
                )
            )
        if names.count(name) > 1:
            raise SpecError(
                message(f"make_mesh: axis name {name!r} is repeated", f"axis_names: {names}", fix="name each axis once")
            )
    return names


def _checked_sizes(axis_shapes: Iterable[int]) -> tuple[int, ...]:
    sizes = _as_tuple(axis_shapes, "axis_shapes")
    try:
        numbers = tuple(operator.index(size) for size in sizes)
    except TypeError:
        numbers = ()
    if len(numbers) != len(sizes) or any(n < 1 for n in numbers) or any(isinstance(size, bool) for size in sizes):
        raise SpecError(
            message(
                f"make_mesh: axis_shapes {sizes} are not all positive ints",
                fix="give the number of devices along each axis; 1 is allowed",
            )
        )
    return numbers


def _checked_backend(backend: str | None, device_mesh: object) -> str:
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if backend is not None and backend not in BACKENDS:
        raise SpecError(
            message(f"make_mesh: unknown backend {backend!r}", fix=f"use one of {', '.join(map(repr, BACKENDS))}")
        )
    if backend in ("gloo", "nccl"):
        asked = f"backend {backend!r}"
    elif device_mesh is not None:
        asked = "device_mesh"
    elif backend is None and launched:
        asked = "the default backend under torchrun"
    else:
        return backend or "local"
    raise SpmdError(
        message(
            f"make_mesh: {asked} needs process groups, which are not available yet in this version",
            fix="pass backend='local' for virtual devices in this process, or backend='fake' for shapes and costs only",
        )
    )


def unknown_axis(axis: object, mesh: Mesh) -> str:
    """The error text for an axis that the mesh lacks: it lists the mesh's axes and guesses which was meant.

    >>> print(unknown_axis("ddp", make_mesh((2, 4), ("dp", "tp"))))
    unknown axis 'ddp'
      the mesh's axes: dp=2, tp=4
      fix: use one of them; 'dp' is close
    """
    close = difflib.get_close_matches(str(axis), mesh.axis_names, n=1, cutoff=0.5)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    hint = f"; {close[0]!r} is close" if close else ", or add the axis in make_mesh"
    return message(f"unknown axis {axis!r}", f"the mesh's axes: {axes or 'none'}", fix=f"use one of them{hint}")


_current: ContextVar[tuple[Mesh | None, bool]] = ContextVar("spmdfn", default=(None, False))


@contextmanager
def ambient(mesh: Mesh | None, op_by_op: bool) -> Iterator[None]:
    """What the calls inside a `with` block find: the default mesh, and whether `spmd_jit` runs op by op."""
    token = _current.set((mesh, op_by_op))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def set_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make `mesh` the default inside a `with` block; blocks nest, and a new thread starts without a default.

    Raises SpecError if `mesh` is no Mesh.

    >>> with set_mesh(make_mesh((4,), ("x",))):
    ...     current_mesh()
    Mesh(x=4)
    >>> current_mesh() is None
    True
    """
    with ambient(_checked_mesh(mesh, "set_mesh"), op_by_op()):
        yield mesh


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `set_mesh` block; None outside."""
    return _current.get()[0]


def op_by_op() -> bool:
    """Whether the caller is inside a `disable_jit` block."""
    return _current.get()[1]


def resolve_mesh(mesh: Mesh | None) -> Mesh:
    """The given mesh, else the current one; SpecError if there is neither.

    >>> resolve_mesh(make_mesh((4,), ("x",)))
    Mesh(x=4)
    """
    if mesh is not None:
        return _checked_mesh(mesh, "mesh")
    found = current_mesh()
    if found is None:
        raise SpecError(message("no mesh", fix="pass mesh=, or call inside `with sp.set_mesh(mesh):`"))
    return found


def _checked_mesh(mesh: object, where: str) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise SpecError(
            message(
                f"{where}: {mesh!r} is a {type(mesh).__name__}, not a Mesh",
                fix="make one, e.g. sp.make_mesh((2, 4), ('dp', 'tp'))",
            )
        )
    return mesh
