"""Every element-wise overload against its rule: blocks, pending sums, shape-only operands."""

from __future__ import annotations

import pytest
import torch
from rule_sim import Block, make_call
from rule_trace import verify

from spmdfn.partition.rule import Call, Operand, rule_for
from spmdfn.partition.rules.pointwise import pointwise_ops, short_name

aten = torch.ops.aten
prims = torch.ops.prims

FLOAT, INT, BOOL = torch.float64, torch.int64, torch.bool
SHAPES = {
    1: [((4, 8),), ((8,),), ((),), ((1, 4),)],
    2: [((4, 8), (4, 8)), ((4, 8), (8,)), ((4, 1), (1, 8)), ((2, 4, 8), (4, 1)), ((), (8,)), ((4, 8), ())],
    3: [((4, 8), (4, 8), (4, 8)), ((4, 1), (1, 8), (8,)), ((4, 8), (), (4, 1)), ((8,), (4, 8), ())],
}
# Values for arguments without a default, by name; all others get 0.75 or 2.
NUMBERS = {"lambd": 0.5, "min": -0.5, "max": 0.75, "min_val": -1.0, "max_val": 1.0, "p": 2, "n": 2, "decimals": 1}
NUMBERS |= {"negative_slope": 0.1, "self_is_result": False, "is_result": False, "training": False, "upper": 0.3}
NUMBERS |= {"rounding_mode": None, "dtype": FLOAT, "device": "cpu", "lower": 0.1, "stride": (8, 1)}
# Operands that are not floats like the others.
DTYPES = {"mask": BOOL, "condition": BOOL, "pred": BOOL}
# These want all their operands in one shape.
ALIKE = {"native_dropout_backward", "_prelu_kernel_backward", "log_sigmoid_backward", "rrelu_with_noise_backward"}
# These are called by hand below.
BY_HAND = {
    "masked_fill.Tensor",  # a 0-d value
    "_prelu_kernel_backward",
    "prims.copy_strided",
    "prims.device_put",
}


def tensor(shape, dtype, positive=False):
    """Values of different sign and size, nowhere 0."""
    if dtype == BOOL:
        return torch.rand(shape) > 0.5
    values = torch.rand(shape, dtype=FLOAT) * 3 + 1.1
    if not positive:
        values = values * (torch.randint(0, 2, shape) * 2 - 1)
    return values.round().to(INT) if dtype == INT else values.to(dtype)


