"""`spmd_jit`: the global view. A function over whole tensors is traced once, partitioned, and replayed as local code."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from ._compat import is_functorch_wrapped, is_traced, transforms_active
from .array import Array, donate, layout_of, take
from .backends.base import backend_of
from .constrain import pin
from .errors import ShardingError, SpecError, SpmdError, message
from .layout import Layout, from_entries, replicated
from .mesh import Mesh, current_mesh, resolve_mesh, set_mesh
from .partition.engine import partition
from .partition.trace import Traced, trace
from .program import Program
from .signature import UNSET, Bound, Leaf, Signature, Static
from .spec import P, Resolved, Spec, resolve, with_context
from .tree import broadcast_specs, flatten, leaf_paths, unflatten


@dataclass
class _TracedCall:
    """A traced function with the structure of its result."""

    traced: Traced
    treedef: optree.PyTreeSpec


@dataclass
class Compiled:
    """A Program with what is needed to call it: where inputs go, and how results come back."""

    program: Program
    wanted: tuple[Layout, ...]
    captured: tuple[Array, ...]
    treedef: optree.PyTreeSpec
    specs: tuple[P | None, ...]


@dataclass
class Jitted:
    """A transformed function: call it, or `.lower(*args)` it to its `Program`."""

    signature: Signature
    mesh: Mesh | None
    in_specs: Any
    out_specs: Any
    donate_argnums: frozenset[int]
    strict: bool
    _programs: dict[Hashable, Compiled] = field(default_factory=dict)
    _traces: dict[Hashable, _TracedCall] = field(default_factory=dict)
    _numbers: dict[Hashable, list[tuple[Any, ...]]] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(args, kwargs)
        tensors = bound.tensors
        if transforms_active() and any(is_functorch_wrapped(t) or is_traced(t) for t in tensors):
            return self.signature.function(*args, **kwargs)
        compiled = self._compiled(bound, tensors)
        return self._run(compiled, bound, tensors)

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The Program for these arguments: tensors, Arrays, or fake or meta tensors as shapes. Nothing runs.

        >>> import torch, spmdfn as sp
        >>> mesh = sp.make_mesh((4,), ("tp",))
        >>> f = sp.spmd_jit(lambda x, w: x @ w, mesh=mesh, in_specs=(sp.P(None, "tp"), sp.P("tp")), out_specs=sp.P())
        >>> program = f.lower(torch.empty(8, 16, device="meta"), torch.empty(16, 4, device="meta"))
        >>> [(row.op, row.axes, row.bytes) for row in program.collectives]
        [('all_reduce', ('tp',), 192)]
        """
        bound = self.signature.bind(args, kwargs)
        return self._compiled(bound, bound.tensors).program

    def _compiled(self, bound: Bound, tensors: Sequence[torch.Tensor]) -> Compiled:
        mesh = self._mesh(bound, tensors)
        shapes = tuple([_signature_of(tensor) for tensor in tensors])
        layouts = tuple([layout_of(t) if isinstance(t, Array) else None for t in tensors])
        traced_key = (bound.treedef, bound.is_tensor, bound.statics, shapes, mesh, _ambient())
        key = (traced_key, layouts)
        compiled = self._programs.get(key)
        if compiled is None:
            compiled = self._programs[key] = self._compile(bound, tensors, mesh, traced_key)
        return compiled

    def _mesh(self, bound: Bound, tensors: Sequence[torch.Tensor]) -> Mesh:
        found = {layout_of(t).mesh: i for i, t in reversed(list(enumerate(tensors))) if isinstance(t, Array)}
        mesh = self.mesh or (next(iter(found)) if found else None)
        mesh = resolve_mesh(mesh)
        for other, place in found.items():
            if other is not mesh:
                raise SpecError(
                    message(
                        f"{self.signature.label}: arguments on two meshes",
                        f"argument {self.signature.names(bound)[place]} is on {other!r}",
                        f"the function runs on {mesh!r}",
                        fix="move the argument first: sp.shard(sp.unshard(x), spec, mesh=mesh)",
                    )
                )
        return mesh

    # compiling

    def _compile(self, bound: Bound, tensors: Sequence[torch.Tensor], mesh: Mesh, traced_key: Hashable) -> Compiled:
        leaves = self.signature.specs(bound, self.in_specs, "in_specs")
        own, wanted = self._input_layouts(leaves, tensors, mesh)
        call = self._traces.get(traced_key)
        if call is None:
            self._warn_of_numbers(bound, traced_key)
            call = self._traces[traced_key] = self._trace(bound, tensors, [leaf.name for leaf in leaves], mesh)
        captured = tuple(call.traced.captured)
        extra = [layout_of(array) for array in captured]
        outputs, specs = self._output_layouts(call, mesh)
        try:
            parts = partition(
                call.traced, mesh, [*own, *extra], [*wanted, *extra], outputs, strict=self.strict
            )
        except ShardingError as error:
            raise ShardingError(f"{self.signature.label}: {error}") from None
        return Compiled(Program(parts), wanted, captured, call.treedef, specs)

    def _input_layouts(
        self, leaves: Sequence[Leaf], tensors: Sequence[torch.Tensor], mesh: Mesh
    ) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts that arguments come in, and those that their specs ask for."""
        own, wanted = [], []
        bindings: dict[str, int] = {}
        for leaf, tensor in zip(leaves, tensors, strict=True):
            has = layout_of(tensor) if isinstance(tensor, Array) else None
            if leaf.spec is UNSET or leaf.spec is None:
                wants = has.settled if has is not None else replicated(mesh, tensor.shape)
            else:
                names = bindings if leaf.shares_names else None
                resolved = self._resolve(leaf.spec, tensor.shape, mesh, names, f"argument: {leaf.name}")
                wants = from_entries(mesh, tensor.shape, *resolved)
            own.append(has if has is not None else wants)
            wanted.append(wants)
        return tuple(own), tuple(wanted)

    def _resolve(
        self, spec: Spec, shape: Sequence[int], mesh: Mesh, bindings: dict[str, int] | None, where: str
    ) -> Resolved:
        try:
            return resolve(spec, shape, mesh, bindings=bindings)
        except SpecError as error:
            raise with_context(error, where, f"function: {self.signature.label}") from None

    def _trace(self, bound: Bound, tensors: Sequence[torch.Tensor], names: list[str], mesh: Mesh) -> _TracedCall:
        trees: list[optree.PyTreeSpec] = []

        def flat(*values: torch.Tensor) -> list[Any]:
            args, kwargs = bound.rebuild(values)
            leaves, treedef = flatten(self.signature.function(*args, **kwargs))
            trees.append(treedef)
            return leaves

        with set_mesh(mesh):
            traced = trace(flat, tensors, names=names, capture=lambda value: isinstance(value, Array))
        return _TracedCall(traced, trees[-1])

    def _output_layouts(
        self, call: _TracedCall, mesh: Mesh
    ) -> tuple[list[Layout | None], tuple[P | None, ...]]:
        returned = call.traced.graph.output_node().args[0]
        out_specs = self.out_specs
        if out_specs is None:
            out_specs = self.signature.annotated.get("return")
        tree = unflatten(call.treedef, list(range(call.treedef.num_leaves)))
        given = broadcast_specs(out_specs, tree, name=f"{self.signature.label}: out_specs")
        paths = leaf_paths(call.treedef)
        layouts: list[Layout | None] = []
        specs: list[P | None] = []
        for item, spec, path in zip(returned, given, paths, strict=True):  # type: ignore[arg-type]
            shape = item.meta["val"].shape if isinstance(item, torch.fx.Node) else None
            if shape is None or spec is None:
                layouts.append(None)
                specs.append(None)
                continue
            resolved = self._resolve(spec, shape, mesh, None, f"result: out_specs{path}")
            layouts.append(from_entries(mesh, shape, *resolved))
            specs.append(P(*resolved.entries, unreduced=resolved.unreduced))
        return layouts, tuple(specs)

    def _warn_of_numbers(self, bound: Bound, key: tuple[Any, ...]) -> None:
        """Warn at the third trace that differs only in a number, and name it."""
        statics = bound.statics
        blurred = tuple(kind if kind in (int, float) else (kind, value) for kind, value in statics)
        seen = self._numbers.setdefault((key[0], key[1], blurred, *key[3:]), [])
        seen.append(statics)
        if len(seen) != 3:
            return
        names = [n for n, d in zip(self.signature.names(bound, every=True), bound.is_tensor, strict=True) if not d]
        changed = [name for name, values in zip(names, zip(*seen, strict=True), strict=True) if len(set(values)) > 1]
        warnings.warn(
            message(
                f"{self.signature.label} was traced for the third time with another number in {', '.join(changed)}",
                "numbers are static: each value is traced anew",
                fix="pass it as a 0-d tensor, torch.tensor(value)",
            ),
            stacklevel=5,
        )

    # running

    def _run(self, compiled: Compiled, bound: Bound, tensors: Sequence[torch.Tensor]) -> Any:
        backend = backend_of(compiled.program.mesh)
        donated = self._donated(bound) if self.donate_argnums else frozenset()
        inputs = []
        for i, (tensor, layout) in enumerate(zip(tensors, compiled.wanted, strict=True)):
            if isinstance(tensor, Array):
                inputs.append(donate(tensor) if i in donated else list(tensor.shards))
            else:
                inputs.append(take(tensor.detach(), layout))
        inputs += [list(array.shards) for array in compiled.captured]
        results = backend.run(compiled.program, inputs)
        leaves = [
            blocks[0] if layout is None else Array(blocks, layout, spec)
            for blocks, layout, spec in zip(results, compiled.program.outputs, compiled.specs, strict=True)
        ]
        return unflatten(compiled.treedef, leaves)

    def _donated(self, bound: Bound) -> frozenset[int]:
        """The places of donated Arrays among the tensors; SpmdError if one is donated twice."""
        names = self.signature.names(bound)
        first: dict[int, str] = {}
        places = set()
        positions = [path.split("]")[1][1:] for path in leaf_paths(bound.treedef)]
        tensors = [(leaf, position) for leaf, position in zip(bound.leaves, positions, strict=True)]
        dynamic = [pair for pair, is_tensor in zip(tensors, bound.is_tensor, strict=True) if is_tensor]
        for place, (leaf, position) in enumerate(dynamic):
            if position.isdigit() and int(position) in self.donate_argnums and isinstance(leaf, Array):
                if id(leaf) in first:
                    raise SpmdError(
                        message(
                            f"{self.signature.label}: the same Array is donated twice",
                            f"arguments: {first[id(leaf)]} and {names[place]}",
                            f"array: {leaf!r}",
                            fix="donate it once, or pass a copy",
                        )
                    )
                first[id(leaf)] = names[place]
                places.add(place)
        return frozenset(places)


def _signature_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _ambient() -> tuple[Any, ...]:
    """The settings of torch that change what a trace contains."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def spmd_jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    reshard: str = "auto",
) -> Any:
    """Transform a function over whole tensors into one that runs sharded, with the same values. Also a decorator.

    mesh             the mesh; None: that of the Array arguments, else that of `sp.set_mesh`
    in_specs         specs as a pytree prefix of the positional arguments, or a dict by parameter name. A None leaf is
                     the argument's own layout (a plain tensor: whole). None altogether: `Annotated` patterns, else so
    out_specs        specs as a pytree prefix of the result; None leaves what propagation gives, never a pending sum
    static_argnums, static_argnames   arguments that are not pytrees of tensors: hashable, part of the cache key
    donate_argnums   arguments whose Arrays are used up by the call, so that their memory is free inside
    reshard          "auto", or "error": refuse communication that no spec asked for (reductions of pending sums are
                     allowed)

    Numbers, strings and other hashable leaves are static. Results are Arrays. Raises SpecError, ShardingError,
    TracingError.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> @sp.spmd_jit(mesh=mesh, in_specs=("(dp b) d", "d (tp n)"))
    ... def layer(x, w):
    ...     return torch.relu(x @ w)
    >>> layer(torch.ones(4, 8), torch.ones(8, 6))
    f32[4@dp, 6@tp]
    """
    if f is None:
        return functools.partial(
            spmd_jit,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            reshard=reshard,
        )
    if reshard not in ("auto", "error"):
        raise SpecError(message(f"reshard is {reshard!r}", fix='use "auto" or "error"'))
    nums = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
    jitted = Jitted(Signature(f, nums, names), mesh, in_specs, out_specs, frozenset(donated), reshard == "error")
    return functools.update_wrapper(jitted, f)  # type: ignore[arg-type]


