"""`shard_map`: the device view. The body sees its own block and calls collectives by axis name.

Outside `spmd_jit` it runs eagerly, op by op, on all devices of this process in lock-step; inside, it is traced with the
rest. In both, types say which values devices share, and gradients follow from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._compat import innermost, tracing
from .array import Array
from .block import memories, mutated
from .blocks import global_shape
from .border import enter, leave
from .casts import Casts, equal_sample
from .crossing import Crossing, borrow, cast, is_plain
from .device_types import NONE, Frame, Refused, current_frame, running, stamp_of, varying
from .errors import CollectiveError, SpecError, SpmdError, VaryingError, message
from .lowering import named
from .mesh import Mesh, resolve_mesh, set_mesh, unknown_axis
from .partition.lines import quoted, raising_line
from .signature import Signature
from .spec import P, Resolved, Spec
from .tree import broadcast_specs, flatten, leaf_paths, unflatten


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: set[str] | None = None,
    check_vma: bool = True,
) -> Any:
    """Run a function on every device's own block. Also a decorator.

    mesh        None: that of the map around it, else of the Array arguments, else of `sp.set_mesh`
    in_specs    specs as a pytree prefix of the positional arguments, or a dict by parameter name; blocks must divide.
                A None leaf passes a static argument through (in `spmd_jit` it means "its own layout")
    out_specs   specs as a pytree prefix of the result. An axis concatenates blocks along a dim (tiles an invariant
                value); an axis that is absent promises that all its devices hold the same value, which is proved or
                refused
    axis_names  the manual axes; the others stay in the global view (inside `spmd_jit` only). None: all that are free
    check_vma   False switches types off: psum is its own transpose, and nothing is proved

    Plain tensors and Arrays are taken, tensors of the result are Arrays. Raises SpecError, VaryingError,
    CollectiveError.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("dp",))
    >>> @sp.shard_map(mesh=mesh, in_specs=(sp.P(), "(dp b) d"), out_specs=(sp.P(), sp.P()))
    ... def step(w, x):
    ...     loss = lambda w: sp.pmean(((x @ w) ** 2).mean(), "dp")
    ...     return torch.func.grad_and_value(loss)(w)
    >>> gradient, loss = step(torch.ones(3), torch.ones(8, 3))
    >>> gradient.unshard(), float(loss)
    (tensor([6., 6., 6.]), 9.0)
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=check_vma
        )
    if not callable(f):
        raise SpecError(
            message(f"shard_map: {f!r} is a {type(f).__name__}, not a function", fix="sp.shard_map(f, mesh=..., ...)")
        )
    signature = Signature(f)

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return _Run(signature, mesh, in_specs, out_specs, axis_names, check_vma)(args, kwargs)

    return mapped