def arguments(op, shapes, dtype, positive):
    """Arguments of one call from the schema, or None for a schema with fewer tensors than shapes."""
    shapes = iter(shapes)
    args, kwargs = [], {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            value = tensor(next(shapes), DTYPES.get(argument.name, dtype), positive)
        elif argument.has_default_value() and argument.name not in ("min", "max"):
            continue
        else:
            value = NUMBERS.get(argument.name, 2 if dtype == INT or kind == "int" else 0.75)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def tensor_count(op):
    return sum("Tensor" in str(argument.type) for argument in op._schema.arguments)


def answer(op, args, kwargs):
    try:
        return op(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # not for this dtype


KINDS = [(FLOAT, False), (FLOAT, True), (INT, True), (BOOL, True), (torch.complex128, False)]


def cases(op):
    """Calls of an overload: the first kind of values that it takes in every shape, the others in the first shape."""
    name = short_name(op)
    shapes = SHAPES[tensor_count(op)]
    if name in ALIKE or name.startswith("prims.") or "backward" in name:
        shapes = [tuple(s) for s in shapes if len(set(s)) == 1]
    torch.manual_seed(len(name))
    found = False
    for dtype, positive in KINDS[1:] if name == "mvlgamma" else KINDS:
        if dtype == BOOL and name.startswith("_neg_view"):
            continue  # torch makes such a view, and fails when it is read
        for these in shapes[:1] if found else shapes:
            args, kwargs = arguments(op, these, dtype, positive)
            if answer(op, args, kwargs) is not None:
                yield these, args, kwargs
                found = True


@pytest.fixture(autouse=True)
def double():
    """Kernels of int operands compute in double too: in float, their vectorized and scalar parts differ."""
    torch.set_default_dtype(FLOAT)
    yield
    torch.set_default_dtype(torch.float32)


OPS = pointwise_ops()  # as collected: other packages may register more while tests run
AUTOMATIC = [op for op in OPS if short_name(op) not in BY_HAND]


def test_how_many_overloads_there_are():
    assert len(AUTOMATIC) + len(BY_HAND) == len(OPS)
    tagged = [op for op in OPS if torch.Tag.pointwise in op.tags]
    assert len(tagged) >= 240
    assert len(OPS) >= 360


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", AUTOMATIC, ids=short_name)
def test_every_overload(op):
    count = 0
    for shapes, args, kwargs in cases(op):
        full = torch.broadcast_shapes(*shapes)
        must_split = [f"d{i}" for i, size in enumerate(full) if size != 1]
        rule = verify(op, *args, must_split=must_split, **kwargs)
        assert rule.elementwise
        count += 1
    assert count > 0, f"no automatic arguments for {op}: call it by hand"


def groups(op, *args, **kwargs):
    """The linear groups of a call, checked."""
    return sorted(sorted(group) for group in verify(op, *args, **kwargs).linear)


A, B, C = (tensor((4, 8), FLOAT) for _ in range(3))
ROW, SCALAR, FLAGS, WHOLE = tensor((8,), FLOAT), tensor((), FLOAT), tensor((4, 8), BOOL), tensor((4, 8), INT)
NARROW, IMAGINARY = A.float(), torch.complex(A, B)

LINEAR_CASES = [
    # both operands together, also where one is broadcast
    (aten.add.Tensor, (A, B), [[0, 1]]),
    (aten.add.Tensor, (A, ROW), [[0, 1]]),
    (aten.sub.Tensor, (A, SCALAR), [[0, 1]]),
    (aten.rsub.Tensor, (A, B), [[0, 1]]),
    (aten.add.Tensor, (WHOLE, WHOLE), [[0, 1]]),
    (aten.where.self, (FLAGS, A, B), [[1, 2]]),
    (aten.complex.default, (A, B), [[0, 1]]),
    (aten.lerp.Scalar, (A, B, 0.3), [[0, 1]]),
    (aten.lerp.Tensor, (A, B, C), [[0, 1]]),
    (aten.addcmul.default, (A, B, C), [[0, 1], [0, 2]]),
    (aten.addcdiv.default, (A, B, C), [[0, 1]]),
    # a number is no pending sum
    (aten.add.Tensor, (A, 1.0), []),
    (aten.add.Scalar, (A, 1.0), []),
    (aten.sub.Tensor, (A, 1), []),
    (aten.rsub.Scalar, (A, 1.0), []),
    # products in each factor, quotients in the numerator
    (aten.mul.Tensor, (A, B), [[0], [1]]),
    (aten.mul.Tensor, (A, 2.0), [[0]]),
    (aten.mul.Tensor, (A, FLAGS), [[0]]),
    (aten.mul.Tensor, (WHOLE, A), [[1]]),
    (aten.mul.Tensor, (IMAGINARY, A), [[0], [1]]),
    (aten.mul.Scalar, (A, 2.0), [[0]]),
    (aten.div.Tensor, (A, B), [[0]]),
    (aten.div.Tensor, (WHOLE, A), []),
    (aten.div.Tensor, (WHOLE, WHOLE), []),
    (aten.div.Scalar, (A, 2.0), [[0]]),
    (aten.polar.default, (A, B), [[0]]),
    (aten.ldexp.Tensor, (A, WHOLE), [[0]]),
    # the same kind of number, not a coarser one
    (aten._to_copy.default, (NARROW,), [], {"dtype": torch.bfloat16}),
    (aten._to_copy.default, (A,), [[0]], {"dtype": torch.complex128}),
    (aten._to_copy.default, (A,), [], {"dtype": INT}),
    (aten._to_copy.default, (WHOLE,), [], {"dtype": FLOAT}),
    (aten._to_copy.default, (FLAGS,), [], {"dtype": FLOAT}),
    (aten._to_copy.default, (WHOLE.int(),), [[0]], {"dtype": INT}),
    (aten._to_copy.default, (WHOLE,), [], {"dtype": torch.int32}),
    (prims.convert_element_type.default, (NARROW, torch.float16), []),
    (aten.clone.default, (A,), [[0]]),
    (aten.alias.default, (WHOLE,), [[0]]),
    (aten.detach.default, (A,), [[0]]),
    (aten.neg.default, (A,), [[0]]),
    (aten._conj.default, (IMAGINARY,), [[0]]),
    (aten.view_as_real.default, (IMAGINARY,), [[0]]),
    (aten.view_as_complex.default, (tensor((4, 8, 2), FLOAT),), [[0]]),
    # rounding, filling with another value than 0
    (aten.div.Tensor_mode, (A, B), [[0]], {"rounding_mode": None}),
    (aten.div.Tensor_mode, (A, B), [], {"rounding_mode": "floor"}),
    (aten.div.Scalar_mode, (A, 2.0), [], {"rounding_mode": "trunc"}),
    (aten.floor_divide.default, (A, B), []),
    (aten.masked_fill.Scalar, (A, FLAGS, 0), [[0]]),
    (aten.masked_fill.Scalar, (A, FLAGS, 1.0), []),
    (aten.masked_fill.Tensor, (A, FLAGS, SCALAR), []),
    (prims.div.default, (A, B), [[0]]),
    (prims.div.default, (WHOLE, WHOLE), []),
    # what published engines got wrong
    (aten.abs.default, (A,), []),
    (aten.square.default, (A,), []),
    (aten.pow.Tensor_Scalar, (A, 1.0), []),
    (aten.clamp.default, (A, -1.0, 1.0), []),
    (aten.relu.default, (A,), []),
    (aten.maximum.default, (A, B), []),
    (aten.gt.Scalar, (A, 0.0), []),
    (aten.reciprocal.default, (A,), []),
    (aten.frexp.Tensor, (A,), []),
    (aten.logical_not.default, (FLAGS,), []),
    # gradients: only in what comes from above
    (aten.gelu_backward.default, (A, B), [[0]], {"approximate": "tanh"}),
    (aten.threshold_backward.default, (A, B, 0.5), [[0]]),
    (aten.tanh_backward.default, (A, B), [[0]]),
    (aten.sigmoid_backward.default, (A, B), [[0]]),
    (aten.silu_backward.default, (A, B), [[0]]),
    (aten.elu_backward.default, (A, 1.0, 1.0, 1.0, False, B), [[0]]),
    (aten.log_sigmoid_backward.default, (A, B, aten.log_sigmoid_forward(B)[1]), [[0]]),
    (aten.hardshrink_backward.default, (A, B, 0.5), [[0]]),
    (aten.native_dropout_backward.default, (A, FLAGS, 2.0), [[0]]),
    (aten._prelu_kernel_backward.default, (A, B, ROW.expand(4, 8)), []),
    # glu halves a dim: (two n)
    (aten.glu.default, (A, -1), []),
    (aten.glu_backward.default, (tensor((4, 4), FLOAT), A, 1), [[0]]),
    (aten.glu_backward.default, (tensor((2, 8), FLOAT), A, 0), [[0]]),
    # only the shape of the first matters
    (aten.copy.default, (A, ROW), [[1]]),
    (aten.copy.default, (A, WHOLE), []),
    (aten.copy.default, (NARROW, A), []),
    (aten.fill.Tensor, (A, SCALAR), [[1]]),
    (aten.fill.Scalar, (A, 2), []),
    (prims.fill.default, (A, 2.0), []),
    # left to the device that it is on
    (prims.device_put.default, (A, torch.device("cpu")), [[0]]),
    (prims.copy_strided.default, (A, [8, 1]), [[0]]),
]


@pytest.mark.parametrize("case", LINEAR_CASES, ids=lambda case: str(case[0]))
def test_linear_groups(case):
    op, args, want, *options = case
    kwargs = options[0] if options else {}
    assert groups(op, *args, must_split=["d0"], **kwargs) == want


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_pass_a_cast_to_a_wider_type(source):
    for op, args, kwargs in (
        (aten._to_copy.default, (), {"dtype": FLOAT}),
        (prims.convert_element_type.default, (FLOAT,), {}),
        (aten.mul.Tensor, (A,), {}),
    ):
        call, _, _ = make_call(op, (A.to(source), *args), kwargs)
        assert frozenset({0}) in rule_for(call).linear
    call, _, _ = make_call(aten._to_copy.default, (A.half(),), {"dtype": torch.bfloat16})
    assert rule_for(call).linear == ()


def falsified(op, args, kwargs, index):
    """Whether op(x) differs from op(y) + op(x - y) in one operand, so that it cannot be linear there."""
    place = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)][index]
    small = torch.rand(args[place].shape) * 0.4 + 0.5
    for whole, piece in ((args[place], tensor(small.shape, FLOAT) * 3), (small, small - 0.3), (small * 10, small * 4)):
        one, two, both = (op(*args[:place], x, *args[place + 1 :], **kwargs) for x in (piece, whole - piece, whole))
        known = torch.isfinite(one) & torch.isfinite(two) & torch.isfinite(both)
        if not torch.allclose((one + two)[known], both[known]):
            return True
    return False


