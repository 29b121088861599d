"""Writes in place to Arrays: the overload that writes nothing runs, and its result is copied into the blocks, so that
views see it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ._compat import below_dispatch, no_functorch
from .backends.base import Blocks
from .dispatch import OneOp, Operand, filled, is_view, like, mover, scan
from .errors import SpmdError, message
from .layout import Layout
from .operators import PROGRAMS, Call, built, copy_blocks, inputs_of, on_whole, run, wrapped
from .partition import guards
from .partition.lines import quoted, user_line

aten = torch.ops.aten

_FUNCTIONAL = {
    aten.native_batch_norm.default: aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._index_put_impl_.default: aten._index_put_impl.default,
}
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)

_UNHELD = 4
"""References to a tensor that no Python code holds: torch made it on the way, as F.one_hot does under a transform."""


def write(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the overload that writes nothing, in the layout of what is written to, and copy: views see it."""
    targets: list[Any] = list(guards.written(func, args, kwargs))
    if not targets:
        return run(cls, func, args, kwargs)
    if args and type(args[0]) is torch.Tensor and sys.getrefcount(args[0]) <= _UNHELD:
        return on_whole(cls, func, args, kwargs)
    where = user_line(sys._getframe()) or ""
    _check_targets(cls, func, targets, where)
    tensors: list[torch.Tensor] = []
    key = (func, scan(args, tensors), scan(kwargs, tensors) if kwargs else None)
    op = PROGRAMS.get(key)
    if op is None:
        op = PROGRAMS.put(key, _built_to_write(cls, func, args, kwargs, tensors, targets, where))
    results = op.run(inputs_of(cls, op, tensors))
    rest = len(results) - len(targets)
    for target, blocks in zip(targets, results[rest:], strict=True):
        _store(cls, target, blocks)
    if rest:
        arrays = wrapped(cls, op, results)
        returned = filled(op.results, arrays)[:rest]
        return returned if rest > 1 else returned[0]
    return targets[0] if func._schema.returns else None


def _store(cls: Any, target: Any, blocks: Blocks) -> None:
    """Put the new value of an Array, in its layout with nothing pending, into its blocks, and into what it views."""
    layout, dtype, device = target._kind
    if layout.pending:  # blocks may be shared by devices: the whole value on the first, zeros on the others
        blocks = mover(Operand(layout.settled, dtype, device), layout).run([blocks])[0]
    copy_blocks(target._blocks, blocks)
    target._writes[0] += 1
    source = target._source
    if source is not None:  # a copy: what it was made from gets it too
        base = source.array
        view = cls._of(source.blocks, source.layout, like(source.layout.shape, dtype, None))
        back = put_back(source.call, base, view)
        tensors: list[torch.Tensor] = []
        key = (base._layout, back[0], scan(back[1], tensors), scan(back[2], tensors))
        op = PROGRAMS.get(key)
        if op is None:
            op = PROGRAMS.put(
                key, built(cls, back[0], back[1], back[2], tensors, outputs=lambda _: [base._layout.settled])
            )
        _store(cls, base, op.run(inputs_of(cls, op, tensors))[0])
        source.seen = base._writes[0]


def put_back(call: Call, base: Any, view: Any) -> Any:
    """The op, with its arguments, that gives `base` with a view of it replaced by `view`; None if there is none."""
    _, func, args, kwargs, place = call
    if func in _SCATTERS:
        return _SCATTERS[func], (base, view, *args[1:]), kwargs
    if func is aten.unbind.int:
        return aten.select_scatter.default, (base, view, args[1] if len(args) > 1 else 0, place), {}
    if func in (aten.split.Tensor, aten.split_with_sizes.default):
        sizes, dim = args[1], args[2] if len(args) > 2 else 0
        start = place * sizes if isinstance(sizes, int) else sum(sizes[:place])
        return aten.slice_scatter.default, (base, view, dim, start, start + view.shape[dim]), {}
    if func in (aten.t.default, aten.transpose.int):
        return func, (view, *args[1:]), {}
    if func is aten.permute.default:
        order = [dim % len(args[1]) for dim in args[1]]
        return func, (view, [order.index(dim) for dim in range(len(order))]), {}
    return (aten.reshape.default, (view, list(base.shape)), {}) if func in _RESHAPES else None


