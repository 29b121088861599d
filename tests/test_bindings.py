"""What a generated program calls instead of an overload gives the same result: value, dtype, shape, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmdfn.bindings import BINDINGS, TEMPLATES, Namespace

aten = torch.ops.aten
torch.manual_seed(0)
X, Y = torch.rand(4, 6) + 0.5, torch.rand(4, 6) + 0.5
ROWS, COLUMN, IMAGE = torch.tensor([2, 0, 3, 3]), torch.rand(6), torch.rand(2, 4, 6, 6)
PLACES, MASK, NUMBERS = torch.randint(0, 4, (4, 6)), torch.rand(4, 6) > 0.5, torch.arange(24).view(4, 6)
HEADS = [torch.rand(2, 2, 3, 4) for _ in range(3)]

# Arguments (and keywords) by overload, where those made from the schema do not do.
ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "_adaptive_avg_pool2d": [(IMAGE, [2, 3])],
    "_fused_rms_norm": [(X, [6], COLUMN, 1e-5), (X, [6], None, None)],
    "_log_softmax": [(X, 1, False), (X, -1, False)],
    "_log_softmax_backward_data": [(X, X.log_softmax(1), 1, torch.float32)],
    "_scaled_dot_product_flash_attention_for_cpu": [(*HEADS, 0.0, True), (*HEADS, {"scale": 0.3})],
    "_softmax": [(X, 1, False)],
    "_softmax_backward_data": [(X, Y.softmax(1), 1, torch.float32)],
    "_unsafe_view": [(X, [2, 12])],
    "addmm": [(COLUMN, X, torch.rand(6, 6)), (X, X, torch.rand(6, 6), {"beta": 2, "alpha": 0.5})],
    "all.dim": [(MASK, 1), (MASK, 0, True)],
    "any.dim": [(MASK, 1), (MASK, 0, True)],
    "argmax": [(X,), (X, 1, True)],
    "argmin": [(X,), (X, 1, True)],
    "avg_pool2d": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [1, 1], [1, 1])],
    "baddbmm": [(torch.rand(2, 3, 3), torch.rand(2, 3, 4), torch.rand(2, 4, 3), {"beta": 0.5})],
    "bmm": [(torch.rand(2, 3, 4), torch.rand(2, 4, 5))],
    "bucketize.Tensor": [(X, torch.tensor([0.5, 1.0])), (X, torch.tensor([0.5, 1.0]), {"out_int32": True})],
    "cat": [([X, Y],), ([X, Y], 1)],
    "clamp": [(X, None, 1.0), (X, 0.7), (NUMBERS, 2, 5)],
    "clamp.Tensor": [(X, Y), (X, None, Y)],
    "clone": [(X.t(),), (X.t(), {"memory_format": torch.contiguous_format})],
    "constant_pad_nd": [(X, [1, 2]), (X, [1, 0, 0, 2], 3.0)],
    "convolution": [(IMAGE, torch.rand(8, 2, 3, 3), torch.rand(8), [2, 2], [1, 1], [1, 1], False, [0, 0], 2)],
    "diagonal": [(X,), (X, 1, 0, 1)],
    "embedding": [(X, PLACES), (X, PLACES, 2, False, False)],
    "empty_like": [(X[:0],), (X[:0], {"dtype": torch.int32, "memory_format": torch.preserve_format})],
    "expand": [(COLUMN, [4, 6]), (X, [3, 4, 6])],
    "flip": [(X, [0, 1])],
    "full_like": [(X, 2), (NUMBERS, 2.0, {"dtype": torch.float64, "pin_memory": False})],
    "gather": [(X, 0, PLACES), (X, 1, PLACES, {"sparse_grad": False})],
    "index_add": [(X, 0, ROWS, Y), (X, 0, ROWS, Y, {"alpha": 2})],
    "index_select": [(X, 0, ROWS)],
    "lerp.Scalar": [(X, Y, 0.3)],
    "lerp.Tensor": [(X, Y, torch.rand(6))],
    "logsumexp": [(X, [1]), (X, [0, 1], True)],
    "masked_fill.Scalar": [(X, MASK, 2)],
    "masked_fill.Tensor": [(X, MASK, torch.tensor(3.0))],
    "max_pool2d_with_indices": [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1])],
    "mean.dim": [(X, [0]), (X, [0, 1], True), (X, [1], False, {"dtype": torch.float64})],
    "mm": [(X, Y.t())],
    "native_batch_norm": [(IMAGE, torch.rand(4), None, None, None, True, 0.1, 1e-5)],
    "native_group_norm": [(IMAGE, torch.rand(4), torch.rand(4), 2, 4, 36, 2, 1e-5)],
    "native_layer_norm": [(X, [6], COLUMN, None, 1e-5), (X, [4, 6], None, None, 1e-5)],
    "ones_like": [(X,), (X.t(), {"pin_memory": False, "memory_format": torch.preserve_format})],
    "permute": [(IMAGE, [0, 2, 3, 1])],
    "pow.Scalar": [(0.9, X), (2, NUMBERS)],
    "pow.Tensor_Scalar": [(X, 2), (X, 0.5), (NUMBERS, 2)],
    "prod.dim_int": [(X, 1), (X, 1, True, {"dtype": torch.float64})],
    "remainder.Scalar": [(X, 0.3), (NUMBERS, 3)],
    "fmod.Scalar": [(X, 0.3), (NUMBERS, 3)],
    "repeat": [(X, [2, 1, 3])],
    "reshape": [(X.t(), [12, 2])],
    "roll": [(X, [1], [0]), (X, [1, 2], [0, 1])],
    "round": [(X,)],
    "rsub.Scalar": [(X, 2), (X, 2, 3), (NUMBERS, 1)],
    "scatter.src": [(X, 0, PLACES[:1], Y)],
    "scatter.value": [(X, 0, PLACES, 7)],
    "scatter_add": [(X, 0, PLACES, Y)],
    "scatter_reduce.two": [(X, 0, PLACES, Y, "amax"), (X, 0, PLACES, Y, "sum", {"include_self": False})],
    "searchsorted.Tensor": [(torch.tensor([0.5, 1.0]), X), (torch.tensor([0.5, 1.0]), X, {"right": True})],
    "select": [(X, 0, 2)],
    "select.int": [(X, 0, 2), (X, -1, -1)],
    "select_scatter": [(X, COLUMN, 0, 2)],
    "slice_scatter": [(X, Y[:2], 0, 1, 3), (X, Y[:, ::2], 1, 0, 6, 2)],
    "softmax.int": [(X, 1), (X, 1, torch.float64)],
    "sort.stable": [(X, {"stable": True}), (X, {"stable": True, "dim": 0, "descending": True})],
    "split.Tensor": [(X, 2), (X, 3, 1)],
    "split_with_sizes": [(X, [1, 3]), (X, [2, 4], 1)],
    "squeeze.dim": [(X[:1], 0), (X, 0)],
    "squeeze.dims": [(X[:1, :1], [0, 1])],
    "stack": [([X, Y],), ([X, Y], 1)],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (X, None), (MASK, [1], False, {"dtype": torch.float32})],
    "topk": [(X, 2), (X, 2, 0, False, True)],
    "transpose.int": [(IMAGE, 1, -1)],
    "tril": [(X,), (X, 1)],
    "triu": [(X,), (X, -1)],
    "unbind.int": [(X,), (X, 1)],
    "unsqueeze": [(X, 0), (X, -1)],
    "upsample_nearest2d": [(IMAGE, [12, 12])],
    "var.correction": [(X, [1], {"correction": 1}), (X, [0, 1], {"correction": 0, "keepdim": True})],
    "var_mean.correction": [(X, [1], {"correction": 0, "keepdim": True})],
    "view": [(X, [2, 12])],
    "view_as_complex": [(X.view(4, 3, 2),)],
    "view_as_real": [(torch.complex(X, Y),)],
    "where.ScalarOther": [(MASK, X, 2.0)],
    "where.ScalarSelf": [(MASK, 2, X)],
    "where.self": [(MASK, X, Y), (MASK, X, torch.tensor(0.0))],
    "zeros_like": [(X,), (X.t(), {"dtype": torch.float64, "memory_format": torch.contiguous_format})],
    "_to_copy": [(X, {"dtype": torch.float64}), (X.t(), {"dtype": torch.float32}), (MASK, {"dtype": torch.int64})],
}
INTEGERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
LOGICAL = {"logical_and", "logical_or", "logical_xor", "logical_not", "all", "any"}
OPS = [op for op in (*BINDINGS, *TEMPLATES, aten._to_copy.default) if isinstance(op, torch._ops.OpOverload)]


def name_of(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def samples(op: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of an op: those listed, else tensors and numbers as its schema asks for, of several dtypes."""
    name = name_of(op)
    if name in ARGUMENTS:
        split = [(call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {}) for call in ARGUMENTS[name]]
        return [(args, kwargs) for args, kwargs in split]
    packet = name.partition(".")[0]
    if packet in INTEGERS:
        pools = [[NUMBERS, NUMBERS.flip(0)], [MASK, ~MASK]]
    elif packet in LOGICAL:
        pools = [[MASK, ~MASK], [X, Y]]
    else:
        pools = [[X, Y], [X.double(), torch.tensor(0.5, dtype=torch.float64)], [X.t(), Y.t()]]
    required = [a for a in op._schema.arguments if not a.has_default_value()]
    found = []
    for pool in pools:
        tensors = iter(pool)
        args = [next(tensors) if str(a.type) == "Tensor" else 1 if str(a.type) == "int" else 0.5 for a in required]
        found.append((tuple(args), {}))
    return found


