"""Rules of products: every factor split, linearity, and what replaces the fused forms when k is split."""

from __future__ import annotations

import pytest
import torch
from rule_sim import make_call
from rule_table import holds as check
from rule_table import rand

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten


PRODUCTS = [
    (aten.mm.default, [(4, 8), (8, 4)], "m k n"),
    (aten.mm.default, [(4, 1), (1, 4)], "m n"),
    (aten.mm.default, [(1, 8), (8, 4)], "k n"),
    (aten.bmm.default, [(2, 4, 8), (2, 8, 4)], "b m k n"),
    (aten.mv.default, [(4, 8), (8,)], "m k"),
    (aten.dot.default, [(8,), (8,)], "k"),
    (aten.vdot.default, [(8,), (8,)], "k"),
    (aten.outer.default, [(4,), (8,)], "m n"),
    (aten.ger.default, [(4,), (8,)], "m n"),
    (aten.linear.default, [(2, 4, 8), (4, 8)], "b0 b1 k n"),
    (aten.linear.default, [(2, 4, 8), (4, 8), (4,)], "b0 b1 n"),
    (aten.linear.default, [(4, 8), (8,)], "b0 k"),
    (aten.matmul.default, [(8,), (8,)], "k"),
    (aten.matmul.default, [(4, 8), (8,)], "m k"),
    (aten.matmul.default, [(8,), (2, 8, 4)], "b0 k n"),
    (aten.matmul.default, [(2, 4, 8), (8, 4)], "b0 m k n"),
    (aten.matmul.default, [(2, 1, 4, 8), (4, 8, 2)], "b0 b1 m k n"),
]


@pytest.mark.parametrize(("op", "shapes", "split"), PRODUCTS)
def test_products(op, shapes, split):
    check(op, *[rand(*shape) for shape in shapes], must_split=split.split())


def test_products_of_integers_and_complex_numbers():
    check(aten.mm.default, torch.randint(-3, 3, (4, 8)), torch.randint(-3, 3, (8, 4)), must_split="mkn")
    left, right = (torch.randn(8, dtype=torch.complex128) for _ in range(2))
    check(aten.vdot.default, left, right, must_split="k")


ADDENDS = [(4,), (4, 4), (4, 1), (1, 4), (1,), ()]


@pytest.mark.parametrize("scales", [{}, {"beta": 0.5, "alpha": 2}, {"beta": 0, "alpha": 3}])
@pytest.mark.parametrize("addend", ADDENDS)
def test_addmm_adds_once(addend, scales):
    rule = check(aten.addmm.default, rand(*addend), rand(4, 8), rand(8, 4), must_split="mn", **scales)
    assert rule.kind("k") == "whole"


def test_beta_zero_does_not_read_the_addend():
    rule = check(aten.addmm.default, rand(4) * torch.nan, rand(4, 8), rand(8, 4), beta=0, must_split="mn")
    assert rule.shape_only == {0}


@pytest.mark.parametrize("scales", [{}, {"beta": 0.5, "alpha": 2}])
def test_other_fused_products(scales):
    check(aten.baddbmm.default, rand(4, 4), rand(2, 4, 8), rand(2, 8, 4), must_split="bmn", **scales)
    check(aten.baddbmm.default, rand(2, 1, 4), rand(2, 4, 8), rand(2, 8, 4), must_split="bmn", **scales)
    check(aten.addbmm.default, rand(4, 4), rand(2, 4, 8), rand(2, 8, 4), must_split="mn", **scales)
    check(aten.addmv.default, rand(4), rand(4, 8), rand(8), must_split="m", **scales)
    check(aten.addr.default, rand(4, 8), rand(4), rand(8), must_split="mn", **scales)
    for gelu in (False, True):
        args = rand(4), rand(4, 8), rand(8, 4)
        rule = check(aten._addmm_activation.default, *args, use_gelu=gelu, must_split="mn", **scales)
        assert rule.linear == ()


def test_einsum():
    check(aten.einsum.default, "bhqd,bhkd->bhqk", [rand(2, 2, 4, 8), rand(2, 2, 2, 8)], must_split="bhqkd")
    check(aten.einsum.default, "ij,jk,k->i", [rand(4, 8), rand(8, 2), rand(2)], must_split="ijk")
    for equation, operand in (("ii->i", rand(4, 4)), ("...i->...", rand(4, 4))):
        call, _, _ = make_call(aten.einsum.default, (equation, [operand]), {})
        assert rule_for(call) is None


def test_bilinear():
    every = ["d0", "d1", "d2", "d3"]
    x, weight, y, grad = rand(4, 8), rand(4, 8, 2), rand(4, 2), rand(4, 4)
    check(aten._trilinear.default, x, weight, y, [1, 3], [0], [1, 2], [2, 3], must_split=every)
    check(aten._trilinear.default, x, grad, y, [1, 3], [2, 3], [1, 2], [0], must_split=every)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances(p):
    x, y = rand(2, 4, 4), rand(2, 8, 4)
    check(aten._cdist_forward.default, x[0], y[0], p, None, must_split="mn")
    check(aten._cdist_forward.default, x, y, p, None, must_split=["b0", "m", "n"])
    check(aten._cdist_backward.default, rand(2, 4, 8), x, y, p, torch.cdist(x, y, p), must_split=["b0", "m", "n", "k"])
