"""How the generated program spells a call: torch's own binding where one is known, the overload otherwise.

A binding costs about half of what an aten overload costs when called from Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ._compat import OpOverload, own_binding

aten = torch.ops.aten

TEMPLATES: dict[Any, str] = {
    operator.mul: "{} * {}",
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.eq: "{} == {}",
    operator.ne: "{} != {}",
    operator.lt: "{} < {}",
    operator.le: "{} <= {}",
    operator.gt: "{} > {}",
    operator.ge: "{} >= {}",
    operator.and_: "{} & {}",
    operator.or_: "{} | {}",
    operator.invert: "~{}",
    operator.neg: "-{}",
    operator.truediv: "{} / {}",
    operator.floordiv: "{} // {}",
    operator.getitem: "{}[{}]",
    aten.add.Tensor: "{} + {}",
    aten.sub.Tensor: "{} - {}",
    aten.mul.Tensor: "{} * {}",
    aten.div.Tensor: "{} / {}",
    aten.add.Scalar: "{} + {}",
    aten.sub.Scalar: "{} - {}",
    aten.mul.Scalar: "{} * {}",
    aten.div.Scalar: "{} / {}",
    aten.eq.Tensor: "{} == {}",
    aten.ne.Tensor: "{} != {}",
    aten.lt.Tensor: "{} < {}",
    aten.le.Tensor: "{} <= {}",
    aten.gt.Tensor: "{} > {}",
    aten.ge.Tensor: "{} >= {}",
    aten.eq.Scalar: "{} == {}",
    aten.ne.Scalar: "{} != {}",
    aten.lt.Scalar: "{} < {}",
    aten.le.Scalar: "{} <= {}",
    aten.gt.Scalar: "{} > {}",
    aten.ge.Scalar: "{} >= {}",
    aten.bitwise_and.Tensor: "{} & {}",
    aten.bitwise_or.Tensor: "{} | {}",
    aten.bitwise_xor.Tensor: "{} ^ {}",
    aten.bitwise_not.default: "~{}",
    aten.neg.default: "-{}",
    aten.view.default: "{}.view({})",
    aten._unsafe_view.default: "{}.view({})",
    aten.reshape.default: "{}.reshape({})",
    aten.permute.default: "{}.permute({})",
    aten.transpose.int: "{}.transpose({}, {})",
    aten.t.default: "{}.t()",
    aten.expand.default: "{}.expand({})",
    aten.repeat.default: "{}.repeat({})",
    aten.unsqueeze.default: "{}.unsqueeze({})",
    aten.select.int: "{}.select({}, {})",
    aten.sum.default: "{}.sum()",
    torch.reshape: "{}.reshape({})",
    torch.narrow: "{}.narrow({}, {}, {})",
}
"""How a call with that many positional arguments, and no others, is written. Operators are the fastest."""

_SAME_OVERLOADS = """
    abs acos acosh addmm all all.dim amax amin any any.dim argmax argmin asin asinh atan atan2 atanh avg_pool2d
    baddbmm bmm bucketize.Tensor cat ceil clamp clamp.Tensor clamp_max clamp_min clone complex constant_pad_nd
    convolution copysign.Tensor cos cosh cumprod cumsum diagonal elu embedding empty_like erf erfc erfinv exp exp2
    expm1 flip floor floor_divide fmod.Scalar fmod.Tensor full_like gather gelu hardsigmoid hardswish hardtanh
    heaviside hypot index_add index_select isfinite isinf isnan leaky_relu lerp.Scalar lerp.Tensor log log10 log1p
    log2 logaddexp logical_and logical_not logical_or logical_xor logsumexp masked_fill.Scalar masked_fill.Tensor
    max max.dim max_pool2d_with_indices maximum mean mean.dim min min.dim minimum mm native_batch_norm
    native_group_norm native_layer_norm ones_like polar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod
    prod.dim_int real reciprocal relu remainder.Scalar remainder.Tensor roll round rsqrt rsub.Scalar scatter.src
    scatter.value scatter_add scatter_reduce.two searchsorted.Tensor select_scatter sgn sigmoid sign silu sin sinh
    slice_scatter softmax.int softplus sort sort.stable split.Tensor split_with_sizes sqrt squeeze.dim squeeze.dims
    stack sum.dim_IntList tan tanh topk tril triu trunc unbind.int upsample_nearest2d var.correction
    var_mean.correction view_as_complex view_as_real where.ScalarOther where.ScalarSelf where.self zeros_like
    _adaptive_avg_pool2d _fused_rms_norm _log_softmax _log_softmax_backward_data
    _scaled_dot_product_flash_attention_for_cpu _softmax _softmax_backward_data
"""


def _same() -> dict[Any, Callable[..., Any]]:
    found = {}
    for name in _SAME_OVERLOADS.split():
        packet, _, overload = name.partition(".")
        binding = own_binding(packet)
        if binding is not None:
            found[getattr(getattr(aten, packet), overload or "default")] = binding
    return found


BINDINGS: dict[Any, Callable[..., Any]] = _same()
"""torch's own function of an overload that takes the same arguments, by place and by name. No factories: a default
device would change what they make."""


class Namespace:
    """The names that a generated program uses, and what they stand for. `taken` are those of its own values."""

    def __init__(self, constants: Mapping[str, torch.Tensor], taken: Iterable[str] = ()):
        self._taken = frozenset(taken)
        self.values: dict[str, Any] = {"torch": torch}
        self._constants = constants
        self._names: dict[Any, str] = {}

    def call(self, target: Callable[..., Any], args: Sequence[str], kwargs: Mapping[str, str]) -> str:
        """The expression for a call of `target` with these argument texts."""
        template = TEMPLATES.get(target)
        if template is not None and not kwargs and template.count("{}") == len(args):
            return template.format(*args)
        if target is aten._to_copy.default and len(args) == 1 and [*kwargs] == ["dtype"]:
            return f"{args[0]}.to({kwargs['dtype']}, copy=True)"
        joined = ", ".join([*args, *(f"{name}={value}" for name, value in kwargs.items())])
        return f"{self._name(target)}({joined})"

    def _name(self, target: Any) -> str:
        if target not in self._names:
            if isinstance(target, OpOverload):
                packet, _, overload = str(target).rpartition(".")
                name = packet.replace("::", ".").replace(".", "_") + ("" if overload == "default" else f"_{overload}")
            elif getattr(torch, name := getattr(target, "__name__", ""), None) is target:
                return f"torch.{name}"
            else:  # a prefix keeps it apart from the names of values
                name = "fn_" + getattr(target, "__name__", "function")
            while name in self.values or name in self._taken:
                name += "_"
            self.values[name] = BINDINGS.get(target, target)
            self._names[target] = name
        return self._names[target]

    def constant(self, name: str) -> str:
        self.values[name] = self._constants[name]
        return name

    def literal(self, value: Any) -> str:
        """The text of a static argument."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if value is None or isinstance(value, (bool, int, float, str, complex)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.{value!r}"
        name = f"_static_{len(self.values)}"
        self.values[name] = value
        return name
