"""One walk over a traced graph: drop identities and what functionalization leaves, merge equals, drop the dead."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from .._compat import FakeTensorMode
from . import along, strided

_aten = torch.ops.aten
_SCATTERS: dict[Any, Any] = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}
_IDENTITIES = (
    _aten.alias.default,
    _aten.detach.default,
    _aten.lift_fresh.default,
    _aten.lift_fresh_copy.default,
    _aten.clone.default,
    _aten.expand.default,
    _aten._to_copy.default,
)
_SIZED = (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default)
_VIEWS: dict[Any, Any] = {view: scatter for scatter, view in _SCATTERS.items()}


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def simplify(graph: fx.Graph, fake: FakeTensorMode, constants: Mapping[str, torch.Tensor]) -> None:
    """Simplify a functional graph in place, keeping its order. Linear in the number of nodes."""
    seen: dict[Hashable, fx.Node] = {}
    rewrite = _Rewriter(graph, fake, constants, seen)
    _spell_strides_out(graph, rewrite)
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        if node.target in _SIZED:
            node.update_arg(1, list(node.meta["val"].shape))  # no -1
        better = rewrite(node) if node.op == "call_function" else None
        if better is None:
            key = _key(node, constants)
            better = node if key is None else seen.setdefault(key, node)
        if better is not node:
            node.replace_all_uses_with(better)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr") and not _has_effects(node):
            graph.erase_node(node)


def _spell_strides_out(graph: fx.Graph, rewrite: _Rewriter) -> None:
    """Before any other rewrite, and from the end: strides are those of what was traced, not of its stand-in."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in (strided.READ, strided.WRITE):
            better = rewrite(node) or strided.without_strides(node, functools.partial(rewrite.make, node))
            node.replace_all_uses_with(better)
            graph.erase_node(node)


