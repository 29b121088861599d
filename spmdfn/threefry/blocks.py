"""Block samplers: any strided box of a global draw, by itself. The element at index `i` of the box has the counter
`base + sum(strides[d] * i[d])`, and its value depends on the key and that counter alone.

These are plain functions, because a generated program calls them once for every device. On the CPU they run the numba
kernels; on other devices, without numba, and for tensors that hold no data, the torch ops of `hash.py` and `floats.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import SpecError, message
from . import floats, hash

WIDTHS = {
    torch.uint8: 8,
    torch.uint16: 16,
    torch.uint32: 32,
    torch.uint64: 64,
    torch.int8: 8,
    torch.int16: 16,
    torch.int32: 32,
    torch.int64: 64,
}
"""The integer types that bits come in, and how many; a signed one holds the same bits."""


class Kernels(NamedTuple):
    bits: ModuleType
    floats: ModuleType


@cache
def kernels() -> Kernels | None:
    """The numba kernels, imported at the first draw, or None where numba is missing or cannot run."""
    try:
        from . import kernel, kernel_floats
    except ImportError:
        return None
    return Kernels(kernel, kernel_floats)


def block_bits(key: Tensor, sizes: Sequence[int], strides: Sequence[int], base: int, dtype: torch.dtype) -> Tensor:
    """The random bits of a box: [*batch, *sizes], contiguous, for keys [*batch, 2]; `dtype` an integer type.

    >>> key = torch.tensor([0, 42], dtype=torch.uint32)
    >>> block_bits(key, (3,), (1,), 0, torch.uint32).tolist()
    [2098992034, 2919706841, 2646866425]
    >>> block_bits(key, (2,), (2,), 0, torch.uint32).tolist()
    [2098992034, 2646866425]
    """
    width = _width(dtype)
    if (run := _runnable(key)) is None:
        y0, y1 = hash.words(key, sizes, strides, base)
        return floats.combine(y0, y1, width).view(dtype)
    out = torch.empty((*key.shape[:-1], *sizes), dtype=dtype, device="cpu")
    _fill(run.bits.fill_bits64 if width == 64 else run.bits.fill_bits, key, sizes, strides, base, out)
    return out


def block_uniform(key: Tensor, sizes: Sequence[int], strides: Sequence[int], base: int, dtype: torch.dtype) -> Tensor:
    """Floats in [0, 1) of a box: [*batch, *sizes], contiguous, for keys [*batch, 2]; `dtype` a float type.

    >>> key = torch.tensor([0, 42], dtype=torch.uint32)
    >>> block_uniform(key, (2,), (2,), 0, torch.float32)
    tensor([0.4887, 0.6163])
    """
    layout = _layout(dtype)
    if (run := _runnable(key)) is None:
        y0, y1 = hash.words(key, sizes, strides, base)
        return floats.uniform_from_bits(floats.combine(y0, y1, layout.bits), dtype)
    out = torch.empty((*key.shape[:-1], *sizes), dtype=dtype, device="cpu")
    if dtype == torch.float32:
        _fill(run.bits.fill_uniform32, key, sizes, strides, base, out)
    elif dtype == torch.float64:
        _fill(run.bits.fill_uniform64, key, sizes, strides, base, out)
    else:
        _fill_table(run, key, sizes, strides, base, out, _table(dtype, normal=False))
    return out


def block_normal(key: Tensor, sizes: Sequence[int], strides: Sequence[int], base: int, dtype: torch.dtype) -> Tensor:
    """Standard normals of a box: [*batch, *sizes], contiguous, for keys [*batch, 2]; `dtype` a float type.

    >>> key = torch.tensor([0, 42], dtype=torch.uint32)
    >>> block_normal(key, (3,), (1,), 1, torch.float32)
    tensor([0.4671, 0.2957, 0.1535])
    """
    _layout(dtype)
    if (run := _runnable(key)) is None:
        return floats.normal_from_uniform(block_uniform(key, sizes, strides, base, dtype))
    if dtype not in (torch.float32, torch.float64):
        out = torch.empty((*key.shape[:-1], *sizes), dtype=dtype, device="cpu")
        _fill_table(run, key, sizes, strides, base, out, _table(dtype, normal=True))
        return out
    out = block_uniform(key, sizes, strides, base, dtype)
    (run.floats.normal32 if dtype == torch.float32 else run.floats.normal64)(out.view(-1).numpy())
    return out


def block_threefry(key: Tensor, sizes: Sequence[int], strides: Sequence[int], base: int) -> Tensor:
    """The keys at the counters of a box: uint32 [*batch, *sizes, 2], for keys [*batch, 2].

    >>> key = torch.tensor([0, 42], dtype=torch.uint32)
    >>> block_threefry(key, (), (), 7).tolist()
    [2547012911, 1371500959]
    """
    if (run := _runnable(key)) is None:
        return torch.stack(hash.words(key, sizes, strides, base), -1).view(torch.uint32)
    out = torch.empty((*key.shape[:-1], *sizes, 2), dtype=torch.uint32, device="cpu")
    _fill(run.bits.fill_words, key, sizes, strides, base, out, (2,))
    return out


def fold(key: Tensor, data: Tensor) -> Tensor:
    """The key of every (key, number) pair: uint32 [*batch, 2] for keys [*batch, 2] and integers [*batch] mod 2**32.

    >>> fold(torch.tensor([0, 42], dtype=torch.uint32), torch.tensor(7)).tolist()
    [2547012911, 1371500959]
    """
    if (run := _runnable(key)) is None or _runnable(data) is None:
        pair, low = key.view(torch.int32), hash.low_word(data)
        words = hash.threefry(pair[..., 0], pair[..., 1], torch.zeros_like(low), low)
        return torch.stack(words, -1).view(torch.uint32)
    out = torch.empty(key.shape, dtype=torch.uint32, device="cpu")
    run.bits.fold(_rows(key), data.to(torch.int64).contiguous().view(-1).numpy(), out.numpy().reshape(-1, 2))
    return out


def _rows(key: Tensor) -> Any:
    # Contiguous, or numba would compile the kernel once more for strided keys.
    return np.ascontiguousarray(key.numpy().reshape(-1, 2))


def _runnable(tensor: Tensor) -> Kernels | None:
    # Subclasses (fake tensors above all) and other devices have no memory that numba could read.
    return kernels() if type(tensor) is Tensor and tensor.is_cpu else None


def _fill(
    kernel: Callable[..., None],
    key: Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    base: int,
    out: Tensor,
    tail: tuple[int, ...] = (),
) -> None:
    if out.numel():
        box_sizes, box_strides, count = _box(tuple(sizes), tuple(strides))
        kernel(_rows(key), box_sizes, box_strides, base, out.numpy().reshape(-1, count, *tail))


def _fill_table(
    run: Kernels,
    key: Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    base: int,
    out: Tensor,
    values: Any,
) -> None:
    layout = floats.LAYOUTS[out.dtype]
    words = out.view(torch.int16)
    _fill(run.bits.fill_bits, key, sizes, strides, base, words)
    run.floats.table(values, words.view(-1).numpy(), layout.bits - layout.mantissa)


@lru_cache(maxsize=4096)
def _box(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, Any, int]:
    """A box as the kernels take it: at least one dim, neighbours that are one run merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        elif size != 1:
            merged.append((size, stride))
    merged = merged or [(1, 0)]
    return np.array([s for s, _ in merged]), np.array([s for _, s in merged]), math.prod(sizes)


@cache
def _table(dtype: torch.dtype, normal: bool) -> Any:
    layout = floats.LAYOUTS[dtype]
    bits = torch.arange(1 << layout.mantissa, dtype=torch.int32, device="cpu") << (layout.bits - layout.mantissa)
    unit = floats.uniform_from_bits(bits, dtype)
    return (floats.normal_from_uniform(unit) if normal else unit).view(torch.int16).numpy()


def _width(dtype: torch.dtype) -> int:
    if dtype not in WIDTHS:
        names = ", ".join(str(name) for name in WIDTHS)
        raise SpecError(message(f"random bits cannot be {dtype}", fix=f"use one of {names}"))
    return WIDTHS[dtype]


def _layout(dtype: torch.dtype) -> floats.Layout:
    if dtype not in floats.LAYOUTS:
        names = ", ".join(str(name) for name in floats.LAYOUTS)
        raise SpecError(message(f"a random float cannot be {dtype}", fix=f"use one of {names}"))
    return floats.LAYOUTS[dtype]
