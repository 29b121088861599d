"""How the generated program spells a call: torch's own binding where one is known, the overload otherwise.

A binding costs about half of what an aten overload costs when called from Python.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ._compat import OpOverload

aten = torch.ops.aten

_FUNCTIONS: dict[Any, str] = {
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
    aten.mm.default: "torch.mm({}, {})",
    aten.bmm.default: "torch.bmm({}, {})",
    aten.addmm.default: "torch.addmm({}, {}, {})",
    aten.add.Tensor: "{} + {}",
    aten.sub.Tensor: "{} - {}",
    aten.mul.Tensor: "{} * {}",
    aten.div.Tensor: "{} / {}",
    aten.add.Scalar: "{} + {}",
    aten.sub.Scalar: "{} - {}",
    aten.mul.Scalar: "{} * {}",
    aten.div.Scalar: "{} / {}",
    aten.neg.default: "-{}",
    aten.pow.Tensor_Scalar: "{} ** {}",
    aten.view.default: "{}.view({})",
    aten.reshape.default: "{}.reshape({})",
    torch.reshape: "{}.reshape({})",
    aten.permute.default: "{}.permute({})",
    aten.transpose.int: "{}.transpose({}, {})",
    aten.t.default: "{}.t()",
    aten.expand.default: "{}.expand({})",
    aten.unsqueeze.default: "{}.unsqueeze({})",
    aten.select.int: "{}.select({}, {})",
    aten.sum.default: "{}.sum()",
    aten.sum.dim_IntList: "torch.sum({}, {}, {})",
    aten.exp.default: "{}.exp()",
    aten.log.default: "{}.log()",
    aten.sqrt.default: "{}.sqrt()",
    aten.rsqrt.default: "{}.rsqrt()",
    aten.tanh.default: "{}.tanh()",
    aten.where.self: "torch.where({}, {}, {})",
    torch.narrow: "{}.narrow({}, {}, {})",
}


class Namespace:
    """The names that a generated program uses, and what they stand for. `taken` are those of its own values."""

    def __init__(self, constants: Mapping[str, torch.Tensor], taken: Iterable[str] = ()):
        self._taken = frozenset(taken)
        self.values: dict[str, Any] = {"torch": torch}
        self._constants = constants
        self._names: dict[Any, str] = {}

    def call(self, target: Callable[..., Any], args: Sequence[str], kwargs: Mapping[str, str]) -> str:
        """The expression for a call of `target` with these argument texts."""
        template = _FUNCTIONS.get(target)
        if template is not None and not kwargs and template.count("{}") == len(args):
            return template.format(*args)
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
            self.values[name] = target
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
