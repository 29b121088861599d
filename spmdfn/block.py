"""`Block`: in an eager map, one value on all devices of this process at once, each device with its own block.

Every op runs on the blocks in turn, in one thread, so a body runs in lock-step and deterministically.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import collectives as c
from ._compat import below_dispatch, make_wrapper, no_function_modes, no_functorch, storage_id
from .backends.meet import groups_over, meet
from .device_types import Stamp, current_frame, refuse_write, result_stamp, tensors_in, typed
from .errors import VaryingError, message
from .mesh import Mesh
from .partition.guards import profile, refuse_draw, written
from .partition.lines import user_line

aten = torch.ops.aten


class Block(torch.Tensor):
    """A tensor of the shape of one device's block; `blocks` has every device's, row-major by mesh coordinate."""

    blocks: list[torch.Tensor]
    mesh: Mesh
    _spmd_stamp: Stamp
    _device: torch.device

    @staticmethod
    def __new__(cls, blocks: Sequence[torch.Tensor], mesh: Mesh, stamp: Stamp) -> Block:
        first = blocks[0]
        with no_functorch(), no_function_modes():
            like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            if offset := first.storage_offset():  # autograd finds by it what a write to a view has written to
                like = like.new_empty(offset + like.untyped_storage().nbytes() // like.itemsize)
                like = like.as_strided(first.shape, first.stride(), offset)
            block = make_wrapper(cls, like, first.device)
        block.blocks, block.mesh, block._spmd_stamp, block._device = list(blocks), mesh, stamp, first.device
        return block

    def __init__(self, blocks: Sequence[torch.Tensor], mesh: Mesh, stamp: Stamp):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with no_function_modes():
            return cls._dispatch(func, args, kwargs or {})

    @classmethod
    def _dispatch(cls, func: Any, args: Any, kwargs: Any) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if func in c.COLLECTIVES:
            return _collective(func, args)
        if func is aten._to_copy.default and kwargs.get("device") is not None and _is_meta(kwargs["device"]):
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
        facts = profile(func)
        if facts.draws:
            refuse_draw(func, args, kwargs, user_line(sys._getframe()) or "", "a function on many devices")
        if facts.writes and (targets := list(written(func, args, kwargs))):
            return _in_place(func, targets, args, kwargs)
        mesh = mesh_of(args, kwargs)
        results = [func(*pick(args, i), **pick(kwargs, i)) for i in range(mesh.size)]
        return wrap(results, mesh, result_stamp(func, args, kwargs) or Stamp(frozenset()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        lines = [typed(self)]
        for place, block in enumerate(self.blocks):
            at = ", ".join(
                f"{axis}={i}" for axis, i in zip(self.mesh.axis_names, self.mesh.coordinates(place), strict=True)
            )
            lines.append(f"  {at}: {str(block).replace(chr(10), chr(10) + '  ')}")
        return "\n".join(lines)

    def tolist(self) -> Any:
        """The value as nested lists of numbers, where all devices have the same."""
        return _agreed(self, [block.tolist() for block in self.blocks])

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a numpy array, where all devices have the same."""
        self.tolist()
        return self.blocks[0].detach().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how and not self.shape else format(repr(self), how)


def mesh_of(*structures: Any) -> Mesh:
    return next(x.mesh for x in tensors_in(list(structures)) if isinstance(x, Block))


def pick(structure: Any, device: int) -> Any:
    """The arguments of one device."""
    if isinstance(structure, Block):
        return structure.blocks[device]
    if isinstance(structure, (list, tuple)):
        return type(structure)(pick(item, device) for item in structure)
    if isinstance(structure, dict):
        return {key: pick(item, device) for key, item in structure.items()}
    return structure


