"""Indexing in which one index runs along another dim: `x[arange(n), i]` as a gather along the dim that `i` indexes.

An index that counts 0, 1, .. over the whole of its dim only says that this dim goes along with one of the result's. A
gather shows that in its shapes, so the dim may be split; `vmap(x[i])` and hand-written cross-entropies are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
Emit = Callable[..., fx.Node]
READS = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
WRITES = (_aten.index_put.default, _aten._unsafe_index_put.default)
_COUNTS = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.reshape.default)
_INTEGERS = (torch.int64, torch.int32)


def counted_dim(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> int | None:
    """The dim, counted from the last (-1), along which an integer tensor counts 0, 1, ..; None if it does not."""
    value = node.meta["val"]
    wide = [dim - value.dim() for dim, size in enumerate(value.shape) if size != 1]
    if value.dtype not in _INTEGERS or len(wide) != 1:
        return None
    n = value.numel()
    while node.op == "call_function" and node.args:
        first: Any = node.args[0]
        if node.target in _COUNTS:
            start, step = (0, 1) if len(node.args) == 1 else (first, (*node.args, 1)[2])
            return wide[0] if (start, step) == (0, 1) and node.meta["val"].numel() == n else None
        casts = node.target is _aten._to_copy.default and first.meta["val"].dtype in _INTEGERS
        if not (casts or node.target in _RESHAPES) or first.meta["val"].numel() != n:
            return None
        node = first
    if node.op != "get_attr":
        return None
    constant = constants[str(node.target)].flatten()
    return wide[0] if constant.dtype in _INTEGERS and constant.tolist() == list(range(n)) else None


@dataclass(frozen=True)
class _Plan:
    """How an indexing becomes a gather over dims (along, kept, last).

    along   the indexed dims that go along with a dim of the indices, as (that dim, indexed dim)
    kept    dims that are not indexed
    rest    the other indexed dims, with their index tensors: merged into the last
    batch   the broadcast shape of the index tensors; `free` are its dims that nothing goes along with
    front   where its dims stand in the result
    """

    shape: tuple[int, ...]
    along: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]
    rest: tuple[tuple[int, fx.Node], ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]
    front: int

    @property
    def order(self) -> list[int]:
        """The order of the indexed tensor's dims."""
        return [*(dim for _, dim in self.along), *self.kept, *(dim for dim, _ in self.rest)]

    @property
    def lead(self) -> list[int]:
        """The sizes of all dims but those of `rest`."""
        return [self.shape[dim] for dim in self.order[: len(self.along) + len(self.kept)]]

    @property
    def turn(self) -> list[int]:
        """For every dim of the result its place in (along, kept, free)."""
        kept = [len(self.along) + i for i in range(len(self.kept))]
        places = {dim: i for i, (dim, _) in enumerate(self.along)}
        places.update({dim: len(self.along) + len(kept) + i for i, dim in enumerate(self.free)})
        return [*kept[: self.front], *(places[dim] for dim in range(len(self.batch))), *kept[self.front :]]


def by_gather(node: fx.Node, constants: Mapping[str, torch.Tensor], emit: Emit) -> fx.Node | None:
    """Emit an equal of an index or index_put node without the indices that count; None if there are none."""
    x: Any = node.args[0]
    plan = _plan(x.meta["val"], node.args[1], constants)  # type: ignore[arg-type]
    if plan is None:
        return None
    last = math.prod(plan.shape[dim] for dim, _ in plan.rest)
    turned = _merge(_permute(x, plan.order, emit), [*plan.lead, last], emit)
    shape = [*plan.lead, *(plan.batch[dim] for dim in plan.free)]
    if node.target in READS:
        found = emit(_aten.gather.default, turned, len(plan.lead), _index(plan, emit)) if plan.rest else turned
        return _permute(_merge(found, shape, emit), plan.turn, emit)
    value: Any = node.args[2]
    if list(value.meta["val"].shape) != [shape[place] for place in plan.turn]:
        value = emit(_aten.expand.default, value, [shape[place] for place in plan.turn])
    value = _permute(value, _inverse(plan.turn), emit)
    value = _merge(value, [*plan.lead, math.prod(plan.batch[dim] for dim in plan.free)], emit)
    accumulate = len(node.args) > 3 and bool(node.args[3])
    if plan.rest:
        op = _aten.scatter_add.default if accumulate else _aten.scatter.src
        value = emit(op, turned, len(plan.lead), _index(plan, emit), value)
    elif accumulate:
        value = emit(_aten.add.Tensor, turned, value)
    value = _merge(value, [*plan.lead, *(plan.shape[dim] for dim, _ in plan.rest)], emit)
    return _permute(value, _inverse(plan.order), emit)


