"""Softmaxes and their gradients: whole along the dim, or a maximum and a sum per row where that dim is split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spmdfn.partition.rule import Call, Rule, register, rule
from spmdfn.partition.rules._dims import names, wide
from spmdfn.partition.rules._masking import is_empty, pattern

aten = torch.ops.aten


def _along_dim(call: Call, formula: Callable[..., Any], **options: Any) -> Rule | None:
    """All tensors are of one shape; `formula(*tensors, dim)` works in the dtype in which kernels accumulate."""
    if is_empty(call):
        return None
    rank, dtype = len(call.operands[0].shape), call.results[0].dtype
    every, dim = names(rank), call.arg("dim")

    def alternative(splits: Mapping[str, int], *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor.to(wide(tensor.dtype)) for tensor in args[: len(call.operands)]]
        return formula(*tensors, dim).to(dtype)

    return rule(
        call,
        pattern(call, dict.fromkeys(call.operands, every), every),
        whole=every[dim] if rank else "",
        alternative=alternative if rank else None,
        **options,
    )


@register(aten._softmax.default)
def softmax(call: Call) -> Rule | None:
    return _along_dim(call, _softmax)


def _softmax(value: Any, dim: int) -> Any:
    part = torch.exp(value - torch.amax(value, dim, True))
    return part / torch.sum(part, dim, True)


@register(aten._safe_softmax.default)
def safe_softmax(call: Call) -> Rule | None:
    """A row that is masked throughout gives zeros."""

    def formula(value: Any, dim: int) -> Any:
        top = torch.amax(value, dim, True)
        return torch.where(top == -math.inf, 0.0, _softmax(value, dim))

    return _along_dim(call, formula)


@register(aten._log_softmax.default)
def log_softmax(call: Call) -> Rule | None:
    def formula(value: Any, dim: int) -> Any:
        shifted = value - torch.amax(value, dim, True)
        return shifted - torch.log(torch.sum(torch.exp(shifted), dim, True))

    return _along_dim(call, formula)


@register(aten._softmax_backward_data.default)
def softmax_backward(call: Call) -> Rule | None:
    def formula(grad: Any, output: Any, dim: int) -> Any:
        part = grad * output
        return part - output * torch.sum(part, dim, True)

    return _along_dim(call, formula, linear=[[0]])


@register(aten._log_softmax_backward_data.default)
def log_softmax_backward(call: Call) -> Rule | None:
    def formula(grad: Any, output: Any, dim: int) -> Any:
        return grad - torch.exp(output) * torch.sum(grad, dim, True)

    return _along_dim(call, formula, linear=[[0]])
