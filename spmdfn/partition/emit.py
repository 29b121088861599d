"""Writing the local program: ops over blocks, slices by device coordinates, and collectives with their rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import collectives
from ..layout import Axes, Dim, Layout, blocks_of
from ..mesh import Mesh
from .calls import Bound, map_structure, paths_of
from .manual import keep, placed
from .reshard import Plan, Step, plans
from .rule import Dims, Local, Operand, Rule

Assignment = Mapping[str, Dim]
"""The layout of every factor of a rule that is split; a factor not in it is whole."""


def local_size(dim: Dim, mesh: Mesh) -> int:
    return math.prod(factor.padded // blocks_of(factor, mesh) for factor in dim)


class Emitter:
    """A local graph in the making. Its first placeholders are this device's coordinates, one int a mesh axis."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.graph = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.coordinates = {axis: self.graph.placeholder(f"at_{axis}") for axis in mesh.axis_names}
        self._places: dict[Axes, fx.Node] = {}

    def placeholder(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def place(self, axes: Axes) -> fx.Node:
        """This device's number in the group of `axes`, major first."""
        if axes not in self._places:
            number = self.coordinates[axes[0]]
            for axis in axes[1:]:
                number = self._int(operator.mul, number, self.mesh.shape[axis])
                number = self._int(operator.add, number, self.coordinates[axis])
            self._places[axes] = number
        return self._places[axes]

    def _int(self, function: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def offset(self, axes: Axes, length: int) -> fx.Node:
        """Where this device's block of that length starts."""
        return self._int(operator.mul, self.place(axes), length) if length != 1 else self.place(axes)

    def call(
        self, bound: Bound, operands: Sequence[fx.Node], assignment: Assignment, where: str | None
    ) -> list[fx.Node]:
        """Emit one op over local blocks; return a node for every tensor result."""

        def fill(argument: Any) -> Any:
            return operands[argument.index] if isinstance(argument, Operand) else argument

        args = map_structure(fill, bound.call.args)
        kwargs = map_structure(fill, dict(bound.call.kwargs))
        rule = bound.rule
        if bound.call.op in collectives.PLACED:
            return [placed(self, bound.call.op, args, bound.node.meta["val"].device.type)]
        if bound.call.op in collectives.COLLECTIVES:
            return [self._named(bound, args, assignment, where)]
        if rule is None or rule.local is None or not (assignment or rule.strided):
            node = self.graph.call_function(bound.call.op, args, kwargs)
            return self._results(node, bound.node.meta["val"], where)

        def proxy(argument: Any) -> Any:
            return fx.Proxy(argument, self.tracer) if isinstance(argument, fx.Node) else argument

        context = _Local(self, rule, assignment)
        value = rule.local(context, *map_structure(proxy, args), **map_structure(proxy, kwargs))
        if isinstance(value, fx.Proxy):
            return self._results(value.node, bound.node.meta["val"], where)
        nodes = [item.node for item in _flat(value)]
        for node in nodes:
            node.meta["where"] = where
        return nodes

    def _named(self, bound: Bound, args: Any, assignment: Assignment, where: str | None) -> fx.Node:
        """Emit a collective of a device-view body, with its row."""
        op, rule = bound.call.op, bound.rule
        place = next(i for i, argument in enumerate(args) if not isinstance(argument, fx.Node))
        axes = tuple(axis for axis in args[place] if self.mesh.shape[axis] > 1)
        if not axes and op is not collectives.ragged_all_to_all and op is not collectives.permute:
            return args[0]
        node = self.graph.call_function(op, (*args[:place], list(axes or args[place]), *args[place + 1 :]))
        assert rule is not None
        numel = math.prod(_Local(self, rule, assignment).in_shape(0))
        name = op._schema.name.removeprefix("spmdfn::")
        n = self._group_size(args, place)
        factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "permute": 1.0}.get(name, (n - 1) / n)
        how = {"all_reduce": 1, "reduce_scatter": 3}.get(name)
        node.meta["where"] = where
        node.meta["row"] = {
            "op": name,
            "reduce": args[place + how] if how else None,
            "axes": axes,
            "bytes": round(factor * numel * bound.call.operands[0].dtype.itemsize),
            "where": where,
            "why": "called in a shard_map",
        }
        return node

    def _group_size(self, args: Any, place: int) -> int:
        cut = next((a for a in args[place + 1 :] if isinstance(a, (list, tuple)) and a), None)
        return cut[0] if cut and len(args) > place + 2 else self.mesh.axis_size(tuple(args[place]))

    def _results(self, node: fx.Node, value: Any, where: str | None) -> list[fx.Node]:
        node.meta["where"] = where
        nodes = []
        for path in paths_of(value):
            result = node
            for index in path:
                result = self.graph.call_function(operator.getitem, (result, index))
            nodes.append(result)
        return nodes

    def convert(
        self, node: fx.Node, source: Layout, target: Layout, dtype: torch.dtype, note: tuple[str | None, str]
    ) -> fx.Node:
        """Emit what leads from one layout to another."""
        for plan in plans(source, target):
            node = self._follow(node, plan, dtype, note)
        return node

    def _follow(self, node: fx.Node, plan: Plan, dtype: torch.dtype, note: tuple[str | None, str]) -> fx.Node:
        shape = list(plan.start)
        if plan.start != plan.source.local_shape:
            node = self._reshape(node, shape)
        for step in plan.steps:
            node = self._step(node, step, shape)
            if step.is_collective:
                where, why = note
                node.meta["where"] = where
                node.meta["row"] = {
                    "op": step.op,
                    "reduce": step.reduce if "reduce" in step.op else None,
                    "axes": step.axes,
                    "bytes": round(step.moved * dtype.itemsize),
                    "where": where,
                    "why": why,
                }
        if tuple(shape) != plan.target.local_shape:
            node = self._reshape(node, plan.target.local_shape)
        return node

    def _reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.graph.call_function(torch.reshape, (node, list(shape)))

    def _step(self, node: fx.Node, step: Step, shape: list[int]) -> fx.Node:
        """Emit one step and update the local shape."""
        call = self.graph.call_function
        axes, dim = list(step.axes), step.dim
        n = self.mesh.axis_size(step.axes)
        if step.op == "slice":
            shape[dim] //= n
            return call(torch.narrow, (node, dim, self.offset(step.axes, shape[dim]), shape[dim]))
        if step.op == "mask":
            return call(keep, (node, self._int(operator.eq, self.place(step.axes), 0)))
        if step.op == "all_reduce":
            return call(collectives.all_reduce, (node, axes, step.reduce))
        if step.op == "reduce_scatter":
            shape[dim] //= n
            return call(collectives.reduce_scatter, (node, axes, n, dim, step.reduce))
        if step.op == "all_gather":
            shape[dim] *= n
            return call(collectives.all_gather, (node, axes, n, dim))
        if step.op == "all_to_all":
            shape[dim] //= n
            shape[step.to_dim] *= n
            return call(collectives.all_to_all, (node, axes, n, dim, step.to_dim))
        return call(collectives.permute, (node, axes, list(step.sources)))


def _flat(value: Any) -> list[fx.Proxy]:
    if isinstance(value, (list, tuple)):
        return [proxy for item in value for proxy in _flat(item)]
    return [value] if isinstance(value, fx.Proxy) else []


class _Local(Local):
    """A device's block of one call; offsets are proxies of ints that follow from its coordinates."""

    def __init__(self, emitter: Emitter, rule: Rule, assignment: Assignment):
        self._emitter, self._rule, self._assignment = emitter, rule, assignment
        self._mesh = emitter.mesh

    def _dim(self, factor: str) -> Dim | None:
        return self._assignment.get(factor)

    def size(self, factor: str) -> int:
        dim = self._dim(factor)
        return self._rule.sizes.get(factor, 1) if dim is None else local_size(dim, self._mesh)

    def is_split(self, factor: str) -> bool:
        return self._dim(factor) is not None

    def offset(self, factor: str) -> Any:
        dim = self._dim(factor)
        if dim is None:
            return 0
        assert factor in self._rule.contiguous and len(dim) == 1, f"factor {factor} is not contiguous"
        return self._proxy(self._emitter.offset(dim[0].axes, self.size(factor)))

    def blocks(self, factor: str) -> Sequence[tuple[int, int, Any]]:
        dim = self._dim(factor)
        if dim is None:
            return ((self.size(factor), 1, 0),)
        pieces: list[tuple[int, int, Any]] = []
        stride = 1
        for piece in reversed(dim):
            length = piece.padded // blocks_of(piece, self._mesh)
            start = self._proxy(self._emitter.offset(piece.axes, length)) if piece.axes else 0
            pieces.append((length, stride, start))
            stride *= piece.size
        return pieces[::-1]

    def _proxy(self, node: fx.Node) -> Any:
        return fx.Proxy(node, self._emitter.tracer)

    def _shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(math.prod(self.size(factor) for factor in dim) for dim in dims)

    def in_shape(self, index: int) -> tuple[int, ...]:
        return self._shape(self._rule.ins[index])

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self._shape(self._rule.outs[index])
