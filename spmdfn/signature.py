"""The arguments of one call as leaves: what each is called, and which spec it has. Built once for each function."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optree
import torch

from .annotations import Annotations
from .errors import SpecError, TracingError, message
from .spec import P, Spec, with_context
from .tree import broadcast_specs, leaf_paths, unflatten

_LEAF = object()


class Leaf(typing.NamedTuple):
    """A leaf of the arguments: its human name, its spec, and whether that is a pattern for the whole argument."""

    name: str
    spec: Spec
    shares_names: bool


@dataclass(frozen=True)
class Static:
    """A static argument: one leaf, whatever it holds."""

    value: Any


def static_key(value: Any) -> Any:
    """A hashable that is equal for the same static value only: 1, 1.0 and True differ, a nan is the same nan."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return type(value), tuple([static_key(item) for item in value])
    if isinstance(value, Static):
        return Static, static_key(value.value)
    return type(value), value


class Signature:
    """How calls of one function bind: parameter names, static and donated arguments, specs by parameter."""

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
        donate_argnums: Sequence[int] = (),
    ):
        self.function = function
        try:
            described = function.forward if isinstance(function, torch.nn.Module) else function
            self._signature: inspect.Signature | None = inspect.signature(described)
        except (TypeError, ValueError):
            self._signature = None
        kinds = inspect.Parameter
        parameters = self._signature.parameters if self._signature else {}
        self.names = frozenset(parameters)
        self.positional = tuple(
            name for name, p in parameters.items() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        )
        self.rest = next((name for name, p in parameters.items() if p.kind is kinds.VAR_POSITIONAL), None)
        self.takes_any_name = self._signature is None or any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        self._static = self._places(static_argnums, static_argnames, "static_argn")
        self._donated = self._places(donate_argnums, (), "donate_argn")
        if both := self._static & self._donated:
            raise SpecError(message(f"{self.label}: argument {min(both, key=str)} is both static and donated"))

    def _places(self, numbers: Sequence[int], names: Sequence[str], option: str) -> frozenset[int | str]:
        """Arguments given by number or name, as both: a call may pass them either way. Negative numbers count back."""
        places: set[int | str] = set()
        known = len(self.positional)
        for number in numbers:
            place = number + known if number < 0 else number
            if place < 0 or (place >= known and self.rest is None and self._signature is not None):
                raise self._no_such(f"{option}ums has {number}")
            places.add(place)
            if place < known:
                places.add(self.positional[place])
        for name in names:
            if name not in self.names and not self.takes_any_name:
                raise self._no_such(f"{option}ames has {name!r}")
            places.add(name)
            if name in self.positional:
                places.add(self.positional.index(name))
        return frozenset(places)

    def _no_such(self, what: str) -> SpecError:
        return SpecError(
            message(
                f"{self.label} has no such parameter: {what}",
                f"parameters: {self._listed}",
                fix="name one of them",
            )
        )

    @property
    def _listed(self) -> str:
        return "unknown" if self._signature is None else ", ".join(self._signature.parameters) or "none"

    @cached_property
    def label(self) -> str:
        """What errors call the function."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        full, name = getattr(function, "__qualname__", ""), getattr(function, "__name__", "")
        return full.replace("<locals>.", "") if full.endswith(name) and full else name or type(function).__qualname__

    @cached_property
    def annotated(self) -> Annotations:
        """The specs in `Annotated` types."""
        return Annotations(self.function)

    # one call

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], optree.PyTreeSpec]:
        """The leaves of a call and their structure; static arguments are one `Static` leaf each."""
        static = self._static
        if static:
            args = tuple([Static(value) if i in static else value for i, value in enumerate(args)])
            if kwargs:
                kwargs = {name: Static(value) if name in static else value for name, value in kwargs.items()}
        return optree.tree_flatten((args, kwargs))

    def call(self, treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> Any:
        """Call the function with these leaves."""
        args, kwargs = unflatten(treedef, [leaf.value if isinstance(leaf, Static) else leaf for leaf in leaves])
        return self.function(*args, **kwargs)

    def check(self, treedef: optree.PyTreeSpec, leaves: Sequence[Any]) -> None:
        """Before a trace: TypeError, Python's own, if the arguments do not bind; TracingError for a wrong static."""
        args, kwargs = unflatten(treedef, leaves)
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)
        for place, leaf in enumerate(leaves):
            declared = isinstance(leaf, Static)
            value = leaf.value if declared else leaf
            if isinstance(value, torch.Tensor):
                if declared:
                    what, fix = "is a tensor", "leave it out of static_argnums and static_argnames: tensors are traced"
                    raise TracingError(self._wrong_static(treedef, place, value, what, fix))
                continue
            try:
                hash(static_key(value))
            except TypeError:
                fix = "pass a hashable value (a tuple for a list, a frozen dataclass), or tensors (torch.as_tensor)"
                raise TracingError(self._wrong_static(treedef, place, value, "cannot be hashed", fix)) from None

    def _wrong_static(self, treedef: optree.PyTreeSpec, place: int, value: Any, what: str, fix: str) -> str:
        text = repr(value)
        return message(
            f"{self.label}: the static argument {self.leaf_names(treedef)[place]} {what}",
            f"value: {text if len(text) < 200 else text[:200] + '...'}, a {type(value).__name__}",
            "what is no tensor is static: part of the key by which programs are found",
            fix=fix,
        )

    # names and specs: looked at once for each new signature

    def parameter(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.positional):
            return self.positional[position]
        return f"{self.rest or 'args'}[{position - len(self.positional)}]"

    def leaf_names(self, treedef: optree.PyTreeSpec) -> list[str]:
        """The human name of every leaf: parameter and tree path, like "params['w']"."""
        return [name + tail for _, name, tail in self._leaf_arguments(treedef)]

    def donated(self, treedef: optree.PyTreeSpec) -> tuple[int, ...]:
        """The places of the leaves that belong to donated arguments."""
        arguments = self._leaf_arguments(treedef) if self._donated else []
        return tuple(place for place, (argument, _, _) in enumerate(arguments) if argument in self._donated)

    def _leaf_arguments(self, treedef: optree.PyTreeSpec) -> list[tuple[int | str, str, str]]:
        """For every leaf its argument (position or keyword), that one's name, and the path within it."""
        found: list[tuple[int | str, str, str]] = []
        for path in leaf_paths(treedef):
            group, _, rest = path[1:].partition("]")
            inner, _, tail = rest[1:].partition("]")
            keyword = inner.strip("'")
            found.append((int(inner), self.parameter(int(inner)), tail) if group == "0" else (keyword, keyword, tail))
        return found

    def specs(self, treedef: optree.PyTreeSpec, in_specs: Any) -> list[Leaf]:
        """Name and spec of every leaf. SpecError, with the path, if `in_specs` does not fit the arguments."""
        args, kwargs = unflatten(treedef, [_LEAF] * treedef.num_leaves)
        per_argument = self._per_argument(in_specs, args, kwargs)
        names = iter(self.leaf_names(treedef))
        leaves: list[Leaf] = []
        for position, value in [*enumerate(args), *((key, kwargs[key]) for key in sorted(kwargs))]:
            argument = self.parameter(position) if isinstance(position, int) else position
            spec = per_argument.get(position)
            try:
                given = broadcast_specs(spec, value, name=f"in_specs[{position!r}]")
            except SpecError as error:
                raise with_context(error, f"argument: {argument}", f"function: {self.label}") from None
            leaves += [Leaf(next(names), one, isinstance(spec, str)) for one in given]
        return leaves

    def _per_argument(self, in_specs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
        """The specs of each argument, by position or keyword, as the call has them."""
        if in_specs is None:
            in_specs = {name: self.annotated[name] for name in self.names}
        elif type(in_specs) is tuple:
            return self._by_position(in_specs, args, kwargs)
        elif isinstance(in_specs, P | str):
            return dict.fromkeys([*range(len(args)), *kwargs], in_specs)
        elif type(in_specs) is not dict:
            raise self._not_fitting(f"in_specs is a {type(in_specs).__name__}", in_specs)
        elif unknown := [name for name in in_specs if name not in self.names and not self.takes_any_name]:
            raise self._not_fitting(f"in_specs names {', '.join(map(repr, unknown))}, no parameters", in_specs)
        found: dict[int | str, Any] = {name: in_specs[name] for name in kwargs if name in in_specs}
        known = len(self.positional)
        found |= {i: in_specs[name] for i, name in enumerate(self.positional[: len(args)]) if name in in_specs}
        if self.rest in in_specs and len(args) > known:
            rest = in_specs[self.rest]
            if type(rest) is tuple and len(rest) != len(args) - known:
                raise self._not_fitting(f"in_specs[{self.rest!r}] has {len(rest)} of {len(args) - known}", in_specs)
            found |= {i: rest[i - known] if type(rest) is tuple else rest for i in range(known, len(args))}
        return found

    def _by_position(
        self, in_specs: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[int | str, Any]:
        statics = sorted(place for place in self._static if isinstance(place, int) and place < len(self.positional))
        given = list(in_specs)
        if statics and len(given) == len(self.positional) - len(statics):
            for place in statics:  # an entry for each argument that is traced will do, as in JAX
                given.insert(place, None)
        most = max(len(args), len(self.positional)) if self.rest is None else len(args)
        if not len(args) <= len(given) <= most:
            count = f"{len(in_specs)} entries for {len(args)} positional arguments"
            raise self._not_fitting(f"in_specs has {count}", in_specs)
        by_name = {self.parameter(i): spec for i, spec in enumerate(given)}
        return dict(enumerate(given[: len(args)])) | {name: by_name[name] for name in kwargs if name in by_name}

    def _not_fitting(self, what: str, in_specs: Any) -> SpecError:
        return SpecError(
            message(
                f"{self.label}: {what}",
                f"in_specs: {in_specs!r}",
                f"parameters: {self._listed}",
                fix="write a tuple with one entry for each positional argument, in_specs=(a, b), "
                "or a dict by parameter name",
            )
        )