# linear for all finite values but not where others meet them, or not to the last bit
ALMOST_LINEAR = {"xlogy.Tensor", "xlogy.Scalar_Other", "special_xlog1py", "special_xlog1py.other_scalar"}
ALMOST_LINEAR |= {"special_zeta.self_scalar"}  # no values at 0.75
ALMOST_LINEAR |= {"nan_to_num", "nextafter", "prims.nextafter"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [op for op in AUTOMATIC if len(op._schema.returns) == 1], ids=short_name)
def test_no_linear_operand_is_missed(op):
    """An operand in which an op is linear, alone, is in the table (or pending sums would be reduced too early)."""
    args, kwargs = arguments(op, SHAPES[tensor_count(op)][0], FLOAT, positive=False)
    result = answer(op, args, kwargs)
    if result is None or not result.is_floating_point() or short_name(op) in ALMOST_LINEAR:
        return  # over ints, a predicate
    call, tensors, _ = make_call(op, args, kwargs)
    linear = {i for group in rule_for(call).linear for i in group}
    for index, operand in enumerate(tensors):
        if index not in linear and operand.dtype == FLOAT:
            assert falsified(op, args, kwargs, index), f"{op} is linear in operand {index}"


LIKE = [
    (aten.zeros_like.default, (), {}),
    (aten.zeros_like.default, (), {"dtype": INT, "memory_format": torch.preserve_format}),
    (aten.ones_like.default, (), {"pin_memory": False}),
    (aten.full_like.default, (3,), {}),
    (aten.full_like.default, (), {"fill_value": 0.5, "dtype": torch.float32}),
    (aten.empty_like.default, (), {}),
    (aten.zero.default, (), {}),
    (prims.full_like.default, (2.0,), {"dtype": FLOAT, "device": torch.device("cpu"), "requires_grad": False}),
]


