"""Laid-out inputs for the table: numbers, the short words for layouts, and Arrays in any layout.

Layouts are written as short words, one letter a dim: "x-" is P("x", None), "(yx)-" is P(("y", "x"), None), "-x+y" is
P(None, "x", unreduced={"y"}), "" is P(). Numbers are multiples of 1/256, so that the pieces of a pending sum add up to
the very value: comparisons and roundings are tested too.
"""

from __future__ import annotations

import itertools
import re

import torch

import spmdfn as sp
from spmdfn import P
from spmdfn.blocks import take
from spmdfn.layout import from_entries
from spmdfn.spec import resolve

LINE = sp.make_mesh((4,), ("x",))
SQUARE = sp.make_mesh((2, 2), ("x", "y"))
CUBE = sp.make_mesh((2, 2, 2), ("x", "y", "z"))


def is_smooth(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


# ---------------------------------------------------------------- inputs

_numbers = torch.Generator().manual_seed(0)


def n(*shape: int) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(shape, dtype=torch.float64, generator=_numbers) * 256).round() / 256


def pos(*shape: int) -> torch.Tensor:
    """Numbers from 1/4 to 4."""
    return (torch.rand(shape, dtype=torch.float64, generator=_numbers) * 960).round() / 256 + 0.25


def unit(*shape: int) -> torch.Tensor:
    """Numbers from -0.9 to 0.9."""
    return ((torch.rand(shape, dtype=torch.float64, generator=_numbers) - 0.5) * 460).round() / 256


def distinct(*shape: int) -> torch.Tensor:
    """Numbers of both signs, no two equal."""
    count = torch.Size(shape).numel()
    return ((torch.randperm(count, generator=_numbers) - count // 3) * 0.375 + 0.125).double().reshape(shape)


def cn(*shape: int) -> torch.Tensor:
    """Complex numbers."""
    return torch.complex(n(*shape), n(*shape))


def ints(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_numbers)


def bools(*shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=_numbers) > 0


# ---------------------------------------------------------------- layouts


def word(spec: P) -> str:
    """A spec in short."""
    dims = "".join("-" if not axes else axes[0] if len(axes) == 1 else f"({''.join(axes)})" for axes in spec.entries)
    return dims + ("+" + "".join(sorted(spec.unreduced)) if spec.unreduced else "")


def spec_of(text: str) -> P:
    """The spec that a word stands for."""
    dims, _, pending = text.partition("+")
    entries = [None if one == "-" else tuple(one.strip("()")) for one in re.findall(r"\(\w+\)|.", dims)]
    return P(*entries, unreduced=set(pending))


def specs_of(text: str, count: int) -> list[P]:
    """The specs of all inputs; those that are not written are whole."""
    specs = [spec_of(one) for one in text.split(",")]
    return specs + [P()] * (count - len(specs))


def layouts(value: torch.Tensor, mesh: sp.Mesh) -> list[P]:
    """Every spec that a tensor can have on a mesh of one or two axes; a pending sum for all but bools."""
    shape, found = value.shape, []
    places = [-1, *range(len(shape)), *(["pending"] if value.dtype != torch.bool else [])]
    for chosen in itertools.product(places, repeat=len(mesh.axis_names)):
        dims: dict[int, list[str]] = {}
        pending = []
        for axis, place in zip(mesh.axis_names, chosen, strict=True):
            if place == "pending":
                pending.append(axis)
            elif place >= 0:
                dims.setdefault(place, []).append(axis)
        if all(shape[d] and shape[d] % mesh.axis_size(tuple(axes)) == 0 for d, axes in dims.items()):
            for flip in (False, True) if any(len(axes) > 1 for axes in dims.values()) else (False,):
                entries = [tuple(reversed(dims.get(d, ())) if flip else dims.get(d, ())) for d in range(len(shape))]
                found.append(P(*entries, unreduced=pending))
    return found


def lay_out(value: torch.Tensor, spec: P, mesh: sp.Mesh) -> sp.Array:
    """An Array of that value; the pieces of a pending sum differ in sign and size."""
    settled = from_entries(mesh, value.shape, resolve(P(*spec.entries), value.shape, mesh).entries)
    pending = [axis for axis in mesh.axis_names if axis in spec.unreduced]
    pieces = pieces_of(value, mesh.axis_size(tuple(pending)) if pending else 1)
    blocks = []
    cut = [take(piece, settled) for piece in pieces]
    for device in mesh.devices:
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        number = 0
        for axis in pending:
            number = number * mesh.shape[axis] + place[axis]
        blocks.append(cut[number][device])
    return sp.Array.from_shards(blocks, spec, mesh)


def pieces_of(value: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Tensors that add up to a value, to the bit."""
    numbers = torch.Generator().manual_seed(count)
    pieces = []
    for i in range(count - 1):
        shape = (*value.shape, 2) if value.is_complex() else value.shape
        piece = torch.randint(-900, 1200, shape, generator=numbers) * (i + 1)
        if value.is_complex():
            piece = torch.view_as_complex(piece.to(value.real.dtype) / 256)
        pieces.append((piece / 256 if value.is_floating_point() else piece).to(value.dtype))
    return [*pieces, value - sum(pieces)] if pieces else [value]
