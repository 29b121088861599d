"""Rules for embedding, gather, scatter and indexing with tensors, checked block by block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rule_sim import check, make_call
from traced_calls import traced_calls

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten
FAMILIES = (
    "embedding",
    "gather",
    "scatter",
    "index",
    "_unsafe_index",
    "take",
    "put",
    "masked_scatter",
    "searchsorted",
    "bucketize",
    "isin",
)


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ints(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high + sum(shape))
    return torch.randint(low, high, shape, generator=generator)


X = randn(8, 4, 12)
W = randn(8, 4)
REPEATED = torch.tensor([0, 7, 3, 3, 0, -1, -8, 5])
UNIQUE = torch.tensor([6, -1, 0, 3])  # 7 is written as -1

CASES = [
    # name, op, args, kwargs, factors that must be splittable
    ("embedding", aten.embedding.default, (W, ints(8, 4, 8)), {}, ["v", "d", "b0", "b1"]),
    ("embedding with padding", aten.embedding.default, (W, ints(8, 4, 8), 3), {}, ["v"]),
    ("embedding of one index", aten.embedding.default, (W, torch.tensor(5)), {}, ["v", "d"]),
    ("embedding of int32", aten.embedding.default, (W, ints(8, 4).int()), {}, ["v", "b0"]),
    ("embedding backward", aten.embedding_dense_backward.default,
     (randn(4, 8, 4), ints(8, 4, 8), 8, -1, False), {}, ["v", "d", "b0", "b1"]),
    ("embedding backward with padding", aten.embedding_dense_backward.default,
     (randn(4, 8, 4), ints(8, 4, 8), 8, 3, False), {}, ["v", "b0"]),
    ("embedding backward by frequency", aten.embedding_dense_backward.default,
     (randn(4, 8, 4), ints(8, 4, 8), 8, 3, True), {}, ["v", "d"]),
    ("gather", aten.gather.default, (X, 0, ints(8, 16, 4, 12)), {}, ["n", "i", "s1", "s2"]),
    ("gather along the last", aten.gather.default, (X, -1, ints(12, 8, 4, 4)), {}, ["n", "i", "s0", "s1"]),
    ("gather by a smaller index", aten.gather.default, (X, 1, ints(4, 4, 8, 1)), {}, ["n", "i", "i0"]),
    ("gather by one row", aten.gather.default, (X, 1, ints(4, 1, 4, 12)), {}, ["n", "i", "s2"]),
    ("gather of bools", aten.gather.default, (X > 0, 0, ints(8, 4, 4, 12)), {}, ["n", "i"]),
    ("gather of ints", aten.gather.default, (ints(9, 8, 4), 0, ints(8, 4, 4)), {}, ["n", "i", "s1"]),
    ("gather of a scalar", aten.gather.default, (torch.tensor(2.0), 0, torch.tensor(0)), {}, []),
    ("scatter_add", aten.scatter_add.default, (X, 0, ints(8, 16, 4, 12), randn(16, 4, 12)), {}, ["n", "i", "s1", "s2"]),
    ("scatter_add of a longer source", aten.scatter_add.default,
     (X, 0, ints(8, 4, 4, 8), randn(8, 4, 12)), {}, ["n", "s1"]),
    ("scatter_add of bools", aten.scatter_add.default, (W > 1, 0, ints(8, 4, 4), randn(4, 4) > 0), {}, ["n", "i"]),
    ("scatter", aten.scatter.src, (X, 0, UNIQUE.remainder(8)[:, None, None].expand(4, 4, 12), randn(4, 4, 12)), {},
     ["n", "s1", "s2"]),
    ("scatter of a longer source", aten.scatter.src,
     (X, 2, torch.tensor([5, 1]).expand(8, 4, 2), randn(8, 4, 3)), {}, ["n", "s0", "s1"]),
    ("scatter of a value", aten.scatter.value, (X, 2, ints(12, 8, 4, 1), 2.5), {}, ["n", "s0", "s1"]),
    ("scatter of zero", aten.scatter.value, (X, -1, ints(12, 8, 2, 1), 0), {}, ["n", "s0"]),
    ("scatter and add", aten.scatter.reduce,
     (X, 0, ints(8, 16, 4, 12), randn(16, 4, 12)), {"reduce": "add"}, ["n", "i"]),
    ("scatter and multiply", aten.scatter.reduce,
     (X, 0, ints(8, 4, 4, 12), randn(4, 4, 12)), {"reduce": "multiply"}, ["n", "s1"]),
    ("scatter and add a value", aten.scatter.value_reduce, (X, 0, ints(8, 4, 4, 12), 2.0), {"reduce": "add"}, ["n"]),
    *(
        (f"scatter_reduce {reduce} {include}", aten.scatter_reduce.two,
         (X, 0, ints(8, 16, 4, 12), randn(16, 4, 12), reduce), {"include_self": include},
         ["n", "s1", "s2", *(["i"] if include and reduce in ("sum", "amax", "amin") else [])])
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    ),
    ("index_select", aten.index_select.default, (X, 1, ints(4, 8)), {}, ["n", "i", "s0", "s2"]),
    ("index_select of one", aten.index_select.default, (X, -1, torch.tensor(3)), {}, ["n", "s0", "s1"]),
    ("index_add", aten.index_add.default, (X, 1, ints(4, 8), randn(8, 8, 12)), {"alpha": 2}, ["n", "i", "s0", "s2"]),
    ("index_add of one", aten.index_add.default, (X, 0, torch.tensor(7), randn(1, 4, 12)), {}, ["n", "s1"]),
    ("index_copy", aten.index_copy.default,
     (X, 0, UNIQUE.remainder(8), randn(4, 4, 12)), {}, ["n", "s1", "s2"]),
    ("index_reduce", aten.index_reduce.default, (X, 0, ints(8, 4), randn(4, 4, 12), "prod"), {}, ["n", "s1"]),
    ("index_fill", aten.index_fill.int_Scalar, (X, 0, UNIQUE, 2.5), {}, ["n", "s1", "s2"]),
    ("index_fill with zero", aten.index_fill.int_Scalar, (X, 0, UNIQUE, 0), {}, ["n"]),
    ("index_fill with a tensor", aten.index_fill.int_Tensor,
     (X, -1, UNIQUE, torch.tensor(3.0, dtype=torch.float64)), {}, ["n", "s0"]),
    ("x[i]", aten.index.Tensor, (X, [REPEATED]), {}, ["n0", "b0", "s1", "s2"]),
    ("x[i, 0-d]", aten.index.Tensor, (X, [torch.tensor(-2)]), {}, ["n0", "s1", "s2"]),
    ("x[:, i]", aten.index.Tensor, (X, [None, UNIQUE.remainder(4)]), {}, ["n1", "b0", "s0", "s2"]),
    ("x[:, :, i]", aten.index.Tensor, (X, [None, None, REPEATED]), {}, ["n2", "b0", "s0", "s1"]),
    ("x[ii]", aten.index.Tensor, (X, [ints(8, 4, 8, low=-8)]), {}, ["n0", "b0", "b1", "s1"]),
    ("x[i, j]", aten.index.Tensor, (X, [REPEATED, ints(4, 8, low=-4)]), {}, ["n0", "n1", "b0", "s2"]),
    ("x[:, i, j]", aten.index.Tensor, (X, [None, ints(4, 8), REPEATED]), {}, ["n1", "n2", "b0", "s0"]),
    ("x[i, :, j]", aten.index.Tensor, (X, [REPEATED, None, REPEATED]), {}, ["n0", "n2", "b0", "s1"]),
    ("x[i, :, j] broadcast", aten.index.Tensor,
     (X, [REPEATED[:, None], None, ints(12, 4)]), {}, ["n0", "n2", "b0", "b1", "s1"]),
    ("x[:, i, j] broadcast", aten.index.Tensor,
     (X, [None, ints(4, 4, 1), ints(12, 8, low=-12)]), {}, ["n1", "n2", "b0", "b1", "s0"]),
    ("x[i, j, k]", aten.index.Tensor, (X, [ints(8, 4), ints(4, 4), ints(12, 4)]), {}, ["n0", "n1", "n2", "b0"]),
    ("bools[i]", aten.index.Tensor, (X > 0, [REPEATED]), {}, ["n0", "b0"]),
    ("x[i] of int32", aten.index.Tensor, (X, [REPEATED.int()]), {}, ["n0", "b0"]),
    ("unsafe x[:, i]", aten._unsafe_index.Tensor, (X, [None, ints(4, 8)]), {}, ["n1", "b0"]),
    ("x[i] = v", aten.index_put.default, (X, [UNIQUE], randn(4, 4, 12)), {}, ["n0", "s1", "s2"]),
    ("x[i] = scalar", aten.index_put.default, (X, [REPEATED], X.new_tensor(3.0)), {}, ["n0", "s1", "s2"]),
    ("x[:, i] = v", aten.index_put.default, (X, [None, ints(4, 1)], randn(8, 1, 12)), {}, ["n1", "s0", "s2"]),
    ("x[i, j] = v", aten.index_put.default,
     (X, [UNIQUE, ints(4, 4, low=-4)], randn(4, 12)), {}, ["n0", "n1", "s2"]),
    ("x[i, :, j] = v", aten.index_put.default,
     (X, [UNIQUE[:, None], None, torch.arange(8)], randn(4, 8, 4)), {}, ["n0", "n2", "s1"]),
    ("x[i, :, j] = row", aten.index_put.default,
     (X, [UNIQUE[:, None], None, torch.arange(8)], randn(4)), {}, ["n0", "s1"]),
    ("x[i] += v", aten.index_put.default, (X, [REPEATED], randn(8, 4, 12), True), {}, ["n0", "b0", "s1", "s2"]),
    ("x[i] += scalar", aten.index_put.default, (X, [REPEATED], X.new_tensor(3.0), True), {}, ["n0", "b0", "s1"]),
    ("x[:, i] += v", aten.index_put.default,
     (X, [None, ints(4, 8)], randn(8, 8, 12), True), {}, ["n1", "b0", "s0", "s2"]),
    ("x[i, j] += v", aten.index_put.default,
     (X, [REPEATED, ints(4, 8, low=-4)], randn(8, 12), True), {}, ["n0", "n1", "b0", "s2"]),
    ("x[i, :, j] += v", aten.index_put.default,
     (X, [REPEATED[:, None], None, ints(12, 4)], randn(8, 4, 4), True), {}, ["n0", "n2", "b0", "b1", "s1"]),
    ("x[:, i, j] += row", aten.index_put.default,
     (X, [None, ints(4, 4, 1), ints(12, 8)], randn(8), True), {}, ["n1", "n2", "b0", "b1", "s0"]),
    ("unsafe x[i] += v", aten._unsafe_index_put.default, (X, [REPEATED], randn(8, 4, 12), True), {}, ["n0", "b0"]),
    ("x[mask] = scalar", aten.index_put.default, (X, [X > 0], X.new_tensor(3.0)), {}, ["s0", "s1", "s2"]),
    ("x[:, rows] = scalar", aten.index_put.default,
     (X, [None, torch.tensor([True, False, True, False])], X.new_tensor(3.0)), {}, ["s0", "s1", "s2"]),
    ("x[mask] += scalar", aten.index_put.default, (X, [X > 0], X.new_tensor([3.0]), True), {}, ["s0"]),
    ("take", aten.take.default, (X, ints(384, 4, 8, low=-384)), {}, ["n0", "n1", "n2", "b0", "b1"]),
    ("put", aten.put.default, (X, torch.tensor([3, -1, 200, 17]), randn(4)), {}, ["n0", "n1", "n2"]),
    ("put and add", aten.put.default, (X, ints(384, 64, low=-384), randn(64), True), {}, ["n0", "n1", "n2", "b0"]),
    ("masked_scatter", aten.masked_scatter.default, (W, W > 0, randn(32)), {}, []),
    ("masked_scatter backward", aten.masked_scatter_backward.default, (W, W > 0, [4, 8]), {}, []),
    ("searchsorted", aten.searchsorted.Tensor, (randn(8).sort()[0], X), {}, ["n", "v0", "v1", "v2"]),
    ("searchsorted by rows", aten.searchsorted.Tensor,
     (X.sort(-1)[0], randn(8, 4, 4)), {"right": True}, ["n", "s0", "s1", "v"]),
    ("searchsorted with a sorter", aten.searchsorted.Tensor, (W, randn(8, 8)), {"sorter": W.argsort()}, ["s0", "v"]),
    ("searchsorted with ties", aten.searchsorted.Tensor,
     (ints(4, 8).sort()[0], torch.arange(-1, 7)), {"out_int32": True, "side": "right"}, ["n", "v0"]),
    ("searchsorted of a number", aten.searchsorted.Scalar, (randn(8).sort()[0], 0.3), {}, ["n"]),
    ("bucketize", aten.bucketize.Tensor, (X, randn(8).sort()[0]), {}, ["n", "v0", "v1", "v2"]),
    ("bucketize a number", aten.bucketize.Scalar, (0.3, randn(8).sort()[0]), {"right": True}, ["n"]),
    ("isin", aten.isin.Tensor_Tensor, (ints(9, 8, 4), ints(9, 4, 2)), {}, ["e0", "e1", "t0", "t1"]),
    ("not isin", aten.isin.Tensor_Tensor, (ints(9, 8, 4), ints(9, 4)), {"invert": True}, ["e0", "e1", "t0"]),
    ("isin one", aten.isin.Tensor_Scalar, (ints(9, 8, 4), 3), {}, ["e0", "e1"]),
    ("one isin", aten.isin.Scalar_Tensor, (3, ints(9, 8)), {}, ["t0"]),
]  # fmt: skip


@pytest.mark.parametrize("op, args, kwargs, split", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_blocks_give_the_whole(op, args, kwargs, split):
    check(op, *args, must_split=split, **kwargs)


LINEAR = [
    (aten.embedding.default, (W, ints(8, 4)), {}, [{0}]),
    (aten.embedding_dense_backward.default, (randn(4, 4), ints(8, 4), 8, -1, False), {}, [{0}]),
    (aten.gather.default, (W, 0, ints(8, 4, 4)), {}, [{0}]),
    (aten.index.Tensor, (W, [None, ints(4, 8)]), {}, [{0}]),
    (aten.scatter_add.default, (W, 0, ints(8, 4, 4), randn(4, 4)), {}, [{0, 2}]),
    (aten.scatter.src, (W, 0, ints(1, 1, 4), randn(1, 4)), {}, [{0, 2}]),
    (aten.scatter.value, (W, 0, ints(8, 4, 4), 1.0), {}, []),
    (aten.scatter.value, (W, 0, ints(8, 4, 4), 0.0), {}, [{0}]),
    (aten.scatter_reduce.two, (W, 0, ints(8, 4, 4), randn(4, 4), "mean"), {}, [{0, 2}]),
    (aten.scatter_reduce.two, (W, 0, ints(8, 4, 4), randn(4, 4), "amax"), {}, []),
    (aten.index_put.default, (W, [ints(8, 4)], randn(4, 4), True), {}, [{0, 2}]),
    (aten.index_add.default, (W, 0, ints(8, 4), randn(4, 4)), {"alpha": 3}, [{0, 2}]),
    (aten.index_fill.int_Scalar, (W, 0, ints(8, 4), 1.0), {}, []),
    (aten.index_fill.int_Scalar, (W, 0, ints(8, 4), 0), {}, [{0}]),
    (aten.take.default, (W, ints(32, 4)), {}, [{0}]),
    (aten.isin.Tensor_Tensor, (W, W), {}, []),
]


@pytest.mark.parametrize("op, args, kwargs, linear", LINEAR)
def test_pending_sums_pass_where_the_op_is_linear(op, args, kwargs, linear):
    assert [set(group) for group in check(op, *args, **kwargs).linear] == linear


def test_embedding_of_the_reported_case():
    weight = randn(8, 4)
    ids = torch.tensor([0, 7, 3, 4, 7])
    check(aten.embedding.default, weight, ids, 3, must_split=["v"])
    check(
        aten.embedding_dense_backward.default, torch.ones(5, 4, dtype=torch.float64), ids, 8, 3, False, must_split=["v"]
    )
    counts = aten.embedding_dense_backward(torch.ones(5, 4, dtype=torch.float64), ids, 8, 3, False)[:, 0]
    assert counts.tolist() == [1, 0, 0, 0, 1, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_an_accumulating_write_counts_its_target_once(dtype):
    target = torch.full((8, 4), 5).to(dtype)
    index = torch.tensor([0, 0, 0, 1, 1, 7, 7, 7])
    source = torch.arange(32).reshape(8, 4).remainder(3).to(dtype)
    check(aten.index_put.default, target, [index], source, True, must_split=["b0"])
    check(aten.index_add.default, target, 0, index, source, must_split=["i"])
    check(aten.scatter_add.default, target, 0, index[:, None].expand(8, 4), source, must_split=["i"])


def test_rows_of_other_blocks_may_hold_nan():
    table = randn(8, 4)
    table[0] = float("nan")
    check(aten.embedding.default, table, torch.tensor([1, 7, 2, 5]), must_split=["v", "b0"])
    check(aten.index.Tensor, table, [torch.tensor([1, -1, 2, 5])], must_split=["n0", "b0"])
    check(aten.index_add.default, table, 0, torch.tensor([1, 7]), randn(2, 4), must_split=["n", "i"])


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.index.Tensor, (W, [W > 0])),
        (aten.index_put.default, (W, [W > 9], randn(0))),
        (aten.index_put.default, (W, [W[:, 0] > 9, ints(1, 1)], randn(1))),
        (aten.gather.default, (W, 0, ints(8, 0, 4))),
        (aten.scatter_add.default, (torch.tensor(1.0), 0, torch.tensor(0), torch.tensor(1.0))),
    ],
)
def test_no_rule_for_masks_and_nothing(op, args):
    assert rule_for(make_call(op, args, {})[0]) is None


def put(x, place, value):
    x = x.clone()
    x[place] = value
    return x


ROWS, COLUMNS = torch.tensor([0, 2, 1, 2]), torch.tensor([1, 3, 0, 1])
WRITTEN = {
    "F.embedding": lambda x: F.embedding(ROWS, x[:, 0], padding_idx=2),
    "x[i]": lambda x: x[ROWS],
    "x[:, i]": lambda x: x[:, COLUMNS],
    "x[..., i, :]": lambda x: x[..., COLUMNS, :],
    "x[i, j]": lambda x: x[ROWS, COLUMNS],
    "x[i, :, j]": lambda x: x[ROWS, :, COLUMNS],
    "x[3, :, j]": lambda x: x[3, :, COLUMNS],
    "y[i] = v": lambda x: put(x, ROWS, x[4:] * 2),
    "y[i] = 0": lambda x: put(x, ROWS, 0.0),
    "y[:, i] = 0": lambda x: put(x, (slice(None), COLUMNS), 0.0),
    "y[mask] = 0": lambda x: put(x, x > 0, 0.0),
    "y[:, i] += 1": lambda x: put(x, (slice(None), COLUMNS), x[:, COLUMNS] + 1),
    "gather": lambda x: x.gather(1, COLUMNS[None, :, None].expand(8, 4, 12)),
    "take_along_dim": lambda x: torch.take_along_dim(x, COLUMNS[None, :, None], 1),
    "scatter_add": lambda x: torch.scatter_add(x, 1, COLUMNS[None, :, None].expand(8, 4, 12), x * 2),
    "scatter": lambda x: torch.scatter(x, 1, COLUMNS[None, :3, None].expand(8, 3, 12), x[:, :3] * 2),
    "scatter_reduce": lambda x: torch.scatter_reduce(x, 1, COLUMNS[None, :, None].expand(8, 4, 12), x * 2, "amax"),
    "index_select": lambda x: x.index_select(1, COLUMNS),
    "index_add": lambda x: x.index_add(1, COLUMNS, x * 2),
    "index_copy": lambda x: x.index_copy(1, COLUMNS[:3], x[:, :3] * 2),
    "index_fill": lambda x: x.index_fill(1, COLUMNS, 0.0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "take": lambda x: x.take(ROWS),
    "log-probabilities": lambda x: F.log_softmax(x[:, 0], -1)[torch.arange(8), torch.arange(8) % 6],
    "vmap": lambda x: torch.vmap(lambda row, place: row[place])(x, torch.zeros(8, 2, dtype=torch.long)),
    "vmap of embedding": lambda x: torch.vmap(lambda table: F.embedding(ROWS, table))(x[:, :, :2].contiguous()),
    "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)),
    "isin": lambda x: x * torch.isin(x.detach(), torch.tensor([1.0], dtype=x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("function", WRITTEN.values(), ids=WRITTEN)
def test_what_users_write_has_rules(function):
    found = [
        (op, args, kwargs)
        for op, args, kwargs in traced_calls(torch.func.grad(lambda x: (function(x) ** 2).sum()), X)
        if op._schema.name.removeprefix("aten::").startswith(FAMILIES)
    ]
    for op, args, kwargs in found:
        check(op, *args, meshes=(2,), **kwargs)
    assert found


def test_one_hot_is_a_comparison():
    calls = traced_calls(lambda i: F.one_hot(i, 8), ROWS)
    assert [str(op) for op, _, _ in calls] == [
        "aten.arange.default", "aten.unsqueeze.default", "aten.eq.Tensor", "aten._to_copy.default",
    ]  # fmt: skip
    for op, args, kwargs in traced_calls(lambda i: F.one_hot(i, 8), ROWS):
        assert rule_for(make_call(op, args, kwargs)[0]) is not None, op