def same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    else:
        assert type(got) is type(want) and got == want


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_a_binding_is_its_overload(op):
    calls = samples(op)
    assert calls
    for args, kwargs in calls:
        namespace = Namespace({})
        names = [f"x{i}" for i in range(len(args))]
        text = namespace.call(op, names, {name: namespace.literal(value) for name, value in kwargs.items()})
        assert all(value is not op for value in namespace.values.values()), text
        scope = {**namespace.values, **dict(zip(names, args, strict=True))}
        same(eval(text, scope), op(*args, **kwargs))


def test_factories_keep_the_overload():
    """A default device, which is a mode of torch's functions, must not change what a program makes."""
    assert not {aten.full.default, aten.zeros.default, aten.arange.default, aten.scalar_tensor.default} & set(BINDINGS)


def test_other_numbers_of_arguments_keep_the_overload():
    namespace = Namespace({})
    assert namespace.call(aten.add.Tensor, ["x", "y"], {"alpha": "2"}) == "aten_add_Tensor(x, y, alpha=2)"
    assert namespace.values["aten_add_Tensor"] is aten.add.Tensor
    assert namespace.call(aten.sum.default, ["x"], {"dtype": "torch.float64"}) == "aten_sum(x, dtype=torch.float64)"
    assert namespace.call(aten._to_copy.default, ["x"], {"device": "'cpu'"}) == "aten__to_copy(x, device='cpu')"


def test_names_of_values_are_kept_apart():
    namespace = Namespace({}, ["aten_gelu", "aten_gelu_"])
    assert namespace.call(aten.gelu.default, ["x"], {}) == "aten_gelu__(x)"
