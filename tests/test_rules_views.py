"""Ops that move data: views, cuts, joins, pads, diagonals and factories, every splittable factor of each."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from rule_sim import Block, make_call
from rule_trace import verify

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten
prims = torch.ops.prims

FLOAT, INT, BOOL = torch.float64, torch.int64, torch.bool
CPU = {"device": torch.device("cpu"), "requires_grad": False}


def t(*shape, dtype=FLOAT):
    """Values of different sign and size."""
    count = torch.Size(shape).numel()
    return ((torch.randperm(count) - count // 3) * 1.25).reshape(shape).to(dtype)


def groups(rule):
    return sorted(sorted(group) for group in rule.linear)


# op, arguments, factors that must be splittable, factors that must not be, keywords
VIEWS = [
    (aten.view.default, (t(4, 8, 6), [32, 6]), "a0 a1 a2", ""),
    (aten.view.default, (t(32, 6), [4, 8, 6]), "a0 a1 a2", ""),
    (aten.view.default, (t(8, 24), [8, 3, 8]), "a0 a1 a2", ""),
    (aten.view.default, (t(4, 6), [3, 8]), "a0", "b0 b1 c0 c1"),
    (aten.view.default, (t(8, 4), [-1]), "a0 a1", ""),
    (aten.view.default, (t(1, 8, 1, 4), [8, 1, 4, 1]), "a0 a1", ""),
    (aten.view.default, (t(), [1, 1]), "", ""),
    (aten.view.default, (t(0, 4), [4, 0]), "", "b0 b1 c0 c1"),
    (aten.view_copy.default, (t(8, 4), [32]), "a0 a1", ""),
    (aten._unsafe_view.default, (t(8, 4), [2, 4, 4]), "a0 a1 a2", ""),
    (aten.reshape.default, (t(8, 4), [2, 16]), "a0 a1 a2", ""),
    (aten._reshape_alias.default, (t(8, 4), [32], [1]), "a0 a1", ""),
    (aten.unsqueeze.default, (t(8, 4), 1), "a0 a1", ""),
    (aten.unsqueeze_copy.default, (t(8, 4), -1), "a0 a1", ""),
    (aten.squeeze.default, (t(1, 2, 1, 4),), "a0 a1", ""),
    (aten.squeeze.dim, (t(1, 2, 4), 0), "a0 a1", ""),
    (aten.squeeze.dim, (t(2, 4), 0), "a0 a1", ""),
    (aten.squeeze.dims, (t(1, 2, 1, 4), [0, 1, 2]), "a0 a1", ""),
    (aten.squeeze_copy.dims, (t(1, 2, 1, 4), [0, 2]), "a0 a1", ""),
    (prims.squeeze.default, (t(1, 2, 4), [0]), "a0 a1", ""),
    (prims.reshape.default, (t(8, 4), [32]), "a0 a1", ""),
    (prims.split_dim.default, (t(8, 4), 0, 2), "a0 a1 a2", ""),
    (prims.collapse_view.default, (t(8, 4, 2), 0, 1), "a0 a1 a2", ""),
    (aten.permute.default, (t(4, 8, 2), [2, 0, -2]), "d0 d1 d2", ""),
    (aten.permute_copy.default, (t(4, 8), [1, 0]), "d0 d1", ""),
    (prims.transpose.default, (t(4, 8), [1, 0]), "d0 d1", ""),
    (aten.transpose.int, (t(4, 8, 2), 0, -1), "d0 d1 d2", ""),
    (aten.transpose.int, (t(), 0, -1), "", ""),
    (aten.t.default, (t(4, 8),), "d0 d1", ""),
    (aten.t.default, (t(4),), "d0", ""),
    (aten.numpy_T.default, (t(4, 8),), "d0 d1", ""),
    (aten.expand.default, (t(4, 1), [2, 4, 8]), "d0 d1 d2", ""),
    (aten.expand.default, (t(4, 8), [-1, -1]), "d0 d1", ""),
    (aten.expand.default, (t(), [4]), "d0", ""),
    (aten.expand_copy.default, (t(1, 4), [8, 4]), "d0 d1", ""),
    (prims.broadcast_in_dim.default, (t(4, 1), [2, 4, 8], [1, 2]), "d0 d1 d2", ""),
    (prims.broadcast_in_dim.default, (t(4), [4, 8], [0]), "d0 d1", ""),
    (aten.repeat.default, (t(4, 8), [2, 1, 4]), "d1 d2 r0 r2", ""),
    (aten.repeat.default, (t(1, 8), [4, 2]), "d1 r0 r1", ""),
    (aten.repeat_interleave.self_int, (t(4, 8), 2, 0), "d0 d1 r", ""),
    (aten.repeat_interleave.self_int, (t(4, 8), 2), "d0 d1 r", ""),
    (aten.repeat_interleave.self_int, (t(4, 8), 4, -1), "d0 d1 r", "", {"output_size": 32}),
    (aten.unfold.default, (t(4, 8), 1, 4, 4), "d0 d1 d2", ""),
    (aten.unfold.default, (t(4, 8), 0, 2, 1), "d1", "d0 d2 whole"),
    (aten.unfold.default, (t(4, 9), -1, 4, 4), "d0", "d1 d2 whole"),
    (
        aten.unfold_copy.default,
        (
            t(
                8,
            ),
            0,
            2,
            2,
        ),
        "d0 d1",
        "",
    ),
    (aten.unfold_backward.default, (t(4, 3, 4), [4, 8], 1, 4, 2), "d0", "d1 d2 whole"),
    (aten.flip.default, (t(4, 8), [-1]), "d0", "d1"),
    (aten.flip.default, (t(4, 8), []), "d0 d1", ""),
    (aten.rot90.default, (t(4, 8, 2), 1, [0, -1]), "d1", "d0 d2"),
    (aten.rot90.default, (t(4, 8), 2), "", "d0 d1"),
    (prims.rev.default, (t(4, 8), [0]), "d1", "d0"),
    (aten.roll.default, (t(4, 8), [3], [1]), "d0", "d1"),
    (aten.roll.default, (t(4, 8), [3]), "", "d0 d1"),
    (aten.roll.default, (t(4, 8), [1, 2], [0, -1]), "", "d0 d1"),
    (aten.as_strided.default, (t(4, 8), [4, 8], [8, 1], 0), "a0 a1", ""),
    (aten.as_strided.default, (t(4, 8), [32], [1]), "a0 a1", ""),
    (aten.as_strided_copy.default, (t(4, 8), [2, 2, 1, 8], [16, 8, 3, 1]), "a0 a1 a2", ""),
]
DIAGONALS = [
    (aten.tril.default, (t(8, 8),), "d0 d1", ""),
    (aten.tril.default, (t(2, 4, 8), 1), "d0 d1 d2", ""),
    (aten.triu.default, (t(8, 4), -2), "d0 d1", ""),
    (aten.triu.default, (t(1, 8),), "d1", ""),
    (aten.tril.default, (t(8, 8, dtype=BOOL), 1), "d0 d1", ""),
    (aten.diagonal.default, (t(4, 8, 8), 1, 1, 2), "d0", "d1 d2 diagonal"),
    (aten.diagonal_copy.default, (t(4, 8, 8), 0, 0, -1), "d1", "d0 d2"),
    (aten.diagonal_backward.default, (t(4, 8), [4, 8, 8], 0, 1, 2), "d0", "d1 d2 diagonal"),
    (aten.diag_embed.default, (t(4, 8), 1), "d0", "d1 d2 diagonal"),
]
CUTS = [
    (aten.slice.Tensor, (t(4, 8), 0, 0, sys.maxsize), "g d1", ""),
    (aten.slice.Tensor, (t(4, 8), 1, -8, 8), "d0 g", ""),
    (aten.slice.Tensor, (t(4, 8), 1, 0, 4), "d0 g", "parts"),
    (aten.slice.Tensor, (t(4, 8), 1, 4, 100), "d0 g", "parts"),
    (aten.slice.Tensor, (t(4, 12), 1, 4, 8), "d0 g", "parts"),
    (aten.slice.Tensor, (t(4, 12), 1, 2, 10), "d0 g", "parts range"),
    (aten.slice.Tensor, (t(4, 8), 1, 1, 6), "d0", "parts range"),
    (aten.slice.Tensor, (t(4, 8), 1, 0, 8, 2), "d0", "parts range"),
    (aten.slice.Tensor, (t(4, 8), -1, 1, None, 3), "d0", "parts range"),
    (aten.slice.Tensor, (t(4, 8), 1, 6, 2), "d0", "parts"),
    (aten.slice.Tensor, (t(4, 8, dtype=BOOL), 1, 4), "d0 g", "parts"),
    (aten.slice_copy.Tensor, (t(4, 8), 1, 4), "d0 g", "parts"),
    (aten.slice.Tensor, (t(4, 1), 1, 0, 1), "d0", ""),
    (aten.narrow_copy.default, (t(4, 8), 1, 4, 4), "d0 g", "parts"),
    (aten.slice_backward.default, (t(4, 4), [4, 8], 1, 4, 8, 1), "d0 g", "parts"),
    (aten.slice_backward.default, (t(4, 8), [4, 8], 1, 0, sys.maxsize, 1), "d0 g", ""),
    (aten.slice_backward.default, (t(4, 3), [4, 8], 1, 1, 7, 2), "d0", "parts range"),
    (aten.slice_backward.default, (t(4, 1), [4, 8], 1, 7, 8, 1), "d0", "parts"),
    (aten.select_backward.default, (t(8), [4, 8], 0, 2), "d0 d1", ""),
    (aten.select_backward.default, (t(4), [4, 8], -1, -1), "d0 d1", ""),
    (aten.select_backward.default, (t(4), [4, 1], 1, 0), "d0", ""),
]
SPLITS = [
    (aten.split.Tensor, (t(4, 12), 4, 1), "d0 g", "parts"),
    (aten.split.Tensor, (t(4, 8), 3, -1), "d0", "parts parts0 parts2"),
    (aten.split_with_sizes.default, (t(4, 16), [8, 4, 4], 1), "d0 g", "parts parts0"),
    (aten.split_with_sizes_copy.default, (t(4, 8), [4, 4], 1), "d0 g", "parts"),
    (aten.unsafe_split.Tensor, (t(4, 8), 2, 0), "d1 g", "parts"),
    (aten.unsafe_split_with_sizes.default, (t(4, 8), [2, 2], 0), "d1 g", "parts"),
    (aten.unsafe_chunk.default, (t(4, 8), 2, 1), "d0 g", "parts"),
    (aten.unbind.int, (t(4, 8), 0), "d1", "d0"),
    (aten.unbind_copy.int, (t(4, 8), -1), "d0", "d1"),
]
PADS = [
    (aten.constant_pad_nd.default, (t(4, 8), [1, 2]), "d0", "in1 out1"),
    (aten.constant_pad_nd.default, (t(4, 8), [4, 0], 0.0), "d0 d1", "in1 out1"),
    (aten.constant_pad_nd.default, (t(4, 8), [-1, 3, 2, 0]), "d0", "in1 out1 in0 out0"),
    (aten.reflection_pad1d.default, (t(2, 4, 8), [1, 2]), "d0 d1", ""),
    (aten.reflection_pad2d.default, (t(2, 4, 8), [1, 2, 0, 1]), "d0", ""),
    (aten.replication_pad1d.default, (t(2, 4, 8), [1, 2]), "d0 d1", ""),
    (aten.replication_pad2d_backward.default, (t(2, 5, 11), t(2, 4, 8), [1, 2, 0, 1]), "d0", ""),
    (aten.pixel_shuffle.default, (t(2, 16, 4, 6), 2), "d0 c h w", "r s"),
    (aten.channel_shuffle.default, (t(2, 12, 4), 3), "d0 d2 c", "g"),
    (aten.pixel_unshuffle.default, (t(4, 8, 4), 2), "c h w", "r s"),
]
UNARY = [*VIEWS, *DIAGONALS, *CUTS, *SPLITS, *PADS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNARY, ids=lambda case: str(case[0]))
def test_one_operand(case):
    op, args, splits, wholes, *kwargs = case
    rule = verify(op, *args, must_split=splits.split(), **(kwargs[0] if kwargs else {}))
    assert all(rule.kind(name) == "whole" for name in wholes.split())
    single = len(rule.outs) == 1 and args[0].dtype != BOOL
    assert groups(rule) == ([[0]] if single else [])
    moves_sums = "pad2d_backward" in str(op) or op == aten.unfold_backward.default
    assert rule.elementwise != moves_sums


PICKS = [
    (aten.select.int, (t(4, 8), 0, 3), "d1 i"),
    (aten.select.int, (t(4, 8), 1, -1), "d0 i"),
    (aten.select.int, (t(4, 8, 2), -2, 5), "d0 d2 i"),
    (aten.select_copy.int, (t(8), 0, 2), "i"),
    (aten.select.int, (t(4, 8, dtype=INT), 0, 0), "d1 i"),
    (aten.slice.Tensor, (t(4, 8), 1, 5, 6), "d0 i"),
    (aten.slice.Tensor, (t(4, 8), 1, -1), "d0 i"),
]


@pytest.mark.parametrize("case", PICKS, ids=lambda case: str(case[0]))
def test_one_row_is_a_sum(case):
    """The device that has the row gives it, the others give zeros; so nothing else is moved."""
    op, args, splits = case
    rule = verify(op, *args, must_split=splits.split())
    assert rule.kind("i") == "sum" and rule.contiguous == {"i"} and groups(rule) == [[0]]
    assert not rule.elementwise


def test_zeros_are_selected_where_the_rest_is_not_finite():
    """Not mine must be zero, not something times zero."""
    x = torch.tensor([[1.0, float("nan")], [float("inf"), -0.5], [2.0, 3.0], [4.0, float("-inf")]], dtype=FLOAT)
    verify(aten.select.int, x, 0, 0, must_split=["i"])
    verify(aten.select.int, x[:, 1:].contiguous(), 0, 1, must_split=["i"])


def test_rows_without_a_sum():
    """Bools are joined by max; keys (uint32) have no kernel for sums."""
    rule = verify(aten.select.int, t(4, 8, dtype=BOOL), 0, 2, must_split=["d1", "i"])
    assert rule.kind("i") == "max" and rule.linear == ()
    keys = t(4, 2).abs().to(torch.uint32)
    rule = verify(aten.select.int, keys, 1, 1, must_split=["d0"])
    assert rule.kind("i") == "whole" and rule.elementwise
    assert verify(aten.select.int, t(4, 1), 1, 0).elementwise  # a dim of size 1 has nothing to be split
    rule = verify(aten.slice.Tensor, keys, 1, 0, 1, must_split=["d0"])
    assert rule.kind("parts") == "whole"


x, y, z = t(4, 8), t(4, 8), t(4, 4)
JOINS = [
    (aten.cat.default, ([x, y],), "g d1", "parts", [[0, 1]]),
    (aten.cat.default, ([x, z, y], -1), "d0 g", "parts parts0", [[0, 1, 2]]),
    (aten.cat.default, ([t(4, 3), t(4, 5)], 1), "d0", "parts0 parts1 parts", [[0, 1]]),
    (aten.cat.default, ([x, torch.empty(0), y], 1), "d0 g", "parts", [[0, 2]]),
    (aten.cat.default, ([x, x.bool()],), "g d1", "parts", []),
    (aten.cat.default, ([x, t(4, 8, dtype=INT)], 1), "d0 g", "parts", []),
    (aten.cat.default, ([x],), "g d1", "", [[0]]),
    (prims.cat.default, ([x, y], 0), "g d1", "parts", [[0, 1]]),
    (aten.stack.default, ([x, y],), "d0 d1", "stacked", [[0, 1]]),
    (aten.stack.default, ([x, y, x], -1), "d0 d1", "stacked", [[0, 1, 2]]),
    (aten.slice_scatter.default, (x, z, 1, 4, 8), "d0 g", "parts", [[0, 1]]),
    (aten.slice_scatter.default, (x, y, 1), "d0 g", "", [[0, 1]]),
    (aten.slice_scatter.default, (x, z, 1, 1, 8, 2), "d0", "parts range", [[0, 1]]),
    (aten.slice_scatter.default, (x, t(1, 8), 0, 3, 4), "d1", "parts", [[0, 1]]),
    (aten.slice_scatter.default, (x, t(3, 8), 0, 1), "d1", "parts range", [[0, 1]]),
    (aten.select_scatter.default, (x, t(8), 0, 3), "d0 d1", "", [[0, 1]]),
    (aten.select_scatter.default, (x, t(4), 1, -3), "d0 d1", "", [[0, 1]]),
    (aten.select_scatter.default, (x > 0, t(4) > 0, 1, 2), "d0 d1", "", []),
    (aten.diagonal_scatter.default, (t(4, 8, 8), t(4, 8), 0, 1, 2), "d0", "d1 d2 diagonal", [[0, 1]]),
    (aten.as_strided_scatter.default, (x, t(32), [32], [1], 0), "a0 a1", "", [[1]]),
]


@pytest.mark.parametrize("case", JOINS, ids=lambda case: str(case[0]))
def test_several_operands(case):
    op, args, splits, wholes, linear = case
    rule = verify(op, *args, must_split=splits.split())
    assert all(rule.kind(name) == "whole" for name in wholes.split())
    assert groups(rule) == linear and rule.elementwise


def test_a_fused_weight_is_cut_between_its_devices():
    """q, k and v of a dim (3 tp n) take along the axes that its minor factor has."""
    rule = verify(aten.split.Tensor, t(2, 24), 8, 1, must_split=["g"])
    assert rule.ins[0][1] == ("parts", "g") and rule.sizes == {"g": 8, "parts": 3, "d0": 2}
    assert all(out[1] == ("g",) for out in rule.outs)


STRIDED = [
    (aten.as_strided.default, (x, [8, 4], [1, 8], 0)),
    (aten.as_strided.default, (x, [4], [9], 0)),
    (aten.as_strided.default, (x, [8], [1], 8)),
    (aten.as_strided.default, (x, [4, 8], [0, 1], 0)),
    (aten.as_strided_scatter.default, (x, t(4), [4], [9], 0)),
]


@pytest.mark.parametrize("case", STRIDED, ids=lambda case: str(case[1][1:]))
def test_strides_say_nothing_about_a_block(case):
    call, _, _ = make_call(*case, {})
    assert rule_for(call) is None


BYTES = [
    (t(4, 8), torch.float32, "d0 d1", True),
    (t(4, 8), INT, "d0 d1", True),
    (t(4, 8, dtype=torch.float32), FLOAT, "d0 d1", False),
    (t(4, 8, dtype=torch.float32).to(torch.int32), torch.uint32, "d0 d1", True),
]


@pytest.mark.parametrize("case", BYTES, ids=lambda case: f"{case[0].dtype}-{case[1]}")
def test_bit_casts(case):
    value, dtype, splits, elementwise = case
    value = torch.randint(0, 100, value.shape).to(value.dtype)
    rule = verify(aten.view.dtype, value, dtype, must_split=splits.split())
    assert rule.linear == () and rule.elementwise == elementwise


SIZES = {"dtype": FLOAT}
FACTORIES = [
    (aten.full.default, ([4, 8], 2.5), {}, "d0 d1"),
    (aten.full.default, ([], 2.5), {}, ""),
    (aten.full.default, ([4, 8], 1), {"dtype": INT, "device": torch.device("cpu"), "pin_memory": False}, "d0 d1"),
    (aten.zeros.default, ([8],), SIZES, "d0"),
    (aten.ones.default, ([2, 4],), SIZES, "d0 d1"),
    (aten.empty.memory_format, ([2, 4],), SIZES, "d0 d1"),
    (aten.empty_strided.default, ([2, 4], [1, 2]), SIZES, "d0 d1"),
    (aten.empty_permuted.default, ([2, 4], [1, 0]), SIZES, "d0 d1"),
    (aten._efficientzerotensor.default, ([2, 4],), SIZES, "d0 d1"),
    (aten.scalar_tensor.default, (2.5,), SIZES, ""),
    (aten.arange.default, (8,), {}, "d0"),
    (aten.arange.default, (8.0,), {}, "d0"),
    (aten.arange.default, (1,), {}, ""),
    (aten.arange.start, (3, 11), {"dtype": torch.float32}, "d0"),
    (aten.arange.start_step, (20, 4, -2), {}, "d0"),
    (aten.arange.start_step, (0, 64, 2), {"dtype": torch.bfloat16}, "d0"),
    (aten.arange.start_step, (1, 24, 3), {"device": torch.device("cpu")}, "d0"),
    (aten.eye.default, (8,), SIZES, "d0 d1"),
    (aten.eye.m, (4, 8), {"dtype": BOOL}, "d0 d1"),
    (aten.eye.m, (1, 8), {}, "d1"),
    (prims.iota.default, (8,), {"start": 2, "step": 3, "dtype": INT, **CPU}, "d0"),
    (prims.full.default, ([4, 8], 1.5), {**SIZES, **CPU}, "d0 d1"),
    (prims.scalar_tensor.default, (1.5,), {**SIZES, "device": torch.device("cpu")}, ""),
    (aten.linspace.default, (0.0, 1.0, 8), SIZES, ""),
    (aten.tril_indices.default, (4, 4), {}, ""),
    (aten.arange.start_step, (0.0, 0.8, 0.1), {}, ""),
    (aten.arange.start, (250, 258), {"dtype": torch.bfloat16}, ""),
]


@pytest.fixture
def filled_empties():
    """Uninitialized memory is filled with NaN, so that it can be compared."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", FACTORIES, ids=lambda case: f"{case[0]}{case[1]}")
