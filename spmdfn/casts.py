"""Casts in a map's body, above autograd, where torch functions are called: the operands of a call get one device type.

So an invariant value that meets a varying one is cast, and the transpose of the cast sums its cotangent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from . import _compat
from .device_types import NONE, Frame, Refused, Stamp, current_frame, refuse_write, stamp_of, tensors_in, typed, varying
from .errors import TracingError, VaryingError, message
from .scalar_index import by_scalar, one_hot


class Casts(_compat.TorchFunctionMode):
    """Active in a body: brings in values from outside, and casts the operands of a call to one type."""

    def __init__(self, frame: Frame, pcast: Callable[[torch.Tensor, frozenset[str]], torch.Tensor]) -> None:
        super().__init__()
        self.frame, self.pcast = frame, pcast

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_frame() is not self.frame:  # in a map inside this one, or in the global view around it
            return function(*args, **(kwargs or {}))
        try:
            return self._call(function, args, kwargs or {})
        except (VaryingError, TracingError) as error:
            raise Refused(error) from None

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function in _EXEMPT or getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        if _compat.is_function_apply(function):
            if getattr(args[0] if args else None, "spmd_own", False):
                return function(*args, **kwargs)
        elif function is torch.autograd.grad:
            return self._grad(function, args, kwargs)
        tensors = tensors_in((args, kwargs))
        stamps = [stamp_of(x) for x in tensors]
        inside = [found for found in stamps if found is not None]
        targets = _targets(function, args, kwargs)
        if not inside:
            if function in _DRAWS:
                raise TracingError(drawn(function.__name__, self.frame))
            for target in targets:
                self._check_target(function, target, NONE)
            result = function(*args, **kwargs)
            return result if tensors else self._made(result)
        axes = frozenset().union(*(found.varying for found in inside)) if self.frame.checked else NONE
        for target in targets:
            self._check_target(function, target, axes)
        kept = {id(target) for target in targets}
        if by_scalar(function, args, _has_no_value) is not None:
            instead = by_scalar(function, self._cast(args, axes, kept), _has_no_value)
            assert instead is not None
            return instead()
        if not _compat.tracing() and (instead := one_hot(function, args, kwargs)) is not None:
            return instead()
        if all(found is not None and found.varying == axes for found in stamps) or not (
            None in stamps or self.frame.checked
        ):
            return function(*args, **kwargs)
        return function(*self._cast(args, axes, kept), **self._cast(kwargs, axes, kept))

    def _cast(self, structure: Any, axes: frozenset[str], kept: set[int]) -> Any:
        """Cast all tensors but those that are written to: a cast would write into a copy."""
        if isinstance(structure, torch.Tensor):
            return structure if id(structure) in kept else self._cast_one(structure, axes)
        if isinstance(structure, dict):
            return {key: self._cast(item, axes, kept) for key, item in structure.items()}
        if isinstance(structure, (list, tuple)):
            items = [self._cast(item, axes, kept) for item in structure]
            return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
        return structure

    def _check_target(self, function: Any, x: torch.Tensor, axes: frozenset[str]) -> None:
        """What a call writes to was made inside, and varies as what is written does."""
        found = stamp_of(x)
        name = getattr(function, "__name__", str(function))
        if found is None:
            raise VaryingError(
                message(
                    f"{name} in {self.frame.label} writes into a tensor from outside the map",
                    f"target: shape {tuple(x.shape)}",
                    fix="make the tensor inside the body, or pass it as an argument and return the new value",
                )
            )
        if self.frame.checked:
            refuse_write(name, found, Stamp(axes), None)

    def _cast_one(self, x: torch.Tensor, axes: frozenset[str]) -> torch.Tensor:
        x = self.frame.inside(x)
        found = stamp_of(x)
        missing = axes - (found.varying if found is not None else NONE)
        if not missing or not self.frame.checked:
            return x
        if found is not None and found.sample:
            raise VaryingError(equal_sample(self.frame, missing))
        return self.pcast(x, missing)

    def _made(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.frame.made(result)
        if type(result) in (list, tuple):
            return type(result)(self._made(item) for item in result)
        return result

    def _grad(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Never cast the inputs here (the gradients would be zero), but give a cotangent its output's type.

        And a free check: a gradient has its input's type.
        """
        if self.frame.checked and (given := args[2] if len(args) > 2 else kwargs.get("grad_outputs")) is not None:
            outputs = args[0] if args else kwargs["outputs"]
            if isinstance(given, torch.Tensor):
                given = self._cotangent(outputs, given)
            else:
                given = [g if g is None else self._cotangent(y, g) for y, g in zip(outputs, given, strict=True)]
            args, kwargs = (*args[:2], given, *args[3:]) if len(args) > 2 else args, kwargs
            kwargs = kwargs if len(args) > 2 else {**kwargs, "grad_outputs": given}
        result = function(*args, **kwargs)
        if self.frame.checked:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for x, g in zip(tensors_in(inputs), result, strict=False):
                if isinstance(g, torch.Tensor) and stamp_of(g) is not None and varying(g) != varying(x):
                    raise VaryingError(
                        message(
                            f"a gradient in {self.frame.label} is {typed(g)}, its input {typed(x)}",
                            fix="this is a fault of a backward that mixes types: write the function with sp.psum and "
                            "sp.pcast, which have the right transposes",
                        )
                    )
        return result

    def _cotangent(self, output: Any, g: torch.Tensor) -> torch.Tensor:
        output = tensors_in(output)[0]
        g = self.frame.inside(g) if stamp_of(output) is not None else g
        if extra := sorted(varying(g) - varying(output)):
            raise VaryingError(
                message(
                    f"a cotangent in {self.frame.label} varies over {', '.join(extra)}, its output does not",
                    f"cotangent: {typed(g)}, output: {typed(output)}",
                    fix=f"sp.psum(cotangent, {extra[0]!r}), or sp.pcast the output to varying in the function",
                )
            )
        missing = varying(output) - varying(g)
        return self.pcast(g, missing) if missing else g


