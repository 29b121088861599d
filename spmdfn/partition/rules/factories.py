"""Rules for ops that make tensors from numbers: every dim may be split, each device makes its own block."""

from __future__ import annotations

from typing import Any

import torch

from spmdfn.partition.rule import Call, Local, Rule, register

from ._factors import Dim, Factors, make

aten = torch.ops.aten
prims = torch.ops.prims


def _made(call: Call, local: Any, *, contiguous: bool = False) -> Rule:
    """A rule for a result whose dims are factors of its own."""
    factors = Factors()
    dims = factors.dims("d", call.results[0].shape)
    names = _names(call) if contiguous else []
    return factors.rule([], [dims], elementwise=True, local=local, contiguous=frozenset(names))


def _names(call: Call) -> list[str]:
    """The factors of the result."""
    return [f"d{i}" for i, size in enumerate(call.results[0].shape) if size != 1]


def _kept(call: Call) -> Rule:
    """A rule for a result that must be made whole."""
    factors = Factors()
    shape = call.results[0].shape
    numbers: list[list[Dim]] = [[] for _ in call.operands]  # tensors of rank 0
    return factors.rule(numbers, [factors.dims("d", shape, whole=range(len(shape)))], elementwise=True)


@register(
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.scalar_tensor.default,
    prims.full.default,
    prims.empty_permuted.default,
    prims.scalar_tensor.default,
)
def sized(call: Call) -> Rule:
    """The first argument is the shape."""
    op: Any = call.op
    names = _names(call)

    def local(ctx: Local, size: Any, *args: Any, **kwargs: Any) -> Any:
        return make(ctx, names, op, list(ctx.out_shape()), *args, **kwargs)

    return _made(call, local)


@register(aten.empty_strided.default, aten.empty_permuted.default, aten._efficientzerotensor.default)
def unstrided(call: Call) -> Rule:
    """A block is made contiguous, and zeros with storage: only shape and values matter."""
    op: Any = aten.zeros.default if call.op is aten._efficientzerotensor.default else aten.empty.memory_format
    names = _names(call)

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        return make(ctx, names, op, list(ctx.out_shape()), **kwargs)

    return _made(call, local)


@register(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def new(call: Call) -> Rule:
    """As the sized ones; the operand gives dtype and device. Equal shapes share their factors, to be laid out alike."""
    factors = Factors()
    before, after = call.operands[0].shape, call.results[0].shape
    outs = factors.dims("d", after)
    ins = outs if before == after else factors.dims("x", before, whole=range(len(before)))
    op: Any = call.op
    strided = op is aten.new_empty_strided.default

    def local(ctx: Local, self: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        shape = list(ctx.out_shape())
        return aten.new_empty.default(self, shape, **kwargs) if strided else op(self, shape, *args, **kwargs)

    return factors.rule([ins], [outs], shape_only=frozenset({0}), elementwise=True, local=local)


@register(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: Call) -> Rule:
    """Whole numbers that the dtype holds exactly are counted from the block's start; others are made whole.

    Rounding differs between a range and a part of it, and a block must equal the slice of the whole to the bit.
    """
    numbers = [call.arg("start", 0), call.arg("end"), call.arg("step", 1)]
    start, end, step = numbers
    result = call.results[0]
    if any(isinstance(number, complex) or number != int(number) for number in numbers):
        return _kept(call)
    exact = 2 / torch.finfo(result.dtype).eps if result.dtype.is_floating_point else torch.iinfo(result.dtype).max
    if max(abs(start), abs(end)) > exact:
        return _kept(call)
    start, step = int(start), int(step)
    names = _names(call)

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        (count,) = ctx.out_shape()
        first = start + step * ctx.offset("d0") if result.shape != (1,) else start
        options = {**kwargs, "dtype": result.dtype}
        return make(ctx, names, aten.arange.start_step, first, first + step * count, step, **options)

    return _made(call, local, contiguous=True)


@register(prims.iota.default)
def iota(call: Call) -> Rule:
    """As arange, over ints."""
    names = _names(call)

    def local(ctx: Local, length: int, *, start: int, step: int, **kwargs: Any) -> Any:
        (count,) = ctx.out_shape()
        first = start + step * ctx.offset("d0") if length != 1 else start
        return make(ctx, names, prims.iota.default, count, start=first, step=step, **kwargs)

    return _made(call, local, contiguous=True)


@register(aten.eye.default, aten.eye.m)
def eye(call: Call) -> Rule:
    """Ones where the global row is the global column."""
    dtype = call.results[0].dtype
    shape = call.results[0].shape
    names = _names(call)

    def local(ctx: Local, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        rows, columns = (
            make(ctx, names, torch.arange, size, device=device) + (ctx.offset(f"d{i}") if shape[i] != 1 else 0)
            for i, size in enumerate(ctx.out_shape())
        )
        return torch.eq(torch.unsqueeze(rows, 1), columns).to(dtype)

    return _made(call, local, contiguous=True)


WINDOWS = [getattr(aten, f"{name}_window") for name in ("hann", "hamming", "blackman", "bartlett", "kaiser")]


@register(
    aten.tril_indices.default,
    aten.triu_indices.default,
    *(
        op
        for packet in (aten.linspace, aten.logspace, *WINDOWS)
        for op in (getattr(packet, overload) for overload in packet.overloads())
        if not op._schema.is_mutable
    ),
)
def made_whole(call: Call) -> Rule:
    """Rounding (or the counting of indices) depends on the whole."""
    return _kept(call)
