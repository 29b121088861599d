"""Run a function sharded and plain, and compare: the one test there is for an engine like this."""

from __future__ import annotations

import optree
import torch

import spmdfn as sp


def difference(got, want) -> float:
    """The largest difference between two trees of tensors, relative to a tensor's largest value if that is over 1."""
    got, want = optree.tree_leaves(sp.unshard(got)), optree.tree_leaves(want)
    assert len(got) == len(want)
    largest = 0.0
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        wide = torch.complex128 if w.is_complex() else torch.float64
        if w.numel():
            scale = max(1.0, w.to(wide).abs().max().item())
            largest = max(largest, (g.to(wide) - w.to(wide)).abs().max().item() / scale)
    return largest


def moves(program) -> list[tuple[str, tuple[str, ...]]]:
    """The collectives of a program as (op, axes), in order."""
    return [(row.op, row.axes) for row in program.collectives]


def tally(program) -> dict[tuple[str, ...], int]:
    """How many collectives of each op there are over each group: {(op, *axes): count}."""
    counts: dict[tuple[str, ...], int] = {}
    for row in program.collectives:
        counts[row.op, *row.axes] = counts.get((row.op, *row.axes), 0) + 1
    return counts


def run_both(function, mesh, in_specs, out_specs, args, **options):
    """The program and the largest difference between sharded and plain."""
    jitted = sp.spmd_jit(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return jitted.lower(*args), difference(jitted(*args), function(*args))