def equal_sample(frame: Frame, axes: frozenset[str]) -> str:
    """The error text for a sample from an invariant key where devices should differ."""
    axis = sorted(axes)[0]
    return message(
        f"{frame.label}: a sample from an invariant key is the same on every device of {', '.join(sorted(axes))}",
        fix=f'for other numbers on each device draw with sp.random.fold_in(key, sp.axis_index("{axis}")), for this '
        f'device\'s block of one global draw with spec=; sp.pcast(sample, "{axis}", to="varying") if that is meant',
    )


def drawn(name: str, frame: Frame) -> str:
    """The error text for a draw from torch's global generator."""
    return message(
        f"{name} in {frame.label} draws from torch's global generator; a function on many devices needs a key",
        fix="pass a key and draw from it: sp.random.normal(key, shape), sp.random.uniform, sp.random.randint",
    )


_DRAWS = frozenset([torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal])


def _has_no_value(x: torch.Tensor) -> bool:
    """Whether an index may differ between devices; while tracing, the trace sees to it."""
    return stamp_of(x) is not None and not _compat.is_traced(x)


def _targets(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    if not (_is_in_place(function) or kwargs):
        return []
    found = tensors_in(kwargs["out"]) if kwargs.get("out") is not None else []
    if _is_in_place(function):
        found += tensors_in(args[0] if args else next(iter(kwargs.values()), None))
    elif kwargs.get("inplace") is True:
        found += tensors_in(args[0] if args else kwargs.get("input"))
    return found


@lru_cache(maxsize=4096)
def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_IN_PLACE = frozenset([*(f"__i{name}__" for name in _OPERATORS.split()), "__setitem__", "__delitem__"])
_NO_WRITES = frozenset(["requires_grad_", "share_memory_", "rename_"])
_EXEMPT: frozenset[Any] = frozenset(
    [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.__repr__, torch.Tensor.__len__]
    + [torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__hash__]
)
