"""`spmd_jit`: the global view. A function of whole tensors is traced once, partitioned, and replayed as local code."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import optree
import torch

from ._compat import tracing, transforms_active
from .array import Array
from .backends.base import backend_of
from .compiled import Compiled
from .errors import SpecError, message
from .lowering import Call, TracedCall, is_dataless, lower, mesh_of_call, trace_call
from .mesh import Mesh, current_mesh, op_by_op, set_mesh
from .op_by_op import run_op_by_op
from .program import Program
from .signature import Signature, static_key


class Jitted:
    """A transformed function: call it, or `.lower(*args)` it to its `Program`. Made by `spmd_jit`."""

    def __init__(self, signature: Signature, mesh: Mesh | None, in_specs: Any, out_specs: Any, strict: bool):
        self._signature, self._mesh, self._strict = signature, mesh, strict
        self._in_specs, self._out_specs = in_specs, out_specs
        self._programs: dict[Hashable, Compiled] = {}
        # Apart from the programs: other layouts of the same shapes need no second trace.
        self._traces: dict[Hashable, TracedCall] = {}
        self._numbers: dict[Hashable, list[tuple[Any, ...]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if transforms_active():  # on Arrays too: what the function closes over may belong to the transform
            return self._inline(args, kwargs)
        leaves, treedef = self._signature.flatten(args, kwargs)
        if op_by_op():
            return run_op_by_op(self._call(leaves, treedef, runs=True), self._out_specs)
        compiled = self._found(leaves, treedef)
        if compiled is None:
            compiled = self._compile(leaves, treedef, runs=True)
        return compiled.run(leaves)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<spmd_jit of {self._signature.label}>"

    def lower(self, *args: Any, **kwargs: Any) -> Program:
        """The Program for these arguments: tensors, Arrays, or fake or meta tensors as shapes. Nothing runs.

        >>> import torch, spmdfn as sp
        >>> mesh = sp.make_mesh((4,), ("tp",))
        >>> f = sp.spmd_jit(lambda x, w: x @ w, mesh=mesh, in_specs=(sp.P(None, "tp"), sp.P("tp")), out_specs=sp.P())
        >>> program = f.lower(torch.empty(8, 16, device="meta"), torch.empty(16, 4, device="meta"))
        >>> [(row.op, row.axes, row.bytes) for row in program.collectives]
        [('all_reduce', ('tp',), 192)]
        """
        leaves, treedef = self._signature.flatten(args, kwargs)
        compiled = self._found(leaves, treedef)
        return (compiled or self._compile(leaves, treedef, runs=False)).program

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself, in the trace or transform that runs around the call."""
        outer = current_mesh()
        if tracing() and self._mesh is not None and outer is not None and outer is not self._mesh:
            raise SpecError(
                message(
                    f"{self._signature.label}: its mesh is another one than that of the function that calls it",
                    f"mesh: {self._mesh!r}",
                    f"the caller's: {outer!r}",
                    fix="use one mesh, or call the two functions one after the other",
                )
            )
        return self._signature.function(*args, **kwargs)

    def _found(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Compiled | None:
        try:
            return self._programs.get(self._key(leaves, treedef))
        except TypeError:  # a static argument that cannot be hashed: told when compiling
            return None

    def _key(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> Hashable:
        kinds = tuple([leaf._kind if type(leaf) is Array else _kind(leaf) for leaf in leaves])
        return treedef, kinds, current_mesh() if self._mesh is None else None, _ambient()

    def _call(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec, *, runs: bool) -> Call:
        """The call's arguments with their names, specs and mesh; `runs`: the mesh must hold data."""
        signature = self._signature
        signature.check(treedef, leaves)
        given = signature.specs(treedef, self._in_specs)
        mesh = mesh_of_call(signature, [leaf.name for leaf in given], leaves, self._mesh)
        if runs:
            backend_of(mesh)
        return Call(signature, treedef, leaves, given, mesh)

    def _compile(self, leaves: Sequence[Any], treedef: optree.PyTreeSpec, *, runs: bool) -> Compiled:
        """A Program for a new signature; `runs`: it is to be called, so its mesh must hold data."""
        call = self._call(leaves, treedef, runs=runs)
        shapes = tuple([_global_kind(leaf) for leaf in leaves])
        key = (treedef, shapes, call.mesh, _ambient())
        traced = self._traces.get(key)
        if traced is None:
            self._warn_of_numbers(call, key)
            traced = self._traces[key] = trace_call(call)
        compiled = lower(call, traced, self._out_specs, strict=self._strict)
        self._programs[self._key(leaves, treedef)] = compiled
        return compiled

    def _warn_of_numbers(self, call: Call, key: tuple[Any, ...]) -> None:
        """Warn at the third trace that differs only in a number, and name it. Declared static arguments may differ."""
        numbers = tuple(leaf for leaf in call.leaves if type(leaf) in (int, float))
        kinds = zip(call.leaves, key[1], strict=True)
        blurred = tuple(type(leaf) if type(leaf) in (int, float) else kind for leaf, kind in kinds)
        seen = self._numbers.setdefault((key[0], blurred, *key[2:]), [])
        seen.append(numbers)
        if len(seen) != 3:
            return
        names = [leaf.name for leaf, value in zip(call.given, call.leaves, strict=True) if type(value) in (int, float)]
        changed = [name for name, values in zip(names, zip(*seen, strict=True), strict=True) if len(set(values)) > 1]
        warnings.warn(
            message(
                f"{call.signature.label} is traced for the third time, with another number in {', '.join(changed)}",
                f"values: {', '.join(repr(values) for values in zip(*seen, strict=True) if len(set(values)) > 1)}",
                "numbers are static: each value is traced anew",
                fix="pass it as a 0-d tensor, torch.tensor(value), or declare it in static_argnames",
            ),
            stacklevel=4,
        )


def _kind(leaf: Any) -> Any:
    """What programs are chosen by: shape, dtype and device type of a tensor, the layout of an Array, the value of a
    static leaf."""
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, Array):
            return leaf._kind
        # the last says whether it holds data, as a fake tensor does not
        return leaf.shape, leaf.dtype, leaf.device.type, type(leaf) in _PLAIN or not is_dataless(leaf)
    return static_key(leaf)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _global_kind(leaf: Any) -> Any:
    """What traces are chosen by: the same without the layout."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device.type
    return static_key(leaf)


def _ambient() -> tuple[Any, ...]:
    """The settings of torch that change what a trace contains."""
    cuda = torch.backends.cuda
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
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
    donate_argnums   arguments whose Arrays are used up by the call, so that their memory is free inside; plain tensors
                     among them stay as they are
    reshard          "auto", or "error": refuse communication that no spec asked for (reductions of pending sums are
                     allowed)

    Numbers, strings and other hashable leaves are static. Tensors among the results are Arrays; other leaves come back
    as they are. Closed-over plain tensors are constants, and closed-over Arrays inputs with their own layout: those
    objects that the variables held when the function was traced, whatever they are rebound to later. Under a transform
    of torch.func, or in another transformed function, the call is one of `f` itself. Raises SpecError, ShardingError,
    TracingError.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> @sp.spmd_jit(mesh=mesh, in_specs=("(dp b) d", "d (tp n)"))
    ... def layer(x, w):
    ...     return torch.relu(x @ w)
    >>> layer(torch.ones(4, 8), torch.ones(8, 6))
    f32[4@dp, 6@tp]
    """
    options: dict[str, Any] = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "reshard": reshard}
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames, "donate_argnums": donate_argnums}
    if f is None:
        return functools.partial(spmd_jit, **options)
    if not callable(f):
        raise SpecError(
            message(f"spmd_jit: {f!r} is a {type(f).__name__}, not a function", fix="spmd_jit(f, mesh=...)")
        )
    if reshard not in ("auto", "error"):
        raise SpecError(message(f"spmd_jit: reshard is {reshard!r}", fix='use "auto" or "error"'))
    if mesh is not None:
        with set_mesh(mesh):  # says so if it is none
            pass
    signature = Signature(
        f,
        (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums),
        (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
        (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums),
    )
    jitted = Jitted(signature, mesh, in_specs, out_specs, reshard == "error")
    return functools.update_wrapper(jitted, f, updated=())
