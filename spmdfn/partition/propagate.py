"""The forward sweep: decide the layout of every value in program order, and emit the local program as it goes.

An assignment that moves nothing wins; bytes rank conflicts only; no split is invented; ties go by operand order.
A pending sum is reduced once, where it is made, in the layout that its consumers have. Values that depend on no sharded
tensor (random, arange, zeros and element-wise chains of them) are *free*: made in their consumer's layout, on demand.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from .. import collectives
from ..constrain import op as constrain_op
from ..errors import ShardingError, message
from ..layout import Layout, replicated
from ..mesh import Mesh
from .alternative import splice
from .assign import combine, dims_for, opinion, result_layout
from .calls import Bound, Calls, source_of, tensors_in
from .choose import Choice, Chooser
from .emit import Emitter
from .manual import BORDER, inside, left, outside
from .outlook import Outlook
from .reshard import moved, plans
from .wishes import Key, Wishes

GATHERS_ALIVE = 8
"""A gathered value is used again only while fewer gathers than this came after it: bounds what is alive at once."""

FREE_DEPTH = 200


class User(Protocol):
    """What uses a value: a node, or the program's end. Its `meta` holds the line and the pass."""

    meta: dict[str, Any]


class Value(NamedTuple):
    """A value that has been computed: its layout and its node in the local program."""

    layout: Layout
    node: fx.Node