def test_factories(case, filled_empties):
    op, args, kwargs, splits = case
    rule = verify(op, *args, must_split=splits.split(), **kwargs)
    assert rule.elementwise and rule.linear == () and rule.ins == ()
    assert {name for name in rule.sizes if rule.kind(name) == "pass"} == set(splits.split())


@pytest.mark.parametrize("op", [aten.arange.default, aten.arange.start, aten.arange.start_step])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, FLOAT, torch.int32, INT])
def test_a_block_of_a_range_is_equal_to_the_bit(op, dtype):
    for args in ((64,), (-32, 32), (3, 387, 6))[:1] if op == aten.arange.default else ((-32, 32), (100, 228)):
        call, _, (whole,) = make_call(op, args, {"dtype": dtype})
        rule = rule_for(call)
        if rule.kind("d0") == "whole":
            continue
        for n in (2, 4, 8):
            blocks = [rule.local(Block(rule, "d0", n, i), *args, dtype=dtype) for i in range(n)]
            assert torch.equal(torch.cat(blocks), whole)


def test_numbers_in_tensors():
    """The ends of a range may be tensors of rank 0."""
    rule = verify(aten.linspace.Tensor_Scalar, torch.tensor(1.0), 2.0, 8)
    assert rule.ins == ((),) and rule.kind("d0") == "whole"


