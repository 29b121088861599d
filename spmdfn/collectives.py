"""The collectives as torch ops over local blocks, named `spmdfn::`; which backend answers is not known here.

An op names mesh axes (a tuple is one group, major first) and, where the result's shape needs it, the group's size.
`reduce` is "sum", "max" or "min". `groups` cuts an axis into equal groups: their size, then indices; empty: one group.
`equal` says that the devices' results count as one invariant value.
In a `Program` the collectives are the points at which devices meet; the other ops here need only a device's place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("spmdfn", "FRAGMENT")
LIBRARY.define("all_reduce(Tensor x, str[] axes, str reduce, int[] groups=[]) -> Tensor")
LIBRARY.define("all_gather(Tensor x, str[] axes, int size, int dim, int[] groups=[], bool equal=False) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, str[] axes, int size, int dim, str reduce, int[] groups=[]) -> Tensor")
LIBRARY.define("all_to_all(Tensor x, str[] axes, int size, int split_dim, int concat_dim, int[] groups=[]) -> Tensor")
LIBRARY.define("permute(Tensor x, str[] axes, int[] sources) -> Tensor")
LIBRARY.define("broadcast(Tensor x, str[] axes, int source) -> Tensor")
LIBRARY.define(
    "ragged_all_to_all(Tensor x, Tensor output, Tensor input_offsets, Tensor send_sizes, Tensor output_offsets, "
    "Tensor recv_sizes, str[] axes) -> Tensor"
)
# no communication: what a device does follows from its place
LIBRARY.define("pcast(Tensor x, str[] axes) -> Tensor")
LIBRARY.define("axis_index(Tensor like, str[] axes) -> Tensor")
LIBRARY.define("own_slice(Tensor x, str[] axes, int size, int dim) -> Tensor")
LIBRARY.define("keep_source(Tensor x, str[] axes, int source) -> Tensor")
# the border of a map; `entries` are comma-joined axes, one a dim, `sizes` the devices along them
LIBRARY.define("enter(Tensor x, str[] entries, int[] sizes, str[] manual) -> Tensor")
LIBRARY.define("leave(Tensor x, str[] entries, int[] sizes, str[] manual) -> Tensor")

all_reduce = torch.ops.spmdfn.all_reduce.default
all_gather = torch.ops.spmdfn.all_gather.default
reduce_scatter = torch.ops.spmdfn.reduce_scatter.default
all_to_all = torch.ops.spmdfn.all_to_all.default
permute = torch.ops.spmdfn.permute.default
broadcast = torch.ops.spmdfn.broadcast.default
ragged_all_to_all = torch.ops.spmdfn.ragged_all_to_all.default
pcast = torch.ops.spmdfn.pcast.default
axis_index = torch.ops.spmdfn.axis_index.default
own_slice = torch.ops.spmdfn.own_slice.default
keep_source = torch.ops.spmdfn.keep_source.default
enter = torch.ops.spmdfn.enter.default
leave = torch.ops.spmdfn.leave.default

COLLECTIVES = frozenset([all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast, ragged_all_to_all])
PLACED = frozenset([pcast, axis_index, own_slice, keep_source])


def _like(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    return x.new_zeros([sizes.get(dim, size) for dim, size in enumerate(x.shape)])


def _same(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.zeros_like(x)


def _all_gather(x: torch.Tensor, axes: list[str], size: int, dim: int, *_: object) -> torch.Tensor:
    return _like(x, {dim: x.shape[dim] * size})


def _reduce_scatter(x: torch.Tensor, axes: list[str], size: int, dim: int, *_: object) -> torch.Tensor:
    return _like(x, {dim: x.shape[dim] // size})


def _all_to_all(
    x: torch.Tensor, axes: list[str], size: int, split_dim: int, concat_dim: int, *_: object
) -> torch.Tensor:
    if split_dim == concat_dim:
        return torch.zeros_like(x)
    return _like(x, {split_dim: x.shape[split_dim] // size, concat_dim: x.shape[concat_dim] * size})


def _ragged(x: torch.Tensor, output: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.zeros_like(output)


def _axis_index(like: torch.Tensor, axes: list[str]) -> torch.Tensor:
    return like.new_empty((), dtype=torch.int32)


def _enter(x: torch.Tensor, entries: list[str], sizes: list[int], manual: list[str]) -> torch.Tensor:
    return x.new_zeros([n // size for n, size in zip(x.shape, sizes, strict=True)])


def _leave(x: torch.Tensor, entries: list[str], sizes: list[int], manual: list[str]) -> torch.Tensor:
    return x.new_zeros([n * size for n, size in zip(x.shape, sizes, strict=True)])


_SHAPES: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(["all_reduce", "permute", "broadcast", "pcast", "keep_source"], _same),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged,
    "own_slice": _reduce_scatter,
    "axis_index": _axis_index,
    "enter": _enter,
    "leave": _leave,
}
for _name, _shape in _SHAPES.items():
    torch.library.register_fake(f"spmdfn::{_name}", _shape)
    # A trace meets tensors with data too, made in the body. So do transforms in an eager map: zeros that autograd makes
    # for what has no derivative are plain tensors, and a linear map of zeros is zeros.
    LIBRARY.impl(_name, _shape, "CompositeExplicitAutograd")
