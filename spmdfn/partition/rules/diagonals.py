"""Rules for diagonals: the two dims of a diagonal stay whole, all others pass. tril and triu pass both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import Dim, Factors, linear_groups, normal_dim

aten = torch.ops.aten


@register(aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Rule:
    """Rows and columns pass: a block's diagonal is shifted by where it starts."""
    factors = Factors()
    op: Any = call.op
    dims = factors.dims("d", call.operands[0].shape)
    rows, columns = dims[-2:]

    def local(ctx: Local, self: Any, diagonal: int = 0) -> Any:
        for name in rows:
            diagonal = diagonal + ctx.offset(name)
        for name in columns:
            diagonal = diagonal - ctx.offset(name)
        return op(self, diagonal)

    options: dict[str, Any] = {"linear": linear_groups(call, call.operands), "elementwise": True, "local": local}
    return factors.rule([dims], [dims], contiguous=frozenset(rows + columns), **options)


def _matrix_and_diagonal(
    factors: Factors, call: Call, matrix: Sequence[int], length: int
) -> tuple[list[Dim], list[Dim]]:
    """Dims of the tensor that has rows and columns, and of the one that has the diagonal as its last dim."""
    pair = [normal_dim(call.arg(name), len(matrix)) for name in ("dim1", "dim2")]
    full = factors.dims("d", matrix, whole=pair)
    return full, [dim for i, dim in enumerate(full) if i not in pair] + [factors.whole("diagonal", length)]


@register(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> Rule:
    factors = Factors()
    full, line = _matrix_and_diagonal(factors, call, call.operands[0].shape, call.results[0].shape[-1])
    return factors.rule([full], [line], linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.diag_embed.default)
def diag_embed(call: Call) -> Rule:
    factors = Factors()
    full, line = _matrix_and_diagonal(factors, call, call.results[0].shape, call.operands[0].shape[-1])
    return factors.rule([line], [full], linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Rule:
    """Linear in both tensors together."""
    factors = Factors()
    full, line = _matrix_and_diagonal(factors, call, call.results[0].shape, call.operands[1].shape[-1])
    return factors.rule([full, line], [full], linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.diagonal_backward.default)
def diagonal_backward(call: Call) -> Rule:
    """Zeros with the gradient on the diagonal."""
    factors = Factors()
    full, line = _matrix_and_diagonal(factors, call, call.results[0].shape, call.operands[0].shape[-1])

    def local(ctx: Local, grad: Any, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.diagonal_backward.default(grad, list(ctx.out_shape()), *args, **kwargs)

    linear = linear_groups(call, call.operands)
    return factors.rule([line], [full], linear=linear, elementwise=True, local=local)
