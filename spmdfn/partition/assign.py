"""What operands' layouts say about a rule's factors, and how several opinions combine. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..layout import Dim, Factor, Layout, axes_of, fits, join, size_of, split, whole
from ..mesh import Mesh
from .rule import Dims, Rule

Opinion = dict[str, Dim]
"""For some factors, a dim that says how each is split."""


def opinion(rule: Rule, dims: Dims, layout: Sequence[Dim], mesh: Mesh, *, kinds: Iterable[str] = ()) -> Opinion:
    """What a tensor laid out as `layout` says about the factors of its dims; "whole" factors only if asked for."""
    result: Opinion = {}
    for names, dim in zip(dims, layout, strict=True):
        if not axes_of(dim) or not names:
            continue
        for name, piece in zip(names, split(dim, [rule.sizes[n] for n in names], mesh), strict=True):
            if axes_of(piece) and (rule.kind(name) != "whole" or "whole" in kinds):
                if name in rule.contiguous and len(piece) > 1:
                    piece = leading(piece, mesh)
                if axes_of(piece):
                    result.setdefault(name, piece)
    return result


def leading(dim: Dim, mesh: Mesh) -> Dim:
    """The part of a split that leaves every block one contiguous run."""
    size = size_of(dim)
    return (Factor(size, size, dim[0].axes),) if dim[0].axes and fits(size, dim[0].axes, mesh) else whole(size)


def combine(opinions: Sequence[Opinion], mesh: Mesh) -> tuple[Opinion, bool]:
    """One assignment from several opinions, the earlier ones first; and whether any of them was overruled."""
    result: Opinion = {}
    used: set[str] = set()
    overruled = False
    for one in opinions:
        for name, dim in one.items():
            mine, axes = result.get(name), axes_of(dim)
            have = axes_of(mine) if mine is not None else ()
            if mine == dim or (mine is not None and have[: len(axes)] == axes):
                continue
            extra = axes[len(have) :] if axes[: len(have)] == have else None
            if extra is None:
                overruled = True
                continue
            if used.intersection(extra):
                overruled = True
                dim = _without(dim, used.difference(have), mesh)
                if len(axes_of(dim)) <= len(have):
                    continue
            result[name] = dim
            used.update(axes_of(dim))
    return result, overruled


def _without(dim: Dim, used: set[str], mesh: Mesh) -> Dim:
    """A dim with those axes, and what is minor to them in their factor, taken away."""
    factors = []
    for factor in dim:
        count = 0
        while count < len(factor.axes) and factor.axes[count] not in used:
            count += 1
        factors.append(Factor(factor.size, factor.padded, factor.axes[:count]))
    return join([tuple(factors)], mesh)


def dims_for(rule: Rule, dims: Dims, assignment: Mapping[str, Dim], mesh: Mesh) -> tuple[Dim, ...]:
    """The layout of a tensor whose dims have these factors, under an assignment."""
    result = []
    for names in dims:
        if len(names) == 1:
            result.append(assignment.get(names[0]) or whole(rule.sizes[names[0]]))
        else:
            result.append(join([assignment.get(name) or whole(rule.sizes[name]) for name in names], mesh))
    return tuple(result)


def used_axes(assignment: Mapping[str, Dim]) -> set[str]:
    return {axis for dim in assignment.values() for axis in axes_of(dim)}


def result_layout(rule: Rule, index: int, assignment: Mapping[str, Dim], passed: Iterable[str], mesh: Mesh) -> Layout:
    """The layout of a result: pending over the axes of reduced factors that it lacks, and over those that passed."""
    dims = rule.outs[index]
    present = {name for names in dims for name in names}
    pending = [(axis, "sum") for axis in passed]
    for name, dim in assignment.items():
        if name not in present:
            kind = rule.kind(name)
            if kind not in ("sum", "max", "min"):
                raise AssertionError(f"factor {name!r} of kind {kind!r} is split but missing in result {index}")
            pending += [(axis, kind) for axis in axes_of(dim)]
    return Layout(mesh, dims_for(rule, dims, assignment, mesh), pending)
