"""Which values of a program may look at the same memory: results must not share any with an argument or each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from . import collectives
from ._compat import OpOverload, storage_id
from .backends.base import Blocks

_COPYING = (collectives.all_gather, collectives.reduce_scatter, collectives.all_to_all)


def memory(block: torch.Tensor) -> int:
    """A number that says which memory a block looks at, while it lives."""
    return storage_id(block.untyped_storage())


def unshared(blocks: Blocks, owned: set[int]) -> Blocks:
    """The blocks, copied where they look at memory that is owned; a block that stands for several devices, once."""
    copies: dict[int, torch.Tensor] = {}
    for block in blocks:
        if id(block) not in copies:
            copies[id(block)] = block.clone() if memory(block) in owned else block
    return [copies[id(block)] for block in blocks]


def aliased(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a program of which some result may be a view."""
    found = _seen_through(node for node in graph.output_node().args[0] if isinstance(node, fx.Node))  # type: ignore[union-attr]
    return {node for node in found if node.op == "placeholder"}


def suspects(graph: fx.Graph) -> tuple[int, ...]:
    """The results that may look at the memory of an input, a constant or another result, by number."""
    results: Sequence[object] = graph.output_node().args[0]  # type: ignore[assignment]
    reached = {i: _seen_through([node]) for i, node in enumerate(results) if isinstance(node, fx.Node)}
    uses: dict[fx.Node, list[int]] = {}
    for i, nodes in reached.items():
        for node in nodes:
            uses.setdefault(node, []).append(i)
    found = [users for node, users in uses.items() if len(users) > 1 or node.op in ("placeholder", "get_attr")]
    return tuple(sorted({i for users in found for i in users}))


def _seen_through(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all of which they may be views."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [argument for argument in node.all_input_nodes if _may_alias(node, argument)]
    return found


def _may_alias(node: fx.Node, argument: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True  # a method or function such as reshape, narrow, getitem
    if target in collectives.COLLECTIVES:
        return target not in _COPYING
    return any(
        given is argument or (isinstance(given, (list, tuple)) and argument in given)
        for given, parameter in zip(node.args, target._schema.arguments, strict=False)
        if parameter.alias_info is not None
    )
