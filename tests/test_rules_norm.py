"""Rules of softmaxes, losses, normalisations, attention, convolution and windows, with their gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from rule_sim import compare, make_call
from rule_table import holds as check
from rule_table import rand

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
reductions = pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])


# ---------------------------------------------------------------- softmax


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dim):
    x, grad = rand(4, 8, 2), rand(4, 8, 2)
    masked = x.clone()
    masked[0], masked[1, :3] = -math.inf, -math.inf
    others = [f"d{d}" for d in range(3) if d != dim % 3]
    for value in (x, masked, x * 1e3):
        check(aten._softmax.default, value, dim, False, must_split=others)
        check(aten._log_softmax.default, value, dim, False, must_split=others)
        check(aten._safe_softmax.default, value, dim, must_split=others)
    for op, output in (
        (aten._softmax_backward_data, x.softmax(dim)),
        (aten._log_softmax_backward_data, x.log_softmax(dim)),
    ):
        assert check(op.default, grad, output, dim, torch.float64, must_split=others).linear == ({0},)


def test_softmax_of_halves_keeps_its_dtype():
    x = rand(4, 8).to(torch.bfloat16)
    for op in (aten._softmax.default, aten._log_softmax.default):
        call, _, (want,) = make_call(op, (x, 1, False), {})
        got = rule_for(call).alternative({"d1": 2}, x, 1, False)
        assert got.dtype == want.dtype and torch.allclose(got, want, rtol=1e-2)
    check(aten._softmax.default, rand(), 0, False)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("shape", [(4, 8), (8,), (4, 8, 2, 2)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 3])
@reductions
def test_nll_loss(shape, weighted, ignored, reduction):
    two = len(shape) == 4
    forward = aten.nll_loss2d_forward.default if two else aten.nll_loss_forward.default
    backward = aten.nll_loss2d_backward.default if two else aten.nll_loss_backward.default
    scores = rand(*shape).log_softmax(min(1, len(shape) - 1))
    target = torch.randint(0, 8, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target[1] = ignored
    rest = (rand(8).abs() if weighted else None, reduction, ignored)
    batch = ["n"] if target.dim() else []
    check(forward, scores, target, *rest, must_split=batch if reduction != MEAN else [])
    output, total = forward(scores, target, *rest)
    rule = check(backward, torch.randn_like(output), scores, target, *rest, total, must_split=batch)
    assert rule.shape_only == {1} and rule.linear == ({0},)


@reductions
def test_losses_of_pairs(reduction):
    x, y, split = rand(4, 8), rand(4, 8), ["d0", "d1"]
    grad = rand(4, 8) if reduction == NONE else rand()
    for name, extra in (("mse", ()), ("smooth_l1", (0.5,)), ("huber", (0.5,)), ("soft_margin", ())):
        check(getattr(aten, f"{name}_loss").default, x, y, reduction, *extra, must_split=split)
        check(getattr(aten, f"{name}_loss_backward").default, grad, x, y, reduction, *extra, must_split=split)
    p, q = x.sigmoid(), y.sigmoid()
    for weight in (None, rand(4, 8).abs()):
        check(aten.binary_cross_entropy.default, p, q, weight, reduction, must_split=split)
        check(aten.binary_cross_entropy_backward.default, grad, p, q, weight, reduction, must_split=split)
    check(aten.binary_cross_entropy_with_logits.default, x, q, rand(8), rand(8), reduction, must_split=split)


@reductions
def test_margin_losses(reduction):
    x, target, targets = rand(4, 8), torch.randint(0, 8, (4,)), torch.randint(0, 8, (4, 8))
    targets[:, 5] = -1
    grad = rand(4) if reduction == NONE else rand()
    for weight in (None, rand(8)):
        rest = (x, target, 1, 1.0, weight, reduction)
        check(aten.multi_margin_loss.default, *rest, must_split="n")
        check(aten.multi_margin_loss_backward.default, grad, *rest, must_split="n")
    _, hits = aten.multilabel_margin_loss_forward(x, targets, reduction)
    check(aten.multilabel_margin_loss_forward.default, x, targets, reduction, must_split="n")
    check(aten.multilabel_margin_loss_backward.default, grad, x, targets, reduction, hits, must_split="n")


# ---------------------------------------------------------------- normalisation

MASKS = [[True, True, True], [True, False, False], [False, True, True], [True, False, True]]


@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("given", ["", "w", "wb"])
def test_layer_norm(inner, given):
    x, grad = rand(2, 4, 4, 8), rand(2, 4, 4, 8)
    shape, batch = list(x.shape[4 - inner :]), [f"b{d}" for d in range(4 - inner)]
    weight, bias = (rand(*shape) if name in given else None for name in "wb")
    check(aten.native_layer_norm.default, x, shape, weight, bias, 1e-5, must_split=batch)
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
    for mask in MASKS if given == "wb" else [[True, False, False]]:
        args = (grad, x, shape, mean, rstd, weight, bias, mask)
        check(aten.native_layer_norm_backward.default, *args, must_split=batch)
    for eps in (1e-5, None):
        check(aten._fused_rms_norm.default, x, shape, weight, eps, must_split=batch)


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]])
def test_rms_norm_backward(mask):
    """The op exists on accelerators only: its call is made by hand, its alternative compared with autograd."""
    x, weight, grad = rand(4, 8).requires_grad_(), rand(8).requires_grad_(), rand(4, 8)
    out, rstd = torch.nn.functional.rms_norm(x, (8,), weight, 1e-5), x.square().mean(-1, True).add(1e-5).rsqrt()
    want = [g for g, wanted in zip(torch.autograd.grad(out, (x, weight), grad), mask, strict=True) if wanted]
    args = (grad, x.detach(), [8], rstd.detach(), weight.detach(), mask)
    like = aten._fused_rms_norm_backward.default

    class Op:
        """The op with results known beforehand."""

        _schema = like._schema

        def __call__(self, *args):
            return want

    call, _, _ = make_call(Op(), args, {})
    rule = rule_for(type(call)(like, call.args, call.kwargs, call.operands, call.results))
    assert rule.kind("b0") == "sum" and rule.kind("d0") == "whole"
    compare(rule.alternative({"d0": 2}, *args), want, "rms_norm_backward")


@pytest.mark.parametrize("shape", [(4, 8, 2, 2), (4, 8), (1, 8, 4), (2, 8, 2, 2, 2)])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_group_norm(shape, group):
    x, grad = rand(*shape), rand(*shape)
    sizes = (shape[0], 8, math.prod(shape[2:]), group)
    split = ["n"] * (shape[0] > 1) + ["g"] * (group > 1)
    for weight, bias in ((rand(8), rand(8)), (None, None)):
        check(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-5, must_split=split)
        _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
        for mask in MASKS if weight is not None else [[True, False, False]]:
            check(aten.native_group_norm_backward.default, grad, x, mean, rstd, weight, *sizes, mask, must_split=split)


@pytest.mark.parametrize("shape", [(4, 8, 2, 2), (4, 8), (4, 8, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm(shape, affine):
    x, mean, var = rand(*shape), rand(8), rand(8).abs()
    w, b = (rand(8), rand(8)) if affine else (None, None)
    constants = (0.1, 1e-5)
    check(aten.native_batch_norm.default, x, w, b, None, None, True, *constants, must_split="c")
    check(aten.native_batch_norm.default, x, w, b, mean, var, False, *constants, must_split="cn")
    check(aten._native_batch_norm_legit.no_stats, x, w, b, True, *constants, must_split="c")
    for training in (True, False):
        split = "c" if training else "cn"
        op = aten._native_batch_norm_legit_functional.default
        check(op, x, w, b, mean, var, training, *constants, must_split=split)
    check(aten._native_batch_norm_legit_no_training.default, x, w, b, mean, var, *constants, must_split="cn")
    check(aten._batch_norm_no_update.default, x, w, b, mean, var, *constants, must_split="cn")
    if affine:
        check(aten._batch_norm_with_update_functional.default, x, w, b, mean, var, *constants, must_split="c")


@pytest.mark.parametrize("shape", [(4, 8, 2, 2), (4, 8), (4, 8, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_backward(shape, training):
    x, grad, w, mean, var = rand(*shape), rand(*shape), rand(8), rand(8), rand(8).abs()
    split = "c" if training else "cn"
    op = aten.native_batch_norm_backward.default
    _, save, std = aten.native_batch_norm(x, w, w, mean.clone(), var.clone(), training, 0.1, 1e-5)
    for mask in MASKS:
        check(op, grad, x, w, mean, var, save, std, training, 1e-5, mask, must_split=split)
    check(op, grad, x, None, mean, var, save, std, training, 1e-5, [True, False, False], must_split=split)
    if training:
        check(op, grad, x, w, None, None, save, std, True, 1e-5, MASKS[0], must_split=split)
    reserve = torch.empty(0, dtype=torch.uint8)
    args = (grad, x, w, mean, var, rand(8), rand(8).abs(), training, 1e-5, MASKS[0], reserve)
    check(aten.batch_norm_backward.default, *args, must_split=split)


def test_batch_norm_that_writes_where_its_schema_does_not_say_has_no_rule():
    args = (rand(4, 8), None, None, rand(8), rand(8).abs(), True, 0.1, 1e-5)
    call, _, _ = make_call(aten.native_batch_norm.default, args, {})
    assert rule_for(call) is None


# ---------------------------------------------------------------- convolution


CONVOLUTIONS = [  # input, weight, bias, (stride, padding, dilation, transposed, output_padding, groups)
    ((4, 8, 6, 6), (4, 8, 3, 3), 4, ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ((4, 8, 6, 6), (8, 2, 3, 3), 8, ([2, 2], [0, 0], [1, 1], False, [0, 0], 4)),
    ((4, 4, 6, 6), (8, 1, 3, 3), 8, ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)),
    ((4, 8, 6), (4, 8, 1), 4, ([1], [0], [1], False, [0], 1)),
    ((4, 8, 3, 3), (8, 4, 3, 3), 4, ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
    ((4, 8, 3, 3), (8, 2, 3, 3), 8, ([2, 2], [1, 1], [1, 1], True, [1, 1], 4)),
    ((2, 4, 4, 4, 4), (4, 4, 2, 2, 2), 4, ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)),
]


@pytest.mark.parametrize(("x", "weight", "bias", "rest"), CONVOLUTIONS)
def test_convolution(x, weight, bias, rest):
    groups, x, weight, bias = rest[-1], rand(*x), rand(*weight), rand(bias)
    inner, outer = x.shape[1] // groups, len(bias) // groups
    split = ["n"] + ["g"] * (groups > 1) + ["o"] * (outer > 1)
    summed = ["i"] * (inner > 1)
    check(aten.convolution.default, x, weight, bias, *rest, must_split=split)
    check(aten.convolution.default, x, weight, None, *rest, must_split=split + summed)
    grad = torch.randn_like(aten.convolution(x, weight, bias, *rest))
    backward = aten.convolution_backward.default
    for mask in itertools.product((True, False), repeat=3):
        if any(mask):
            also = [] if mask[2] else summed
            check(backward, grad, x, weight, [len(bias)], *rest, list(mask), must_split=split + also)
    check(backward, grad, x, weight, None, *rest, [True, True, False], must_split=split + summed)