@dataclass
class Sweep:
    """The state of the forward sweep. `strict` refuses communication that no spec asked for."""

    mesh: Mesh
    calls: Calls
    emitter: Emitter
    wishes: Wishes
    pins: dict[fx.Node, Layout]
    outputs: dict[Key, Layout]
    strict: bool = False
    values: dict[Key, Value] = field(default_factory=dict)
    free: dict[fx.Node, int] = field(default_factory=dict)
    unruled: list[tuple[str, str | None]] = field(default_factory=list)
    _memo: dict[tuple[Key, Layout], tuple[fx.Node, bool, int]] = field(default_factory=dict)
    _natural: dict[Key, Layout] = field(default_factory=dict)
    _gathers: int = 0

    def __post_init__(self) -> None:
        self.outlook = Outlook(self.mesh, self.calls, self.wishes, self.pins, self.outputs, self.layout_of)
        self.chooser = Chooser(self.mesh, self.calls, self.outlook, self.price)

    # values

    def layout_of(self, key: Key) -> Layout | None:
        """The layout of a value, or None while it is free or not computed yet."""
        value = self.values.get(key)
        return None if value is None else value.layout

    def demand(self, key: Key, layout: Layout, user: User, why: str) -> fx.Node:
        """A value in a layout, for a user: computed, converted, or found again."""
        if key not in self.values:
            return self._make_free(key, layout, user)
        value = self.values[key]
        if value.layout is layout:
            return value.node
        found = self._memo.get((key, layout))
        if found is not None and self._lasts(found, user):
            return found[0]
        where = user.meta.get("where")
        steps = [step for plan in plans(value.layout, layout) for step in plan.steps]
        dtype = tensor_of(key).dtype
        if self.strict and why not in ("constrain", "output"):
            refuse_moves(key, value.layout, layout, dtype, where, why)
        node = self.emitter.convert(value.node, value.layout, layout, dtype, (where, why))
        gathered = any(step.op == "all_gather" for step in steps)
        self._gathers += gathered
        self._memo[key, layout] = (node, bool(user.meta.get("backward")), self._gathers if gathered else -1)
        return node

    def price(self, key: Key, layout: Layout, user: User) -> float:
        """Bytes that a user would move to have a value in a layout: none if it is free, so already, or found again."""
        value = self.values.get(key)
        if value is None or value.layout is layout:
            return 0.0
        found = self._memo.get((key, layout))
        if found is not None and self._lasts(found, user):
            return 0.0
        return moved(value.layout, layout) * tensor_of(key).dtype.itemsize

    def _lasts(self, found: tuple[fx.Node, bool, int], user: User) -> bool:
        """Whether an earlier conversion may serve a user: a gathered value only within its pass, and not for long.

        What is computed again in the backward takes nothing from the forward, or it would be kept until then.
        """
        _, backward, gathers = found
        same_pass = backward == bool(user.meta.get("backward"))
        if gathers < 0:
            return same_pass or user.meta.get("recompute") is None
        return same_pass and self._gathers - gathers < GATHERS_ALIVE

    def settle(self, key: Key, layout: Layout, node: fx.Node, user: User, why: str) -> None:
        """Convert a value for good: every later use takes it from here."""
        target = self.outlook.settled_layout(key, layout)
        dtype = tensor_of(key).dtype
        converted = self.emitter.convert(node, layout, target, dtype, (user.meta.get("where"), why))
        self.values[key] = Value(target, converted)

    # the sweep

    def visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            return
        if node.target is constrain_op:
            operand = source_of(node.args[0])  # type: ignore[arg-type]
            layout = self.pins[node]
            self.values[node, 0] = Value(layout, self.demand(operand, layout, node, "constrain"))
            return
        if node.target in BORDER:
            self._cross(node)
            return
        bound = self.calls(node)
        if bound.rule is None:
            self._run_whole(bound)
        elif (splits := self._whole_splits(bound)) and bound.rule.alternative is not None:
            for old, new in splice(bound, splits, self.calls).items():
                if old in self.wishes:
                    self.wishes.setdefault(new, self.wishes[old])
                if old in self.outputs:
                    self.outputs.setdefault(new, self.outputs[old])
        elif self._is_free(bound):
            return
        else:
            self._run(bound, self.chooser.choose(bound))

    def _cross(self, node: fx.Node) -> None:
        """The border of a device-view body: a global value becomes a block, or a block a global value."""
        operand = source_of(node.args[0])  # type: ignore[arg-type]
        natural = self.natural(operand)
        if node.target is collectives.enter:
            layout = outside(node, natural)
            local = self.demand(operand, layout, node, "in_specs of a shard_map")
            self.values[node, 0] = Value(inside(node, layout), local)
        else:
            self.values[node, 0] = Value(left(node, natural), self.demand(operand, natural, node, "out_specs"))

    def _whole_splits(self, bound: Bound) -> dict[str, int]:
        """The "whole" factors on which some operand is split, with the number of their blocks."""
        rule = bound.rule
        assert rule is not None
        splits: dict[str, int] = {}
        if rule.alternative is None:
            return splits
        for place, operand in enumerate(bound.operands):
            layout = self.layout_of(source_of(operand))
            if layout is None or not layout.axes:
                continue
            for name, dim in opinion(rule, rule.ins[place], layout.dims, self.mesh, kinds=["whole"]).items():
                if rule.kind(name) == "whole" and len(dim) == 1:
                    splits[name] = self.mesh.axis_size(dim[0].axes)
        return splits

    def _run_whole(self, bound: Bound) -> None:
        """No rule: gather every operand and run replicated."""
        node = bound.node
        name = str(bound.call.op)
        nodes = [
            self.demand(source_of(o), replicated(self.mesh, o.meta["val"].shape), node, f"no rule for {name}")
            for o in bound.operands
        ]
        where = node.meta.get("where")
        self.unruled.append((name, where))
        for place, result in enumerate(self.emitter.call(bound, nodes, {}, where)):
            self.values[node, place] = Value(replicated(self.mesh, bound.call.results[place].shape), result)

    # free values

    def _is_free(self, bound: Bound) -> bool:
        """Mark the call as free if it is element-wise over free values, scalars and keys."""
        rule = bound.rule
        assert rule is not None
        if not rule.elementwise or len(rule.outs) != 1:
            return False
        depth = 0
        for place, operand in enumerate(bound.operands):
            key = source_of(operand)
            if place in rule.shape_only:
                continue
            if key[0] in self.free:
                depth = max(depth, self.free[key[0]] + 1)
                continue
            layout = self.values[key].layout
            scalar = not layout.shape and not layout.pending
            if not scalar and not (is_key(operand) and layout.is_whole):
                return False
        if depth > FREE_DEPTH:
            return False
        self.free[bound.node] = depth
        return True

    def _make_free(self, key: Key, layout: Layout, user: User) -> fx.Node:
        found = self._memo.get((key, layout))
        if found is not None:
            return found[0]
        node = key[0]
        bound = self.calls(node)
        rule = bound.rule
        assert rule is not None and node in self.free
        assignment = opinion(rule, rule.outs[0], layout.dims, self.mesh)
        made = result_layout(rule, 0, assignment, (), self.mesh)
        nodes = []
        for place, operand in enumerate(bound.operands):
            required = Layout(self.mesh, dims_for(rule, rule.ins[place], assignment, self.mesh))
            if place in rule.shape_only:
                nodes.append(self._shape_of(operand, required))
            else:
                nodes.append(self.demand(source_of(operand), required, node, f"operand {place} of {name_of(bound)}"))
        result = self.emitter.call(bound, nodes, assignment, node.meta.get("where"))[0]
        note = (user.meta.get("where"), "free value")
        result = self.emitter.convert(result, made, layout, bound.call.results[0].dtype, note)
        self._memo[key, layout] = (result, False, -1)
        return result

    def _shape_of(self, operand: fx.Node, layout: Layout) -> fx.Node:
        """A stand-in for an operand of which only the shape matters: nothing is moved or kept alive for it."""
        key = source_of(operand)
        value = self.values.get(key)
        if value is not None and value.layout is layout:
            return value.node
        tensor = operand.meta["val"]
        options = {"dtype": tensor.dtype, "device": tensor.device.type}
        return self.emitter.graph.call_function(torch.empty, (list(layout.local_shape),), options)

    def natural(self, key: Key) -> Layout:
        """The layout of a free value that nobody asked for: its wish, else that of the operands whose shape it took."""
        layout = self.layout_of(key)
        if layout is not None:
            return layout.settled
        if key in self.wishes:
            return Layout(self.mesh, self.wishes[key])
        if key in self._natural:
            return self._natural[key]
        bound = self.calls(key[0])
        rule = bound.rule
        assert rule is not None
        opinions = [
            opinion(rule, rule.ins[place], self.natural(source_of(operand)).dims, self.mesh)
            for place, operand in enumerate(bound.operands)
        ]
        found = self._natural[key] = result_layout(rule, 0, combine(opinions, self.mesh)[0], (), self.mesh)
        return found

    # running

    def _run(self, bound: Bound, choice: Choice) -> None:
        node, rule = bound.node, bound.rule
        assert rule is not None
        nodes = []
        for place, (operand, layout) in enumerate(zip(bound.operands, choice.required, strict=True)):
            if layout is None:
                required = Layout(self.mesh, dims_for(rule, rule.ins[place], choice.assignment, self.mesh))
                nodes.append(self._shape_of(operand, required))
                continue
            key = source_of(operand)
            if key in self.values and self.values[key].layout.pending and not layout.pending:
                self.settle(key, *self.values[key], user=node, why=f"pending sum for {name_of(bound)}")
            nodes.append(self.demand(key, layout, node, f"operand {place} of {name_of(bound)}"))
        results = self.emitter.call(bound, nodes, choice.assignment, node.meta.get("where"))
        for place, (result, layout) in enumerate(zip(results, choice.results, strict=True)):
            key = (node, place)
            self.values[key] = Value(layout, result)
            if layout.pending and (any(op != "sum" for _, op in layout.pending) or self.outlook.needs_settled(key)):
                self.settle(key, layout, result, node, f"{layout.pending[0][1]} of {name_of(bound)}")


