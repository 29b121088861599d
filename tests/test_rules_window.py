"""Rules of pooling, resizing, patches and grid sampling, with their gradients: samples and channels pass."""

from __future__ import annotations

import pytest
import torch
from rule_table import holds as check
from rule_table import rand

aten = torch.ops.aten
PLANES = ["n0", "n1"]


def _pools():
    for d in (2, 3):
        window = ([2] * d, [2] * d, [0] * d)
        yield f"max_pool{d}d_with_indices", d, (*window, [1] * d, False), (*window, [1] * d, False)
        yield f"avg_pool{d}d", d, window, (*window, False, True, None)
        yield f"avg_pool{d}d", d, ([3] * d, [1] * d, [1] * d), ([3] * d, [1] * d, [1] * d, False, True, None)
        yield f"_adaptive_avg_pool{d}d", d, ([3] * d,), ()
        yield f"adaptive_max_pool{d}d", d, ([3] * d,), ()


@pytest.mark.parametrize(("name", "rank", "args", "backward"), list(_pools()))
@pytest.mark.parametrize("batched", [True, False])
def test_pools(name, rank, args, backward, batched):
    x = rand(*(2, 4)[not batched :], *[6] * rank)
    planes = PLANES if batched else PLANES[:1]
    check(getattr(aten, name).default, x, *args, must_split=planes)
    out = getattr(aten, name).default(x, *args)
    picked = "max" in name
    grad = torch.randn_like(out[0] if picked else out)
    rule = check(
        getattr(aten, f"{name}_backward").default, grad, x, *backward, *out[1:] if picked else (), must_split=planes
    )
    assert rule.linear == ({0},) and rule.shape_only == {1}


def test_avg_pool1d():
    check(aten.avg_pool1d.default, rand(2, 4, 6), [2], must_split=PLANES)


RESIZES = [
    *((f"upsample_nearest{d}d", d, ()) for d in (1, 2, 3)),
    *((f"_upsample_nearest_exact{d}d", d, ()) for d in (1, 2, 3)),
    ("upsample_linear1d", 1, (False,)),
    ("upsample_bilinear2d", 2, (True,)),
    ("upsample_trilinear3d", 3, (False,)),
    ("upsample_bicubic2d", 2, (False,)),
    ("_upsample_bilinear2d_aa", 2, (False,)),
    ("_upsample_bicubic2d_aa", 2, (False,)),
]


@pytest.mark.parametrize(("name", "rank", "align"), RESIZES)
def test_resizing(name, rank, align):
    small, large = [4] * rank, [8] * rank
    check(getattr(aten, name).default, rand(2, 4, *small), large, *align, must_split=PLANES)
    op = getattr(aten, f"{name}_backward").default
    check(op, rand(2, 4, *large), large, [2, 4, *small], *align, must_split=PLANES)
    check(op, rand(1, 4, *large), large, [1, 4, *small], *align, must_split=PLANES[1:])


@pytest.mark.parametrize("lead", [["n", "c"], ["c"]])
def test_patches(lead):
    x, window = rand(*(2, 4)[2 - len(lead) :], 6, 6), ([2, 2], [1, 1], [0, 0], [1, 1])
    check(aten.im2col.default, x, *window, must_split=lead)
    check(aten.col2im.default, aten.im2col(x, *window), [6, 6], *window, must_split=lead)


def test_grids():
    x, grid, grad = rand(4, 2, 6, 6), rand(4, 4, 2, 2).tanh(), rand(4, 2, 4, 2)
    split = ["n", "c", "q0", "q1"]
    check(aten.grid_sampler_2d.default, x, grid, 0, 0, False, must_split=split)
    for mask in ([True, True], [True, False], [False, True]):
        check(aten.grid_sampler_2d_backward.default, grad, x, grid, 0, 0, False, mask, must_split=split)
    deep, points = rand(4, 2, 3, 3, 3), rand(4, 2, 2, 2, 3).tanh()
    check(aten.grid_sampler_3d.default, deep, points, 0, 0, False, must_split=[*split, "q2"])
    grad = rand(4, 2, 2, 2, 2)
    check(aten.grid_sampler_3d_backward.default, grad, deep, points, 0, 0, False, [True, True], must_split=split)
    check(aten.affine_grid_generator.default, rand(4, 2, 3), [4, 3, 5, 5], False, must_split="n")
    check(aten.affine_grid_generator.default, rand(4, 3, 4), [4, 3, 5, 5, 2], True, must_split="n")
