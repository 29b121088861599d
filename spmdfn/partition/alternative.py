"""Replacing one node by its rule's alternative: other ops that work when a "whole" factor is split."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from .calls import Bound, Calls, map_structure, source_of, tensors_in
from .rule import Operand
from .trace import Traced, trace
from .wishes import Key

_MEMO: dict[Hashable, Traced] = {}


def splice(bound: Bound, splits: Mapping[str, int], calls: Calls) -> dict[Key, Key]:
    """Put the ops of the alternative in the node's place; return what each of its results has become."""
    node = bound.node
    key = (bound.key, tuple(sorted(splits.items())))
    traced = _MEMO.get(key)
    if traced is None:
        traced = _MEMO[key] = _trace(bound, splits)
    graph = node.graph
    copies: dict[fx.Node, Any] = {}
    operands = iter(bound.operands)
    added: list[fx.Node] = []
    results: list[Any] = []
    marks = {name: node.meta[name] for name in ("where", "backward", "recompute") if name in node.meta}
    with graph.inserting_before(node.next):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(operands)
            elif inner.op == "output":
                results = [copies[item] for item in inner.args[0]]
            elif inner.op == "get_attr":
                copies[inner] = _constant(graph, traced.constants[inner.target], inner)
                added.append(copies[inner])
            else:
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                copies[inner].meta.update(marks)
                added.append(copies[inner])
    moved = _replace(bound, results, calls)
    for new in reversed(added):
        if not new.users:
            graph.erase_node(new)
    return moved


def _constant(graph: fx.Graph, value: torch.Tensor, inner: fx.Node) -> fx.Node:
    """Constants of an alternative are scalars: written out as a `full`."""
    new = graph.call_function(torch.ops.aten.full.default, ([], value.item()), {"dtype": value.dtype})
    new.meta.update(inner.meta)
    return new


def _replace(bound: Bound, results: list[Any], calls: Calls) -> dict[Key, Key]:
    graph, moved = bound.node.graph, dict[Key, Key]()

    def replace(old: fx.Node) -> None:
        if isinstance(old.meta["val"], torch.Tensor):
            key = source_of(old)
            new = results[key[1]]
            moved[key] = source_of(new)
            for user in old.replace_all_uses_with(new):
                calls.forget(user)
        else:  # a list of results: its users are `getitem`s
            for user in list(old.users):
                replace(user)
        graph.erase_node(old)

    replace(bound.node)
    return moved


def _trace(bound: Bound, splits: Mapping[str, int]) -> Traced:
    call, rule = bound.call, bound.rule
    assert rule is not None and rule.alternative is not None
    alternative = rule.alternative

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        def fill(argument: Any) -> Any:
            return tensors[argument.index] if isinstance(argument, Operand) else argument

        args = map_structure(fill, call.args)
        kwargs = map_structure(fill, dict(call.kwargs))
        return tensors_in(alternative(splits, *args, **kwargs))

    inputs = [operand.meta["val"] for operand in bound.operands]
    return trace(function, inputs, names=[f"operand {i}" for i in range(len(inputs))])
