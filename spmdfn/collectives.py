"""The collectives as torch ops over local blocks, named `spmdfn::`; which backend answers is not known here.

An op names mesh axes (a tuple is one group, major first) and, where the result's shape needs it, the group's size.
`reduce` is "sum", "max" or "min". In a `Program` they are the points at which devices meet.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("spmdfn", "FRAGMENT")
LIBRARY.define("all_reduce(Tensor x, str[] axes, str reduce) -> Tensor")
LIBRARY.define("all_gather(Tensor x, str[] axes, int size, int dim) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, str[] axes, int size, int dim, str reduce) -> Tensor")
LIBRARY.define("all_to_all(Tensor x, str[] axes, int size, int split_dim, int concat_dim) -> Tensor")
LIBRARY.define("permute(Tensor x, str[] axes, int[] sources) -> Tensor")

all_reduce = torch.ops.spmdfn.all_reduce.default
all_gather = torch.ops.spmdfn.all_gather.default
reduce_scatter = torch.ops.spmdfn.reduce_scatter.default
all_to_all = torch.ops.spmdfn.all_to_all.default
permute = torch.ops.spmdfn.permute.default

COLLECTIVES = frozenset([all_reduce, all_gather, reduce_scatter, all_to_all, permute])


def _like(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    return x.new_empty([sizes.get(dim, size) for dim, size in enumerate(x.shape)])


@torch.library.register_fake("spmdfn::all_reduce")
def _(x: torch.Tensor, axes: list[str], reduce: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("spmdfn::permute")
def _(x: torch.Tensor, axes: list[str], sources: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("spmdfn::all_gather")
def _(x: torch.Tensor, axes: list[str], size: int, dim: int) -> torch.Tensor:
    return _like(x, {dim: x.shape[dim] * size})


@torch.library.register_fake("spmdfn::reduce_scatter")
def _(x: torch.Tensor, axes: list[str], size: int, dim: int, reduce: str) -> torch.Tensor:
    return _like(x, {dim: x.shape[dim] // size})


@torch.library.register_fake("spmdfn::all_to_all")
def _(x: torch.Tensor, axes: list[str], size: int, split_dim: int, concat_dim: int) -> torch.Tensor:
    return _like(x, {split_dim: x.shape[split_dim] // size, concat_dim: x.shape[concat_dim] * size})