def _built_to_write(
    cls: Any, func: Any, args: Any, kwargs: Any, tensors: Sequence[Any], targets: Sequence[Any], where: str
) -> OneOp:
    functional = _FUNCTIONAL.get(func) or _functional(func)
    if functional is None:
        raise SpmdError(
            message(
                f"{func} is not done to an Array in place",
                f"where: {quoted(where)}",
                f"array: {targets[0]!r}",
                fix="use the op that returns a new tensor",
            )
        )

    def outputs(count: int) -> list[Layout | None]:
        return [None] * (count - len(targets)) + [target._layout.settled for target in targets]

    return built(cls, functional, args, kwargs, tensors, outputs=outputs, checks=func)


def _check_targets(cls: Any, func: Any, targets: Sequence[Any], where: str) -> None:
    name = str(func)
    if any(isinstance(place, str) for place in guards.profile(func).writes):
        raise SpmdError(
            message(
                f"{name}: out= is not taken with Arrays",
                f"where: {quoted(where)}",
                fix="use the result, or copy it over: x.copy_(result)",
            )
        )
    for target in targets:
        shown = repr(target) if isinstance(target, cls) else f"{target.dtype} {tuple(target.shape)}"
        if not isinstance(target, cls):
            what = f"{name} writes an Array into a plain tensor in place"
            fix = "write sp.unshard(array), or make the plain tensor an Array first: sp.shard(x, spec, mesh=mesh)"
        elif target._locked is not None:
            what = f"{target._locked} is mutated in place by {name}"
            fix = "work on a clone (x = x.clone()) and return it as a result"
        elif not _reaches_back(target):
            what = f"{name} writes in place to a view that is a copy, because it needed communication or other strides"
            fix = (
                "write to the tensor itself, as in torch.where(mask, new, x); clone() the view, if only that is to "
                "change; or lay the tensor out so that the view needs no communication"
            )
        else:
            continue
        raise SpmdError(message(what, f"where: {quoted(where)}", f"value: {shown}", fix=fix))


def _reaches_back(target: Any) -> bool:
    """Whether a write to an Array can be put into all that it views."""
    while target._source is not None:
        if put_back(target._source.call, target._source.array, target) is None:
            return False
        target = target._source.array
    return True


def _functional(func: Any) -> Any:
    """The overload that takes the same, writes nothing and returns the new values."""
    name = func._schema.name.rpartition("::")[2]
    bare = name[:2] + name[3:] if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, func.namespace), bare, None) if bare != name else None
    kinds = [str(argument.type) for argument in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [str(argument.type) for argument in found._schema.arguments] == kinds:
            return found
    return None


def view_in_place(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """An op that turns a tensor into a view of itself: `unsqueeze_`, `t_`; the wrapper's own metadata follow."""
    array = args[0]
    if func is aten.detach_.default:
        return array
    view_op = _functional(func)
    where = user_line(sys._getframe()) or ""
    if view_op is None or not is_view(view_op) or view_op is aten.as_strided.default or not isinstance(array, cls):
        fix = "make a new tensor: as_strided, reshape or torch.empty_like and copy"
        raise SpmdError(message(f"{func} on an Array", f"where: {quoted(where)}", f"array: {array!r}", fix=fix))
    view = run(cls, view_op, args, kwargs)
    if view._source is not None and view._source is not array._source:
        raise SpmdError(message(f"{func} on an Array needs communication", f"array: {array!r}", fix=str(view_op)))
    with no_functorch(), below_dispatch():
        func(*args, **kwargs)
    array._become(view)
    return array
