"""Ops over lists of tensors: the foreach family and the fused optimizers.

Position i of every list is a problem by itself, and parameters are laid out each its own way. One assignment of factors
to axes cannot say that, so where a tensor is split each position becomes an op of its own; while nothing is, the op
over the lists stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Operand, Result, Rule, register, rule

aten = torch.ops.aten


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """addcmul and addcdiv, whose scale comes as a number, or as one number of a tensor."""

    def one(tensor: Any, first: Any, second: Any, value: Any = 1) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.add(tensor, function(torch.zeros_like(tensor), first, second) * value)
        return function(tensor, first, second, value=value)

    return one


SAME_NAME = """
    abs acos add asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor frac lerp lgamma log
    log10 log1p log2 mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc
"""
POINTWISE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in SAME_NAME.split()},
    "addcdiv": _scaled(torch.addcdiv),
    "addcmul": _scaled(torch.addcmul),
    "copy": aten.copy.default,
    "maximum": torch.clamp_min,  # maximum itself takes no number
    "minimum": torch.clamp_max,
    "zero": torch.zeros_like,
}
"""Foreach ops that act element by element, without the prefix, and the same for one tensor."""


def _norm(tensor: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(tensor, ord, dtype=dtype)


def _power_sum(tensor: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.sum(torch.pow(torch.abs(tensor), ord), dtype=dtype)


REDUCTIONS: dict[str, Callable[..., Any]] = {"norm": _norm, "powsum": _power_sum, "max": torch.amax}
"""Foreach ops that make a scalar of every tensor, and the same for one tensor."""

FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")


def functional(names: Iterable[str]) -> Iterator[Any]:
    """Every overload of these aten ops that writes to nothing, of those that this torch has."""
    for name in names:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not any(argument.alias_info is not None for argument in op._schema.arguments):
                yield op


def _at(argument: Any, place: int) -> Any:
    """What position `place` has of an argument: its item of a list, or all that is no list."""
    return argument[place] if isinstance(argument, (list, tuple)) else argument


@register(*functional(f"_foreach_{name}" for name in (*POINTWISE, *REDUCTIONS)))
def foreach(call: Call) -> Rule | None:
    """One plain op a position, where a tensor is split."""
    name = call.op._schema.name.removeprefix("aten::_foreach_")
    one = POINTWISE.get(name) or REDUCTIONS[name]
    scales = call.op in (aten._foreach_addcdiv.Tensor, aten._foreach_addcmul.Tensor)

    def separately(splits: Mapping[str, int], *args: Any, **kwargs: Any) -> list[Any]:
        if scales:
            args = (*args[:3], torch.unbind(args[3]))
        count = len(call.results)
        return [one(*(_at(argument, place) for argument in args), **kwargs) for place in range(count)]

    return _lists_rule(call, separately)


@register(*functional(FUSED))
def fused(call: Call) -> Rule | None:
    """One optimizer step: parameter, gradient and moments of a position share their layout; its step is a scalar."""
    count = len(call.args[0])
    # every factor of one parameter is in every result, unless the steps are among the results
    if count == 1 and call.op != aten._fused_adagrad.default:
        return _one_position(call, call.args[0][0].shape)

    def separately(splits: Mapping[str, int], *lists: Any, **kwargs: Any) -> list[list[Any]]:
        op: Any = call.op
        steps: list[list[Any]] = []
        if op == aten._fused_adagrad.default:  # its twin does not return the steps, which it leaves as they are
            op, steps = aten._fused_adagrad.tensor_lr, [lists[3]]
            kwargs["lr"] = torch.full((), kwargs["lr"], dtype=torch.float64)
        each = [op(*(tensors[place : place + 1] for tensors in lists), **kwargs) for place in range(count)]
        return [[tensor for result in each for tensor in result[number]] for number in range(len(each[0]))] + steps

    return _lists_rule(call, separately)


def _one_position(call: Call, shape: Sequence[int]) -> Rule | None:
    """Everything has the parameter's shape, or is a scalar."""
    dims = " ".join(f"p{d}" for d in range(len(shape)))
    tensors: list[Operand | Result] = [*call.operands, *call.results]
    if any(tensor.shape not in (tuple(shape), (), (1,)) for tensor in tensors):
        return None
    terms = [dims if tensor.shape == tuple(shape) else " ".join("1" * len(tensor.shape)) for tensor in tensors]
    left, right = terms[: len(call.operands)], terms[len(call.operands) :]
    return rule(call, f"{', '.join(left)} -> {', '.join(right)}", elementwise=True)


def _lists_rule(call: Call, separately: Callable[..., Any]) -> Rule | None:
    """Every dim of every operand and result whole, with that alternative."""
    if not call.results:
        return None
    # dims of their own for all: nothing is split, so it does not matter which of them are the same
    ins = [_own_dims(f"x{operand.index}_", operand.shape) for operand in call.operands]
    outs = [_own_dims(f"y{number}_", result.shape) for number, result in enumerate(call.results)]
    names = " ".join(" ".join((*ins, *outs)).split())
    return rule(call, f"{', '.join(ins)} -> {', '.join(outs)}", whole=names, alternative=separately, piecewise=True)


def _own_dims(prefix: str, shape: Sequence[int]) -> str:
    return " ".join(f"{prefix}{d}" for d in range(len(shape)))
