"""The linear collectives as values: how each runs, its transpose, and how it acts under vmap and jvp.

forward                        type     transpose
psum                           V -> I   pcast to varying
pcast                          I -> V   psum
all_gather                     V -> V   psum_scatter
all_gather(to="invariant")     V -> I   this device's slice
psum_scatter                   V -> V   all_gather
all_to_all(split, concat)      V -> V   all_to_all(concat, split)
ppermute                       V -> V   ppermute of the reversed pairs
pbroadcast                     V -> I   the cotangent on the source, zero elsewhere
psum by groups                 V -> V   itself
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import collectives as c
from ._compat import transforms_active


@dataclass(frozen=True)
class Move:
    """A linear map between devices. Dims count from 0; `axes` is one group, major first."""

    axes: tuple[str, ...]

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def transpose(self) -> tuple[Move, ...]:
        """What acts on the cotangent, in order."""
        raise NotImplementedError

    def batched(self) -> Move:
        """The same under a new dim 0."""
        return self


@dataclass(frozen=True)
class Sum(Move):
    groups: tuple[int, ...] = ()
    checked: bool = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.all_reduce(x, list(self.axes), "sum", list(self.groups))

    def transpose(self) -> tuple[Move, ...]:
        return (self,) if self.groups or not self.checked else (Cast(self.axes),)


@dataclass(frozen=True)
class Cast(Move):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.pcast(x, list(self.axes))

    def transpose(self) -> tuple[Move, ...]:
        return (Sum(self.axes),)


@dataclass(frozen=True)
class Gather(Move):
    size: int = 1
    dim: int = 0
    groups: tuple[int, ...] = ()
    equal: bool = False
    checked: bool = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.all_gather(x, list(self.axes), self.size, self.dim, list(self.groups), self.equal)

    def transpose(self) -> tuple[Move, ...]:
        if self.equal and self.checked:
            return (OwnSlice(self.axes, self.size, self.dim),)
        return (Scatter(self.axes, self.size, self.dim, self.groups, self.checked),)

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class Scatter(Move):
    size: int = 1
    dim: int = 0
    groups: tuple[int, ...] = ()
    checked: bool = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.reduce_scatter(x, list(self.axes), self.size, self.dim, "sum", list(self.groups))

    def transpose(self) -> tuple[Move, ...]:
        return (Gather(self.axes, self.size, self.dim, self.groups, False, self.checked),)

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class OwnSlice(Move):
    size: int = 1
    dim: int = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.own_slice(x, list(self.axes), self.size, self.dim)

    def transpose(self) -> tuple[Move, ...]:
        return (Gather(self.axes, self.size, self.dim, (), True),)

    def batched(self) -> Move:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class AllToAll(Move):
    size: int = 1
    split_dim: int = 0
    concat_dim: int = 0
    groups: tuple[int, ...] = ()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.all_to_all(x, list(self.axes), self.size, self.split_dim, self.concat_dim, list(self.groups))

    def transpose(self) -> tuple[Move, ...]:
        return (replace(self, split_dim=self.concat_dim, concat_dim=self.split_dim),)

    def batched(self) -> Move:
        return replace(self, split_dim=self.split_dim + 1, concat_dim=self.concat_dim + 1)


@dataclass(frozen=True)
class Permute(Move):
    sources: tuple[int, ...] = ()
    """For every device of the group the one whose block it gets; -1: zeros."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.permute(x, list(self.axes), list(self.sources))

    def transpose(self) -> tuple[Move, ...]:
        back = [-1] * len(self.sources)
        for target, source in enumerate(self.sources):
            if source >= 0:
                back[source] = target
        return (replace(self, sources=tuple(back)),)


@dataclass(frozen=True)
class Broadcast(Move):
    source: int = 0
    checked: bool = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.broadcast(x, list(self.axes), self.source)

    def transpose(self) -> tuple[Move, ...]:
        keep = KeepSource(self.axes, self.source, self.checked)
        return (keep,) if self.checked else (Sum(self.axes, (), False), keep)


@dataclass(frozen=True)
class KeepSource(Move):
    source: int = 0
    checked: bool = True

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return c.keep_source(x, list(self.axes), self.source)

    def transpose(self) -> tuple[Move, ...]:
        return (Broadcast(self.axes, self.source) if self.checked else self,)


