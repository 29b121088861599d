"""What lies ahead of a value: the layouts its consumers have, and whether they can take it as a pending sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from ..collectives import enter
from ..constrain import op as constrain_op
from ..layout import Dim, Layout, axes_of, replicated
from ..mesh import Mesh
from .assign import combine, dims_for, opinion
from .calls import Bound, Calls, source_of, users_of
from .manual import BORDER, outside
from .wishes import Key, Wishes

DEPTH = 6
"""How many element-wise ops a peek looks through."""


@dataclass
class Outlook:
    mesh: Mesh
    calls: Calls
    wishes: Wishes
    pins: dict[fx.Node, Layout]
    outputs: dict[Key, Layout]
    layout_of: Callable[[Key], Layout | None]

    def target(self, key: Key, *, near: bool = False) -> tuple[Dim, ...] | None:
        """The dims that consumers would like: the wish from below, else the layouts that sibling operands have.

        `near` asks element-wise consumers only: what a weight further down has is no reason to move an activation.
        """
        return self.wishes.get(key) or self._peek(key, 0, near)

    def _peek(self, key: Key, depth: int, near: bool) -> tuple[Dim, ...] | None:
        for user in users_of(key[0])[key[1]]:
            dims = self._peek_user(key, user, depth, near)
            if dims is not None and any(axes_of(dim) for dim in dims):
                return dims
        return None

    def _peek_user(self, key: Key, user: fx.Node, depth: int, near: bool) -> tuple[Dim, ...] | None:
        if user.op == "output":
            layout = self.outputs.get(key)
            return layout.dims if layout is not None else None
        if user.target is constrain_op:
            return self.pins[user].dims
        if user.target in BORDER:
            if user.target is not enter:
                return None
            shape = user.args[0].meta["val"].shape  # type: ignore[union-attr]
            return outside(user, replicated(self.mesh, shape)).dims
        bound = self.calls(user)
        rule = bound.rule
        if rule is None or (near and not rule.elementwise):
            return None
        mine, opinions = None, []
        kinds = () if rule.alternative is None else ("whole",)  # an alternative would split those too
        for place, operand in enumerate(bound.operands):
            source = source_of(operand)
            if source == key:
                mine = place
                continue
            layout = self.layout_of(source)
            if layout is not None and layout.axes and place not in rule.shape_only:
                opinions.append(opinion(rule, rule.ins[place], layout.dims, self.mesh, kinds=kinds))
        if mine is None or mine in rule.shape_only:
            return None
        wanted = combine(opinions, self.mesh)[0]
        dims = dims_for(rule, rule.ins[mine], wanted, self.mesh)
        if any(axes_of(dim) for dim in dims):
            return dims
        if rule.elementwise and len(rule.outs) == 1 and depth < DEPTH:
            below = self.wishes.get((user, 0)) or self._peek((user, 0), depth + 1, near)
            if below is not None:
                return dims_for(rule, rule.ins[mine], opinion(rule, rule.outs[0], below, self.mesh), self.mesh)
        return None

    def expected(self, key: Key) -> tuple[Dim, ...] | None:
        """The dims of a value, or those it will have if it is a view of values that are computed."""
        layout = self.layout_of(key)
        if layout is not None:
            return layout.dims
        if key[0].op != "call_function" or key[0].target is constrain_op:
            return None
        bound = self.calls(key[0])
        rule = bound.rule
        if rule is None or not rule.elementwise or len(bound.operands) != 1 or rule.shape_only:
            return None
        below = self.expected(source_of(bound.operands[0]))
        if below is None:
            return None
        return dims_for(rule, rule.outs[0], opinion(rule, rule.ins[0], below, self.mesh), self.mesh)

    def settled_layout(self, key: Key, layout: Layout) -> Layout:
        """Where a pending value is to be reduced to: its own dims, split further as its consumers are."""
        if not layout.pending:
            return layout
        target = self.target(key)
        if target is None or any(op != "sum" for _, op in layout.pending):
            return layout.settled
        dims, used = list(layout.dims), set(layout.axes)
        for i, (have, want) in enumerate(zip(layout.dims, target, strict=True)):
            axes, wanted = axes_of(have), axes_of(want)
            extra = wanted[len(axes) :]
            if wanted[: len(axes)] == axes and layout.pending_axes.intersection(extra) and not used.intersection(extra):
                dims[i] = want
                used.update(extra)
        return Layout(self.mesh, dims)

    def towards_target(self, key: Key, layout: Layout) -> Layout:
        """The layout with the splits that consumers have; other splits stay where they do not stand in the way."""
        target = self.target(key, near=True)
        if target is None or layout.pending:
            return layout
        wanted = {axis for dim in target for axis in axes_of(dim)}
        dims = []
        for have, want in zip(layout.dims, target, strict=True):
            if axes_of(want) or wanted.intersection(axes_of(have)):
                dims.append(want)
            else:
                dims.append(have)
        return Layout(self.mesh, dims)

    def passing(self, bound: Bound, used: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
        """The operands that may stay pending sums in this call, and over which axes: unary linear ops and sums of
        pending values pass them on; an op that combines a pending value with another tensor does not."""
        none: tuple[frozenset[int], tuple[str, ...]] = (frozenset(), ())
        rule = bound.rule
        if rule is None or len(rule.outs) != 1:
            return none
        pending = [self.layout_of(source_of(operand)) for operand in bound.operands]
        if not any(layout is not None and layout.pending for layout in pending):
            return none
        for group in self._groups(bound):
            if self._joins(bound, group):  # the scalars that are not pending are kept on one device: one sum for all
                sums = [layout.pending for layout in pending if layout is not None]
                if all(op == "sum" for layout in sums for _, op in layout):
                    return group, tuple(sorted({axis for layout in sums for axis, _ in layout}))
            axes: set[str] | None = None
            for place in group:
                layout = pending[place]
                mine = {axis for axis, op in layout.pending if op == "sum"} if layout is not None else set()
                axes = mine if axes is None else axes & mine
            found = sorted((axes or set()).difference(used))
            if found:
                return group, tuple(found)
        return none

    def _groups(self, bound: Bound) -> list[frozenset[int]]:
        """The linear groups that hold every operand with dims."""
        rule = bound.rule
        assert rule is not None
        tensors = {o.index for o in bound.call.operands if o.shape and o.index not in rule.shape_only}
        return [group for group in rule.linear if tensors <= group or (not tensors and group)]

    def _joins(self, bound: Bound, group: frozenset[int]) -> bool:
        """Whether a call adds scalars, so that sums over different axes may wait for each other."""
        return len(group) > 1 and len(group) == len(bound.operands) and not any(o.shape for o in bound.call.operands)

    def needs_settled(self, key: Key) -> bool:
        """Whether some consumer, through unary linear ops, cannot take the value as a pending sum."""
        layout = self.layout_of(key)
        assert layout is not None
        users = users_of(key[0])[key[1]]
        return any(self._user_needs(key, user, layout.pending_axes) for user in users)

    def _user_needs(self, key: Key, user: fx.Node, axes: frozenset[str]) -> bool:
        if user.op == "output":
            layout = self.outputs.get(key)
            return layout is None or not axes <= layout.pending_axes
        if user.target is constrain_op:
            return not axes <= self.pins[user].pending_axes
        bound = self.calls(user)
        rule = bound.rule
        if rule is None or len(rule.outs) != 1:
            return True
        places = {place for place, operand in enumerate(bound.operands) if source_of(operand) == key}
        places -= rule.shape_only
        if not places:
            return False
        for group in self._groups(bound):
            if places <= group:
                others = [source_of(bound.operands[place]) for place in group - places]
                if self._joins(bound, group):
                    return False
                if not others:
                    return any(self._user_needs((user, 0), next_, axes) for next_ in users_of(user)[0])
                if all(self._may_be_pending(other, axes) for other in others):
                    return False
        return True

    def _may_be_pending(self, key: Key, axes: frozenset[str]) -> bool:
        layout = self.layout_of(key)
        if layout is None:
            bound = self.calls(key[0]) if key[0].op == "call_function" and key[0].target is not constrain_op else None
            return bound is not None and bool(bound.operands)  # not computed yet: it may turn out so
        return axes <= layout.pending_axes
