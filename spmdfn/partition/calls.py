"""Nodes of the traced graph as calls, and their rules, memoised by op, shapes and static arguments: layers repeat."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import rules as _rules  # noqa: F401  (registers them)
from .rule import Call, Operand, Result, Rule, rule_for


@dataclass(frozen=True)
class Bound:
    """A node with its call, its rule, and the nodes that are its tensor operands, in the call's order."""

    node: fx.Node
    call: Call
    rule: Rule | None
    operands: tuple[fx.Node, ...]
    key: Hashable


class Calls:
    """Binds nodes to calls and rules."""

    def __init__(self) -> None:
        self._bound: dict[fx.Node, Bound] = {}

    def __call__(self, node: fx.Node) -> Bound:
        bound = self._bound.get(node)
        if bound is None:
            bound = self._bound[node] = _bind(node)
        return bound

    def forget(self, node: fx.Node) -> None:
        """The node's operands were replaced: bind it anew."""
        self._bound.pop(node, None)


_MEMO: dict[Hashable, tuple[Call, Rule | None]] = {}


def _bind(node: fx.Node) -> Bound:
    operands: list[fx.Node] = []
    counter = itertools.count()

    def mark(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            operands.append(argument)
            return Operand(next(counter), tuple(value.shape), value.dtype)
        return argument

    args = map_structure(mark, node.args)
    kwargs = map_structure(mark, dict(node.kwargs))
    key = (node.target, _freeze(args), _freeze(kwargs))
    found = _MEMO.get(key)
    if found is None:
        marked = tuple(Operand(i, tuple(o.meta["val"].shape), o.meta["val"].dtype) for i, o in enumerate(operands))
        call = Call(node.target, tuple(args), kwargs, marked, results_of(node))
        found = (call, rule_for(call))
        if found[1] is not None:  # one may be registered later
            _MEMO[key] = found
    return Bound(node, *found, tuple(operands), key)


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dicts (an `Operand` is a leaf)."""
    if isinstance(structure, Operand):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(map_structure(function, item) for item in structure)
    if isinstance(structure, dict):
        return {name: map_structure(function, item) for name, item in structure.items()}
    return function(structure)


def _freeze(structure: Any) -> Hashable:
    """A hashable key: types included, since 1, 1.0 and True are equal but not the same argument."""
    if isinstance(structure, Operand):
        return structure
    if isinstance(structure, (list, tuple)):
        return tuple([_freeze(item) for item in structure])
    if isinstance(structure, dict):
        return tuple([(name, _freeze(item)) for name, item in sorted(structure.items())])
    if isinstance(structure, float):
        return (float, repr(structure))
    if isinstance(structure, (bool, int)):
        return (type(structure), structure)
    return structure


def results_of(node: fx.Node) -> tuple[Result, ...]:
    """The tensor results of a node, in order; results that are None (an unwanted gradient) are left out."""
    return tuple(Result(tuple(value.shape), value.dtype) for value in tensors_in(node.meta["val"]))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that computes a value and which of its tensor results it is: looks through `getitem`."""
    if node.op == "call_function" and node.target is operator.getitem:
        parent, index = node.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        origin, place = source_of(parent)
        return origin, place + len(tensors_in(list(parent.meta["val"][:index])))
    return node, 0


def paths_of(value: Any) -> list[tuple[int, ...]]:
    """For every tensor in a result, the indices that lead to it."""
    if isinstance(value, torch.Tensor):
        return [()]
    if isinstance(value, (list, tuple)):
        return [(i, *path) for i, item in enumerate(value) for path in paths_of(item)]
    return []


def users_of(node: fx.Node) -> list[list[fx.Node]]:
    """For every tensor result of a node, the nodes that use it, looking through `getitem`."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [list(node.users)]
    users: list[list[fx.Node]] = [[] for _ in tensors_in(node.meta["val"])]

    def collect(parent: fx.Node) -> None:
        for user in parent.users:
            if user.target is operator.getitem:
                if isinstance(user.meta["val"], torch.Tensor):
                    users[source_of(user)[1]].extend(user.users)
                else:
                    collect(user)

    collect(node)
    return users
