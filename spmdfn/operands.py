"""What the collectives by axis name share: the checks of their arguments, and casts to varying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from . import moves
from .device_types import Frame, varying
from .errors import CollectiveError, VaryingError, message
from .moves import Cast

Axis = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None


def each(frame: Frame, axes: tuple[str, ...], x: Any, move: moves.Move) -> Any:
    """One move over all leaves of a tree, each cast to varying first."""
    return optree.tree_map(lambda leaf: moves.apply(cast(frame, frame.inside(leaf), axes), move), x)


def size_of(frame: Frame, axes: tuple[str, ...]) -> int:
    """The number of devices along some axes of the running map."""
    return frame.mesh.axis_size(axes)


def cast(frame: Frame, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """A value that varies over these axes; the same value where it does."""
    missing = tuple(axis for axis in axes if axis not in varying(x))
    return moves.apply(x, Cast(missing)) if missing and frame.checked else x


def counted(x: torch.Tensor) -> torch.Tensor:
    """Bools as int32: sums count them."""
    return x.to(torch.int32) if x.dtype == torch.bool else x


def check_varies(frame: Frame, x: torch.Tensor, axes: tuple[str, ...], name: str) -> torch.Tensor:
    """The value itself; VaryingError if it does not vary over all of the axes."""
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


def checked_type(to: str) -> str:
    """The meaning of `to=`. VaryingError for another word."""
    if to not in ("varying", "invariant", "invarying"):
        raise VaryingError(message(f"to={to!r}", fix='use to="varying" or to="invariant"'))
    return "varying" if to == "varying" else "invariant"


def dim_of(dim: int, rank: int, name: str, argument: str) -> int:
    """A dim counted from 0. CollectiveError for one that a block does not have."""
    if not -rank <= dim < rank:
        fix = f"name a dim from {-rank} to {rank - 1}"
        raise CollectiveError(message(f"{name}: {argument}={dim} for a block of rank {rank}", fix=fix))
    return dim % rank


def check_size(x: torch.Tensor, dim: int, n: int, tiled: bool, name: str) -> None:
    """CollectiveError if a dim cannot be cut into n blocks (`tiled`), or is not of size n."""
    size = x.shape[dim]
    if size % n if tiled else size != n:
        raise CollectiveError(
            message(
                f"{name}: dim {dim} of size {size} {'is no multiple of' if tiled else 'is not'} {n}, the axis's size",
                f"block: shape {tuple(x.shape)}",
                fix="pad the dim" if tiled else "use tiled=True to cut the dim into blocks",
            )
        )


def groups_of(frame: Frame, axes: tuple[str, ...], groups: Groups) -> tuple[int, ...]:
    """Groups as the ops take them: their size, then the indices."""
    if groups is None:
        return ()
    listed = [list(group) for group in groups]
    n = size_of(frame, axes)
    if sorted(i for group in listed for i in group) != list(range(n)) or len({len(group) for group in listed}) != 1:
        raise CollectiveError(
            message(
                f"axis_index_groups {listed} do not cut the {n} devices of {', '.join(axes)} into equal groups",
                fix="name each index once, in groups of one size",
            )
        )
    return (len(listed[0]), *(i for group in listed for i in group))
