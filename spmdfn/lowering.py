"""From a call's arguments and specs to a `Compiled`: trace once, resolve the layouts at the border, partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import fx

from ._compat import is_traced
from .aliases import aliased
from .array import Array, layout_of, spec_of
from .compiled import Compiled, Entry, Exit
from .errors import SpecError, SpmdError, message
from .layout import Layout, from_entries, replicated
from .mesh import Mesh, resolve_mesh, set_mesh
from .partition.engine import partition
from .partition.trace import Traced, trace
from .program import Program
from .signature import Leaf, Signature
from .spec import Resolved, Spec, resolve, with_context
from .tree import broadcast_specs, flatten, leaf_paths, unflatten


@dataclass(frozen=True)
class TracedCall:
    """A traced function with the structure of its result; `values[i]` is result i where that is no tensor."""

    traced: Traced
    treedef: optree.PyTreeSpec
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """One call's arguments: their leaves, and the names and specs of those."""

    signature: Signature
    treedef: optree.PyTreeSpec
    leaves: Sequence[Any]
    given: Sequence[Leaf]
    mesh: Mesh

    @property
    def places(self) -> list[int]:
        """The places of tensors among the leaves."""
        return [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]


def mesh_of_call(signature: Signature, names: Sequence[str], leaves: Sequence[Any], mesh: Mesh | None) -> Mesh:
    """The mesh of the transform, else of the Array arguments, else the current one; SpecError if two disagree."""
    source = "the function's mesh"
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Array):
            continue
        if mesh is None:
            mesh, source = leaf.mesh, f"argument {name} is on"
        elif mesh is not leaf.mesh:
            raise SpecError(
                message(
                    f"{signature.label}: arguments on two meshes",
                    f"argument {name} is on {leaf.mesh!r}",
                    f"{source} {mesh!r}",
                    fix="move the argument first: sp.shard(x, spec, mesh=mesh)",
                )
            )
    try:
        return resolve_mesh(mesh)
    except SpecError as error:
        raise with_context(error, f"function: {signature.label}") from None


def trace_call(call: Call) -> TracedCall:
    """Trace the function over this call's shapes. TracingError, with the function's name, if it cannot be traced."""
    input_layouts(call)  # arguments that do not fit their specs are told before the function sees them
    signature, places = call.signature, call.places
    treedef: optree.PyTreeSpec | None = None

    def flat(*values: torch.Tensor) -> list[Any]:
        nonlocal treedef
        leaves = list(call.leaves)
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        results, treedef = flatten(signature.call(call.treedef, leaves))
        return results

    tensors = [call.leaves[place] for place in places]
    names = [call.given[place].name for place in places]
    with set_mesh(call.mesh), torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            traced = trace(flat, tensors, names=names, capture=lambda value: isinstance(value, Array))
        except SpmdError as error:
            raise named(error, f"function: {signature.label}") from error.__cause__
    assert treedef is not None
    _check_captured(call, traced)
    return TracedCall(traced, treedef, _take_values(traced.graph))


def _take_values(graph: fx.Graph) -> tuple[Any, ...]:
    """Take what is no tensor out of the graph's results: any object may be there."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    output.args = ([item if isinstance(item, fx.Node) else None for item in results],)
    return tuple(None if isinstance(item, fx.Node) else item for item in results)


def _check_captured(call: Call, traced: Traced) -> None:
    for array in traced.captured:
        if array.mesh is not call.mesh:
            raise SpecError(
                message(
                    f"{call.signature.label}: a closed-over Array is on another mesh",
                    f"the Array {array!r} is on {array.mesh!r}",
                    f"the function runs on {call.mesh!r}",
                    fix="move it first: sp.shard(x, spec, mesh=mesh)",
                )
            )


def lower(call: Call, traced_call: TracedCall, out_specs: Any, *, strict: bool) -> Compiled:
    """Partition a traced call for the layouts of its arguments. SpecError or ShardingError, with names and paths."""
    label, traced = call.signature.label, traced_call.traced
    own, wanted = input_layouts(call)
    captured = tuple(traced.captured)
    extra = [layout_of(array) for array in captured]
    outputs, exits = _outputs(call, traced_call, out_specs)
    try:
        parts = partition(traced, call.mesh, [*own, *extra], [*wanted, *extra], outputs, strict=strict)
    except SpmdError as error:
        raise named(error, f"function: {label}") from None
    shared = aliased(parts.graph)
    inputs = [node for node in parts.graph.nodes if node.op == "placeholder"][len(call.mesh.axis_names) :]
    entries = []
    for place, layout, node in zip(call.places, wanted, inputs, strict=False):
        plain = not isinstance(call.leaves[place], Array)
        entries.append(Entry(place, layout if plain else None, copy=node in shared))
    names = tuple(leaf.name for leaf in call.given)
    dataless = (names[place] for place in call.places if is_dataless(call.leaves[place]))
    return Compiled(
        Program(parts),
        label,
        names,
        tuple(entries),
        captured,
        exits,
        traced_call.treedef,
        call.signature.donated(call.treedef),
        next(dataless, None),
    )


def is_dataless(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a shape only."""
    return not isinstance(tensor, Array) and (tensor.device.type == "meta" or is_traced(tensor))