def wrap(results: Sequence[Any], mesh: Mesh, stamp: Stamp) -> Any:
    """One result of every device as one value."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if any(result.shape != first.shape for result in results):
            raise VaryingError(
                message(
                    "the shape of a result depends on data, and differs between devices",
                    f"shapes: {[tuple(result.shape) for result in results]}",
                    fix="keep the shape: torch.where(mask, x, fill), or torch.topk or sort for a fixed number",
                )
            )
        return Block(results, mesh, stamp)
    if isinstance(first, (list, tuple)):
        return type(first)(wrap(items, mesh, stamp) for items in zip(*results, strict=True))
    return first


def _is_meta(device: Any) -> bool:
    return torch.device(device).type == "meta"


def _collective(func: Any, args: Any) -> Block:
    count = next(i for i, argument in enumerate(args) if not isinstance(argument, torch.Tensor))
    mesh = mesh_of(args)
    picked = [pick(args[:count], device) for device in range(mesh.size)]
    values = [items[0] if count == 1 else items for items in picked]
    rest = list(args[count + 1 :])
    if func is c.all_gather:
        rest = rest[:3]  # whether devices are equal is a matter of types
    if rest and rest[-1] == []:
        rest.pop()
    results = meet(func, values, args[count], rest, mesh)
    seen = {memory for x in args[:count] for memory in memories(x)}
    for device, result in enumerate(results):  # a write to one block must not be seen in another, nor in the operand
        memory = storage_id(result.untyped_storage())
        if memory in seen:
            results[device] = result = result.clone()
            memory = storage_id(result.untyped_storage())
        seen.add(memory)
    return Block(results, mesh, result_stamp(func, args, {}) or Stamp(frozenset()))


def _in_place(func: Any, targets: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Write to each device's block, unless that is another's memory or would make an invariant value vary."""
    frame = current_frame()
    read = result_stamp(func, [x for x in tensors_in((args, kwargs)) if not any(x is target for target in targets)], {})
    for target in targets:
        if not isinstance(target, Block):
            raise VaryingError(
                message(
                    f"{func} writes a value of a map into a tensor from outside it",
                    f"target: shape {tuple(target.shape)}",
                    fix="make the tensor inside the body, or pass it as an argument and return the new value",
                )
            )
        if frame is not None and frame.checked:
            refuse_write(func, target._spmd_stamp, read or Stamp(frozenset()), None)
        for memory in memories(target) if frame is not None else ():
            if memory in frame.borrowed:  # type: ignore[union-attr]
                raise VaryingError(mutated(frame.label, frame.borrowed[memory]))  # type: ignore[union-attr]
    mesh = mesh_of(args, kwargs)
    results = [func(*pick(args, i), **pick(kwargs, i)) for i in range(mesh.size)]
    if torch.Tag.inplace_view in func.tags:
        with below_dispatch():
            func(*args, **kwargs)
    if len(targets) == 1 and isinstance(results[0], torch.Tensor):
        return targets[0]
    if results[0] is None:
        return None
    return wrap(results, mesh, result_stamp(func, args, kwargs) or Stamp(frozenset()))


def mutated(label: str, name: str) -> str:
    """The error text for a write to an argument."""
    copy = name.removeprefix("the argument ")
    copy = copy if copy.isidentifier() else "x"
    fix = f"write to a copy, {copy} = {copy}.clone(), and return it"
    return message(f"{label}: {name} was written to", "inputs are never mutated", fix=fix)


def memories(block: Block) -> list[int]:
    """Which memory the blocks look at."""
    return [storage_id(x.untyped_storage()) for x in block.blocks]


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    return _agreed(args[0], [block.item() for block in args[0].blocks])


def _agreed(block: Block, values: list[Any]) -> Any:
    """The value that all devices have; a nan equals itself."""
    if any(value != values[0] and repr(value) != repr(values[0]) for value in values):
        shown = repr(values)
        raise VaryingError(
            message(
                "a Python value of a block that differs between devices",
                f"block: {typed(block)}",
                f"values: {shown if len(shown) < 400 else shown[:400] + '...'}",
                fix="reduce it first (sp.psum, sp.pmax), or choose by torch.where",
            )
        )
    return values[0]


def _pcast(func: Any, args: Any, kwargs: Any) -> Block:
    stamp = result_stamp(func, args, kwargs)
    assert stamp is not None
    return Block([block.view_as(block) for block in args[0].blocks], args[0].mesh, stamp)


def _own_slice(func: Any, args: Any, kwargs: Any) -> Block:
    x, axes, size, dim = args
    places = device_places(x.mesh, tuple(axes))
    blocks = [block.chunk(size, dim)[place].clone() for block, place in zip(x.blocks, places, strict=True)]
    stamp = result_stamp(func, args, kwargs)
    assert stamp is not None
    return Block(blocks, x.mesh, stamp)


def _keep_source(func: Any, args: Any, kwargs: Any) -> Block:
    x, axes, source = args
    places = device_places(x.mesh, tuple(axes))
    blocks = [b.clone() if place == source else torch.zeros_like(b) for b, place in zip(x.blocks, places, strict=True)]
    stamp = result_stamp(func, args, kwargs)
    assert stamp is not None
    return Block(blocks, x.mesh, stamp)


def device_places(mesh: Mesh, axes: tuple[str, ...]) -> list[int]:
    """Every device's index in its group over `axes`."""
    places = [0] * mesh.size
    for group in groups_over(mesh, axes):
        for place, device in enumerate(group):
            places[device] = place
    return places


_SPECIAL: dict[Any, Any] = {
    torch.ops.prim.device.default: lambda func, args, kwargs: args[0]._device,
    aten._local_scalar_dense.default: _item,
    c.pcast: _pcast,
    c.own_slice: _own_slice,
    c.keep_source: _keep_source,
}