def _has_effects(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and (not schema.returns or schema.is_mutable)


def _key(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> Hashable | None:
    """What two nodes must agree in to be one; None for a node that stays."""
    if node.op == "get_attr":
        value = constants[str(node.target)]
        if value.numel() != 1 or value.device.type != "cpu":
            return node.target
        data = value.reshape(1).view(torch.uint8).numpy().tobytes()
        return ("scalar", value.dtype, tuple(value.shape), data)
    if _has_effects(node):
        return None
    return (
        node.target,
        _frozen(_args(node)),
        tuple([(name, _frozen(value)) for name, value in sorted(node.kwargs.items())]),
        node.meta.get("recompute"),
    )


def _frozen(value: Any) -> Hashable:
    """A hashable form in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item) for item in value])
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (bool, complex)):
        return (type(value), repr(value))
    return value


def _may_stand_in(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether every later view that was legal on `old` is legal on `new`."""
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        return False
    if new.stride() == old.stride():
        return True
    strides = [stride for stride, size in zip(old.stride(), old.shape, strict=True) if size != 1]
    return new.is_contiguous() and strides == sorted(strides, reverse=True)


class _Rewriter:
    """Calling it with a node gives the node to use instead, or None."""

    def __init__(
        self,
        graph: fx.Graph,
        fake: FakeTensorMode,
        constants: Mapping[str, torch.Tensor],
        seen: dict[Hashable, fx.Node],
    ) -> None:
        self.graph, self.fake, self.constants, self.seen = graph, fake, constants, seen
        self.rules: dict[Any, Callable[[fx.Node], fx.Node | None]] = dict.fromkeys(_IDENTITIES, _same_value)
        self.rules.update({_aten.view.default: _round_trip, _aten._unsafe_view.default: _round_trip})
        self.rules.update(dict.fromkeys((_aten.t.default, _aten.transpose.int, _aten.permute.default), _turned_back))
        self.rules.update({operator.getitem: _only_piece, _aten.copy.default: self._copy})
        self.rules[_aten._efficientzerotensor.default] = self._zeros
        self.rules.update(dict.fromkeys(_SCATTERS, self._scatter))
        self.rules.update(dict.fromkeys(_VIEWS, self._view))
        self.rules.update(dict.fromkeys((*along.READS, *along.WRITES), self._along))

    def __call__(self, node: fx.Node) -> fx.Node | None:
        rule = self.rules.get(node.target)
        if rule is not None:
            return rule(node)
        return self._prim(node) if getattr(node.target, "namespace", "") == "prims" else None

    def emit(self, place: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before `place`, or an equal one that was there before."""
        node = self.make(place, op, *args, **kwargs)
        found = self.seen.setdefault(_key(node, self.constants), node)
        if found is not node:
            self.graph.erase_node(node)
        return found

    def make(self, place: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before `place`, of its line."""
        with self.graph.inserting_before(place):
            node = self.graph.call_function(op, args, kwargs)
        node.meta.update({name: place.meta[name] for name in ("where", "backward", "recompute") if name in place.meta})
        values, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self.fake:
            node.meta["val"] = op(*values, **named)
        return node

    def _along(self, node: fx.Node) -> fx.Node | None:
        return along.by_gather(node, self.constants, functools.partial(self.emit, node))

    def _copy(self, node: fx.Node) -> fx.Node | None:
        """`copy(destination, source)` is the source, in the destination's shape and dtype."""
        source, wanted = _args(node)[1], node.meta["val"]
        given = source.meta["val"]
        if given.device != wanted.device:
            return None
        if given.shape != wanted.shape:
            source = self.emit(node, _aten.expand.default, source, list(wanted.shape))
        if given.dtype != wanted.dtype:
            source = self.emit(node, _aten._to_copy.default, source, dtype=wanted.dtype)
        if _may_stand_in(source.meta["val"], wanted) or all(
            user.target in _SCATTERS and _args(user)[1] is node for user in node.users
        ):
            return source
        if wanted.is_contiguous():
            return self.emit(node, _aten.clone.default, source, memory_format=torch.contiguous_format)
        return None

    def _scatter(self, node: fx.Node) -> fx.Node | None:
        """Writing back what was read there changes nothing; of two writes to one place the second counts."""
        base, source, *static = _args(node)
        read = source
        while isinstance(read, fx.Node) and read.target is _aten.clone.default:
            read = _args(read)[0]
        if (
            isinstance(read, fx.Node)
            and read.target is _SCATTERS[node.target]
            and _args(read) == (base, *static)
            and read.kwargs == node.kwargs
            and _may_stand_in(base.meta["val"], node.meta["val"])
        ):
            return base
        if base.target is node.target and list(_args(base)[2:]) == static and base.kwargs == node.kwargs:
            node.replace_input_with(base, _args(base)[0])
        return None

    def _view(self, node: fx.Node) -> fx.Node | None:
        """Reading what was just written there gives what was written."""
        base, *static = _args(node)
        if base.target is _VIEWS[node.target] and list(_args(base)[2:]) == static and base.kwargs == node.kwargs:
            source = _args(base)[1]
            return source if _may_stand_in(source.meta["val"], node.meta["val"]) else None
        if node.target is _aten.as_strided.default:
            value, whole = node.meta["val"], base.meta["val"]
            same = value.shape == whole.shape and value.stride() == whole.stride()
            return base if same and value.storage_offset() == whole.storage_offset() else None
        return _same_value(node) if node.target is _aten.slice.Tensor else None

    def _zeros(self, node: fx.Node) -> fx.Node | None:
        value = node.meta["val"]
        return self.emit(node, _aten.zeros.default, list(value.shape), dtype=value.dtype, device=value.device)

    def _prim(self, node: fx.Node) -> fx.Node | None:
        """A primitive by its aten name, where there is one of the same arguments."""
        if node.target is torch.ops.prims.convert_element_type.default:
            return self.emit(node, _aten._to_copy.default, _args(node)[0], dtype=_args(node)[1])
        target: Any = node.target
        packet = getattr(_aten, target._schema.name.partition("::")[2], None)
        for overload in ("Tensor", "default"):
            op = getattr(packet, overload, None)
            if op is not None and len(_args(node)) <= len(op._schema.arguments) and not node.kwargs and node.users:
                return self.emit(node, op, *_args(node))
        return None


def _same_value(node: fx.Node, result: fx.Node | None = None) -> fx.Node | None:
    """The operand, where the op changes neither shape nor dtype."""
    source = _args(node)[0]
    if not isinstance(source, fx.Node):
        return None
    return source if _may_stand_in(source.meta["val"], (result or node).meta["val"]) else None


def _round_trip(node: fx.Node) -> fx.Node | None:
    """A chain of views that ends in the shape it began with."""
    source = _args(node)[0]
    while isinstance(source, fx.Node):
        if _may_stand_in(source.meta["val"], node.meta["val"]):
            return source
        if source.target not in (_aten.view.default, _aten._unsafe_view.default):
            return None
        source = _args(source)[0]
    return None


def _only_piece(node: fx.Node) -> fx.Node | None:
    """The one piece of a split into one."""
    split = _args(node)[0]
    if split.target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return None
    return _same_value(split, node)


def _turned_back(node: fx.Node) -> fx.Node | None:
    """A transposition of a transposition that undoes it."""
    inner = _args(node)[0]
    if not isinstance(inner, fx.Node) or inner.target is not node.target:
        return None
    if node.target is _aten.permute.default:
        source, order = _args(inner)[0], [axis % len(_args(node)[1]) for axis in _args(inner)[1]]
        back = [order[axis] for axis in _args(node)[1]]
        return source if back == sorted(back) else None
    return _args(inner)[0] if _args(inner)[1:] == _args(node)[1:] else None
