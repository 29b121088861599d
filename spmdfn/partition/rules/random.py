"""Rules of the samplers: every dim of the result may be split, and each device makes its own block.

An element's counter is its row-major index in the global array, so a block is a box of counters with strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...threefry import blocks, ops
from ..rule import Call, Local, Rule, register, rule


@register(ops.random_bits, ops.random_uniform, ops.random_normal)
def sampler(call: Call) -> Rule:
    """`b 2 -> b d`: the key's batch dims are shared, the drawn dims are free."""
    shape = tuple(call.arg("shape"))
    block = _BLOCKS[call.op]

    def local(ctx: Local, key: Any, shape: Any, dtype: torch.dtype) -> Any:
        sizes, strides, base = _box(ctx, shape)
        return _reshaped(_call(block, key, sizes, strides, base, dtype), ctx, sizes, shape)

    return _draw(call, len(shape), "", local)


@register(ops.threefry)
def threefry(call: Call) -> Rule:
    """`b 2 -> b d 2`: as the samplers; the two words of a new key stay together."""
    shape = tuple(call.arg("shape"))

    def local(ctx: Local, key: Any, shape: Any, start: int) -> Any:
        sizes, strides, base = _box(ctx, shape)
        return _reshaped(_call(blocks.block_threefry, key, sizes, strides, base + start), ctx, sizes, shape)

    return _draw(call, len(shape), " new", local)


@register(ops.fold_in)
def fold_in(call: Call) -> Rule:
    """`b 2, b -> b 2`: pointwise over the keys."""
    batch = _names("b", len(call.operands[1].shape))
    return rule(call, f"{batch} old, {batch} -> {batch} new", whole="old new", elementwise=True, local=_local_fold)


def _local_fold(ctx: Local, key: Any, data: Any) -> Any:
    return _call(blocks.fold, key, data)


_BLOCKS: dict[Any, Callable[..., Any]] = {
    ops.random_bits: blocks.block_bits,
    ops.random_uniform: blocks.block_uniform,
    ops.random_normal: blocks.block_normal,
}


def _draw(call: Call, rank: int, words: str, local: Callable[..., Any]) -> Rule:
    batch = _names("b", len(call.operands[0].shape) - 1)
    pattern = f"{batch} old -> {batch} {_names('d', rank)}{words}"
    return rule(call, pattern, whole="old" + words, elementwise=True, local=local)


def _names(letter: str, count: int) -> str:
    return " ".join(f"{letter}{dim}" for dim in range(count))


def _box(ctx: Local, shape: Any) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """This device's box of counters: sizes, strides, and the first counter (an int, or a proxy of one)."""
    sizes: list[int] = []
    strides: list[int] = []
    base: Any = 0
    for dim, stride in enumerate(ops.row_major(shape)):
        if shape[dim] == 1:
            continue
        for size, inner, offset in ctx.blocks(f"d{dim}"):
            sizes.append(size)
            strides.append(stride * inner)
            if isinstance(offset, int) and not offset:
                continue
            step = offset if stride * inner == 1 else offset * (stride * inner)
            base = step if isinstance(base, int) and not base else base + step
    return tuple(sizes), tuple(strides), base


def _reshaped(block: Any, ctx: Local, sizes: tuple[int, ...], shape: Any) -> Any:
    whole = ctx.out_shape(0)
    drawn = whole[len(whole) - len(shape) :] if len(shape) else ()
    return block if sizes == tuple(drawn) else block.reshape(whole)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, or write the call down where a graph is being written: it is a leaf of the local program."""
    for arg in args:
        if isinstance(arg, torch.fx.Proxy):
            return arg.tracer.create_proxy("call_function", function, args, {})
    return function(*args)