def input_layouts(call: Call) -> tuple[list[Layout], list[Layout]]:
    """The layouts that arguments come in, and those that their specs ask for."""
    own, wanted = [], []
    bound: dict[str, tuple[int, str]] = {}
    for place in call.places:
        tensor, leaf = call.leaves[place], call.given[place]
        has = layout_of(tensor) if isinstance(tensor, Array) else None
        if leaf.spec is None:
            wants = has if has is not None else replicated(call.mesh, tensor.shape)
        else:
            names: dict[str, int] = {}
            resolved = _resolve(call, leaf.spec, tensor.shape, f"argument: {leaf.name}", names)
            if leaf.shares_names:
                _share(call, leaf, names, bound)
            wants = from_entries(call.mesh, tensor.shape, *resolved)
        own.append(has if has is not None else wants)
        wanted.append(wants)
    return own, wanted


def _resolve(call: Call, spec: Spec, shape: Sequence[int], where: str, names: dict[str, int] | None = None) -> Resolved:
    try:
        return resolve(spec, shape, call.mesh, bindings=names)
    except SpecError as error:
        raise with_context(error, where, f"function: {call.signature.label}") from None


def _share(call: Call, leaf: Leaf, names: dict[str, int], bound: dict[str, tuple[int, str]]) -> None:
    """A free name of whole-argument patterns means one size in all of them."""
    for name, size in names.items():
        known, first = bound.setdefault(name, (size, leaf.name))
        if known != size:
            grouped = "(" in str(leaf.spec)
            raise SpecError(
                message(
                    f"{call.signature.label}: the name {name!r} binds two sizes: {known} in the argument {first}, "
                    f"{size} in the argument {leaf.name}",
                    f'pattern: "{leaf.spec}"',
                    f"mesh: {call.mesh!r}",
                    "in a group with an axis, a name is the size of one device's block" if grouped else "",
                    fix='make the sizes equal, give the dims different names, or "_" for one that is not compared',
                )
            )


def _outputs(call: Call, traced_call: TracedCall, out_specs: Any) -> tuple[list[Layout | None], tuple[Exit, ...]]:
    """The layout that each result is to have (None: as propagation gives it), and how it comes back."""
    label = call.signature.label
    if out_specs is None:
        out_specs = call.signature.annotated["return"]
    treedef = traced_call.treedef
    try:
        given = broadcast_specs(out_specs, unflatten(treedef, range(treedef.num_leaves)), name="out_specs")
    except SpecError as error:
        raise with_context(error, f"function: {label}") from None
    layouts: list[Layout | None] = []
    exits = []
    items = traced_call.traced.graph.output_node().args[0]
    for item, value, spec, path in zip(items, traced_call.values, given, leaf_paths(treedef), strict=True):  # type: ignore[arg-type]
        if not isinstance(item, fx.Node) or spec is None:
            layouts.append(None)
            exits.append(Exit(value=value))
            continue
        shape = item.meta["val"].shape
        resolved = _resolve(call, spec, shape, f"result: out_specs{path}")
        layouts.append(from_entries(call.mesh, shape, *resolved))
        exits.append(Exit(spec_of(resolved)))
    return layouts, tuple(exits)


def named(error: SpmdError, *details: str) -> SpmdError:
    """The same error, of its class, with more details before its fix; one function is named."""
    details = tuple(one for one in details if not (one.startswith("function: ") and "\n  function: " in str(error)))
    told = type(error)(str(with_context(SpecError(str(error)), *details)))
    return told.with_traceback(error.__traceback__)
