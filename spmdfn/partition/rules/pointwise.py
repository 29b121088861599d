"""Rules for element-wise ops: one broadcast rule for all of them, and a small table of the linear ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spmdfn._compat import functional_pointwise_ops
from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import Dim, Factors, linear_groups, normal_dim

aten = torch.ops.aten
prims = torch.ops.prims

# Element-wise ops that torch does not tag. A name without overload means all the functional overloads.
UNTAGGED = """
    _to_copy detach detach_copy alias alias_copy lift lift_fresh lift_fresh_copy masked_fill floor_divide true_divide
    rsub polar complex hardswish hardswish_backward hardsigmoid_backward hardtanh_backward elu_backward
    leaky_relu_backward log_sigmoid_forward log_sigmoid_backward mish_backward softplus_backward softshrink_backward
    hardshrink_backward _prelu_kernel _prelu_kernel_backward rrelu_with_noise_backward _conj _conj_copy _neg_view
    _neg_view_copy resolve_conj resolve_neg __and__ __or__ _lazy_clone isreal real imag
    infinitely_differentiable_gelu_backward
"""
UNTAGGED_PRIMS = """
    log cbrt bessel_i1e gt asinh where round atan2 bessel_j1 bessel_i1 bessel_i0 bitwise_and ndtri pow cosh add eq
    asin ge shift_right_arithmetic zeta bessel_i0e imag gcd real fmod shift_left cos sub conj tanh log10
    spherical_bessel_j0 erfcx le atanh clone atan bessel_j0 erf_inv tan mul acos neg floor sin expm1 ceil sinh erfc
    bitwise_xor exp remainder lt erf bitwise_or div log1p ne isfinite sqrt lgamma frexp acosh view_of device_put
    copy_strided