class _Apply(torch.autograd.Function):
    """One autograd.Function for all moves; its backward applies moves again, so every order of derivative works."""

    spmd_own = True

    @staticmethod
    def forward(x: torch.Tensor, move: Move) -> torch.Tensor:
        return move.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.move = inputs[1]
        ctx.set_materialize_grads(False)  # torch's zeros would be a plain tensor, no value of the map

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        cotangent = cotangents[0]
        if cotangent is None:
            return None, None
        for move in ctx.move.transpose():
            cotangent = apply(cotangent, move)
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return apply(tangents[0], ctx.move)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, move: Move) -> tuple[torch.Tensor, int]:
        return apply(x.movedim(in_dims[0], 0), move.batched()), 0


def apply(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Run a move, differentiably where that is asked for."""
    if not x.requires_grad and not transforms_active():
        return move.run(x)  # Function.apply with setup_context costs 30 microseconds more
    return _Apply.apply(x, move)


class Extremum(torch.autograd.Function):
    """pmax or pmin; the cotangent goes to the devices that attain it, ties shared evenly."""

    spmd_own = True

    @staticmethod
    def forward(x: torch.Tensor, axes: tuple[str, ...], how: str, groups: tuple[int, ...]) -> torch.Tensor:
        return c.all_reduce(x, list(axes), how, list(groups))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.axes, _, ctx.groups = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _share(ctx: Any) -> torch.Tensor:
        x, output = ctx.saved_tensors
        cast, total = Cast(ctx.axes), Sum(ctx.axes, ctx.groups)
        mask = (x == (output if ctx.groups else apply(output, cast))).to(x.dtype)
        count = apply(mask, total)
        return mask / (count if ctx.groups else apply(count, cast))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        if cotangents[0] is None:
            return None, None, None, None
        g = apply(cotangents[0], Sum(ctx.axes, ctx.groups)) if ctx.groups else apply(cotangents[0], Cast(ctx.axes))
        return g * Extremum._share(ctx), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return apply(tangents[0] * Extremum._share(ctx), Sum(ctx.axes, ctx.groups))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: torch.Tensor, axes: tuple[str, ...], how: str, groups: tuple[int, ...]
    ) -> tuple[torch.Tensor, int]:
        return Extremum.apply(x.movedim(in_dims[0], 0), axes, how, groups), 0


class Ragged(torch.autograd.Function):
    """ragged_all_to_all, linear in the operand and the output."""

    spmd_own = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        output: torch.Tensor,
        input_offsets: torch.Tensor,
        send_sizes: torch.Tensor,
        output_offsets: torch.Tensor,
        recv_sizes: torch.Tensor,
        axes: tuple[str, ...],
        size: int,
    ) -> torch.Tensor:
        return c.ragged_all_to_all(x, output, input_offsets, send_sizes, output_offsets, recv_sizes, list(axes))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.axes, ctx.size = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        x, _, input_offsets, send_sizes, output_offsets, recv_sizes = ctx.saved_tensors
        g = cotangents[0]
        if g is None:
            return (None,) * 8
        exchange = AllToAll(ctx.axes, ctx.size, 0, 0)
        landed, taken = apply(output_offsets, exchange), apply(input_offsets, exchange)
        zeros = torch.zeros_like(x)
        to_x = Ragged.apply(g, zeros, landed, recv_sizes, taken, send_sizes, ctx.axes, ctx.size)
        kept = Ragged.apply(zeros, g, input_offsets, send_sizes, output_offsets, recv_sizes, ctx.axes, ctx.size)
        return to_x, kept, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        x, output, *counts = ctx.saved_tensors
        moving = [torch.zeros_like(p) if t is None else t for p, t in zip((x, output), tangents, strict=False)]
        return Ragged.apply(*moving, *counts, ctx.axes, ctx.size)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, output: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        if any(dim is not None for dim in in_dims[2:6]):
            raise TypeError("ragged_all_to_all under vmap takes the same offsets and sizes for the whole batch")
        n = info.batch_size
        moved = [
            t.unsqueeze(1).expand(t.shape[0], n, *t.shape[1:]) if dim is None else t.movedim(dim, 1)
            for t, dim in ((x, in_dims[0]), (output, in_dims[1]))
        ]
        return Ragged.apply(*moved, *rest), 1
