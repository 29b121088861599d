"""`scan` and `cond`: loops and branches that every transform sees as plain operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeGuard

import torch

from . import _compat
from .device_types import current_frame, selected_branch, varying
from .errors import TracingError, message
from .signature import Signature
from .tree import flatten, leaf_paths, unflatten

Number = (bool, int, float, complex)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = f(carry, x)` over the leading dim of `xs`; return the last carry, and the ys stacked.

    An unrolled loop. `xs` is a pytree of tensors of leading size n, or None with `length=n`; `reverse` starts at the
    last x, and ys keep the order of xs. The carry keeps its structure, shapes and dtypes; a number in `init` may become
    a 0-d tensor. In a map its device types may grow on the way. `scan(remat(f), ...)` keeps only the carries for the
    backward. Raises TracingError, which names the leaf, for a carry or a y that changes, and for sizes that differ.

    >>> import torch, spmdfn as sp
    >>> sp.scan(lambda total, x: (total + x, total), torch.zeros(()), torch.arange(4.))
    (tensor(6.), tensor([0., 0., 1., 3.]))
    """
    label = Signature(f).label
    leaves, treedef = flatten(xs)
    n = _length(label, leaves, leaf_paths(treedef), length)
    columns = [leaf.unbind(0) for leaf in leaves] if n else []
    carry, ys = init, [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = _step(f, label, carry, unflatten(treedef, [column[i] for column in columns]))
        first = n - 1 if reverse else 0
        what = f"scan: what {label} returns as y changes with the step"
        _refuse_change(what, f"step {first}", ys[first], f"step {i}", ys[i], grows=True)
    if n:
        return carry, _stacked(ys)
    # the shapes of an empty result follow from a step that is thrown away
    example = unflatten(treedef, [leaf.new_zeros(leaf.shape[1:]) for leaf in leaves])
    with torch.no_grad():
        return init, _stacked([_step(f, label, init, example)[1]], empty=True)


def _length(label: str, leaves: list[Any], paths: list[str], length: int | None) -> int:
    sizes = {} if length is None else {"length=": length}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
            raise TracingError(
                message(f"scan of {label}: xs{path} is {_what(leaf)}", fix="xs has a leading dim to run over")
            )
        sizes[f"xs{path}"] = leaf.shape[0]
    if not sizes:
        raise TracingError(message(f"scan of {label}: xs has no tensors", fix="say how often: length=n"))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise TracingError(
            message(f"scan of {label}: leading sizes differ", f"sizes: {listed}", fix="give xs one leading size")
        )
    return next(iter(sizes.values()))


def _step(f: Callable[..., Any], label: str, carry: Any, x: Any) -> tuple[Any, Any]:
    result = f(carry, x)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TracingError(message(f"scan of {label}: it returns {_what(result)}", fix="return (carry, y)"))
    _refuse_change(f"scan: the carry of {label} changes", "carry in", carry, "carry out", result[0], grows=True)
    return result


def _stacked(ys: list[Any], *, empty: bool = False) -> Any:
    columns = zip(*[flatten(y)[0] for y in ys], strict=True)
    stacked = [torch.stack(_tensors(column)) for column in columns]
    return unflatten(flatten(ys[0])[1], [column[:0] for column in stacked] if empty else stacked)


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """`true_fun(*operands)` where `pred` holds, else `false_fun(*operands)`. `pred`: a bool or a 0-d tensor.

    A predicate whose value is known, outside a trace and equal on all devices, runs one branch. Else (in `spmd_jit`,
    under vmap, or when `pred` varies between devices) both run and torch.where selects, so a branch must not fail or
    give a nan gradient where the other one is taken, and may not contain a collective over an axis of the map: that
    raises CollectiveError. Raises TracingError, which names the leaf, for branches that differ in structure, shape or
    dtype; only a selection compares them.

    >>> import torch, spmdfn as sp
    >>> sp.cond(torch.tensor(True), torch.sin, torch.cos, torch.zeros(()))
    tensor(0.)
    >>> torch.func.vmap(lambda x: sp.cond(x > 0, torch.neg, torch.exp, x))(torch.tensor([2., 0.]))
    tensor([-2.,  1.])
    """
    names = [Signature(true_fun).label, Signature(false_fun).label]
    if not isinstance(pred, torch.Tensor):
        return true_fun(*operands) if pred else false_fun(*operands)
    if pred.ndim:
        raise TracingError(
            message(
                f"cond of {names[0]} and {names[1]}: the predicate has shape {tuple(pred.shape)}",
                fix="a 0-d tensor, pred.all() or pred.any(); torch.where chooses element by element",
            )
        )
    why = _selects(pred)
    if not why:
        return true_fun(*operands) if pred else false_fun(*operands)
    results = []
    for branch, name in zip((true_fun, false_fun), names, strict=True):
        with selected_branch(f"the branch {name} of a cond: {why}"):
            results.append(branch(*operands))
    _refuse_change("cond: the branches differ", names[0], results[0], names[1], results[1])
    (first, treedef), (second, _) = map(flatten, results)
    return unflatten(treedef, [_chosen(pred.bool(), a, b) for a, b in zip(first, second, strict=True)])


def _selects(pred: torch.Tensor) -> str:
    """Why both branches run; empty if one does."""
    if _compat.is_traced(pred):
        return "in a trace both branches run"
    if axes := varying(pred):
        return f"the predicate varies over {', '.join(sorted(axes))}, so both branches run"
    frame = current_frame()
    if frame is not None and not frame.checked:
        return "without types (check_vma=False) the predicate may vary, so both branches run"
    return "vmap maps over the predicate, so both branches run" if _compat.is_batched(pred) else ""


def _chosen(pred: torch.Tensor, a: Any, b: Any) -> Any:
    if (isinstance(a, Number) and a == b) or not isinstance(a, (torch.Tensor, *Number)):
        return a
    return torch.where(pred, a, b)


# what must stay


def _refuse_change(what: str, name: str, old: Any, other: str, new: Any, *, grows: bool = False) -> None:
    """Two trees must agree in structure, their leaves in shape and dtype. `grows`: a number may become a tensor."""
    (leaves, treedef), (others, other_treedef) = flatten(old), flatten(new)
    if treedef != other_treedef:
        paths, other_paths = leaf_paths(treedef), leaf_paths(other_treedef)
        extra = [path or "itself" for path in sorted(set(paths) ^ set(other_paths))]
        _refuse(what, f"structure: {name} {treedef}, {other} {other_treedef}", *[f"leaf: {p}" for p in extra[:1]])
    for path, leaf, instead in zip(leaf_paths(treedef), leaves, others, strict=True):
        if not _alike(leaf, instead, grows):
            _refuse(what, f"leaf: {path or 'itself'}", f"{name}: {_what(leaf)}", f"{other}: {_what(instead)}")


def _refuse(what: str, *details: str) -> NoReturn:
    fix = "keep structure, shapes and dtypes: x.to(dtype), x.expand(shape), a value in place of None"
    raise TracingError(message(what, *details, fix=fix))


def _alike(a: Any, b: Any, grows: bool) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return grows and _is_number(a) and isinstance(b, torch.Tensor) and not b.ndim
    return (_is_number(a) and _is_number(b)) or bool(a == b)


def _is_number(x: Any) -> TypeGuard[complex]:
    return isinstance(x, Number)


def _what(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
    return f"the {type(x).__name__} {x!r}" if isinstance(x, (str, *Number)) else f"a {type(x).__name__}"


def _tensors(column: Sequence[Any]) -> list[torch.Tensor]:
    """The values of one leaf of y: tensors, and numbers of their dtype."""
    dtype = next((x.dtype for x in column if isinstance(x, torch.Tensor)), None)
    for x in column:
        if not isinstance(x, (torch.Tensor, *Number)):
            raise TracingError(message(f"scan: a y holds {_what(x)}", fix="return tensors and numbers as y"))
    return [x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype) for x in column]