@pytest.mark.parametrize("case", LIKE, ids=lambda case: str(case[0]))
def test_only_the_shape_matters(case, filled_empties):
    op, args, kwargs = case
    rule = verify(op, A, *args, must_split=["d0", "d1"], **kwargs)
    assert rule.shape_only == {0} and rule.elementwise


@pytest.fixture
def filled_empties():
    """Uninitialized memory is filled with NaN, so that it can be compared."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_block_does_not_read_the_shape_of_a_shape_only_operand():
    """It may be laid out otherwise than the result."""
    call, _, _ = make_call(aten.zeros_like.default, (A,), {})
    rule = rule_for(call)
    block = rule.local(Block(rule, "d0", 2, 0), torch.zeros(3))
    assert block.shape == (2, 8)


def test_glu_halves_are_split_inside():
    rule = verify(aten.glu.default, A, -1, must_split=["d0", "d1"])
    assert rule.ins == ((("d0",), ("two", "d1")),) and rule.outs == ((("d0",), ("d1",)),)
    assert rule.kind("two") == "whole" and not rule.elementwise


def test_the_answers_of_jvp_cost_nothing():
    for op in (aten.is_same_size.default, aten._has_same_storage_numel.default):
        rule = verify(op, A, B)
        assert rule.outs == () and rule.shape_only == {0, 1}


def test_an_unused_buffer_stays_whole():
    """On a GPU, log_sigmoid's buffer is empty."""
    call, _, _ = make_call(aten.log_sigmoid_backward.default, (A, B, torch.empty(4, 8)), {})
    empty = Operand(2, (0,), FLOAT)
    rule = rule_for(Call(call.op, (*call.args[:2], empty), {}, (*call.operands[:2], empty), call.results))
    assert rule.ins[0] == (("d0",), ("d1",)) and rule.kind(rule.ins[2][0][0]) == "whole"
    assert rule.linear == (frozenset({0}),)
