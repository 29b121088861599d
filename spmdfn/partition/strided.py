"""`as_strided` in words that a layout survives: slices, selects, diagonals, reshapes; else an index into the storage.

Strides speak of memory, and a device's block has a memory of its own. So every read or write through strides becomes
one of the tensor that owns the memory, in the strides that it had when it was traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

from ..errors import TracingError, message
from .lines import quoted

_aten = torch.ops.aten
Emit = Callable[..., fx.Node]
READ, WRITE = _aten.as_strided.default, _aten.as_strided_scatter.default


class Step(NamedTuple):
    """A view, and the op that writes a source back through it (None: a view that only renames, undone by another)."""

    view: Any
    args: tuple[Any, ...]
    write: Any = None


def without_strides(node: fx.Node, emit: Emit) -> fx.Node:
    """Emit an equal of an `as_strided` or `as_strided_scatter` node; `emit(op, *args, **kwargs)` makes nodes before it.

    Raises TracingError where the memory that is read is not all of one tensor's.
    """
    base, *rest = node.args
    source = rest.pop(0) if node.target is WRITE else None
    size, stride = (list(value) for value in rest[:2])  # type: ignore[arg-type]
    value = base.meta["val"]  # type: ignore[union-attr]
    offset: Any = rest[2] if len(rest) > 2 and rest[2] is not None else value.storage_offset()
    owner = base if node.target is WRITE else _owner(base)  # type: ignore[arg-type]
    whole = owner.meta["val"]  # type: ignore[union-attr]
    order = sorted(range(whole.dim()), key=lambda dim: (-whole.stride(dim), whole.shape[dim] == 1, dim))
    shape = [whole.shape[dim] for dim in order]
    strides = [whole.stride(dim) for dim in order]
    if any(s != w for n, s, w in zip(shape, strides, _contiguous(shape), strict=True) if n != 1):
        raise TracingError(_refusal(node, whole))
    offset -= whole.storage_offset()
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if math.prod(size) and not 0 <= offset <= last < math.prod(shape):
        raise TracingError(_refusal(node, whole))
    steps = [Step(_aten.permute.default, (order,))] if order != sorted(order) else []
    if source is not None and any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True)):
        raise TracingError(_refusal(node, whole))  # torch refuses it too, but not on a fake tensor
    steps += _steps(shape, size, stride, offset)
    return _read(owner, steps, emit) if source is None else _write(owner, source, steps, emit)  # type: ignore[arg-type]


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [*accumulate(reversed(shape), lambda a, b: a * b, initial=1)][-2::-1] if shape else []


def _owner(node: fx.Node) -> fx.Node:
    """The node whose memory a view looks at."""
    while node.op == "call_function":
        made: Any = node.args[0] if node.target is operator.getitem else node  # a piece of a split
        schema = getattr(made.target, "_schema", None)
        if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
            break
        node = made.args[0]
    return node


def _refusal(node: fx.Node, whole: torch.Tensor) -> str:
    return message(
        "as_strided reads memory that is not that of one dense tensor",
        f"where: {quoted(node.meta.get('where', ''))}",
        f"value: {tuple(whole.shape)} with strides {whole.stride()}; as_strided{tuple(node.args[1:])}",
        fix="say it by slices, select, diagonal, unfold or reshape, or index with integers: x.flatten()[index]",
    )


def _steps(shape: list[int], size: list[int], stride: list[int], offset: int) -> list[Step]:
    """The views that lead from a contiguous tensor of that shape to the strided one."""
    inner = [i for i, (n, s) in enumerate(zip(size, stride, strict=True)) if n != 1 and s != 0]
    order = sorted(inner, key=lambda i: -stride[i])
    dims = [(size[i], stride[i]) for i in order]
    found = _by_slices(shape, dims, offset) if 0 not in size and 0 not in shape else None
    if found is None:
        flat = [Step(_aten.reshape.default, ([math.prod(shape)],))] if len(shape) != 1 else []
        return [*flat, Step(None, (size, stride, offset))]
    steps = found
    if order != inner:
        steps.append(Step(_aten.permute.default, ([order.index(i) for i in inner],)))
    if len(inner) != len(size):
        steps.append(Step(_aten.reshape.default, ([n if i in inner else 1 for i, n in enumerate(size)],)))
        if any(n != 1 and i not in inner for i, n in enumerate(size)):
            steps.append(Step(_aten.expand.default, (size,)))
    return steps


def _by_slices(shape: list[int], dims: list[tuple[int, int]], offset: int) -> list[Step] | None:
    numel = math.prod(shape)
    ours, theirs = set(_contiguous(shape)), {s for _, s in dims}
    tried = []
    for strides in (ours, ours | theirs, theirs):
        fine = _refined(numel, strides)
        if fine is not None and fine not in tried:
            tried.append(fine)
            steps = _each(fine, dims, offset)
            if steps is not None:
                first = [Step(_aten.reshape.default, (fine,))] if fine != shape else []
                return first + steps
    sizes = [n for n, _ in dims]
    if [s for _, s in dims] != _contiguous(sizes):
        return None
    return [  # one run of the memory
        Step(_aten.reshape.default, ([numel],)),
        Step(_aten.slice.Tensor, (0, offset, offset + math.prod(sizes)), _aten.slice_scatter.default),
        Step(_aten.reshape.default, (sizes,)),
    ]


def _refined(numel: int, strides: Iterable[int]) -> list[int] | None:
    """The shape of a contiguous tensor in which dims of all these strides stand."""
    edges = [numel, *sorted({*strides, 1}, reverse=True)]
    if any(high % low for high, low in pairwise(edges)):
        return None
    return [high // low for high, low in pairwise(edges)]


def _each(shape: list[int], dims: list[tuple[int, int]], offset: int) -> list[Step] | None:
    """A slice of one dim, or a diagonal of two, for each strided dim; a select for every other dim."""
    strides = _contiguous(shape)
    starts = [offset // s % n for n, s in zip(shape, strides, strict=True)]
    if sum(a * s for a, s in zip(starts, strides, strict=True)) != offset:
        return None
    uses: list[tuple[int, ...]] = []
    slices: dict[int, tuple[int, int]] = {}
    for n, s in dims:
        place = next((k for k, t in enumerate(strides) if s % t == 0 and s < t * shape[k] and shape[k] > 1), None)
        step = s // strides[place] if place is not None else 0
        if place is not None and place not in slices and starts[place] + step * (n - 1) < shape[place]:
            uses.append((place,))
            slices[place] = (n, step)
            continue
        pair = _pair(s, strides, shape, starts, n, slices)
        if pair is None:
            return None
        uses.append(pair)
        slices.update(dict.fromkeys(pair, (n, 1)))
    steps = []
    for k, (n, step) in sorted(slices.items()):
        if (starts[k], n, step) != (0, shape[k], 1):
            ends = (k, starts[k], starts[k] + (n - 1) * step + 1, step)
            steps.append(Step(_aten.slice.Tensor, ends, _aten.slice_scatter.default))
    left = list(range(len(shape)))
    for k in reversed(range(len(shape))):
        if k not in slices:
            steps.append(Step(_aten.select.int, (k, starts[k]), _aten.select_scatter.default))
            left.remove(k)
    names: list[tuple[int, ...]] = [(k,) for k in left]
    for use in uses:
        if len(use) == 2:
            pair = (names.index((use[0],)), names.index((use[1],)))
            steps.append(Step(_aten.diagonal.default, (0, *pair), _aten.diagonal_scatter.default))
            names = [name for name in names if name[0] not in use] + [use]
    turn = [names.index(use) for use in uses]
    if turn != sorted(turn):
        steps.append(Step(_aten.permute.default, (turn,)))
    return steps


def _pair(
    stride: int, strides: list[int], shape: list[int], starts: list[int], n: int, taken: dict[int, tuple[int, int]]
) -> tuple[int, int] | None:
    """Two free dims along whose diagonal that stride goes."""
    fits = [k for k in range(len(shape)) if k not in taken and shape[k] > 1 and starts[k] + n <= shape[k]]
    return next(((a, b) for a in fits for b in fits if a < b and strides[a] + strides[b] == stride), None)


def _read(node: fx.Node, steps: Sequence[Step], emit: Emit) -> fx.Node:
    for step in steps:
        if step.view is None:
            node = emit(_aten.index.Tensor, node, [_places(step, node, emit)])
        else:
            node = emit(step.view, node, *step.args)
    return node


def _write(node: fx.Node, source: fx.Node, steps: Sequence[Step], emit: Emit) -> fx.Node:
    """The tensor with the source at the place that the steps lead to."""
    if not steps:
        shape = list(node.meta["val"].shape)
        return source if list(source.meta["val"].shape) == shape else emit(_aten.expand.default, source, shape)
    step, *rest = steps
    if step.view is None:
        return emit(_aten.index_put.default, node, [_places(step, node, emit)], source)
    inner = _write(emit(step.view, node, *step.args), source, rest, emit)
    if step.write is not None:
        return emit(step.write, node, inner, *step.args)
    if step.view is _aten.permute.default:
        order = step.args[0]
        return emit(_aten.permute.default, inner, [order.index(dim) for dim in range(len(order))])
    return emit(_aten.reshape.default, inner, list(node.meta["val"].shape))


def _places(step: Step, node: fx.Node, emit: Emit) -> fx.Node:
    """The storage index of every element: integers that depend on nothing."""
    size, stride, offset = step.args
    options = {"dtype": torch.int64, "device": node.meta["val"].device}
    total = emit(_aten.full.default, [1] * len(size), offset, **options)
    for dim, (n, s) in enumerate(zip(size, stride, strict=True)):
        if n == 1 or s == 0:
            continue
        along = emit(_aten.mul.Tensor, emit(_aten.arange.default, n, **options), s)
        shape = [n if d == dim else 1 for d in range(len(size))]
        total = emit(_aten.add.Tensor, total, emit(_aten.view.default, along, shape))
    return emit(_aten.expand.default, total, size)
