"""Rules of reductions and scans: every dim, with and without keepdim, split by itself, and the combined blocks."""

from __future__ import annotations

import math

import pytest
import torch
from rule_sim import make_call
from rule_table import holds as check

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten
EVERY = ["d0", "d1", "d2"]
SHAPE = (4, 8, 2)
INF, NAN = math.inf, math.nan


def values(kind: str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "int":
        return torch.randint(-4, 5, shape, generator=generator)
    floats = torch.randn(shape, dtype=torch.float64, generator=generator)
    if kind == "bool":
        return floats > 0.5
    if kind == "complex":
        return torch.complex(floats, floats.flip(0) * 3)
    return torch.where(floats > 1, NAN, floats) if kind == "nan" else floats


KINDS = ["float", "int", "bool"]
DIMS = [[0], [1, -1], [-2], [], None]
keepdims = pytest.mark.parametrize("keepdim", [False, True])
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("dims", DIMS)
@keepdims
@kinds
def test_reductions_that_split_every_dim(kind, dims, keepdim):
    x = values(kind)
    check(aten.sum.dim_IntList, x, dims, keepdim, must_split=EVERY)
    check(aten.sum.dim_IntList, x, dims, keepdim, dtype=torch.float64, must_split=EVERY)
    check(aten.any.dims, x, dims, keepdim, must_split=EVERY)
    check(aten.all.dims, x, dims, keepdim, must_split=EVERY)
    if dims is not None:
        check(aten.amax.default, x, dims, keepdim, must_split=EVERY)
        check(aten.amin.default, x, dims, keepdim, must_split=EVERY)
    if kind == "float":
        check(aten.mean.dim, x, dims, keepdim, must_split=EVERY)
    if dims:
        check(aten.count_nonzero.dim_IntList, x, dims, must_split=EVERY)


@pytest.mark.parametrize("shape", [SHAPE, (1, 4), ()])
@kinds
def test_reductions_of_everything(kind, shape):
    x = values(kind, shape)
    split = EVERY if shape == SHAPE else []
    for op in (aten.sum, aten.max, aten.min, aten.any, aten.all, aten.count_nonzero):
        check(op.default, x, must_split=split)
    check(aten.prod.default, x)
    check(aten.aminmax.default, x)
    if kind != "bool":
        check(aten.argmax.default, x)
        check(aten.argmin.default, x)
    if kind == "float":
        check(aten.mean.default, x, must_split=split)


def test_what_is_linear():
    x = values("float")
    assert check(aten.sum.default, x).linear == ({0},)
    assert check(aten.mean.default, x).linear == ({0},)
    assert check(aten.sum.default, values("int"), dtype=torch.float64).linear == ()
    assert check(aten.sum.default, x, dtype=torch.int64).linear == ()  # truncates
    for op in (aten.max, aten.nansum, aten.count_nonzero, aten.linalg_vector_norm, aten.var, aten.prod):
        assert check(op.default, x).linear == (), op


def test_nansum():
    for dims in ([0], [1, 2], None):
        check(aten.nansum.default, values("nan"), dims, must_split=EVERY)


@pytest.mark.parametrize("dims", DIMS)
@keepdims
def test_variance(dims, keepdim):
    x = values("float")
    for correction in (0, 1, 2.5, None, 64):
        options = {"correction": correction, "keepdim": keepdim}
        for op in (aten.var, aten.std, aten.var_mean, aten.std_mean):
            check(op.correction, x, dims, **options)
    for unbiased in (False, True):
        check(aten.var.dim, x, dims, unbiased, keepdim)
        check(aten.std_mean.dim, x, dims, unbiased, keepdim)
    check(aten.std.default, x, False)
    check(aten.var_mean.correction, values("complex"), dims, keepdim=keepdim)


@pytest.mark.parametrize("p", [0, 1, 2, 3, 0.5, -1, INF, -INF])
@keepdims
def test_norms(p, keepdim):
    x = values("float")
    for dims in DIMS:
        check(aten.linalg_vector_norm.default, x, p, dims, keepdim)
        check(aten.linalg_vector_norm.default, x.float(), p, dims, keepdim, dtype=torch.float64)
    check(aten.norm.ScalarOpt_dim, x, p, [0, 2], keepdim)
    check(aten.norm.Scalar, x, p)
    check(aten.norm.ScalarOpt_dtype, x.float(), p, dtype=torch.float64)
    check(aten.norm.ScalarOpt_dim_dtype, x.float(), None, [1], keepdim, dtype=torch.float64)
    check(aten.linalg_vector_norm.default, values("complex"), p, [1], keepdim)
    check(aten.dist.default, x, values("float", (8, 1)), p)


def test_a_norm_of_halves_accumulates_in_float():
    x = (values("float") * 200).to(torch.float16)  # its squares overflow
    call, _, (want,) = make_call(aten.linalg_vector_norm.default, (x,), {})
    got = rule_for(call).alternative({"d0": 2}, x)
    assert got.dtype == torch.float16 and torch.allclose(got, want, rtol=1e-3) and got.isfinite()


@pytest.mark.parametrize("dim", [0, 1, -1])
@keepdims
@kinds
def test_along_a_dim(kind, dim, keepdim):
    x = values(kind)
    check(aten.any.dim, x, dim, keepdim, must_split=EVERY)
    check(aten.all.dim, x, dim, keepdim, must_split=EVERY)
    check(aten.prod.dim_int, x, dim, keepdim)
    check(aten.max.dim, x, dim, keepdim)
    check(aten.min.dim, x, dim, keepdim)
    check(aten.aminmax.default, x, dim=dim, keepdim=keepdim)
    if kind != "bool":
        check(aten.argmax.default, x, dim, keepdim)
        check(aten.argmin.default, x, dim, keepdim)


def test_the_first_of_equals_and_nan():
    ties = torch.tensor([[1.0, 5, 2, 5], [7, 0, 7, 7]], dtype=torch.float64)
    nans = values("nan")
    for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        check(op, ties, 1)
        check(op, nans, 1)
    for op in (aten.argmax.default, aten.argmin.default):
        check(op, ties)
        check(op, nans)


@pytest.mark.parametrize("dim", [0, 1, -1])
@kinds
def test_scans(kind, dim):
    x = values(kind)
    check(aten.cumsum.default, x, dim)
    check(aten.cumsum.default, x, dim, dtype=torch.float64)
    check(aten.cumprod.default, x, dim)
    check(aten.cummax.default, x, dim)
    check(aten.cummin.default, x, dim)
    if kind == "float":
        check(aten.logcumsumexp.default, x, dim)
        check(aten.cumsum.default, values("complex"), dim)
        check(aten.cumsum.default, torch.where(x > 1.5, INF, x), dim)  # an infinity stays in the blocks behind it


@keepdims
def test_logsumexp(keepdim):
    x = values("float")
    for dims in ([0], [1, -1], [-2]):
        check(aten.logsumexp.default, x, dims, keepdim)
        check(aten.logsumexp.default, x * 1e3, dims, keepdim)
    for fill in (-INF, INF):
        check(aten.logsumexp.default, torch.full((4, 4), fill, dtype=torch.float64), [0], keepdim)


def test_complex_and_others():
    z = values("complex", (4, 4))
    for op in (aten.sum, aten.mean, aten.prod):
        check(op.default, z)
    check(aten.cumprod.default, z, 0)
    check(aten.renorm.default, values("float"), 2, 1, 1.0, must_split=["d1"])


def test_nothing_to_split_in_nothing():
    call, _, _ = make_call(aten.sum.default, (torch.ones(0, 3),), {})
    assert rule_for(call) is None
