"""`disable_jit`: functions of `spmd_jit` run op by op on Arrays, so that print and pdb work in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._compat import is_functorch_wrapped
from .array import Array, spec_of
from .errors import SpecError, SpmdError, message
from .layout import Layout, from_entries
from .lowering import Call, input_layouts, is_dataless
from .mesh import ambient, current_mesh, set_mesh
from .operators import moved
from .spec import resolve, with_context
from .tree import broadcast_specs, flatten, leaf_paths, unflatten


@contextmanager
def disable_jit() -> Iterator[None]:
    """Run functions of `spmd_jit` op by op inside a `with` block, to look at values: print and pdb work in them.

    Arguments are laid out by in_specs, every op runs at once on Arrays, and results are laid out by out_specs: the
    same rules and the same numbers, up to the order of sums, at the price of a small program for each op. Writing to
    an argument in place raises at the line. Donated arguments stay alive, and `reshard="error"` is not enforced.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("dp",))
    >>> @sp.spmd_jit(mesh=mesh, in_specs="(dp b)", out_specs=sp.P())
    ... def f(x):
    ...     y = x * 2
    ...     print(y, y.tolist())
    ...     return y.sum()
    >>> with sp.disable_jit():
    ...     f(torch.arange(4.)).item()
    f32[4@dp] [0.0, 2.0, 4.0, 6.0]
    12.0
    """
    with ambient(current_mesh(), op_by_op=True):
        yield


def run_op_by_op(call: Call, out_specs: Any) -> Any:
    """Call the function on Arrays. SpecError, as when it is traced, for specs that do not fit."""
    leaves = list(call.leaves)
    names = {place: call.given[place].name for place in call.places}
    for place, layout in zip(call.places, input_layouts(call)[1], strict=True):
        leaves[place] = _argument(leaves[place], layout, names[place], call)
    with set_mesh(call.mesh), torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
        result = call.signature.call(call.treedef, leaves)
    found, treedef = flatten(result)
    if out_specs is None:
        out_specs = call.signature.annotated["return"]
    try:
        given = broadcast_specs(out_specs, result, name="out_specs")
    except SpecError as error:
        raise with_context(error, f"function: {call.signature.label}") from None
    seen: set[int] = set()
    for place, (value, spec, path) in enumerate(zip(found, given, leaf_paths(treedef), strict=True)):
        if isinstance(value, torch.Tensor):
            found[place] = _result(value, spec, f"result: out_specs{path}", call, seen)
    return unflatten(treedef, found)


def _argument(value: torch.Tensor, layout: Layout, name: str, call: Call) -> Array:
    """An argument in the layout that its spec asks for. It must not be written to."""
    label = call.signature.label
    if is_dataless(value):
        raise SpmdError(
            message(
                f"{label}: the argument {name} is a meta or fake tensor and holds no data",
                fix="use .lower(*args) for the program alone, or pass tensors with data",
            )
        )
    array = value if isinstance(value, Array) else Array._cut(value, layout)
    if array._layout is not layout:
        array = moved(Array, array, layout)
    return array._alias(locked=f"{label}: the input {name}")


def _result(value: torch.Tensor, spec: Any, where: str, call: Call, seen: set[int]) -> Array:
    """A result in its layout, with memory of its own."""
    if is_functorch_wrapped(value):
        raise SpmdError(
            message(
                f"{call.signature.label} returns a value of a transform that has ended",
                where,
                fix="return plain values",
            )
        )
    array = (
        value
        if isinstance(value, Array)
        else Array._cut(value, from_entries(call.mesh, value.shape, [()] * value.ndim))
    )
    exact = None
    layout = array._layout.settled
    if spec is not None:
        try:
            resolved = resolve(spec, value.shape, call.mesh)
        except SpecError as error:
            raise with_context(error, where, f"function: {call.signature.label}") from None
        layout, exact = from_entries(call.mesh, value.shape, *resolved), spec_of(resolved)
    if array._locked is not None or array._layout is not layout or id(array._writes) in seen:
        array = moved(Array, array, layout)
    seen.add(id(array._writes))
    array = array._alias()
    array._spec = exact
    return array
