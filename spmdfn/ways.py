"""Which way each torch op on Arrays is run: what `Array.__torch_dispatch__` answers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ._compat import autograd_node, is_composite, modes_active, tracing
from .errors import SpmdError, TracingError, message
from .gradients import lay_like, watch
from .layout import Layout, axes_of, replicated, whole
from .operators import moved, on_whole, run
from .partition import guards
from .partition.lines import quoted, user_line
from .writes import view_in_place, write

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any, Any], Any]


def operate(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """One torch op with an Array among its operands: what `Array.__torch_dispatch__` answers."""
    if modes_active() and tracing():
        raise TracingError(
            message(
                f"{func} on an Array inside a make_fx trace, which would record this process's blocks as constants",
                f"where: {quoted(user_line(sys._getframe()) or '')}",
                fix="use sp.spmd_jit to trace; instead of torch.func.linearize use torch.func.jvp",
            )
        )
    node = autograd_node()
    if node is not None:
        watch(node)
    return handler(func)(cls, func, args, kwargs)


@lru_cache(maxsize=4096)
def handler(func: Any) -> Handler:
    """The way in which an op is run."""
    found = _SPECIAL.get(func)
    if found is not None:
        return found
    facts = guards.profile(func)
    if facts.draws:
        return _draw
    if is_composite(func):
        return lambda cls, func, args, kwargs: func.decompose(*args, **kwargs)
    if torch.Tag.inplace_view in getattr(func, "tags", ()):
        return view_in_place
    if facts.writes:
        return write
    if not any("Tensor" in str(result.type) for result in func._schema.returns) and (
        facts.data_dependent or not func._schema.returns
    ):
        return on_whole
    return run


def _same(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Another Array of the same blocks: `detach`, `alias`, `lift`."""
    return args[0]._alias()


def _physical(op: Any) -> Handler:
    """A view by a bit of the tensor, which a wrapper cannot carry, as the op that computes."""
    return lambda cls, func, args, kwargs: run(cls, op, args, kwargs)


def _draw(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    guards.refuse(func, args, kwargs, user_line(sys._getframe()) or "")
    return run(cls, func, args, kwargs)  # it draws only if an argument says so, and that one does not


def _to_copy(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Another dtype; or the shape alone, for the device meta, which forward mode asks for."""
    array, device = args[0], kwargs.get("device")
    if device is None or torch.device(device).type == array.device.type:
        return run(cls, func, args, {name: value for name, value in kwargs.items() if name != "device"})
    if torch.device(device).type == "meta":
        return torch.empty_strided(array.shape, array.stride(), dtype=kwargs.get("dtype") or array.dtype, device="meta")
    raise SpmdError(
        message(
            f"an Array on {array.device} does not move to {device}",
            f"array: {array!r}",
            fix="its devices are those of its mesh: sp.unshard(x).to(device)",
        )
    )


def _lay_like(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A gradient laid out as its primal; batch dims keep the axes that the primal leaves free."""
    x, wanted, batch = args
    if not isinstance(wanted, cls):
        return x.unshard()
    layout = wanted._layout.settled
    if not isinstance(x, cls):
        x = cls._cut(x, replicated(layout.mesh, x.shape))
    kept = [() if layout.axes.intersection(axes_of(dim)) else dim for dim in x._layout.dims[:batch]]
    dims = [dim or whole(size) for dim, size in zip(kept, x.shape, strict=False)]
    return moved(cls, x, Layout(layout.mesh, [*dims, *layout.dims]))


_SPECIAL: dict[Any, Handler] = {
    torch.ops.prim.device.default: lambda cls, func, args, kwargs: args[0]._device,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift.default: _same,
    aten.lift_fresh.default: _same,
    aten._conj.default: _physical(aten._conj_physical.default),
    aten._neg_view.default: _physical(aten.neg.default),
    aten._to_copy.default: _to_copy,
    lay_like: _lay_like,
}