def _plan(x: torch.Tensor, indices: Sequence[fx.Node | None], constants: Mapping[str, torch.Tensor]) -> _Plan | None:
    places = {dim: index for dim, index in enumerate(indices) if index is not None}
    values = [index.meta["val"] for index in places.values()]
    if 0 in x.shape or any(value.dtype not in _INTEGERS or 0 in value.shape for value in values):
        return None
    batch = tuple(torch.broadcast_shapes(*(value.shape for value in values)))
    along: dict[int, int] = {}
    for dim, index in places.items():
        counted = counted_dim(index, constants)
        if counted is not None and counted + len(batch) not in along and x.shape[dim] == batch[counted]:
            along[counted + len(batch)] = dim
    if not along:
        return None
    indexed = sorted(places)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    return _Plan(
        shape=tuple(x.shape),
        along=tuple(sorted(along.items())),
        kept=tuple(dim for dim in range(x.dim()) if dim not in places),
        rest=tuple((dim, index) for dim, index in places.items() if dim not in along.values()),
        batch=batch,
        free=tuple(dim for dim in range(len(batch)) if dim not in along),
        front=indexed[0] if adjacent else 0,
    )


def _index(plan: _Plan, emit: Emit) -> fx.Node:
    """The index into the last dim, of shape (along, kept, product of free), from the indices of its parts."""
    parts = [_from_zero(index, plan.shape[dim], emit) for dim, index in plan.rest]
    total = parts[0]
    for part, (dim, _) in zip(parts[1:], plan.rest[1:], strict=True):
        total = emit(_aten.add.Tensor, emit(_aten.mul.Tensor, total, plan.shape[dim]), part)
    if tuple(total.meta["val"].shape) != plan.batch:
        total = emit(_aten.expand.default, total, list(plan.batch))
    order = [*(dim for dim, _ in plan.along), *plan.free]
    total = _permute(total, order, emit)
    sizes = [plan.batch[dim] for dim, _ in plan.along]
    last = math.prod(plan.batch[dim] for dim in plan.free)
    total = _merge(total, [*sizes, *[1] * len(plan.kept), last], emit)
    wide = [*plan.lead, last]
    return total if list(total.meta["val"].shape) == wide else emit(_aten.expand.default, total, wide)


def _from_zero(index: fx.Node, size: int, emit: Emit) -> fx.Node:
    """The index without negative numbers: gather takes none."""
    if index.meta["val"].dtype != torch.int64:
        index = emit(_aten._to_copy.default, index, dtype=torch.int64)
    negative = emit(_aten.lt.Scalar, index, 0)
    return emit(_aten.where.self, negative, emit(_aten.add.Tensor, index, size), index)


def _permute(node: fx.Node, order: Sequence[int], emit: Emit) -> fx.Node:
    return node if list(order) == sorted(order) else emit(_aten.permute.default, node, list(order))


def _merge(node: fx.Node, shape: Sequence[int], emit: Emit) -> fx.Node:
    same = list(node.meta["val"].shape) == list(shape)
    return node if same else emit(_aten.reshape.default, node, list(shape))


def _inverse(order: Sequence[int]) -> list[int]:
    return [list(order).index(place) for place in range(len(order))]
