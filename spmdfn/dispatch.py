"""One-op programs: what an operator on an Array runs. Each is partitioned once for the layouts of its operands, as a
traced function is, and replayed. Nothing here knows an Array: an operand is a layout, a dtype and strides.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from ._compat import FakeTensorMode, OpOverload, no_dispatch_modes, no_functorch, quiet_fakes
from .aliases import aliased, memory, unshared
from .backends.base import Backend, Blocks, backend_of
from .layout import Layout
from .mesh import Mesh
from .partition import guards, strided
from .partition.calls import paths_of
from .partition.engine import partition
from .partition.lines import user_line
from .partition.trace import Traced
from .program import Program

Strides = tuple[tuple[int, ...], int] | None
"""The strides and the storage offset of a tensor; None if it is contiguous from the start."""

MOST = 8192
"""So many one-op programs are kept; the oldest go first."""


class Operand(NamedTuple):
    """A tensor operand, as a program sees it."""

    layout: Layout
    dtype: torch.dtype
    device: str
    strides: Strides = None


class Place(NamedTuple):
    """Stands for tensor `index` in a structure of arguments or results."""

    index: int  # type: ignore[assignment]  # its place, not a lookup


@dataclass(frozen=True)
class OneOp:
    """A program of one op, ready to run over blocks.

    results   the op's result, with a `Place` for every tensor; what is no tensor is there as it is
    likes     a meta tensor with the metadata of every tensor result
    is_view   the op's results look at the memory of its first operand, in plain torch
    leaks     a result might look at an operand's memory although the op is no view
    """

    program: Program
    results: Any
    likes: tuple[torch.Tensor, ...]
    strides: tuple[Strides, ...]
    is_view: bool = False
    leaks: bool = False

    @cached_property
    def backend(self) -> Backend:
        return backend_of(self.program.mesh)

    def run(self, inputs: Sequence[Blocks]) -> list[Blocks]:
        """The results' blocks; those of no view share memory with an operand."""
        if not self.leaks:
            return self.backend.run(self.program, [list(blocks) for blocks in inputs])
        owned = {memory(block) for blocks in inputs for block in blocks}
        results = self.backend.run(self.program, [list(blocks) for blocks in inputs])
        return [unshared(blocks, owned) for blocks in results]


# ---------------------------------------------------------------- keys


