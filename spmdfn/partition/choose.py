"""Choosing how one call is split: which factors over which axes, and what that asks of its operands.

An assignment that moves nothing wins; bytes rank clashes only; no split is invented; ties go by operand order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ..constrain import op as constrain_op
from ..layout import Layout
from ..mesh import Mesh
from .assign import Opinion, combine, dims_for, opinion, result_layout, used_axes
from .calls import Bound, Calls, source_of, users_of
from .outlook import Outlook
from .reshard import moved
from .wishes import Key


@dataclass
class Choice:
    """An assignment for one call, with the layouts it asks of operands and gives to results."""

    assignment: Opinion
    required: list[Layout | None]
    results: list[Layout]
    moved: float = 0.0


@dataclass
class Chooser:
    """Chooses for one call after another. `price` tells what a user pays for a value in a layout."""

    mesh: Mesh
    calls: Calls
    outlook: Outlook
    price: Callable[[Key, Layout, fx.Node], float]

    def choose(self, bound: Bound) -> Choice:
        rule = bound.rule
        assert rule is not None
        opinions: list[Opinion] = []
        settled: set[str] = set()
        for place in sorted(range(len(bound.operands)), key=lambda place: place not in rule.follow):
            layout = self.outlook.layout_of(source_of(bound.operands[place]))
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
        for operand, layout in zip(bound.operands, choice.required, strict=True):
            key = source_of(operand)
            if layout is not None and (price := self.price(key, layout, bound.node)):
                total += price / self._sharers(key, bound.node)
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