def name_of(bound: Bound) -> str:
    return str(bound.call.op).removeprefix("aten.").rsplit(".", 1)[0]


def tensor_of(key: Key) -> torch.Tensor:
    return tensors_in(key[0].meta["val"])[key[1]]


def is_key(operand: fx.Node) -> bool:
    """Random keys are small, replicated and uint32: a value drawn from one depends on no sharded tensor."""
    return operand.meta["val"].dtype == torch.uint32


def refuse_moves(key: Key, source: Layout, target: Layout, dtype: torch.dtype, where: str | None, why: str) -> None:
    """`reshard="error"`: only the reductions of pending sums may communicate unasked."""
    steps = [step for plan in plans(source, target) for step in plan.steps if step.is_collective]
    refused = [step for step in steps if step.op not in ("all_reduce", "reduce_scatter")]
    if refused:
        step = refused[0]
        size = round(step.moved * dtype.itemsize)
        raise ShardingError(
            message(
                f'reshard="error": {step.op} over {", ".join(step.axes)} of {size} bytes was not asked for',
                f"why: {why}",
                f"where: {where}" if where else "",
                f"from {source!r} to {target!r}",
                fix=f'lay the value out as {target!r} with in_specs or sp.constrain, or allow reshard="auto" '
                f"({size} bytes per device and call)",
            )
        )
