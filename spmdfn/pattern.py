"""Patterns such as `"(dp b) t (tp d)"`: parsed once, read once for each mesh, then fitted to shapes.

A pattern has a term for each dim: a size, a name, or a group of them. A name is an axis if the mesh has it, otherwise
a free name that binds a size. In a group the order is axes, integers, and at most one free name: a block of a dim is
contiguous only if its axes are the major factors. Errors here are short; `spec.resolve` adds pattern, shape and mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .errors import SpecError, message
from .mesh import Mesh

ANONYMOUS = "_"
_TOKEN = re.compile(r"\s*(\.\.\.|[()]|\w+|\S)")


class Pattern(NamedTuple):
    """The terms before and after the ellipsis; `after` is None if there is none. A term is a flat tuple of factors."""

    before: tuple[tuple[str | int, ...], ...]
    after: tuple[tuple[str | int, ...], ...] | None


class Term(NamedTuple):
    """One dim as a given mesh reads it: the axes, the product of the integers, the free name."""

    axes: tuple[str, ...]
    number: int
    free: str | None
    factors: tuple[str | int, ...]


@lru_cache(maxsize=4096)
def parse(pattern: str) -> Pattern:
    """Parse a pattern, before any mesh is known; SpecError if it is malformed. Nested groups are flattened.

    >>> parse("((dp fsdp) b) ... 3")
    Pattern(before=(('dp', 'fsdp', 'b'),), after=((3,),))
    """
    terms: list[tuple[str | int, ...]] = []
    group: list[str | int] = []
    depth, ellipsis = 0, None
    for token in _TOKEN.findall(pattern):
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
            if depth < 0:
                raise SpecError(message("unbalanced parentheses: a ')' without its '('"))
            if depth == 0:
                terms.append(tuple(group))
                group = []
        elif token == "...":
            if depth:
                raise SpecError(message("an ellipsis inside a group", fix="'...' stands for whole dims: move it out"))
            if ellipsis is not None:
                raise SpecError(message("an ellipsis twice", fix="use '...' once and name the other dims"))
            ellipsis = len(terms)
        elif depth:
            group.append(_factor(token))
        else:
            terms.append((_factor(token),))
    if depth:
        raise SpecError(message("unbalanced parentheses: a '(' without its ')'"))
    if ellipsis is None:
        return Pattern(tuple(terms), None)
    return Pattern(tuple(terms[:ellipsis]), tuple(terms[ellipsis:]))


def _factor(token: str) -> str | int:
    if token.isidentifier():
        return token
    if token.isdecimal() and int(token) > 0:
        return int(token)
    raise SpecError(
        message(
            f"{token!r} is neither a name nor a positive integer",
            fix='dims are separated by spaces and grouped by parentheses, e.g. "(dp b) t"',
        )
    )


@lru_cache(maxsize=4096)
def read(pattern: str, mesh: Mesh) -> tuple[tuple[Term, ...], tuple[Term, ...] | None]:
    """The pattern's terms before and after its ellipsis, with axes told from free names; SpecError if out of order.

    >>> from spmdfn.mesh import make_mesh
    >>> read("(dp 4 b)", make_mesh((2,), ("dp",)))[0][0][:3]
    (('dp',), 4, 'b')
    """
    before, after = parse(pattern)
    seen: set[str] = set()
    for factor in itertools.chain.from_iterable(before + (after or ())):
        if factor in mesh.shape:
            if factor in seen:
                raise SpecError(repeated_axis(str(factor)))
            seen.add(str(factor))
    return tuple(_term(t, mesh) for t in before), None if after is None else tuple(_term(t, mesh) for t in after)


def repeated_axis(axis: str) -> str:
    """The error text for an axis that one spec uses twice."""
    return message(f"axis {axis!r} is used twice", fix="an axis splits at most one dim, once: drop one of the two")


def _term(factors: tuple[str | int, ...], mesh: Mesh) -> Term:
    axes = tuple(f for f in factors if isinstance(f, str) and f in mesh.shape)
    counts = tuple(f for f in factors if isinstance(f, int))
    frees = tuple(f for f in factors if isinstance(f, str) and f not in mesh.shape)
    if len(frees) > 1:
        raise SpecError(
            message(
                f"two free names in the group {write(factors)}: {', '.join(map(repr, frees))}",
                f"the mesh's axes: {', '.join(mesh.axis_names) or 'none'}",
                fix=f'keep one name for all that is not an axis, e.g. "{write((*axes, *counts, frees[-1]))}"',
            )
        )
    ordered: tuple[str | int, ...] = (*axes, *counts, *frees)
    if factors != ordered:
        late = next(f for f, right in zip(factors, ordered, strict=True) if f != right)
        what = f"the integer {late}" if isinstance(late, int) else f"the free name {late!r}"
        rule = "integers come after the axes" if isinstance(late, int) and axes else "the free name comes last"
        raise SpecError(
            message(
                f"{what} is too early in the group {write(factors)}: {rule}",
                fix=f'write "{write(ordered)}" to split the dim into contiguous blocks; reshape first for any other',
            )
        )
    return Term(axes, math.prod(counts), frees[0] if frees else None, factors)


def write(factors: tuple[str | int, ...]) -> str:
    """A term as text: `"(dp b)"`, or `"dp"` for a single factor."""
    text = " ".join(map(str, factors))
    return text if len(factors) == 1 else f"({text})"


class Fit(NamedTuple):
    """The axes of every dim, and the sizes of the free names in the order met."""

    entries: tuple[tuple[str, ...], ...]
    bound: tuple[tuple[str, int], ...]


def fit(pattern: str, shape: tuple[int, ...], mesh: Mesh) -> Fit:
    """Fit a pattern to a shape; SpecError if the rank or a size does not fit.

    >>> from spmdfn.mesh import make_mesh
    >>> fit("(dp b) ... (tp d)", (8, 3, 5, 16), make_mesh((2, 4), ("dp", "tp")))
    Fit(entries=(('dp',), (), (), ('tp',)), bound=(('b', 4), ('d', 4)))
    """
    before, after = read(pattern, mesh)
    named = len(before) + len(after or ())
    whole = len(shape) - named
    if whole < 0 or (whole and after is None):
        least = "" if after is None else "at least "
        raise SpecError(
            message(
                f"the pattern has {least}{_dims(named)}, the shape {shape} has {len(shape)}",
                fix='name each dim once; "..." stands for any number of whole dims, "" for a scalar',
            )
        )
    entries: list[tuple[str, ...]] = []
    bound: list[tuple[str, int]] = []
    for term in (*before, *(itertools.repeat(None, whole)), *(after or ())):
        if term is not None:
            size = _free_size(term, len(entries), shape[len(entries)], mesh)
            if term.free is not None and term.free != ANONYMOUS:
                bound.append((term.free, size))
        entries.append(() if term is None else term.axes)
    return Fit(tuple(entries), tuple(bound))


def _dims(number: int) -> str:
    return f"{number} dim" if number == 1 else f"{number} dims"


def _free_size(term: Term, dim: int, size: int, mesh: Mesh) -> int:
    """The size left for the free name, 1 if there is none; checks everything that the term says of the dim."""
    parts = mesh.axis_size(term.axes)
    want = parts * term.number
    if term.free is None:
        if size != want:
            raise SpecError(_wrong_size(term, dim, size, want, mesh))
        return 1
    if size % parts:
        raise SpecError(undivided(dim, size, term.axes, mesh))
    if size % want:
        product = " * ".join([*_sizes(term.axes, mesh), *(str(f) for f in term.factors if isinstance(f, int))])
        raise SpecError(
            message(
                f"dim {dim} has size {size}, which {write(term.factors)} does not divide: {product} = {want}",
                fix=f"make the size a multiple of {want}",
            )
        )
    return size // want


def _sizes(axes: tuple[str, ...], mesh: Mesh) -> Iterator[str]:
    return (f"{axis}={mesh.shape[axis]}" for axis in axes)


def undivided(dim: int, size: int, axes: tuple[str, ...], mesh: Mesh) -> str:
    """The error text for a dim that its axes do not divide."""
    parts = mesh.axis_size(axes)
    return message(
        f"dim {dim} has size {size}, which its axes do not divide: {' * '.join(_sizes(axes, mesh))}"
        + (f" = {parts}" if len(axes) > 1 else ""),
        fix=f"pad dim {dim} to {-(-size // parts) * parts}, or leave it whole (None in P, a free name in a pattern)",
    )


def _wrong_size(term: Term, dim: int, size: int, want: int, mesh: Mesh) -> str:
    taken = {*mesh.axis_names, *map(str, term.factors)}
    free = next(name for name in itertools.chain("bnmk", map("n{}".format, itertools.count())) if name not in taken)
    if not term.axes:
        return message(
            f"dim {dim} has size {size}, the pattern says {want}",
            fix=f'write {size}, or a name such as "{free}" for any size',
        )
    return message(
        f"dim {dim} has size {size}, but {write(term.factors)} without a free name means a size of exactly {want}: "
        + ", ".join(_sizes(term.axes, mesh)),
        fix=f'write "{write((*term.factors, free))}" to split a dim over {", ".join(term.axes)}',
    )
