"""The backward sweep: which layout an out spec or `constrain` further down would like each value to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..constrain import op as constrain_op
from ..layout import Dim, Layout, axes_of
from ..mesh import Mesh
from .assign import dims_for, opinion
from .calls import Calls, source_of

Key = tuple[fx.Node, int]
Wishes = dict[Key, tuple[Dim, ...]]


def sweep(
    graph: fx.Graph, calls: Calls, outputs: Mapping[Key, Layout], pins: Mapping[fx.Node, Layout], mesh: Mesh
) -> Wishes:
    """Wishes of values, from the program's end to its beginning, up through element-wise ops and views."""
    wishes: Wishes = {key: layout.dims for key, layout in outputs.items() if layout.axes}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is constrain_op:
            _wish(wishes, source_of(node.args[0]), pins[node].dims)
            continue
        dims = wishes.get((node, 0))
        if dims is None:
            continue
        bound = calls(node)
        rule = bound.rule
        if rule is None or not rule.elementwise or len(rule.outs) != 1:
            continue
        wanted = opinion(rule, rule.outs[0], dims, mesh)
        for place, operand in enumerate(bound.operands):
            if place not in rule.shape_only:
                _wish(wishes, source_of(operand), dims_for(rule, rule.ins[place], wanted, mesh))
    return wishes


def _wish(wishes: Wishes, key: Key, dims: Sequence[Dim]) -> None:
    if key not in wishes and any(axes_of(dim) for dim in dims):
        wishes[key] = tuple(dims)