def in_trace() -> bool:
    """Whether a function is being traced, or transformed by torch.func, around the caller."""
    return transforms_active()


def constrain(x: Any, spec: Spec, *, mesh: Mesh | None = None) -> Any:
    """Pin the layout of a value in a traced function; the identity on the value and on its cotangent.

    Outside a trace an Array is laid out so, and a plain tensor passes unchanged: it is on no mesh. SpecError if the spec
    does not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("tp",))
    >>> f = sp.spmd_jit(lambda x: sp.constrain(x * 2, sp.P("tp")), mesh=mesh)
    >>> f(torch.ones(8))
    f32[8@tp]
    """
    if isinstance(x, Array):
        return shard(x, spec)
    if not in_trace() and not is_traced(x):
        return x
    mesh = mesh or current_mesh()
    if mesh is None:  # under torch.func alone: on no mesh
        return x
    try:
        resolved = resolve(spec, x.shape, mesh)
    except SpecError as error:
        raise with_context(error, "in sp.constrain") from None
    return pin(x, resolved)


def shard(tree: Any, specs: Any, *, mesh: Mesh | None = None) -> Any:
    """Lay the tensors of a tree out over a mesh: plain tensors are cut into blocks, Arrays are resharded.

    `specs` is a prefix of the tree; a None spec leaf keeps an Array's layout and leaves a plain tensor whole. Leaves
    that are no tensors pass unchanged. Results are Arrays. SpecError, with the path, if a spec does not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 4), ("dp", "tp"))
    >>> sp.shard({"w": torch.zeros(8, 8), "n": None}, {"w": "(dp m) (tp n)", "n": None}, mesh=mesh)
    {'w': f32[8@dp, 8@tp], 'n': None}
    """
    leaves, treedef = flatten(tree)
    given = broadcast_specs(specs, tree, name="specs")
    results = []
    for leaf, spec, path in zip(leaves, given, leaf_paths(treedef), strict=True):
        results.append(_shard_leaf(leaf, spec, path, mesh) if isinstance(leaf, torch.Tensor) else leaf)
    return unflatten(treedef, results)


