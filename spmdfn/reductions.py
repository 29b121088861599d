"""The reductions by axis name, for functions under `shard_map`: psum, pmean, pmax, pmin over pytrees."""

from __future__ import annotations

from typing import Any

import optree
import torch

from . import moves
from .device_types import frame_for, varying
from .moves import Extremum, Sum
from .operands import Axis, Groups, cast, check_varies, counted, groups_of, size_of


def psum(x: Any, axis_name: Axis, *, axis_index_groups: Groups = None) -> Any:
    """The sum over the devices of an axis: a varying value becomes invariant. Transpose: the cotangent cast to varying.

    `x`: a pytree of tensors (any shape and dtype; bools are counted, int32) or numbers (n · c). With
    `axis_index_groups`, sums within each group, and the result varies. Raises VaryingError for a tensor that does not
    vary over the axis, CollectiveError outside a map.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> total = sp.shard_map(lambda x: sp.psum(x, "i"), mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())
    >>> total(torch.arange(4.)).unshard()
    tensor([6.])
    """
    frame, axes = frame_for(axis_name, "psum")
    cut = groups_of(frame, axes, axis_index_groups)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf * (cut[0] if cut else size_of(frame, axes))
        leaf = counted(frame.inside(leaf))
        leaf = cast(frame, leaf, axes) if cut else check_varies(frame, leaf, axes, "psum")
        return moves.apply(leaf, Sum(axes, cut, frame.checked))

    return optree.tree_map(one, x)


def pmean(x: Any, axis_name: Axis, *, axis_index_groups: Groups = None) -> Any:
    """The mean over the devices of an axis: the sum, then divided; bools and ints give float32. Else as `psum`.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> mean = sp.shard_map(lambda x: sp.pmean(x, "i"), mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())
    >>> mean(torch.tensor([True, False, False, False])).unshard()
    tensor([0.2500])
    """
    frame, axes = frame_for(axis_name, "pmean")
    cut = groups_of(frame, axes, axis_index_groups)
    n = cut[0] if cut else size_of(frame, axes)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = frame.inside(leaf)
        if not (leaf.is_floating_point() or leaf.is_complex()):
            leaf = leaf.to(torch.float32)
        leaf = cast(frame, leaf, axes) if cut else check_varies(frame, leaf, axes, "pmean")
        return moves.apply(leaf, Sum(axes, cut, frame.checked)) / n

    return optree.tree_map(one, x)


def pmax(x: Any, axis_name: Axis, *, axis_index_groups: Groups = None) -> Any:
    """The largest over the devices of an axis, elementwise; an invariant value is returned as it is.

    Gradient: to the devices that attain it, ties shared evenly (JAX has none). Raises CollectiveError outside a map.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> largest = sp.shard_map(lambda x: sp.pmax(x, "i"), mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())
    >>> largest(torch.tensor([1., 7., 3., 5.])).unshard()
    tensor([7.])
    """
    return _extremum(x, axis_name, "pmax", "max", axis_index_groups)


def pmin(x: Any, axis_name: Axis, *, axis_index_groups: Groups = None) -> Any:
    """The smallest over the devices of an axis, elementwise; else as `pmax`.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> smallest = sp.shard_map(lambda x: sp.pmin(x, "i"), mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())
    >>> smallest(torch.tensor([1., 7., 3., 5.])).unshard()
    tensor([1.])
    """
    return _extremum(x, axis_name, "pmin", "min", axis_index_groups)


def _extremum(x: Any, axis_name: Axis, name: str, how: str, groups: Groups) -> Any:
    frame, axes = frame_for(axis_name, name)
    cut = groups_of(frame, axes, groups)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = frame.inside(leaf)
        over = axes if cut or not frame.checked else tuple(axis for axis in axes if axis in varying(leaf))
        if not over:
            return leaf
        return Extremum.apply(cast(frame, leaf, over), over, how, cut)

    return optree.tree_map(one, x)
