"""Specs in the annotations of a function: `x: Annotated[torch.Tensor, "(dp b) t"]`."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import torch

from .errors import SpecError, message
from .spec import P, Spec


class Annotations:
    """The pattern or `P` of each parameter whose type is `Annotated` with one ("return": of the result), else None.

    SpecError at a look-up if that annotation cannot be evaluated.

    >>> def f(x: typing.Annotated[torch.Tensor, "(dp b) t"], y: torch.Tensor): ...
    >>> Annotations(f)["x"], Annotations(f)["y"]
    ('(dp b) t', None)
    """

    def __init__(self, function: Callable[..., Any]):
        self._hints: dict[str, Any] = {}
        described = _annotated_part(function)
        if described is None:
            return
        try:
            self._hints = typing.get_type_hints(described, include_extras=True)
        except NameError:
            hints = described.__annotations__
            self._hints = {name: _evaluated(hint, name, described) for name, hint in hints.items()}
        except TypeError:
            pass  # a builtin has none

    def __getitem__(self, name: str) -> Spec:
        hint = self._hints.get(name)
        if isinstance(hint, SpecError):
            raise hint
        return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, (str, P))), None)


def _annotated_part(function: Any) -> Any:
    """The function whose annotations speak of the arguments and results of a callable, or None."""
    while not inspect.isroutine(function):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            function = function.forward if isinstance(function, torch.nn.Module) else type(function).__call__
    # what torch.func makes has the annotations of the function in it: grad has another result, vmap other ranks
    made_by = getattr(function, "__globals__", {}).get("__name__", "")
    return None if hasattr(function, "__wrapped__") and made_by.startswith("torch.") else function


def _evaluated(hint: Any, name: str, function: Any) -> Any:
    """One annotation, where some cannot be evaluated: names of an enclosing function, or imported for typing only."""
    if not isinstance(hint, str):
        return hint
    holder = types.SimpleNamespace(__annotations__={name: hint})
    names = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}), names, include_extras=True)[name]
    except NameError as error:
        if "Annotated" not in hint:
            return None
        return SpecError(
            message(
                f"the annotation of {name} cannot be evaluated: {error}",
                f"annotation: {hint}",
                f"function: {getattr(function, '__qualname__', function)}",
                fix="use names that the module has, or give in_specs and out_specs",
            )
        )
