"""Every collective as a body, next to the same thing said of the whole: a function of the list of blocks.

Blocks are (4·n, 3) or so: `rows` rows a device, so that every collective can cut its block into n pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import spmdfn as sp
from spmdfn import P

Blocks = list[torch.Tensor]
Axes = tuple[str, ...]


class Row(NamedTuple):
    """A collective: `body(x, axes)` on a block; `whole(blocks)` gives the blocks of all devices; `equal`: all alike."""

    body: Callable[[torch.Tensor, Axes], torch.Tensor]
    whole: Callable[[Blocks], Blocks]
    equal: bool = False


def total(blocks: Blocks) -> torch.Tensor:
    """The sum of blocks, in order; bools are counted, and half precision is summed in float32."""
    first = blocks[0]
    if first.dtype == torch.bool:
        blocks = [block.to(torch.int32) for block in blocks]
    wide = torch.float32 if first.dtype in (torch.bfloat16, torch.float16) else blocks[0].dtype
    result = blocks[0].to(wide)
    for block in blocks[1:]:
        result = result + block.to(wide)
    return result.to(blocks[0].dtype)


def everywhere(value: torch.Tensor, blocks: Blocks) -> Blocks:
    return [value] * len(blocks)


def extremum(function: Any) -> Callable[[Blocks], Blocks]:
    """Ties share the gradient evenly, as amax does over a stacked dim."""
    return lambda blocks: everywhere(function(torch.stack(blocks), 0), blocks)


def pieces(blocks: Blocks, dim: int) -> list[list[torch.Tensor]]:
    """pieces(b, d)[i][j]: what device i sends to device j."""
    return [list(block.chunk(len(blocks), dim)) for block in blocks]


def exchanged(blocks: Blocks, split: int, concat: int) -> Blocks:
    sent = pieces(blocks, split)
    return [torch.cat([sent[i][j] for i in range(len(blocks))], concat) for j in range(len(blocks))]


def scattered(blocks: Blocks) -> Blocks:
    sent = pieces(blocks, 0)
    return [total([sent[i][j] for i in range(len(blocks))]) for j in range(len(blocks))]


def ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def grouped(n: int) -> list[list[int]]:
    """Two groups of every other device; one, on one device."""
    return [list(range(n))[i::2] for i in range(2)] if n > 1 else [[0]]


def by_groups(function: Callable[[Blocks], Blocks]) -> Callable[[Blocks], Blocks]:
    def run(blocks: Blocks) -> Blocks:
        results = list(blocks)
        for group in grouped(len(blocks)):
            for device, result in zip(group, function([blocks[i] for i in group]), strict=True):
                results[device] = result
        return results

    return run


def mean(blocks: Blocks) -> torch.Tensor:
    wide = blocks if blocks[0].is_floating_point() else [block.float() for block in blocks]
    return total(wide) / len(blocks)


def _size(axes: Axes) -> int:
    return sp.axis_size(axes)


def _ragged(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Device i sends one row, row j, to each device j, and lands at row i; the other rows keep what they had."""
    n = _size(axes)
    one = torch.ones(n, dtype=torch.int32)
    order = torch.arange(n, dtype=torch.int32)
    mine = sp.axis_index(axes) * one
    return sp.ragged_all_to_all(x, x * 2, order, one, mine, one, axis_name=axes)


def _ragged_whole(blocks: Blocks) -> Blocks:
    n = len(blocks)
    return [torch.cat([torch.stack([blocks[i][j] for i in range(n)]), blocks[j][n:] * 2]) for j in range(n)]


def shifted(blocks: Blocks) -> Blocks:
    """The first device sends to the second one, and so on: the first gets zeros."""
    return [torch.zeros_like(blocks[0]), *blocks[:-1]]


