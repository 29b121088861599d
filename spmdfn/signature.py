"""The arguments of one call as leaves: which are tensors, what they are called, and which spec each has."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch

from .errors import SpecError, TracingError, message
from .spec import P, Spec
from .tree import broadcast_specs, flatten, leaf_paths, unflatten

UNSET = "unset"
"""Stands for a spec that nobody gave: the argument's own layout."""


class Leaf(typing.NamedTuple):
    """A tensor argument: its human name, its spec, and whether that is a pattern for the whole argument."""

    name: str
    spec: Spec
    shares_names: bool


@dataclass(frozen=True)
class Bound:
    """One call's arguments: dynamic leaves are tensors, the rest is static and part of the cache key."""

    leaves: list[Any]
    treedef: optree.PyTreeSpec
    is_tensor: tuple[bool, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf, dynamic in zip(self.leaves, self.is_tensor, strict=True) if dynamic]

    @property
    def statics(self) -> tuple[Any, ...]:
        return tuple(
            _typed(leaf) for leaf, dynamic in zip(self.leaves, self.is_tensor, strict=True) if not dynamic
        )

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) with other tensors in the places of the dynamic leaves."""
        new = iter(tensors)
        leaves = [next(new) if dynamic else leaf for leaf, dynamic in zip(self.leaves, self.is_tensor, strict=True)]
        args, kwargs = unflatten(self.treedef, [leaf.value if isinstance(leaf, Static) else leaf for leaf in leaves])
        return args, kwargs


@dataclass(frozen=True)
class Static:
    """A static argument: one leaf, whatever it holds."""

    value: Any


def _typed(leaf: Any) -> Any:
    """1, 1.0 and True are equal but not the same argument; nan is unequal to itself but is."""
    return (type(leaf), repr(leaf)) if isinstance(leaf, float) else (type(leaf), leaf)


class Signature:
    """How calls of one function bind: parameter names, static arguments, specs by parameter or `Annotated`."""

    def __init__(self, function: Callable[..., Any], static_argnums: Sequence[int], static_argnames: Sequence[str]):
        self.function = function
        self.static_argnums = frozenset(static_argnums)
        self.static_argnames = frozenset(static_argnames)

    @cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    @cached_property
    def _positional(self) -> tuple[str, ...]:
        if self._signature is None:
            return ()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(name for name, p in self._signature.parameters.items() if p.kind in kinds)

    @cached_property
    def annotated(self) -> dict[str, Spec]:
        """Patterns and `P`s in `Annotated` parameter types, by parameter name ("return" for the result)."""
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
        except (NameError, TypeError):
            return {}
        found: dict[str, Spec] = {}
        for name, hint in hints.items():
            for extra in getattr(hint, "__metadata__", ()):
                if isinstance(extra, (str, P)):
                    found[name] = extra
        return found

    def parameter(self, position: int) -> str:
        return self._positional[position] if position < len(self._positional) else f"args[{position}]"

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
        """Bind a call. TracingError if a static argument cannot be hashed."""
        if kwargs and self._signature is not None:
            self._signature.bind(*args, **kwargs)  # the user's own TypeError, before any tracing
        args = tuple(
            self._static(value, self.parameter(i)) if i in self.static_argnums or self._named_static(i) else value
            for i, value in enumerate(args)
        )
        kwargs = {k: self._static(v, k) if k in self.static_argnames else v for k, v in kwargs.items()}
        leaves, treedef = flatten((args, kwargs))
        is_tensor = tuple([isinstance(leaf, torch.Tensor) for leaf in leaves])
        bound = Bound(leaves, treedef, is_tensor)
        for i, leaf in enumerate(leaves):
            if not is_tensor[i] and not isinstance(leaf, Static):
                _check_hashable(leaf, lambda i=i: self.names(bound, every=True)[i])
        return bound

    def _named_static(self, position: int) -> bool:
        return bool(self.static_argnames) and self.parameter(position) in self.static_argnames

    @staticmethod
    def _static(value: Any, name: str) -> Static:
        _check_hashable(value, lambda: name)
        return Static(value)

    def names(self, bound: Bound, *, every: bool = False) -> list[str]:
        """The human name of each tensor leaf (or of every leaf): parameter and tree path, like "params['w']"."""
        names = []
        for path, dynamic in zip(leaf_paths(bound.treedef), bound.is_tensor, strict=True):
            if every or dynamic:
                group, _, rest = path[1:].partition("]")
                inner, _, tail = rest[1:].partition("]")
                names.append((self.parameter(int(inner)) if group == "0" else inner.strip("'")) + tail)
        return names

    def specs(self, bound: Bound, in_specs: Any, name: str) -> list[Leaf]:
        """The spec of each tensor leaf. `in_specs`: a prefix of the argument tuple, or a dict by parameter name."""
        args, kwargs = bound.treedef.children()
        args, kwargs = (optree.tree_unflatten(tree, [_LEAF] * tree.num_leaves) for tree in (args, kwargs))
        by_name = self._by_name(in_specs)
        if by_name is not None:
            per_arg = [by_name.get(self.parameter(i), UNSET) for i in range(len(args))]
        elif isinstance(in_specs, tuple):
            per_arg = list(in_specs[: len(args)])
            self._check_count(in_specs, len(args), kwargs, name)
            by_name = {self.parameter(i): spec for i, spec in enumerate(in_specs)}
        else:
            per_arg, by_name = [in_specs] * len(args), dict.fromkeys(kwargs, in_specs)
        groups = [(value, spec, f"{name}[{i}]", i) for i, (value, spec) in enumerate(zip(args, per_arg, strict=True))]
        for key in sorted(kwargs):
            groups.append((kwargs[key], by_name.get(key, UNSET), f"{name}[{key!r}]", key))
        leaves: list[Leaf] = []
        names = iter(self.names(bound, every=True))
        for value, spec, path, _ in groups:
            given = broadcast_specs(spec, value, name=path)
            shares = isinstance(spec, str) and spec is not UNSET
            leaves += [Leaf(next(names), one, shares) for one in given]
        return [leaf for leaf, dynamic in zip(leaves, bound.is_tensor, strict=True) if dynamic]

    def _by_name(self, in_specs: Any) -> dict[str, Any] | None:
        if in_specs is None:
            return dict(self.annotated)
        if isinstance(in_specs, dict) and set(in_specs) <= set(self._positional) | set(self.static_argnames) | {
            name for name in (self._signature.parameters if self._signature else ())
        }:
            return in_specs
        return None

    def _check_count(self, in_specs: tuple[Any, ...], count: int, kwargs: Mapping[str, Any], name: str) -> None:
        if len(in_specs) != count and not (len(in_specs) > count and (kwargs or len(in_specs) <= len(self._positional))):
            raise SpecError(
                message(
                    f"{name} has {len(in_specs)} entries for {count} arguments of {self.label}",
                    f"{name}: {in_specs!r}",
                    fix="give one entry for each positional argument, or a dict by parameter name",
                )
            )

    @property
    def label(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function)).replace("<locals>.", "")


_LEAF = object()


def _check_hashable(value: Any, name: Callable[[], str]) -> None:
    try:
        hash(value)
    except TypeError:
        raise TracingError(
            message(
                f"the static argument {name()} cannot be hashed",
                f"value: {value!r}, a {type(value).__name__}",
                fix="a static argument is part of the cache key: pass a hashable value (a tuple for a list), or tensors",
            )
        ) from None