NEW = [
    (aten.new_zeros.default, ([4, 8],), {}, "d0 d1"),
    (aten.new_zeros.default, ([32],), {"dtype": INT}, "d0"),
    (aten.new_ones.default, ([2, 4],), {}, "d0 d1"),
    (aten.new_full.default, ([2, 4], 3.5), {"pin_memory": False}, "d0 d1"),
    (aten.new_empty.default, ([4, 8],), {}, "d0 d1"),
    (aten.new_empty_strided.default, ([4, 8], [8, 1]), {}, "d0 d1"),
]


@pytest.mark.parametrize("case", NEW, ids=lambda case: f"{case[0]}{case[1]}")
def test_new_tensors(case, filled_empties):
    op, args, kwargs, splits = case
    rule = verify(op, x, *args, must_split=splits.split(), **kwargs)
    assert rule.elementwise and rule.shape_only == {0}
    shared = args[0] == [4, 8]
    assert (rule.ins[0] == rule.outs[0]) == shared  # equal shapes are laid out alike


def random_shape(numbers, size):
    """Dims whose product is `size`."""
    dims = []
    while size > 1:
        dim = numbers.choice([d for d in range(2, size + 1) if size % d == 0])
        dims.append(dim)
        size //= dim
    for _ in range(numbers.randrange(2)):
        dims.insert(numbers.randrange(len(dims) + 1), 1)
    numbers.shuffle(dims)
    return dims


