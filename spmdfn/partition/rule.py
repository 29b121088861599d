"""What a rule says about one call of one op: the factors of its dims, their kinds, and how ints localise.

A *factor* is a named piece of the op's index space. `"m k, k n -> m n"` names three for a matrix product; a dim may be
a product of several, `"(b t) d -> b t d"`, major to minor. The engine decides which factors lie on which mesh axes;
a rule knows neither meshes nor specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Dims = tuple[tuple[str, ...], ...]
"""For every dim of a tensor, its factors from major to minor; a dim of size 1 has none."""

KINDS = ("pass", "sum", "max", "min", "whole")


class Operand(NamedTuple):
    """A tensor operand of a call: its place among the call's tensors, and its global shape."""

    index: int  # type: ignore[assignment]  # its place, not a lookup
    shape: tuple[int, ...]
    dtype: torch.dtype


class Result(NamedTuple):
    """A tensor result of a call, with its global shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One call of an op over global shapes. Tensors in `args` and `kwargs` are replaced by their `Operand`.

    `operands` lists them in the order of (args, kwargs), lists of tensors flattened in place, None skipped.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument of that schema name, wherever it was passed; the schema's default when it was not."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default


@dataclass(frozen=True)
class Rule:
    """The rule for one call.

    ins, outs    factors of every dim of every operand and result
    sizes        the size of every factor
    kinds        by factor; those not named are "pass". "pass": may be split, and then every result that lacks it would
                 be wrong, so every result has it. "sum", "max", "min": may be split; a result that lacks it is then a
                 pending sum (max, min). "whole": must not be split.
    linear       groups of operand indices. A pending sum may pass the op if all operands of one group are pending over
                 the same axes and no other operand is. mul: ({0}, {1}); add: ({0, 1},); cat: ({0, 1, .., n-1},).
                 Single-result ops only.
    shape_only   operands of which only the shape matters
    elementwise  each result element depends on at most one element of each operand: pointwise ops, views, factories.
                 Such a value may be computed in any layout that its consumer has, and wishes pass up through it.
    follow       operands that stay put when layouts clash, whatever the bytes: a table comes to its indices
    contiguous   factors whose offset `local` reads: a block of them must be one contiguous run
    local        `local(ctx, *args, **kwargs) -> result(s)`, called instead of the op when some factor is split: args as
                 in the call, tensors now local blocks. It rewrites baked-in global ints and may use several torch ops.
                 Tensors may be fx proxies and the ints that ctx returns from `offset` may be too: no branching on them.
    strided      the op is legal on some strides only, which a block may lack: `local` is called though nothing is split
    piecewise    the alternative is taken wherever there is more than one device: an op over lists of tensors, say,
                 hides from each tensor what its consumers are
    alternative  `alternative(splits, *args, **kwargs) -> result(s)`: the same op from other torch ops over *global*
                 tensors, used when an operand is split on a "whole" factor. `splits` maps each such factor to the
                 number of its blocks n: reshape the dim to (n, size // n), combine the inner part, then the outer.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    shape_only: frozenset[int] = frozenset()
    elementwise: bool = False
    follow: frozenset[int] = frozenset()
    contiguous: frozenset[str] = frozenset()
    local: Callable[..., Any] | None = None
    alternative: Callable[..., Any] | None = None
    strided: bool = False
    piecewise: bool = False

    def kind(self, factor: str) -> str:
        return self.kinds.get(factor, "pass")


class Local:
    """What `Rule.local` may ask about this device's block."""

    def size(self, factor: str) -> int:
        """The local size of a factor."""
        raise NotImplementedError

    def offset(self, factor: str) -> Any:
        """Where the local block of a *contiguous* factor starts: an int, or a proxy of one."""
        raise NotImplementedError

    def is_split(self, factor: str) -> bool:
        raise NotImplementedError

    def blocks(self, factor: str) -> Sequence[tuple[int, int, Any]]:
        """The factor's pieces, major to minor, as (local size, stride within the factor, offset within the piece)."""
        raise NotImplementedError

    def in_shape(self, index: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        raise NotImplementedError

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        """The local shape of a result."""
        raise NotImplementedError


RuleFunction = Callable[[Call], "Rule | None"]
_RULES: dict[Hashable, RuleFunction] = {}


def register(*ops: Hashable) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function that makes the rule for a call of any of these ops (it may answer None: no rule)."""

    def decorator(function: RuleFunction) -> RuleFunction:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"{op} has a rule already")
            _RULES[op] = function
        return function

    return decorator


def rule_for(call: Call) -> Rule | None:
    """The rule for a call, or None: gather every operand and run replicated."""
    function = _RULES.get(call.op)
    return None if function is None else function(call)


def rule(
    call: Call,
    pattern: str,
    *,
    linear: Iterable[Iterable[int]] = (),
    sizes: Mapping[str, int] | None = None,
    whole: str = "",
    sum: str = "",
    max: str = "",
    min: str = "",
    contiguous: str = "",
    **options: Any,
) -> Rule:
    """Make a rule from einops' notation: `rule(call, "m k, k n -> m n", sum="k", linear=[[0], [1]])`.

    Operands are separated by commas, dims by spaces; "1" is a dim without a factor; a dim of size 1 loses its factor.
    Sizes are read off the call's shapes; a group needs all but one of its sizes known. Kinds are given as
    space-separated names.
    """
    left, _, right = pattern.partition("->")
    known = dict(sizes or {})
    ins = _bind(left, [operand.shape for operand in call.operands], known, pattern)
    outs = _bind(right, [result.shape for result in call.results], known, pattern)
    kinds = {
        name: kind
        for kind, names in (("whole", whole), ("sum", sum), ("max", max), ("min", min))
        for name in names.split()
    }
    return Rule(
        ins=ins,
        outs=outs,
        sizes={name: size for name, size in known.items() if size != 1},
        kinds=kinds,
        linear=tuple(frozenset(group) for group in linear),
        contiguous=frozenset(contiguous.split()),
        **options,
    )


def _bind(side: str, shapes: Sequence[tuple[int, ...]], known: dict[str, int], pattern: str) -> tuple[Dims, ...]:
    terms = [_parse(term) for term in side.split(",")] if shapes else []
    if len(terms) != len(shapes) or any(len(t) != len(s) for t, s in zip(terms, shapes, strict=True)):
        raise ValueError(f"rule {pattern!r} does not fit shapes {list(shapes)}")
    for groups, shape in zip(terms, shapes, strict=True):
        for group, size in zip(groups, shape, strict=True):
            unknown = [name for name in group if name not in known]
            if len(unknown) > 1:
                raise ValueError(f"rule {pattern!r}: sizes of {unknown} are not known")
            rest = math.prod(known[name] for name in group if name in known)
            if unknown:
                known[unknown[0]] = size // rest if rest else 0
            elif size != 1 and rest != size:  # a broadcast dim of size 1 has no factor
                raise ValueError(f"rule {pattern!r}: {group} is {rest}, the dim is {size}")
    return tuple(
        tuple(
            () if size == 1 else tuple(name for name in group if known[name] != 1)
            for group, size in zip(groups, shape, strict=True)
        )
        for groups, shape in zip(terms, shapes, strict=True)
    )


def _parse(term: str) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in term.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            inside = []
        elif token == ")":
            groups.append(tuple(inside or ()))
            inside = None
        elif inside is not None:
            inside.append(token)
        else:
            groups.append(() if token == "1" else (token,))
    return groups
