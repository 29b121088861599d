"""From a traced graph and the layouts at its border to a local program: the room's one entrance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ..constrain import op as constrain_op
from ..constrain import pinned
from ..layout import Layout, from_entries, replicated
from ..mesh import Mesh
from .alternative import splice
from .assign import leading
from .calls import Calls, source_of
from .emit import Emitter
from .propagate import Sweep, Value
from .trace import Traced
from .wishes import Key, sweep


@dataclass(frozen=True)
class Partitioned:
    """A local graph: placeholders are the device's coordinates, then the inputs; its output is a flat list."""

    graph: fx.Graph
    mesh: Mesh
    constants: dict[str, torch.Tensor]
    inputs: tuple[Layout, ...]
    dtypes: tuple[torch.dtype, ...]
    coordinates: tuple[str, ...]
    outputs: tuple[Layout | None, ...]
    unruled: tuple[tuple[str, str | None], ...]


def partition(
    traced: Traced,
    mesh: Mesh,
    inputs: Sequence[Layout],
    wanted: Sequence[Layout],
    outputs: Sequence[Layout | None],
    *,
    strict: bool = False,
) -> Partitioned:
    """Lay a traced graph out over a mesh.

    `inputs` are the layouts that arguments come in, `wanted` those that their specs ask for; `outputs` the layouts of
    results, None where propagation decides. `strict` is `reshard="error"`. Raises ShardingError under it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(traced.graph, copies))  # alternatives are spliced into a copy
    _copy_meta(copies)
    calls = Calls()
    if mesh.size > 1:
        _take_apart(graph, calls)
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    targets: dict[Key, Layout] = {}
    for item, layout in zip(returned, outputs, strict=True):
        if isinstance(item, fx.Node) and layout is not None:
            targets.setdefault(source_of(item), layout)
    emitter = Emitter(mesh)
    pins = {node: _pin(node, mesh) for node in graph.nodes if node.target is constrain_op}
    wishes = sweep(graph, calls, targets, pins, mesh)
    state = Sweep(mesh, calls, emitter, wishes, pins, targets, strict)
    _enter(graph, state, inputs, wanted)
    node = next(iter(graph.nodes))
    while node.op != "output":
        before = node.prev
        if node.op == "call_function":
            state.visit(node)
        node = node.next if before.next is node else before.next
    results, layouts = _leave(state, list(node.args[0]), outputs)
    emitter.graph.output(results)
    emitter.graph.eliminate_dead_code()
    return Partitioned(
        graph=emitter.graph,
        mesh=mesh,
        constants=traced.constants,
        inputs=tuple(inputs),
        dtypes=tuple(node.meta["val"].dtype for node in graph.nodes if node.op == "placeholder"),
        coordinates=tuple(node.name for node in emitter.coordinates.values()),
        outputs=tuple(layouts),
        unruled=tuple(dict.fromkeys(state.unruled)),
    )


def _take_apart(graph: fx.Graph, calls: Calls) -> None:
    """Replace ops over lists of tensors by one op a tensor, before anything is decided."""
    for node in list(graph.nodes):
        if node.op == "call_function" and not isinstance(node.meta["val"], torch.Tensor) and node.target is not getitem:
            bound = calls(node)
            if bound.rule is not None and bound.rule.piecewise:
                splice(bound, {}, calls)


def _copy_meta(copies: dict[fx.Node, fx.Node]) -> None:
    for old, new in copies.items():
        new.meta = dict(old.meta)


def _pin(node: fx.Node, mesh: Mesh) -> Layout:
    spec = pinned(*node.args[1:])  # type: ignore[arg-type]
    return from_entries(mesh, node.meta["val"].shape, spec.entries, spec.unreduced)


def _enter(graph: fx.Graph, state: Sweep, inputs: Sequence[Layout], wanted: Sequence[Layout]) -> None:
    places = [node for node in graph.nodes if node.op == "placeholder"]
    entered = [state.emitter.placeholder(identifier(node.meta["where"])) for node in places]
    for node, local, layout in zip(places, entered, inputs, strict=True):
        state.values[node, 0] = Value(layout, local)
    for node, layout in zip(places, wanted, strict=True):
        if state.values[node, 0].layout is not layout:
            state.values[node, 0] = Value(layout, state.demand((node, 0), layout, node, "input"))
    for node in graph.nodes:
        if node.op == "get_attr":
            layout = replicated(state.mesh, node.meta["val"].shape)
            state.values[node, 0] = Value(layout, state.emitter.graph.get_attr(node.target))


def _leave(
    state: Sweep, returned: Sequence[Any], outputs: Sequence[Layout | None]
) -> tuple[list[Any], list[Layout | None]]:
    results: list[Any] = []
    layouts: list[Layout | None] = []
    for item, wanted in zip(returned, outputs, strict=True):
        if not isinstance(item, fx.Node):
            results.append(item)
            layouts.append(None)
            continue
        key = source_of(item)
        layout = wanted or _expressible(state.natural(key))
        origin = item if "where" in item.meta else key[0]
        results.append(state.demand(key, layout, _Output(origin), "output"))
        layouts.append(layout)
    return results, layouts


def identifier(name: str) -> str:
    """The name of an argument as an identifier.

    >>> identifier("params['layers'][0].weight")
    'params_layers_0_weight'
    >>> identifier("2")
    'arg_2'
    """
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return plain if plain[:1].isalpha() else f"arg_{plain}".rstrip("_")


class _Output:
    """Stands for the program's end as the user of a value, at the line that made the value."""

    def __init__(self, node: fx.Node):
        self.meta = {"where": node.meta.get("where"), "backward": node.meta.get("backward")}


def _expressible(layout: Layout) -> Layout:
    """The nearest layout that a `P` can say: a dim of several split factors keeps its leading axes."""
    if layout.entries is not None:
        return layout
    dims = (leading(dim, layout.mesh) if len(dim) > 1 else dim for dim in layout.dims)
    return Layout(layout.mesh, dims, layout.pending)