def test_random_views():
    """Every factor that a view lets pass may be split, and aligned boundaries always pass."""
    numbers = random.Random(0)
    free = 0
    for _ in range(500):
        size = numbers.choice([8, 12, 16, 24, 36, 48, 60, 64, 96, 144])
        before, after = random_shape(numbers, size), random_shape(numbers, size)
        rule = verify(aten.view.default, torch.randn(before, dtype=FLOAT), after)
        free += all(rule.kind(name) == "pass" for name in rule.sizes)
        if before == after:
            assert rule.ins == rule.outs
    assert free > 250


def test_common_boundaries_always_pass():
    """Where the strides of both shapes form one chain of divisors, nothing is whole."""
    numbers = random.Random(1)
    for _ in range(100):
        pieces = [numbers.choice([2, 3, 4]) for _ in range(4)]
        before, after = (merged(numbers, pieces) for _ in range(2))
        call, _, _ = make_call(aten.view.default, (torch.empty(before), after), {})
        rule = rule_for(call)
        assert all(rule.kind(name) == "pass" for name in rule.sizes), (before, after)


def merged(numbers, pieces):
    """A shape whose dims are products of neighbouring pieces."""
    shape = [pieces[0]]
    for piece in pieces[1:]:
        if numbers.random() < 0.5:
            shape[-1] *= piece
        else:
            shape.append(piece)
    return shape
