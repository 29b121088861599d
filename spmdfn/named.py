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
from .device_types import Frame, frame_for, varying
from .errors import CollectiveError, VaryingError, message
from .moves import AllToAll, Broadcast, Cast, Extremum, Gather, Permute, Scatter, Sum

Axis = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None


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
    cut = _groups(frame, axes, axis_index_groups)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf * (cut[0] if cut else _size(frame, axes))
        leaf = _counted(_inside(frame, leaf))
        leaf = _cast(frame, leaf, axes) if cut else _varies(frame, leaf, axes, "psum")
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
    cut = _groups(frame, axes, axis_index_groups)
    n = cut[0] if cut else _size(frame, axes)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = _inside(frame, leaf)
        if not (leaf.is_floating_point() or leaf.is_complex()):
            leaf = leaf.to(torch.float32)
        leaf = _cast(frame, leaf, axes) if cut else _varies(frame, leaf, axes, "pmean")
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
    cut = _groups(frame, axes, groups)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = _inside(frame, leaf)
        over = axes if cut or not frame.checked else tuple(axis for axis in axes if axis in varying(leaf))
        if not over:
            return leaf
        return Extremum.apply(_cast(frame, leaf, over), over, how, cut)

    return optree.tree_map(one, x)


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
    equal = _to(to) == "invariant"
    cut = _groups(frame, axes, axis_index_groups)
    if equal and cut:
        raise CollectiveError(
            message('all_gather by groups cannot be to="invariant"', fix="leave out to=: groups hold other values")
        )
    n = cut[0] if cut else _size(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = _cast(frame, _inside(frame, leaf), axes)
        place = _dim(dim, leaf.ndim + (not tiled), "all_gather", "dim")
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
    cut = _groups(frame, axes, axis_index_groups)
    n = cut[0] if cut else _size(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = _cast(frame, _counted(_inside(frame, leaf)), axes)
        place = _dim(scatter_dim, leaf.ndim, "psum_scatter", "scatter_dim")
        _check_size(leaf, place, n, tiled, "psum_scatter")
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
    cut = _groups(frame, axes, axis_index_groups)
    n = cut[0] if cut else _size(frame, axes)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        leaf = _cast(frame, _inside(frame, leaf), axes)
        split = _dim(split_dim, leaf.ndim, "all_to_all", "split_dim")
        concat = _dim(concat_dim, leaf.ndim, "all_to_all", "concat_dim")
        _check_size(leaf, split, n, tiled, "all_to_all")
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
    cast = [_cast(frame, _inside(frame, t), tuple(sorted(everything))) for t in tensors]
    return moves.Ragged.apply(*cast, axes, _size(frame, axes))


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
    n = _size(frame, axes)
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
    return _each(frame, axes, x, Permute(axes, tuple(sources)))


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
    if sorted(perm) != list(range(_size(frame, axes))):
        raise CollectiveError(
            message(
                f"pshuffle: {perm} is no permutation of the {_size(frame, axes)} devices of {', '.join(axes)}",
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
    n = _size(frame, axes)
    if not 0 <= source < n:
        raise CollectiveError(
            message(
                f"pbroadcast: the source {source} is none of the {n} devices of {', '.join(axes)}",
                fix=f"use an index from 0 to {n - 1}",
            )
        )
    return _each(frame, axes, x, Broadcast(axes, source, frame.checked))


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
    return _size(frame, axes)


def pcast(x: Any, axis_name: Axis, *, to: str = "varying") -> Any:
    """State that a value varies over an axis: free, no change to a varying value. Transpose: psum.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("i",))
    >>> f = lambda x: sp.psum(sp.pcast(x, "i", to="varying"), "i")
    >>> sp.shard_map(f, mesh=mesh, in_specs=sp.P(), out_specs=sp.P())(torch.ones(1)).unshard()
    tensor([4.])
    """
    frame, axes = frame_for(axis_name, "pcast")
    if _to(to) == "invariant":
        raise VaryingError(
            message(
                'pcast(to="invariant") would promise an equality that nothing shows',
                fix='use sp.psum, sp.pmax, sp.pbroadcast or sp.all_gather(to="invariant"), whose results are equal',
            )
        )

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        inside = _inside(frame, leaf)
        result = _cast(frame, inside, axes)
        # op by op a cast looks at the memory of its operand, and this one may be written to
        return result if result is inside or tracing() else result.clone()

    return optree.tree_map(one, x)


# helpers


def _each(frame: Frame, axes: tuple[str, ...], x: Any, move: moves.Move) -> Any:
    return optree.tree_map(lambda leaf: moves.apply(_cast(frame, _inside(frame, leaf), axes), move), x)


def _size(frame: Frame, axes: tuple[str, ...]) -> int:
    return frame.mesh.axis_size(axes)


def _inside(frame: Frame, x: torch.Tensor) -> torch.Tensor:
    return frame.inside(x)


def _cast(frame: Frame, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return moves.apply(x, Cast(missing)) if missing and frame.checked else x


def _counted(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32) if x.dtype == torch.bool else x


def _varies(frame: Frame, x: torch.Tensor, axes: tuple[str, ...], name: str) -> torch.Tensor:
    missing = [axis for axis in axes if axis not in varying(x)]
    if missing and frame.checked:
        axis = repr(missing[0])
        raise VaryingError(
            message(
                f"{name} over {', '.join(missing)} of a value that is already equal there (in {frame.label})",
                f"value: shape {tuple(x.shape)}, varying over {', '.join(sorted(varying(x))) or 'nothing'}",
                "a gradient with respect to an invariant value is already summed",
                fix=f"leave the {name} out; or write sp.axis_size({axis}) * x if the multiple is meant, or "
                f"sp.{name}(sp.pcast(x, {axis}), {axis}) in code that serves both",
            )
        )
    return x


def _to(to: str) -> str:
    if to not in ("varying", "invariant", "invarying"):
        raise VaryingError(message(f"to={to!r}", fix='use to="varying" or to="invariant"'))
    return "varying" if to == "varying" else "invariant"


def _dim(dim: int, rank: int, name: str, argument: str) -> int:
    if not -rank <= dim < rank:
        fix = f"name a dim from {-rank} to {rank - 1}"
        raise CollectiveError(message(f"{name}: {argument}={dim} for a block of rank {rank}", fix=fix))
    return dim % rank


def _check_size(x: torch.Tensor, dim: int, n: int, tiled: bool, name: str) -> None:
    size = x.shape[dim]
    if size % n if tiled else size != n:
        raise CollectiveError(
            message(
                f"{name}: dim {dim} of size {size} {'is no multiple of' if tiled else 'is not'} {n}, the axis's size",
                f"block: shape {tuple(x.shape)}",
                fix="pad the dim" if tiled else "use tiled=True to cut the dim into blocks",
            )
        )


def _groups(frame: Frame, axes: tuple[str, ...], groups: Groups) -> tuple[int, ...]:
    """Groups as the ops take them: their size, then the indices."""
    if groups is None:
        return ()
    listed = [list(group) for group in groups]
    n = _size(frame, axes)
    if sorted(i for group in listed for i in group) != list(range(n)) or len({len(group) for group in listed}) != 1:
        raise CollectiveError(
            message(
                f"axis_index_groups {listed} do not cut the {n} devices of {', '.join(axes)} into equal groups",
                fix="name each index once, in groups of one size",
            )
        )
    return (len(listed[0]), *(i for group in listed for i in group))
