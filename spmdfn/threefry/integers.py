"""Random integers below a span, by remainders of twice the bits: the arithmetic of `randint`.

All of it is int64, which wraps around as uint64 does: 32-bit draws fit, and 64-bit ones need an unsigned remainder.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops

SIGN = -(1 << 63)
MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
Int = int | Tensor


def draw(pair: Tensor, sizes: tuple[int, ...], low: Int, high: Int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high) of a dtype, from a pair of keys (..., 2, 2). Bounds outside its range are clipped."""
    minimum, maximum = range_of(dtype)
    width = 64 if dtype in (torch.int64, torch.uint64) else 32
    span: Int
    if isinstance(low, int) and isinstance(high, int):
        low = min(max(low, minimum), maximum)
        span = max(min(high, maximum + 1) - low, 1)
    else:
        low, span = _tensor_span(low, high, minimum, maximum)
    total = _below(pair, sizes, span, width) + (_signed(low) if isinstance(low, int) else low)
    return total.view(dtype) if dtype == torch.uint64 else total.to(dtype)


def range_of(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest value of an integer dtype.

    >>> range_of(torch.int8), range_of(torch.uint64)[1] == 2**64 - 1
    ((-128, 127), True)
    """
    bits = torch.iinfo(dtype).bits
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.is_signed else (0, (1 << bits) - 1)


def _tensor_span(low: Int, high: Int, minimum: int, maximum: int) -> tuple[Tensor, Tensor]:
    bottom, _ = _clipped(low, minimum, maximum)
    top, beyond = _clipped(high, minimum, maximum)
    # Flipped signs compare as unsigned numbers do.
    empty = (top ^ SIGN) <= (bottom ^ SIGN) if maximum == MASK64 else top <= bottom
    return bottom, torch.where(empty, 1, top - bottom + beyond)


def _clipped(end: Int, minimum: int, maximum: int) -> tuple[Tensor, Int]:
    """A bound as an int64, and 1 where it lies beyond the dtype's greatest value."""
    if isinstance(end, int):
        return torch.full((), _signed(min(max(end, minimum), maximum)), dtype=torch.int64), int(end > maximum)
    if end.dtype == torch.uint64 or maximum == MASK64:
        return end.to(torch.int64), 0
    wide = end.to(torch.int64)
    return wide.clamp(minimum, maximum), (wide > maximum).to(torch.int64)


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _below(pair: Tensor, sizes: tuple[int, ...], span: Int, width: int) -> Tensor:
    """(h * 2**width + l) mod span, as JAX's arithmetic of that width has it, for h and l of `width` random bits."""
    multiplier: Int
    if isinstance(span, int):
        square = (1 << width // 2) % span
        multiplier = (square * square % (1 << width)) % span
        if multiplier == 0:  # a small power of two: the high bits do not matter, and need not be drawn
            return _remainder(_draw(pair, 1, sizes, width), span, width)
    else:
        square_root = _remainder(torch.full_like(span, 1 << width // 2), span, width)
        multiplier = _remainder(_wrap(square_root * square_root, width), span, width)
    high, low = (_remainder(_draw(pair, which, sizes, width), span, width) for which in (0, 1))
    factor = multiplier if isinstance(multiplier, Tensor) else _signed(multiplier)
    return _remainder(_wrap(_wrap(high * factor, width) + low, width), span, width)


def _draw(pair: Tensor, which: int, sizes: tuple[int, ...], width: int) -> Tensor:
    key = pair[..., which, :]
    if width == 64:
        return ops.random_bits(key, sizes, torch.int64)
    return ops.random_bits(key, sizes, torch.int32).to(torch.int64) & MASK32


def _wrap(value: Tensor, width: int) -> Tensor:
    return value & MASK32 if width == 32 else value


def _remainder(value: Tensor, span: Int, width: int) -> Tensor:
    """value mod span; at 64 bits both are unsigned numbers in an int64, and a span of 2**64 reads 0."""
    if width == 32:
        return value % span
    if isinstance(span, int):
        if span > MASK64:
            return value
        return _large_remainder(value, _signed(span)) if span >> 63 else _unsigned_remainder(value, span)
    small = _unsigned_remainder(value, span.clamp_min(1))
    return torch.where(span > 0, small, torch.where(span == 0, value, _large_remainder(value, span)))


def _unsigned_remainder(value: Tensor, span: Int) -> Tensor:
    """For 0 < span < 2**63: halve the value, then double the remainder without leaving the range."""
    half = ((value >> 1) & ~SIGN) % span
    odd = value & 1
    rest = span - half
    return torch.where(half + odd >= rest, half - rest + odd, half * 2 + odd)


def _large_remainder(value: Tensor, span: Int) -> Tensor:
    """For span >= 2**63 the value holds it once at most. Flipped signs compare as unsigned numbers do."""
    return torch.where((value ^ SIGN) >= (span ^ SIGN), value - span, value)
