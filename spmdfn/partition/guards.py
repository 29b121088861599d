"""What a traced function must not do, and what to write instead: the checks, and the texts of their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .._compat import (
    DataDependentOutput,
    DynamicOutputShape,
    FakeTensor,
    FunctionalTensor,
    OpOverload,
    data_mutated,
    is_traced,
)
from ..errors import TracingError, message
from .lines import quoted

_aten = torch.ops.aten
_BATCH_NORM = "clone the buffers, pass the clones (torch.func.functional_call), and return them as results"
_CLONE = "work on a clone (x = x.clone()) and return it as a result"
_BRANCH = "torch.where(condition, a, b) instead of a branch; a static argument (static_argnums) for a value of Python's"
_SHAPE = "keep the shape: torch.where(mask, x, fill), or multiply by the mask; torch.topk or sort for a fixed number"
_KEY = (
    "pass a key and draw from it: sp.random.normal(key, shape), sp.random.uniform, sp.random.randint; "
    "dropout is torch.where(sp.random.bernoulli(key, 1 - p, x.shape), x / (1 - p), 0)"
)


class Profile(NamedTuple):
    """What an op may do that a trace must not see."""

    writes: tuple[int | str, ...]
    draws: bool
    data_dependent: bool

    @property
    def harmless(self) -> bool:
        return not (self.writes or self.draws or self.data_dependent)


@lru_cache(maxsize=4096)
def profile(op: Any) -> Profile:
    """The profile of an op overload, from its schema and tags."""
    if not isinstance(op, OpOverload):
        return Profile((), False, False)
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return Profile(
        writes or _UNDECLARED_WRITES.get(op, ()),
        torch.Tag.nondeterministic_seeded in op.tags,
        torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags,
    )


# Ops that write to their running statistics in training mode, although their schemas do not say so.
_UNDECLARED_WRITES: dict[Any, tuple[int | str, ...]] = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.cudnn_batch_norm.default: (3, 4),
    _aten.miopen_batch_norm.default: (3, 4),
}
_TRAINING_FLAG = 5

# Ops that draw only if this argument says so. (sdpa: dropout_p > 0; native_dropout: train.)
_DRAWS_IF = {"dropout_p": 0.0, "p": 0.0, "train": False, "training": False, "dropout": 0.0}
_CONDITIONAL_PREFIXES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "native_dropout", "rrelu")

TO_HOST = {
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.data_ptr: "data_ptr()",
}


def refuse(op: Any, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> None:
    """Raise if this call would write to a closed-over tensor or draw from the global generator."""
    refuse_draw(op, args, kwargs, where)
    for tensor in written(op, args, kwargs):
        if not isinstance(tensor, (FunctionalTensor, FakeTensor)):
            raise TracingError(
                message(
                    f"{_name(op)} would mutate a closed-over tensor in place",
                    f"where: {quoted(where)}",
                    f"value: {_describe(tensor)}",
                    fix=_BATCH_NORM
                    if "batch_norm" in _name(op)
                    else "make it an input, work on a clone (x = x.clone()), and return the new value "
                    "(buffers of a module, as BatchNorm's, too)",
                )
            )


def refuse_draw(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], where: str, who: str = "a traced function"
) -> None:
    """Raise if this call would draw from the global generator."""
    if profile(op).draws and _draws(op, args, kwargs):
        raise TracingError(
            message(
                f"{_name(op)} draws from torch's global generator; {who} needs a key",
                f"where: {quoted(where)}",
                *_values(args, kwargs),
                fix=_KEY,
            )
        )


def written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    writes = profile(op).writes
    if not writes or (op in _UNDECLARED_WRITES and not args[_TRAINING_FLAG]):
        return
    for place in writes:
        value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def refuse_mutated(wrapped: Sequence[FunctionalTensor], names: Sequence[str], op: Any, where: str) -> None:
    """Raise if an input of the trace has been written to, by this op or through a view of it."""
    for tensor, name in zip(wrapped, names, strict=True):
        if data_mutated(tensor):
            raise TracingError(
                message(
                    f"the input {name} is mutated in place" + (f" by {_name(op)}" if op is not None else ""),
                    f"where: {quoted(where)}" if where else "",
                    f"value: {_describe(tensor)}",
                    fix=_BATCH_NORM if op is not None and "batch_norm" in _name(op) else _CLONE,
                )
            )


def refuse_to_host(function: Callable[..., Any], args: Sequence[Any], where: str) -> None:
    """Raise if the data of a traced value is asked for."""
    if args and isinstance(args[0], torch.Tensor) and is_traced(args[0]):
        raise TracingError(_needs_value(TO_HOST[function], where, f"value: {_describe(args[0])}"))


def any_traced(args: Sequence[Any]) -> bool:
    """Whether some argument, at any depth of lists, stands for a value of the trace."""
    return any(
        any_traced(value) if isinstance(value, (list, tuple)) else isinstance(value, (FunctionalTensor, FakeTensor))
        for value in args
    )


def explained(error: Exception, where: str, args: Sequence[Any] = ()) -> TracingError | None:
    """The error to raise for one of torch's own about data; None if it says something else."""
    text = str(error)
    if isinstance(error, DataDependentOutput):
        name = "item()" if error.func is _aten._local_scalar_dense.default else _name(error.func)
        return TracingError(_needs_value(name, where, *_values(args, {})))
    if isinstance(error, DynamicOutputShape):
        return TracingError(_shape_depends(_name(error.func), where, *_values(args, {})))
    if not isinstance(error, RuntimeError):
        return None
    if (
        "would mutate a captured Tensor" in text
        or "leaf Variable that requires grad is being used in an in-place" in text
    ):
        what = "inside grad, an input of the function or a closed-over tensor is mutated in place"
        return TracingError(message(what, f"where: {quoted(where)}", fix=_CLONE))
    if text.startswith("vmap: called random operation") or "random operations inside of vmap" in text:
        what = "a random op inside vmap draws from torch's global generator; a traced function needs a key"
        return TracingError(
            message(what, f"where: {quoted(where)}", fix=f"{_KEY}; split the key and vmap over the keys")
        )
    if text.startswith("vmap:") and any(word in text for word in ("dynamic shape", "masked_select")):
        return TracingError(_shape_depends("an op inside vmap", where))
    if text.startswith("vmap:") and any(word in text for word in ("data-dependent control flow", ".item()")):
        return TracingError(_needs_value("bool() or item() inside vmap", where))
    if "trying to get value out of a tracing tensor" in text:  # one made in the function
        return TracingError(_needs_value("item()", where))
    if "numpy() is not supported for tensor subclasses" in text or "data is not allocated yet" in text:
        return TracingError(_needs_value("the data", where))
    return None


def is_device_mix(error: Exception) -> bool:
    """Whether torch complains about tensors on two devices."""
    return isinstance(error, RuntimeError) and ("same device" in str(error) or "different devices" in str(error))


def _needs_value(name: str, where: str, *values: str) -> str:
    return message(
        f"Python needs the value of a traced tensor ({name}); while tracing it has only a shape and a dtype",
        f"where: {quoted(where)}",
        *values,
        fix=_BRANCH,
    )


def _shape_depends(name: str, where: str, *values: str) -> str:
    return message(
        f"the shape of a result of {name} depends on data (a boolean mask, nonzero, unique, ...)",
        f"where: {quoted(where)}",
        *values,
        fix=_SHAPE,
    )


def _draws(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if not _name(op).startswith(_CONDITIONAL_PREFIXES):
        return True
    for position, argument in enumerate(op._schema.arguments):
        if argument.name in _DRAWS_IF:
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if given is not None and not given:
                return False
    return True


def _name(op: Any) -> str:
    return op._schema.name.rpartition("::")[2] if isinstance(op, OpOverload) else str(op)


def _values(args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return [f"values: {', '.join(_describe(tensor) for tensor in tensors)}"] if tensors else []


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
