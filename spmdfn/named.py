"""The collectives by axis name, for functions under `shard_map`: JAX's names and meaning, over pytrees.

An axis may be a tuple of names in the order given, the first one major. All work under grad, jvp and vmap, nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import optree
import torch

from . import moves
from ._compat import tracing
from .device_types import frame_for, varying
from .errors import CollectiveError, VaryingError, message
from .moves import AllToAll, Broadcast, Gather, Permute, Scatter
from .operands import Axis, Groups, cast, check_size, checked_type, counted, dim_of, each, groups_of, size_of
from .reductions import pmax as pmax
from .reductions import pmean as pmean
from .reductions import pmin as pmin
from .reductions import psum as psum


def all_gather(
    x: Any,
    axis_name: Axis,
    *,
    dim: int = 0,
    tiled: bool = False,
    to: str = "varying",
    axis_index_groups: Groups = None,
) -> Any:
    """Every device's block on every device: a new dim, or with `tiled` concatenated along `dim`.

    `to="invariant"` states that the result is equal on all devices; its transpose is then this device's slice, and
    psum_scatter otherwise. Raises CollectiveError outside a map.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.all_gather(x, "i", tiled=True, to="invariant")
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())(torch.arange(4)).unshard()
    tensor([0, 1, 2, 3])
    """
    frame, axes = frame_for(axis_name, "all_gather")
    equal = checked_type(to) == "invariant"
    cut = groups_of(frame, axes, axis_index_groups)
    if equal and cut:
        raise CollectiveError(
            message('all_gather by groups cannot be to="invariant"', fix="leave out to=: groups hold other values")
        )
    n = cut[0] if cut else size_of(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = cast(frame, frame.inside(leaf), axes)
        place = dim_of(dim, leaf.ndim + (not tiled), "all_gather", "dim")
        if not tiled:
            leaf = leaf.unsqueeze(place)
        return moves.apply(leaf, Gather(axes, n, place, cut, equal, frame.checked))

    return optree.tree_map(one, x)


def psum_scatter(
    x: Any, axis_name: Axis, *, scatter_dim: int = 0, tiled: bool = False, axis_index_groups: Groups = None
) -> Any:
    """The sum over the devices of an axis, each device keeping its block of `scatter_dim`. Transpose: all_gather.

    Untiled, the size of that dim is that of the axis, and the dim goes. CollectiveError if the sizes do not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("i",))
    >>> f = lambda x: sp.psum_scatter(x, "i", tiled=True)
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P(), out_specs=sp.P("i"))(torch.arange(4)).unshard()
    tensor([0, 2, 4, 6])
    """
    frame, axes = frame_for(axis_name, "psum_scatter")
    cut = groups_of(frame, axes, axis_index_groups)
    n = cut[0] if cut else size_of(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = cast(frame, counted(frame.inside(leaf)), axes)
        place = dim_of(scatter_dim, leaf.ndim, "psum_scatter", "scatter_dim")
        check_size(leaf, place, n, tiled, "psum_scatter")
        result = moves.apply(leaf, Scatter(axes, n, place, cut, frame.checked))
        return result if tiled else result.squeeze(place)

    return optree.tree_map(one, x)


def all_to_all(
    x: Any,
    axis_name: Axis,
    split_dim: int,
    concat_dim: int,
    *,
    tiled: bool = False,
    axis_index_groups: Groups = None,
) -> Any:
    """Block i of `split_dim` goes to device i; what arrives is stacked along `concat_dim`. Transpose: the way back.

    Untiled, `split_dim` has the axis's size and goes, and a new dim is put in at `concat_dim`; tiled, blocks are
    concatenated. CollectiveError if the sizes do not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("i",))
    >>> f = lambda x: sp.all_to_all(x, "i", 1, 0, tiled=True)
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P(None, "i"))(torch.arange(4).view(2, 2)).shards
    (tensor([[0],
            [2]]), tensor([[1],
            [3]]))
    """
    frame, axes = frame_for(axis_name, "all_to_all")
    cut = groups_of(frame, axes, axis_index_groups)
    n = cut[0] if cut else size_of(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = cast(frame, frame.inside(leaf), axes)
        split = dim_of(split_dim, leaf.ndim, "all_to_all", "split_dim")
        concat = dim_of(concat_dim, leaf.ndim, "all_to_all", "concat_dim")
        check_size(leaf, split, n, tiled, "all_to_all")
        if tiled:
            return moves.apply(leaf, AllToAll(axes, n, split, concat, cut))
        new = concat if concat <= split else concat + 1
        split += concat <= split
        return moves.apply(leaf.unsqueeze(new), AllToAll(axes, n, split, new, cut)).squeeze(split)

    return optree.tree_map(one, x)


def ragged_all_to_all(
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: torch.Tensor,
    send_sizes: torch.Tensor,
    output_offsets: torch.Tensor,
    recv_sizes: torch.Tensor,
    *,
    axis_name: Axis,
) -> torch.Tensor:
    """Send `send_sizes[j]` rows, from row `input_offsets[j]` on, to device j, where they land at `output_offsets[j]`.

    operand (rows, ...), output (rows, ...): rows that nobody writes keep `output`. The four counts are int tensors with
    one entry a device; `output_offsets` are offsets on the receiver. They are read on the host.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("i",))
    >>> def swap(x):
    ...     i = sp.axis_index("i")
    ...     other = (torch.arange(2) != i).int()  # two rows to the other device, none to this one
    ...     zero, two = other * 0, other * 2
    ...     return sp.ragged_all_to_all(x, torch.zeros_like(x), zero, two, zero, two, axis_name="i")
    >>> sp.shard_map(swap, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P("i"))(torch.arange(4)).unshard()
    tensor([2, 3, 0, 1])
    """
    frame, axes = frame_for(axis_name, "ragged_all_to_all")
    tensors = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    together = axes if frame.checked else ()
    everything = set(together).union(*(varying(t) for t in tensors))
    varied = [cast(frame, frame.inside(t), tuple(sorted(everything))) for t in tensors]
    return moves.Ragged.apply(*varied, axes, size_of(frame, axes))


def ppermute(x: Any, axis_name: Axis, perm: Iterable[tuple[int, int]]) -> Any:
    """Send each block along (source, destination) pairs; a device that nobody sends to gets zeros.

    Transpose: the reversed pairs. CollectiveError for a source or destination named twice, or an index out of range.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.ppermute(x, "i", [(0, 1), (1, 2)])
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P("i"))(torch.tensor([1, 2, 3, 4])).unshard()
    tensor([0, 1, 2, 0])
    """
    frame, axes = frame_for(axis_name, "ppermute")
    pairs = [tuple(pair) if isinstance(pair, Sequence) else (pair,) for pair in perm]
    n = size_of(frame, axes)
    sources = [-1] * n
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(i, int) and 0 <= i < n for i in pair):
            raise CollectiveError(
                message(
                    f"ppermute: the pair {pair} does not name two of the {n} devices of {', '.join(axes)}",
                    f"perm: {pairs}",
                    fix=f"use (source, destination) with indices from 0 to {n - 1}",
                )
            )
    for what, seen in (("source", [p[0] for p in pairs]), ("destination", [p[1] for p in pairs])):
        for i, index in enumerate(seen):
            if index in seen[:i]:
                raise CollectiveError(
                    message(
                        f"ppermute: device {index} is a {what} twice: {pairs[seen.index(index)]} and {pairs[i]}",
                        fix="every device sends once and receives once at most; broadcast with sp.pbroadcast",
                    )
                )
    for source, target in pairs:
        sources[target] = source
    return each(frame, axes, x, Permute(axes, tuple(sources)))


def pshuffle(x: Any, axis_name: Axis, perm: Sequence[int]) -> Any:
    """Device i gets the block of device `perm[i]`: a ppermute by a whole permutation.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.pshuffle(x, "i", [3, 2, 1, 0])
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P("i"))(torch.arange(4)).unshard()
    tensor([3, 2, 1, 0])
    """
    frame, axes = frame_for(axis_name, "pshuffle")
    perm = list(perm)
    if sorted(perm) != list(range(size_of(frame, axes))):
        raise CollectiveError(
            message(
                f"pshuffle: {perm} is no permutation of the {size_of(frame, axes)} devices of {', '.join(axes)}",
                fix="name each device once; sp.ppermute takes pairs",
            )
        )
    return ppermute(x, axis_name, list(zip(perm, range(len(perm)), strict=True)))


def pbroadcast(x: Any, axis_name: Axis, source: int) -> Any:
    """The block of one device on all of an axis: invariant. Transpose: the cotangent on the source, zero elsewhere.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.pbroadcast(x, "i", 2)
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P())(torch.arange(4)).unshard()
    tensor([2])
    """
    frame, axes = frame_for(axis_name, "pbroadcast")
    n = size_of(frame, axes)
    if not 0 <= source < n:
        raise CollectiveError(
            message(
                f"pbroadcast: the source {source} is none of the {n} devices of {', '.join(axes)}",
                fix=f"use an index from 0 to {n - 1}",
            )
        )
    return each(frame, axes, x, Broadcast(axes, source, frame.checked))


def axis_index(axis_name: Axis) -> torch.Tensor:
    """This device's index along an axis: a 0-d int32 tensor that varies over it.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: x + sp.axis_index("i")
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P("i"))(torch.zeros(4)).unshard()
    tensor([0., 1., 2., 3.])
    """
    frame, axes = frame_for(axis_name, "axis_index")
    return frame.place(axes)


def axis_size(axis_name: Axis) -> int:
    """The number of devices along an axis (or a tuple of axes), an int.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: x * sp.axis_size("i")
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P("i"), out_specs=sp.P("i"))(torch.ones(4)).unshard()
    tensor([4., 4., 4., 4.])
    """
    frame, axes = frame_for(axis_name, "axis_size")
    return size_of(frame, axes)


def pcast(x: Any, axis_name: Axis, *, to: str = "varying") -> Any:
    """State that a value varies over an axis: free, no change to a varying value. Transpose: psum.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.psum(sp.pcast(x, "i", to="varying"), "i")
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P(), out_specs=sp.P())(torch.ones(1)).unshard()
    tensor([4.])
    """
    frame, axes = frame_for(axis_name, "pcast")
    if checked_type(to) == "invariant":
        raise VaryingError(
            message(
                'pcast(to="invariant") would promise an equality that nothing shows',
                fix='use sp.psum, sp.pmax, sp.pbroadcast or sp.all_gather(to="invariant"), whose results are equal',
            )
        )

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        x = frame.inside(leaf)
        result = cast(frame, x, axes)
        # op by op a cast looks at the memory of its operand, and this one may be written to
        return result if result is x or tracing() else result.clone()

    return optree.tree_map(one, x)