def scan(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """What a program is chosen by, of an argument; its tensors are appended to `tensors`, in order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        kind = getattr(value, "_kind", None)
        return (value.shape, value.dtype, value.device.type) if kind is None else (kind, value._strides)  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return tuple([scan(item, tensors) for item in value])
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, (int, complex)):
        return type(value), repr(value) if isinstance(value, complex) else value
    if isinstance(value, dict):
        return tuple([(name, scan(item, tensors)) for name, item in value.items()])
    return value


def marked(args: Any) -> Any:
    """The arguments with a `Place` for every tensor, in the order of `scan`."""
    count = iter(range(1 << 30))
    return _map(lambda value: Place(next(count)) if isinstance(value, torch.Tensor) else value, args)


def filled(structure: Any, values: Sequence[Any]) -> Any:
    """The structure with values in the places of tensors."""
    return _map(lambda value: values[value.index] if isinstance(value, Place) else value, structure)


def _map(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, (list, tuple)) and not isinstance(structure, Place):
        return type(structure)([_map(function, item) for item in structure])
    if isinstance(structure, dict):
        return {name: _map(function, item) for name, item in structure.items()}
    return function(structure)


class Cache:
    """Programs by key, `MOST` of them."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        return self._found.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        if len(self._found) >= MOST:
            self._found.pop(next(iter(self._found)), None)
        self._found[key] = value
        return value


# ---------------------------------------------------------------- building


def build(
    func: Any,
    args: Any,
    kwargs: Any,
    operands: Sequence[Operand],
    mesh: Mesh,
    *,
    outputs: Callable[[int], Sequence[Layout | None]] | None = None,
    checks: Any = None,
) -> OneOp | Any:
    """Partition one call. `args` and `kwargs` have a `Place` for every tensor.

    outputs   gives the layouts of results, for their number
    checks    another overload that is called on the shapes first, for its errors: the one that writes in place

    Answers with the result itself where that holds no tensor (a question about shapes). Raises TracingError if the
    result's shape depends on data, and whatever the op itself raises for such shapes and dtypes.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    graph = fx.Graph()
    with no_functorch(), no_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        with fake, quiet_fakes():
            try:
                if checks is not None:
                    checks(*filled(args, stand_ins(operands)), **filled(kwargs, stand_ins(operands)))
                values = stand_ins(operands)
                result = func(*filled(args, values), **filled(kwargs, values))
            except Exception as error:
                clearer = guards.explained(error, user_line(sys._getframe()) or "", values_in(operands))
                raise (error if clearer is None else clearer) from None
        nodes = [_noted(graph.placeholder(f"x{i}"), value) for i, value in enumerate(values)]
        call = graph.call_function(func, filled(args, nodes), filled(kwargs, nodes))
        call = _without_strides(_noted(call, result), fake)
        returned = [_picked(call, path) for path in paths_of(result)]
        if not returned:
            return Answer(result)
        graph.output(returned)
        found = [node.meta["val"] for node in returned]
        layouts = [operand.layout for operand in operands]
        wanted = [None] * len(returned) if outputs is None else outputs(len(returned))
        program = Program(partition(Traced(graph, {}), mesh, layouts, layouts, wanted))
        strides = tuple(strides_of(value) for value in found)
        likes = tuple(like(tuple(v.shape), v.dtype, s) for v, s in zip(found, strides, strict=True))
    looks = is_view(func)
    return OneOp(
        program,
        marked(result),
        likes,
        strides,
        is_view=looks,
        leaks=not looks and bool(aliased(program.graph)),
    )


class Answer(NamedTuple):
    """The result of an op that returns no tensor."""

    value: Any


def stand_ins(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """Tensors of the operands' metadata, of the mode that is on."""
    return [_empty(operand.layout.shape, operand.dtype, operand.strides, operand.device) for operand in operands]


def values_in(operands: Sequence[Operand]) -> list[torch.Tensor]:
    """Meta tensors in the operands' places, to be described."""
    return [like(operand.layout.shape, operand.dtype, None) for operand in operands]


def _noted(node: fx.Node, value: Any) -> fx.Node:
    node.meta.update(val=value, where="", backward=False)
    return node


def _picked(node: fx.Node, path: Sequence[int]) -> fx.Node:
    for index in path:
        value = node.meta["val"][index]
        node = _noted(node.graph.call_function(operator.getitem, (node, index)), value)
    return node


def _without_strides(call: fx.Node, fake: FakeTensorMode) -> fx.Node:
    """Strides speak of memory, which blocks have of their own: say it by views."""
    if call.target not in (strided.READ, strided.WRITE):
        return call

    def emit(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with fake:
            return _noted(call.graph.call_function(op, args, kwargs), op(*values, **named))

    return strided.without_strides(call, emit)


def is_view(func: Any) -> bool:
    """Whether results look at the memory of the first operand, and nothing is written."""
    if func is torch.ops.aten._unsafe_view.default:  # its operand is one that nobody else has
        return True
    return isinstance(func, OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns
    )


# ---------------------------------------------------------------- metadata


def strides_of(value: torch.Tensor) -> Strides:
    if not value.storage_offset() and value.is_contiguous():
        return None
    return tuple(value.stride()), int(value.storage_offset())


@lru_cache(maxsize=8192)
def like(shape: tuple[int, ...], dtype: torch.dtype, strides: Strides) -> torch.Tensor:
    """The meta tensor of that metadata."""
    with no_functorch(), no_dispatch_modes(), torch.inference_mode(False):
        return _empty(shape, dtype, strides, "meta")


def _empty(shape: Sequence[int], dtype: torch.dtype, strides: Strides, device: str) -> torch.Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    stride, offset = strides
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    extent = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else offset
    return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride, offset)


# ---------------------------------------------------------------- moving


@lru_cache(maxsize=4096)
def mover(operand: Operand, target: Layout) -> OneOp:
    """The program that takes a value from its layout to another."""
    with no_functorch(), no_dispatch_modes():
        graph = fx.Graph()
        with FakeTensorMode():
            value = stand_ins([operand])[0]
        node = _noted(graph.placeholder("x0"), value)
        graph.output([node])
        source = [operand.layout]
        program = Program(partition(Traced(graph, {}), target.mesh, source, source, [target]))
    return OneOp(program, Place(0), (like(target.shape, operand.dtype, None),), (None,), leaks=True)
