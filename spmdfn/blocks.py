"""Whole tensors to blocks and back: which part of a tensor each device holds under a layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .layout import Layout
from .mesh import Mesh
from .pattern import read
from .spec import Spec, resolve


class Cut(NamedTuple):
    """One device's part: the (factor, start, length) of every factor that is split, and whether it holds only zeros."""

    narrows: tuple[tuple[int, int, int], ...]
    zero: bool


@lru_cache(maxsize=4096)
def cuts(layout: Layout) -> tuple[Cut, ...]:
    """Every device's part, row-major by coordinate. A pending sum lies on the first device of its axes.

    >>> from spmdfn.layout import from_entries
    >>> from spmdfn.mesh import make_mesh
    >>> [cut.narrows for cut in cuts(from_entries(make_mesh((2,), ("dp",)), (6, 3), (("dp",), ())))]
    [((0, 0, 3),), ((0, 3, 3),)]
    """
    mesh, found = layout.mesh, []
    sizes = [factor.size for factor in layout.factors]
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        place = dict(zip(mesh.axis_names, coordinates, strict=True))
        boxes = enumerate(layout.box(coordinates))
        narrows = tuple((dim, start, length) for dim, (start, length) in boxes if length != sizes[dim])
        found.append(Cut(narrows, any(place[axis] for axis in layout.pending_axes)))
    return tuple(found)


def take(tensor: torch.Tensor, layout: Layout, *, copy: bool = False) -> list[torch.Tensor]:
    """The blocks of a whole tensor, one a device: views of it, or copies. Devices with equal parts share one block."""
    if layout.is_whole:
        return [tensor.clone() if copy else tensor] * layout.mesh.size
    whole = tensor.reshape([factor.size for factor in layout.factors])
    made: dict[Cut, torch.Tensor] = {}
    blocks = []
    for cut in cuts(layout):
        block = made.get(cut)
        if block is None:
            block = whole
            for dim, start, length in cut.narrows:
                block = block.narrow(dim, start, length)
            block = block.reshape(layout.local_shape)
            if cut.zero:
                block = torch.zeros_like(block)
            elif copy:
                block = block.clone(memory_format=torch.contiguous_format)
            made[cut] = block
        blocks.append(block)
    return blocks


def assemble(blocks: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor, a new one, from every device's block: the inverse of `take`. A pending sum is summed."""
    if layout.is_whole:
        return blocks[0].clone()
    mesh = layout.mesh
    whole = blocks[0].new_empty([factor.size for factor in layout.factors])
    matter = layout.axes | layout.pending_axes
    for device, (block, cut) in enumerate(zip(blocks, cuts(layout), strict=True)):
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        if any(at for axis, at in place.items() if axis not in matter):
            continue  # the same block again
        target = whole
        for dim, start, length in cut.narrows:
            target = target.narrow(dim, start, length)
        if cut.zero:
            target += block.reshape(target.shape)
        else:
            target.copy_(block.reshape(target.shape))
    return whole.reshape(layout.shape)


def global_shape(local: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the tensor whose blocks have the local shape; SpecError if the spec has more dims than that.

    >>> from spmdfn.mesh import make_mesh
    >>> global_shape((3, 5), "(dp b) ...", make_mesh((2,), ("dp",)))
    (6, 5)
    """
    shape = tuple(local)
    entries: list[tuple[str, ...]] = []
    if isinstance(spec, str):
        before, after = read(spec, mesh)
        rest = len(shape) - len(before) - len(after or ())
        if rest < 0 or (rest and after is None):
            resolve(spec, shape, mesh)  # says what is wrong with the rank
        entries = [term.axes for term in before] + [()] * rest + [term.axes for term in after or ()]
    elif spec is not None:
        entries = list(spec.entries)
    entries += [()] * (len(shape) - len(entries))
    # entries beyond the rank are left for `resolve` to refuse
    return tuple(n * mesh.axis_size(axes) for n, axes in zip(shape, entries, strict=False))
