"""The forward sweep: decide the layout of every value in program order, and emit the local program as it goes.

An assignment that moves nothing wins; bytes rank conflicts only; no split is invented; ties go by operand order.
A pending sum is reduced once, where it is made, in the layout that its consumers have. Values that depend on no sharded
tensor (random, arange, zeros and element-wise chains of them) are *free*: made in their consumer's layout, on demand.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from ..constrain import op as constrain_op
from ..errors import ShardingError, message
from ..layout import Layout, replicated
from ..mesh import Mesh
from .alternative import splice
from .assign import Opinion, combine, dims_for, opinion, result_layout, used_axes
from .calls import Bound, Calls, source_of, tensors_in, users_of
from .emit import Emitter
from .outlook import Outlook
from .reshard import moved, plans
from .wishes import Key, Wishes

GATHERS_ALIVE = 8
"""A gathered value is used again only while fewer gathers than this came after it: bounds what is alive at once."""

FREE_DEPTH = 200


class Value(NamedTuple):
    """A value that has been computed: its layout and its node in the local program."""

    layout: Layout
    node: fx.Node


@dataclass
class Choice:
    """An assignment for one call, with the layouts it asks of operands and gives to results."""

    assignment: Opinion
    required: list[Layout | None]
    results: list[Layout]
    moved: float = 0.0


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
    _gathers: int = 0

    def __post_init__(self) -> None:
        self.outlook = Outlook(self.mesh, self.calls, self.wishes, self.pins, self.outputs, self.layout_of)

    # values

    def layout_of(self, key: Key) -> Layout | None:
        """The layout of a value, or None while it is free or not computed yet."""
        value = self.values.get(key)
        return None if value is None else value.layout

    def demand(self, key: Key, layout: Layout, user: fx.Node, why: str) -> fx.Node:
        """A value in a layout, for a user: computed, converted, or found again."""
        if key not in self.values:
            return self._make_free(key, layout, user)
        value = self.values[key]
        if value.layout is layout:
            return value.node
        backward = bool(user.meta.get("backward"))
        found = self._memo.get((key, layout))
        if found is not None:
            node, when, gathers = found
            if gathers < 0 or (when == backward and self._gathers - gathers < GATHERS_ALIVE):
                return node
        where = user.meta.get("where")
        steps = [step for plan in plans(value.layout, layout) for step in plan.steps]
        dtype = tensor_of(key).dtype
        if self.strict and why not in ("constrain", "output"):
            refuse_moves(key, value.layout, layout, dtype, where, why)
        node = self.emitter.convert(value.node, value.layout, layout, dtype, (where, why))
        gathered = any(step.op == "all_gather" for step in steps)
        self._gathers += gathered
        self._memo[key, layout] = (node, backward, self._gathers if gathered else -1)
        return node

    def settle(self, key: Key, layout: Layout, node: fx.Node, user: fx.Node, why: str) -> None:
        """Convert a value for good: every later use takes it from here."""
        old = Value(layout, node)
        target = self.outlook.settled_layout(key, layout)
        dtype = tensor_of(key).dtype
        converted = self.emitter.convert(old.node, old.layout, target, dtype, (user.meta.get("where"), why))
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
        bound = self.calls(node)
        if bound.rule is None:
            self._run_whole(bound)
        elif (splits := self._whole_splits(bound)) and bound.rule.alternative is not None:
            for old, new in splice(bound, splits, self.calls).items():
                for table in (self.wishes, self.outputs):
                    if old in table:
                        table.setdefault(new, table[old])  # type: ignore[attr-defined]
        elif self._is_free(bound):
            return
        else:
            self._run(bound, self._choose(bound))

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

    def _make_free(self, key: Key, layout: Layout, user: fx.Node) -> fx.Node:
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
        """The layout of a free value that nobody asked for: that of the operands whose shape it took."""
        layout = self.layout_of(key)
        if layout is not None:
            return layout.settled
        bound = self.calls(key[0])
        rule = bound.rule
        assert rule is not None
        opinions = [
            opinion(rule, rule.ins[place], self.natural(source_of(operand)).dims, self.mesh)
            for place, operand in enumerate(bound.operands)
        ]
        return result_layout(rule, 0, combine(opinions, self.mesh)[0], (), self.mesh)

    # decisions

    def _choose(self, bound: Bound) -> Choice:
        rule = bound.rule
        assert rule is not None
        opinions: list[Opinion] = []
        settled: set[str] = set()
        for place in sorted(range(len(bound.operands)), key=lambda place: place not in rule.follow):
            layout = self.layout_of(source_of(bound.operands[place]))
            if layout is not None and place not in rule.shape_only:
                settled.update(name for names in rule.ins[place] for name in names)
                opinions.append(opinion(rule, rule.ins[place], layout.dims, self.mesh))
        fill: Opinion = {}
        if not settled.issuperset(rule.sizes):  # some factors are left to a wish
            fill = {name: dim for name, dim in self._wish(bound).items() if name not in settled}
        assignment, clash = combine([*opinions, fill], self.mesh)
        first = self._outcome(bound, assignment)
        if not clash or rule.follow:
            return first
        choices = [first]
        for i in range(1, len(opinions)):
            order = [opinions[i], *opinions[:i], *opinions[i + 1 :], fill]
            choices.append(self._outcome(bound, combine(order, self.mesh)[0]))
        if wish := self._wish(bound, near=True):
            choices.append(self._outcome(bound, combine([wish, *opinions], self.mesh)[0]))
        for choice in choices:
            choice.moved = self._cost(bound, choice)
        return min(choices, key=lambda choice: choice.moved)

    def _wish(self, bound: Bound, *, near: bool = False) -> Opinion:
        """What the consumers of the first result would like, if some factor is not settled or opinions clash."""
        rule = bound.rule
        assert rule is not None
        target = self.outlook.target((bound.node, 0), near=near) if rule.outs else None
        return {} if target is None else opinion(rule, rule.outs[0], target, self.mesh)

    def _outcome(self, bound: Bound, assignment: Opinion) -> Choice:
        rule = bound.rule
        assert rule is not None
        group, passed = self.outlook.passing(bound, used_axes(assignment))
        required: list[Layout | None] = []
        for place in range(len(bound.operands)):
            pending = [(axis, "sum") for axis in passed] if place in group else []
            if place in rule.shape_only:
                required.append(None)
            else:
                required.append(Layout(self.mesh, dims_for(rule, rule.ins[place], assignment, self.mesh), pending))
        results = [result_layout(rule, i, assignment, passed, self.mesh) for i in range(len(rule.outs))]
        return Choice(assignment, required, results)

    def _cost(self, bound: Bound, choice: Choice) -> float:
        """Bytes that a choice moves: its operands (a shared gather counts in part), its sums, and towards its wish."""
        total = 0.0
        backward = bound.node.meta.get("backward")
        for operand, layout in zip(bound.operands, choice.required, strict=True):
            key = source_of(operand)
            value = self.values.get(key)
            if layout is None or value is None or value.layout is layout:
                continue
            found = self._memo.get((key, layout))
            if found is not None and found[1] == bool(backward) and self._gathers - found[2] < GATHERS_ALIVE:
                continue
            total += moved(value.layout, layout) * operand.meta["val"].dtype.itemsize / self._sharers(key, bound.node)
        for place, layout in enumerate(choice.results):
            target = self.outlook.settled_layout((bound.node, place), layout)
            wanted = self.outlook.towards_target((bound.node, place), target)
            elements = moved(layout, target) + moved(target, wanted)
            total += elements * bound.call.results[place].dtype.itemsize
        return total

    def _sharers(self, key: Key, user: fx.Node) -> int:
        """How many consumers of the same pass cannot take a value as it is: they share what moving it costs."""
        count = 1
        for other in users_of(key[0])[key[1]]:
            if other is not user and other.meta.get("backward") == user.meta.get("backward"):
                count += self._clashes(other)
        return count

    def _clashes(self, user: fx.Node) -> bool:
        if user.op != "call_function" or user.target is constrain_op:
            return False
        bound = self.calls(user)
        if bound.rule is None:
            return False
        opinions = []
        for place, operand in enumerate(bound.operands):
            dims = self.outlook.expected(source_of(operand))
            if dims is not None and place not in bound.rule.shape_only:
                opinions.append(opinion(bound.rule, bound.rule.ins[place], dims, self.mesh))
        return combine(opinions, self.mesh)[1]

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
