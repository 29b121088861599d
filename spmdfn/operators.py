"""Running one torch op on Arrays by its program, and what views of Arrays are.

The class comes as an argument (`cls`), for the Array stands above this room. A view that needs no communication shares
the memory of its blocks with what it looks at. Any other is a copy: made anew when the original has been written to
since, and refusing to be written to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._compat import no_functorch
from .aliases import memory
from .backends.base import Blocks
from .dispatch import Answer, Cache, OneOp, Operand, Place, build, filled, marked, mover, scan
from .errors import SpecError, message
from .layout import Layout, replicated
from .mesh import Mesh

PROGRAMS = Cache()


def run(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The op on these operands, by its program."""
    tensors: list[torch.Tensor] = []
    key = (func, scan(args, tensors), scan(kwargs, tensors) if kwargs else None)
    op = PROGRAMS.get(key)
    if op is None:
        op = PROGRAMS.put(key, built(cls, func, args, kwargs, tensors))
    if type(op) is Answer:
        return op.value
    inputs = inputs_of(cls, op, tensors)
    arrays = wrapped(cls, op, op.run(inputs))
    if op.is_view and isinstance(tensors[0], cls):
        for place, array in enumerate(arrays):
            _look((op, func, args, kwargs, place), array, tensors[0])
    return arrays[0] if type(op.results) is Place else filled(op.results, arrays)


def inputs_of(cls: Any, op: OneOp, tensors: Sequence[Any]) -> list[Blocks]:
    size = op.program.mesh.size
    return [tensor._current() if isinstance(tensor, cls) else [tensor] * size for tensor in tensors]


def wrapped(cls: Any, op: OneOp, results: Sequence[Blocks]) -> list[Any]:
    layouts = op.program.outputs
    return [
        cls._of(blocks, layout, like, strides)
        for blocks, layout, like, strides in zip(results, layouts, op.likes, op.strides, strict=True)
    ]


def built(cls: Any, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any], **options: Any) -> Any:
    mesh = _mesh_of(cls, func, tensors)
    operands = [_operand(cls, tensor, mesh) for tensor in tensors]
    places, named = marked((args, kwargs))
    return build(func, places, named, operands, mesh, **options)


def _operand(cls: Any, tensor: Any, mesh: Mesh) -> Operand:
    if isinstance(tensor, cls):
        layout, dtype, device = tensor._kind
        return Operand(layout, dtype, device, tensor._strides)
    return Operand(replicated(mesh, tensor.shape), tensor.dtype, tensor.device.type)


def _mesh_of(cls: Any, func: Any, tensors: Sequence[Any]) -> Mesh:
    arrays = [tensor for tensor in tensors if isinstance(tensor, cls)]
    for array in arrays:
        if array.mesh is not arrays[0].mesh:
            raise SpecError(
                message(
                    f"{func} of Arrays on two meshes",
                    f"{arrays[0]!r} is on {arrays[0].mesh!r}",
                    f"{array!r} is on {array.mesh!r}",
                    fix="move one of them first: sp.shard(x, spec, mesh=mesh)",
                )
            )
    return arrays[0].mesh


def on_whole(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An op that looks at values and makes no tensor: `item`, `equal`."""
    tensors: list[Any] = []
    scan((args, kwargs), tensors)
    values = [tensor.unshard() if isinstance(tensor, cls) else tensor for tensor in tensors]
    args, kwargs = filled(marked((args, kwargs)), values)
    return func(*args, **kwargs)


def moved(cls: Any, array: Any, layout: Layout) -> Any:
    """An Array in another layout of its mesh, with memory of its own."""
    op = mover(Operand(*array._kind), layout)
    with no_functorch():
        return wrapped(cls, op, op.run([array._current()]))[0]


# ---------------------------------------------------------------- views


Call = tuple[OneOp, Any, Any, Any, int]
"""A view's program, its op with the arguments, and which result it is."""


class Source:
    """What a view that is a copy was made from: it is made anew once that has been written to."""

    def __init__(self, call: Call, view: Any, array: Any):
        self.call, self.array, self.seen = call, array, array._writes[0]
        self.blocks, self.layout, self.writes = view._blocks, view._layout, view._writes

    def refresh(self) -> None:
        now = self.array._current()
        if self.array._writes[0] != self.seen:
            self.seen = self.array._writes[0]
            copy_blocks(self.blocks, self.call[0].run([now])[self.call[-1]])
            self.writes[0] += 1


def _look(call: Call, view: Any, array: Any) -> None:
    """Tie a view to what it looks at."""
    view._locked = array._locked
    pairs = zip(view._blocks, array._blocks, strict=True)
    if call[0].program.is_uniform and all(memory(a) == memory(b) for a, b in pairs):
        view._writes, view._source = array._writes, array._source
    else:
        view._blocks = [block.contiguous() if 0 in block.stride() else block for block in view._blocks]
        view._source = Source(call, view, array)


def copy_blocks(blocks: Blocks, new: Blocks) -> None:
    """Write new values into blocks; one that stands for several devices, once."""
    done = set()
    with torch.no_grad():
        for block, value in zip(blocks, new, strict=True):
            if id(block) not in done:
                done.add(id(block))
                block.copy_(value)