"""

# In which arguments an op is linear: groups apart by "|", the members of a group by blanks. Everything that is not
# here is not linear: abs, square, clamp, rsub with a number, comparisons, casts that lose range or precision ...
LINEAR = {
    name: groups
    for groups, names in {
        "self": "neg positive clone alias alias_copy detach detach_copy lift lift_fresh lift_fresh_copy _lazy_clone "
        "_to_copy conj_physical _conj_physical _conj _conj_copy _neg_view _neg_view_copy resolve_conj resolve_neg real "
        "imag deg2rad rad2deg mul.Scalar div.Scalar div.Tensor true_divide.Scalar true_divide.Tensor ldexp.Tensor",
        "a": "prims.convert_element_type prims.view_of prims.device_put prims.copy_strided prims.conj",
        "self | other": "mul.Tensor",
        "self other": "add.Tensor sub.Tensor rsub.Tensor where.self",
        "self end": "lerp.Scalar lerp.Tensor",
        "self tensor1 | self tensor2": "addcmul",
        "self tensor1": "addcdiv",
        "real imag": "complex",
        "abs": "polar",
        "a b": "prims.where",
        "grad_output": "threshold_backward gelu_backward tanh_backward sigmoid_backward silu_backward mish_backward "
        "elu_backward leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward "
        "softplus_backward softshrink_backward log_sigmoid_backward logit_backward native_dropout_backward "
        "rrelu_with_noise_backward",
        "grad_out": "hardshrink_backward",
        "grad": "infinitely_differentiable_gelu_backward",
    }.items()
    for name in names.split()
} | {f"prims.{name}": "self" for name in ("neg", "clone", "real", "imag", "conj_physical", "div")}
LINEAR |= {"prims.mul": "self | other", "prims.add": "self other", "prims.sub": "self other"}


def short_name(op: Any) -> str:
    """`aten::mul.Tensor` as "mul.Tensor", `prims::mul` as "prims.mul"."""
    return str(op.name()).replace("aten::", "").replace("::", ".")


def _functional(packet: Any) -> Iterator[Any]:
    for overload in packet.overloads():
        op = getattr(packet, overload)
        if not op._schema.is_mutable and all(isinstance(r.type, torch.TensorType) for r in op._schema.returns):
            yield op


def pointwise_ops() -> list[Any]:
    """The overloads that the broadcast rule serves."""
    found = dict.fromkeys(functional_pointwise_ops())
    for namespace, names in ((aten, UNTAGGED), (prims, UNTAGGED_PRIMS)):
        for name in names.split():
            found.update(dict.fromkeys(_functional(getattr(namespace, name))))
    return list(found)


def broadcast_dims(factors: Factors, shape: Sequence[int], full: Sequence[int], spare: str) -> list[Dim]:
    """The dims of a tensor that is broadcast to `full`; one that does not fit (an unused buffer) stays whole."""
    lead = len(full) - len(shape)
    if lead < 0 or any(size not in (1, full[lead + i]) for i, size in enumerate(shape)):
        return factors.dims(spare, shape, whole=range(len(shape)))
    return [factors.new(f"d{lead + i}", size) for i, size in enumerate(shape)]


@register(*pointwise_ops())
def pointwise(call: Call) -> Rule:
    """Every dim of the result passes; dims of size 1 are broadcast."""
    factors = Factors()
    full = call.results[0].shape
    outs = [broadcast_dims(factors, result.shape, full, f"r{i}_") for i, result in enumerate(call.results)]
    ins = [broadcast_dims(factors, operand.shape, full, f"x{i}_") for i, operand in enumerate(call.operands)]
    return factors.rule(ins, outs, linear=_linear(call), elementwise=True)


def _linear(call: Call) -> tuple[frozenset[int], ...]:
    name = short_name(call.op)
    groups = LINEAR.get(name, "")
    true_division = name in ("div.Tensor_mode", "div.Scalar_mode") and call.arg("rounding_mode") is None
    if true_division or (name == "masked_fill.Scalar" and call.arg("value") == 0):
        groups = "self"
    if name == "prims.div" and not call.results[0].dtype.is_floating_point and not call.results[0].dtype.is_complex:
        return ()  # truncates
    if not groups:
        return ()
    return linear_groups(call, *([call.arg(member) for member in group.split()] for group in groups.split("|")))


@register(aten.glu.default, aten.glu_backward.default, aten.glu_jvp.default, aten.glu_backward_jvp.default)
def glu(call: Call) -> Rule:
    """The dim that is halved is (two n): the halves belong together, n may be split."""
    factors = Factors()
    shapes = [operand.shape for operand in call.operands] + [result.shape for result in call.results]
    dim = normal_dim(call.arg("dim"), len(shapes[0]))
    half = min(shape[dim] for shape in shapes)
    terms: list[list[Dim]] = []
    for shape in shapes:
        dims = [factors.new(f"d{i}", half if i == dim else size) for i, size in enumerate(shape)]
        if shape[dim] != half:
            dims[dim] = factors.whole("two", 2) + dims[dim]
        terms.append(dims)
    count = len(call.operands)
    linear = linear_groups(call, [call.arg("grad_output")]) if call.op is aten.glu_backward.default else ()
    return factors.rule(terms[:count], terms[count:], linear=linear)


@register(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(call: Call) -> Rule:
    factors = Factors()
    dims = factors.dims("d", call.operands[0].shape)

    def local(ctx: Local, self: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.resolve_conj(self))  # a block may be conjugated lazily

    options: dict[str, Any] = {"linear": linear_groups(call, call.operands), "local": local, "strided": True}
    return factors.rule([dims], [[*dims, factors.whole("two", 2)]], elementwise=True, **options)


@register(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(call: Call) -> Rule:
    factors = Factors()
    dims = factors.dims("d", call.results[0].shape)

    def local(ctx: Local, self: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.contiguous())  # a block's strides may be odd

    linear = linear_groups(call, call.operands)
    return factors.rule([[*dims, factors.whole("two", 2)]], [dims], linear=linear, local=local, strided=True)


@register(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.zero.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.copy.default,
    prims.fill.default,
    prims.full_like.default,
)
def like(call: Call) -> Rule:
    """The first operand gives only its shape; a second one is broadcast to it."""
    factors = Factors()
    full = call.results[0].shape
    ins = [broadcast_dims(factors, operand.shape, full, f"x{i}_") for i, operand in enumerate(call.operands)]
    outs = [broadcast_dims(factors, full, full, "")]
    op: Any = call.op
    name = short_name(op)

    def local(ctx: Local, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # not from self's own shape: nothing says that it is laid out like the result
        shape = ctx.out_shape()
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "layout", "pin_memory")}
        if name in ("zeros_like", "zero"):
            return self.new_zeros(shape, **options)
        if name == "ones_like":
            return self.new_ones(shape, **options)
        if name == "empty_like":
            return self.new_empty(shape, **options)
        if name in ("fill.Tensor", "copy"):
            return op(self.new_empty(shape), *args, **kwargs)
        return self.new_full(shape, kwargs["fill_value"] if "fill_value" in kwargs else args[0], **options)

    linear = linear_groups(call, call.operands[1:]) if len(call.operands) > 1 else ()
    return factors.rule(ins, outs, linear=linear, shape_only=frozenset({0}), elementwise=True, local=local)


@register(aten.is_same_size.default, aten._has_same_storage_numel.default)
def same_shape(call: Call) -> Rule:
    """Leftovers of jvp: Python has used their answer already, so they must only not cause a move."""
    factors = Factors()
    ins = [factors.dims(f"x{i}_", operand.shape) for i, operand in enumerate(call.operands)]
    first, second = (operand.shape for operand in call.operands)
    answer = first == second if call.op is aten.is_same_size.default else math.prod(first) == math.prod(second)

    def local(ctx: Local, *args: Any) -> bool:
        return answer

    return factors.rule(ins, [], shape_only=frozenset({0, 1}), local=local)