TABLE: dict[str, Row] = {
    "psum": Row(lambda x, a: sp.psum(x, a), lambda b: everywhere(total(b), b), equal=True),
    "pmean": Row(lambda x, a: sp.pmean(x, a), lambda b: everywhere(mean(b), b), equal=True),
    "pmax": Row(lambda x, a: sp.pmax(x, a), extremum(torch.amax), equal=True),
    "pmin": Row(lambda x, a: sp.pmin(x, a), extremum(torch.amin), equal=True),
    "psum groups": Row(
        lambda x, a: sp.psum(x, a, axis_index_groups=grouped(_size(a))),
        by_groups(lambda b: everywhere(total(b), b)),
    ),
    "pmax groups": Row(
        lambda x, a: sp.pmax(x, a, axis_index_groups=grouped(_size(a))), by_groups(extremum(torch.amax))
    ),
    "all_gather": Row(lambda x, a: sp.all_gather(x, a), lambda b: everywhere(torch.stack(b), b)),
    "all_gather tiled": Row(
        lambda x, a: sp.all_gather(x, a, dim=1, tiled=True), lambda b: everywhere(torch.cat(b, 1), b)
    ),
    "all_gather invariant": Row(
        lambda x, a: sp.all_gather(x, a, dim=-1, to="invariant"),
        lambda b: everywhere(torch.stack(b, -1), b),
        equal=True,
    ),
    "all_gather groups": Row(
        lambda x, a: sp.all_gather(x, a, tiled=True, axis_index_groups=grouped(_size(a))),
        by_groups(lambda b: everywhere(torch.cat(b), b)),
    ),
    "psum_scatter": Row(lambda x, a: sp.psum_scatter(x, a, tiled=True), scattered),
    "psum_scatter untiled": Row(
        lambda x, a: sp.psum_scatter(x[: _size(a)], a), lambda b: [s[0] for s in scattered([x[: len(b)] for x in b])]
    ),
    "psum_scatter groups": Row(
        lambda x, a: sp.psum_scatter(x, a, tiled=True, axis_index_groups=grouped(_size(a))), by_groups(scattered)
    ),
    "all_to_all": Row(lambda x, a: sp.all_to_all(x, a, 0, 1, tiled=True), lambda b: exchanged(b, 0, 1)),
    "all_to_all same": Row(lambda x, a: sp.all_to_all(x, a, 0, 0, tiled=True), lambda b: exchanged(b, 0, 0)),
    "all_to_all untiled": Row(
        lambda x, a: sp.all_to_all(x[: _size(a)], a, 0, 1),
        lambda b: [torch.stack([x[j] for x in b], 1) for j in range(len(b))],
    ),
    "all_to_all groups": Row(
        lambda x, a: sp.all_to_all(x, a, 0, 1, tiled=True, axis_index_groups=grouped(_size(a))),
        by_groups(lambda b: exchanged(b, 0, 1)),
    ),
    "ppermute ring": Row(lambda x, a: sp.ppermute(x, a, ring(_size(a))), lambda b: [b[-1], *b[:-1]]),
    "ppermute partial": Row(lambda x, a: sp.ppermute(x, a, ((i, i + 1) for i in range(_size(a) - 1))), shifted),
    "ppermute none": Row(lambda x, a: sp.ppermute(x, a, []), lambda b: [(x * 0).to(x.dtype) for x in b]),
    "pshuffle": Row(lambda x, a: sp.pshuffle(x, a, list(range(_size(a)))[::-1]), lambda b: b[::-1]),
    "pbroadcast": Row(lambda x, a: sp.pbroadcast(x, a, _size(a) - 1), lambda b: everywhere(b[-1], b), equal=True),
    "ragged_all_to_all": Row(_ragged, _ragged_whole),
    "axis_index": Row(
        lambda x, a: x * sp.axis_index(a), lambda b: [x * torch.tensor(i, dtype=torch.int32) for i, x in enumerate(b)]
    ),
    "pcast": Row(lambda x, a: sp.pcast(x.new_ones(2), a) * x[:1, :2], lambda b: [x[:1, :2] for x in b]),
}


def reference(row: Row, mesh: sp.Mesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same computation on the whole tensor: blocks in, blocks out, concatenated (or one of them, if all alike)."""

    def run(x: torch.Tensor) -> torch.Tensor:
        results = row.whole(list(x.chunk(mesh.size)))
        return results[0] if row.equal else torch.cat(results)

    return run


def placed(row: Row, mesh: sp.Mesh) -> Callable[[torch.Tensor], sp.Array]:
    """The mapped collective: blocks of dim 0 over all axes."""
    axes = mesh.axis_names
    out = P() if row.equal else P(axes)
    return sp.shard_map(lambda x: row.body(x, axes), mesh=mesh, in_specs=P(axes), out_specs=out)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, multiples of 1/4 in floats: sums are exact."""
    drawn = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(sum(shape)))
    if dtype == torch.bool:
        return drawn > 0
    return (
        drawn.abs().to(dtype) if dtype == torch.uint8 else (drawn / 4 if dtype.is_floating_point else drawn).to(dtype)
    )
