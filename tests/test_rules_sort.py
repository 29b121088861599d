"""Rules for sorting and selecting: whole along the sorted dim, split along all others, and topk by blocks."""

from __future__ import annotations

import pytest
import torch
from rule_sim import check, make_call
from traced_calls import traced_calls

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


X = randn(8, 4, 12)

CASES = [
    ("sort", aten.sort.default, (X,), {}, ["s0", "s1"]),
    ("sort the first dim", aten.sort.default, (X, 0, True), {}, ["s1", "s2"]),
    ("stable sort", aten.sort.stable, (X,), {"stable": True, "dim": 1}, ["s0", "s2"]),
    ("sort a vector", aten.sort.default, (X[:, 0, 0],), {}, []),
    ("sort a scalar", aten.sort.default, (torch.tensor(2.0),), {}, []),
    ("topk", aten.topk.default, (X, 3), {}, ["s0", "s1"]),
    ("topk of the first dim", aten.topk.default, (X, 2, 0), {}, ["s1", "s2"]),
    ("topk smallest", aten.topk.default, (X, 2, 1, False), {}, ["s0", "s2"]),
    ("topk of all", aten.topk.default, (X, 12), {}, ["s0", "s1"]),
    ("topk of one", aten.topk.default, (X, 1, -1, True, False), {}, ["s0", "s1"]),
    ("kthvalue", aten.kthvalue.default, (X, 2, 1), {}, ["s0", "s2"]),
    ("kthvalue of the last", aten.kthvalue.default, (X, 12), {"keepdim": True}, ["s0", "s1"]),
    ("mode", aten.mode.default, (X.round(), 0, True), {}, ["s1", "s2"]),
    ("median of a dim", aten.median.dim, (X, 1), {}, ["s0", "s2"]),
    ("nanmedian of a dim", aten.nanmedian.dim, (X, -1, True), {}, ["s0", "s1"]),
    ("topk of a scalar", aten.topk.default, (torch.tensor(2.0), 1), {}, []),
]


@pytest.mark.parametrize("op, args, kwargs, split", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_blocks_give_the_whole(op, args, kwargs, split):
    rule = check(op, *args, must_split=split, **kwargs)
    assert rule.kind("n") == "whole" or "n" not in rule.sizes
    assert rule.linear == ()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_topk_by_blocks_with_ties(largest, k, dim, blocks):
    x = torch.randint(-3, 3, (8, 8, 8), generator=torch.Generator().manual_seed(k)).double()
    x[x == 2] = float("nan")
    rule = rule_for(make_call(aten.topk.default, (x, k, dim, largest), {})[0])
    values, positions = rule.alternative({"n": blocks}, x, k, dim, largest)
    wanted = x.topk(k, dim, largest)[0]
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    # among equals any position is right, but no position may come twice
    torch.testing.assert_close(x.gather(dim, positions), values, rtol=0, atol=0, equal_nan=True)
    ordered = positions.sort(dim)[0]
    assert (ordered.diff(dim=dim) > 0).all()


def test_topk_by_blocks_sorts_only_a_few():
    x = randn(4, 64)
    rule = rule_for(make_call(aten.topk.default, (x, 3), {})[0])
    calls = list(traced_calls(lambda x: rule.alternative({"n": 4}, x, 3), x))
    sorted_shapes = [args[0].shape for op, args, _ in calls if op == aten.sort.default]
    assert sorted_shapes == [(4, 12)]
    # if a block gives all that it has there is nothing to gain, and values alone are gathered
    calls = list(traced_calls(lambda x: rule.alternative({"n": 32}, x, 3), x))
    assert aten.topk.default not in [op for op, _, _ in calls]


def test_medians_of_everything_need_all_of_it():
    for op in (aten.median.default, aten.nanmedian.default):
        rule = check(op, X)
        assert {rule.kind(name) for name in rule.sizes} == {"whole"}
        check(op, torch.tensor(2.0))


def test_integers_and_bools_sort():
    check(aten.sort.default, torch.arange(32).reshape(4, 8).remainder(5), 0, must_split=["s1"])
    check(aten.sort.default, X > 0, 0, must_split=["s1"])
    check(aten.topk.default, torch.arange(32).reshape(4, 8), 2, must_split=["s0"])


WRITTEN = {
    "topk": lambda x: x.topk(2, dim=1)[0],
    "sort": lambda x: x.sort(dim=1)[0],
    "stable argsort": lambda x: x.gather(1, x.argsort(dim=1, stable=True)),
    "msort": lambda x: x.msort(),
    "max": lambda x: x.max(dim=1)[0],
    "median": lambda x: x.median(dim=1)[0],
    "kthvalue": lambda x: x.kthvalue(2, dim=1)[0],
    "mode": lambda x: x.mode(dim=1)[0],
    "quantile": lambda x: x.quantile(0.3, dim=1),
}
FAMILIES = ("sort", "topk", "max", "median", "kthvalue", "mode", "scatter", "gather")


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_what_users_write_has_rules(function):
    found = [
        (op, args, kwargs)
        for op, args, kwargs in traced_calls(torch.func.grad(lambda x: (function(x) ** 2).sum()), X)
        if op._schema.name.removeprefix("aten::").startswith(FAMILIES)
    ]
    assert len(found) >= 2, "one forward and one backward"
    for op, args, kwargs in found:
        assert rule_for(make_call(op, args, kwargs)[0]) is not None, op