class _Run:
    """One call of a mapped function."""

    def __init__(
        self,
        signature: Signature,
        mesh: Mesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: set[str] | None,
        checked: bool,
    ):
        self.signature, self.in_specs, self.out_specs, self.checked = signature, in_specs, out_specs, checked
        self.label = signature.label
        self.outer = current_frame()
        self.given_mesh, self.given_axes = mesh, axis_names

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, treedef = self.signature.flatten(args, kwargs)
        given = self.signature.specs(treedef, self.in_specs)
        self.mesh = self._mesh([(want.name, leaf) for want, leaf in zip(given, leaves, strict=True)])
        self.manual = self._axes()
        self.crossing = Crossing(self.mesh, self.manual, self.outer, self.checked, self.label)
        frame = self.crossing.frame()
        bindings: dict[str, int] = {}
        inside, versions = list(leaves), []
        for place, (leaf, want) in enumerate(zip(leaves, given, strict=True)):
            if want.spec is None or not isinstance(leaf, torch.Tensor):
                continue
            names = bindings if want.shares_names else None
            resolved = self.crossing.resolve(want.spec, leaf.shape, names, f"argument: {want.name}")
            inside[place] = enter(leaf, self.crossing.border(resolved, plain=is_plain(leaf)))
            versions.append((want.name, inside[place], inside[place]._version))
            borrow(frame, inside[place], f"the argument {want.name}")
        with set_mesh(self.mesh), running(frame), Casts(frame, cast):
            try:
                result = self.signature.call(treedef, inside)
            except Refused as refused:
                raise self._told(refused.args[0], refused.__traceback__) from None
            except (VaryingError, CollectiveError) as error:
                raise self._told(error, error.__traceback__) from None
        for name, block, version in versions:  # in a trace a write is seen at the end only
            if block._version != version:
                raise VaryingError(mutated(self.label, f"the argument {name}"))
        return self._leave(frame, result)

    def _told(self, error: SpmdError, traceback: Any) -> SpmdError:
        """The error of a body, with the line that it comes from."""
        line = raising_line(traceback)
        if line is not None and "\n  where: " not in str(error):
            error = named(error, f"where: {quoted(line)}")
        return error.with_traceback(traceback)

    def _mesh(self, leaves: Sequence[tuple[str, Any]]) -> Mesh:
        arrays = [(name, x) for name, leaf in leaves if isinstance(x := innermost(leaf), Array)]
        mesh = self.given_mesh
        if mesh is None and self.outer is not None:
            mesh = self.outer.mesh
        if mesh is None and arrays:
            mesh = arrays[0][1].mesh
        mesh = resolve_mesh(mesh)
        others = [(f"the argument {name} is", array.mesh) for name, array in arrays]
        others += [(f"the map {self.outer.label} around it is", self.outer.mesh)] if self.outer is not None else []
        for what, other in others:
            if other is not mesh:
                raise SpecError(
                    message(
                        f"{self.label}: {what} on {other!r}",
                        f"the map is on {mesh!r}",
                        fix="use one mesh: sp.shard(x, spec, mesh=mesh) moves an Array",
                    )
                )
        return mesh

    def _axes(self) -> tuple[str, ...]:
        taken = self.outer.manual if self.outer is not None else NONE
        named = self.given_axes
        axes = tuple(a for a in self.mesh.axis_names if a not in taken) if named is None else tuple(named)
        for axis in axes:
            if axis not in self.mesh.shape:
                raise SpecError(f"{self.label}: axis_names: {unknown_axis(axis, self.mesh)}")
            if axis in taken:
                raise SpecError(
                    message(
                        f"{self.label}: the axis {axis!r} is manual in the map around it already",
                        f"axes that are free: {', '.join(a for a in self.mesh.axis_names if a not in taken) or 'none'}",
                        fix="nested maps take disjoint axes: name others in axis_names=",
                    )
                )
        if not axes and taken:
            raise SpecError(
                message(
                    f"{self.label}: all axes are manual in the map around it already: {', '.join(sorted(taken))}",
                    fix="name the axes of the outer map in its axis_names=, and leave others to this one",
                )
            )
        if not tracing() and set(axes) | taken != set(self.mesh.axis_names):
            left = [axis for axis in self.mesh.axis_names if axis not in axes and axis not in taken]
            raise CollectiveError(
                message(
                    f"{self.label}: a map over some of the mesh's axes runs inside spmd_jit only",
                    f"left to the global view: {', '.join(left)}",
                    fix="call it in a function under sp.spmd_jit, or leave out axis_names=",
                )
            )
        return axes

    # results

    def _leave(self, frame: Frame, result: Any) -> Any:
        leaves, treedef = flatten(result)
        given = broadcast_specs(self.out_specs, result, name=f"{self.label}: out_specs")
        faults: list[str] = []
        outside = []
        with running(frame):
            for leaf, spec, path in zip(leaves, given, leaf_paths(treedef), strict=True):
                if spec is None and not isinstance(leaf, torch.Tensor):
                    outside.append(leaf)
                    continue
                where = f"result{path}"
                value = self._value(leaf)
                resolved = self._out(spec, value, where)
                named = {axis for axes in resolved.entries for axis in axes}
                faults += self._unproved(frame, value, named, where)
                if not faults:
                    outside.append((value, resolved, named))
        if faults:
            raise VaryingError("\n".join(faults))
        return unflatten(treedef, [self._out_of(frame, x) if isinstance(x, tuple) else x for x in outside])

    def _value(self, leaf: Any) -> torch.Tensor:
        value = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
        if stamp_of(value) is None:
            value = self.crossing.close_over(value)
        return value

    def _out(self, spec: Spec, value: torch.Tensor, where: str) -> Resolved:
        """An out spec over the shape of the global result."""
        if isinstance(spec, P):
            entries = spec.entries
            if not value.ndim and entries:
                raise SpecError(
                    message(
                        f"{self.label}: {where} is a scalar, its spec {spec!r} has {len(entries)} entries",
                        fix="return x[None] to concatenate the devices' scalars, or use P() for an equal one",
                    )
                )
            known = [tuple(axis for axis in axes if axis in self.mesh.shape) for axes in _pad(entries, value.ndim)]
            sizes = [self.mesh.axis_size(axes) if axes else 1 for axes in known]
            shape = [n * size for n, size in zip(value.shape, sizes, strict=False)]
            return self.crossing.resolve(spec, shape, None, where)
        if spec is None:
            return self.crossing.resolve(P(), value.shape, None, where)
        return self.crossing.resolve(spec, global_shape(tuple(value.shape), spec, self.mesh), None, where)

    def _unproved(self, frame: Frame, value: torch.Tensor, named: set[str], where: str) -> list[str]:
        if not frame.checked:
            return []
        found = stamp_of(value)
        assert found is not None
        taken = self.outer.manual if self.outer is not None else NONE
        extra = sorted(found.varying - named - taken)
        if extra:
            axis = repr(extra[0])
            return [
                message(
                    f"{self.label}: {where} varies over {', '.join(extra)}, which its out spec does not name",
                    f"value: shape {tuple(value.shape)}, mesh: {self.mesh!r}",
                    "an absent axis promises that all its devices hold the same value",
                    fix=f"name {axis} in the out spec to concatenate, or make it equal: sp.psum(x, {axis}), "
                    f"sp.pmean(x, {axis})",
                )
            ]
        missing = frozenset(named - found.varying)
        if found.sample and missing:
            return [equal_sample(frame, missing)]
        return []

    def _out_of(self, frame: Frame, item: tuple[torch.Tensor, Resolved, set[str]]) -> torch.Tensor:
        value, resolved, named = item
        missing = frozenset(named - varying(value))
        if missing and self.checked:
            value = cast(value, missing)
        if not tracing():  # results share no memory with an argument, nor with each other
            block = innermost(value)
            if any(memory in frame.borrowed for memory in memories(block)):
                value = value.clone()
            borrow(frame, value, "another result")
        return leave(value, self.crossing.border(resolved, plain=False))


def _pad(entries: Sequence[Any], rank: int) -> list[Any]:
    return [*entries, *([()] * (rank - len(entries)))]