def _shard_leaf(leaf: torch.Tensor, spec: Spec, path: str, mesh: Mesh | None) -> Any:
    if isinstance(leaf, Array):
        if spec is None:
            return leaf
        return _identity(layout_of(leaf).mesh if mesh is None else mesh, spec)(leaf)
    mesh = resolve_mesh(mesh)
    try:
        resolved = resolve(spec, leaf.shape, mesh)
    except SpecError as error:
        raise with_context(error, f"leaf: {path or '(the tree itself)'}") from None
    layout = from_entries(mesh, leaf.shape, *resolved)
    return Array(take(leaf.detach(), layout), layout, P(*resolved.entries, unreduced=resolved.unreduced))


@functools.lru_cache(maxsize=4096)
def _identity(mesh: Mesh, spec: Spec) -> Any:
    return spmd_jit(lambda x: x, mesh=mesh, out_specs=spec)


def unshard(tree: Any) -> Any:
    """The tree with every Array as one whole torch tensor; anything else passes unchanged.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("dp",))
    >>> sp.unshard({"x": sp.shard(torch.arange(4), sp.P("dp"), mesh=mesh), "lr": 0.1, "n": None})
    {'x': tensor([0, 1, 2, 3]), 'lr': 0.1, 'n': None}
    """
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [leaf.unshard() if isinstance(leaf, Array) else leaf for leaf in leaves])


__all__ = ["Compiled", "Jitted", "Static", "constrain", "shard", "spmd_jit", "unshard"]
