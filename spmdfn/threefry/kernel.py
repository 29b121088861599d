"""The CPU kernels of bits and uniform floats, in numba: tile by tile, so that each pass is a loop that vectorises.

Each kernel fills `out[b, :]` with the elements of one box for key `b`. The steps are those of `hash.py` and
`floats.py`, bit for bit. numba is optional: only `blocks.py` imports this file, and it does without where that fails.
A kernel calls only what its own file defines, because numba's disk cache watches no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from .hash import PARITY, ROTATIONS

TILE = 1024
U32 = np.uint32
F32 = np.float32
_PARITY = U32(PARITY)
(_R0, _R1, _R2, _R3), (_R4, _R5, _R6, _R7) = (tuple(U32(r) for r in row) for row in ROTATIONS)


def jit(function: Callable[..., Any]) -> Any:
    """Compile at the first call, and keep the machine code on disk where there is a place for it."""
    try:
        return numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # no directory that can hold the cache: neither __pycache__ here nor the user's own
        return numba.njit(nogil=True, error_model="numpy")(function)


@jit
def _rotate(x, by):
    return U32(U32(x << by) | U32(x >> U32(U32(32) - by)))


@jit
def _round(x0, x1, by):
    x0 = U32(x0 + x1)
    return x0, U32(_rotate(x1, by) ^ x0)


@jit
def _even(x0, x1):
    x0, x1 = _round(x0, x1, _R0)
    x0, x1 = _round(x0, x1, _R1)
    x0, x1 = _round(x0, x1, _R2)
    return _round(x0, x1, _R3)


@jit
def _odd(x0, x1):
    x0, x1 = _round(x0, x1, _R4)
    x0, x1 = _round(x0, x1, _R5)
    x0, x1 = _round(x0, x1, _R6)
    return _round(x0, x1, _R7)


@jit
def _hash(k0, k1, c0, c1):
    k2 = U32(k0 ^ k1 ^ _PARITY)
    x0, x1 = _even(U32(c0 + k0), U32(c1 + k1))
    x0, x1 = _odd(U32(x0 + k1), U32(U32(x1 + k2) + U32(1)))
    x0, x1 = _even(U32(x0 + k2), U32(U32(x1 + k0) + U32(2)))
    x0, x1 = _odd(U32(x0 + k0), U32(U32(x1 + k1) + U32(3)))
    x0, x1 = _even(U32(x0 + k1), U32(U32(x1 + k2) + U32(4)))
    return U32(x0 + k2), U32(U32(x1 + k0) + U32(5))


@jit
def _count(high, low, count, index, sizes, strides, base):
    """Write the words of the next `count` counters of the box and move `index` on."""
    last = len(sizes) - 1
    inner, stride = sizes[last], strides[last]
    done = 0
    while done < count:
        start = base + index[last] * stride
        for dim in range(last):
            start += index[dim] * strides[dim]
        run = min(inner - index[last], count - done)
        first, step = U32(start & 0xFFFFFFFF), U32(stride & 0xFFFFFFFF)
        head, tail = high[done : done + run], low[done : done + run]  # not [done + i], which might be negative
        if start >> 32 == (start + (run - 1) * stride) >> 32:  # the usual case: no carry, so 32 bits do
            for i in range(run):
                head[i] = U32(start >> 32)
                tail[i] = U32(first + U32(U32(i) * step))
        else:
            for i in range(run):
                head[i] = U32((start + i * stride) >> 32)
                tail[i] = U32((start + i * stride) & 0xFFFFFFFF)
        done += run
        index[last] += run
        dim = last
        while dim > 0 and index[dim] == sizes[dim]:
            index[dim] = 0
            dim -= 1
            index[dim] += 1


@jit
def _tile(k0, k1, words, count, index, sizes, strides, base):
    """Hash the next `count` counters of the box, in place: loops of 32-bit words alone fill all lanes."""
    y0, y1 = words[0], words[1]
    _count(y0, y1, count, index, sizes, strides, base)
    for i in range(count):
        y0[i], y1[i] = _hash(k0, k1, y0[i], y1[i])


@jit
def fill_bits(keys, sizes, strides, base, out):
    """8, 16 or 32 bits: the low bits of y0 ^ y1."""
    words = np.empty((2, TILE), np.uint32)
    y0, y1 = words[0], words[1]
    for row in range(keys.shape[0]):
        index = np.zeros(len(sizes), np.int64)
        for start in range(0, out.shape[1], TILE):
            count = min(TILE, out.shape[1] - start)
            _tile(keys[row, 0], keys[row, 1], words, count, index, sizes, strides, base)
            part = out[row, start : start + count]
            for i in range(count):
                part[i] = y0[i] ^ y1[i]


@jit
def fill_words(keys, sizes, strides, base, out):
    """Both words, as out[b, i, :]: new keys."""
    words = np.empty((2, TILE), np.uint32)
    y0, y1 = words[0], words[1]
    for row in range(keys.shape[0]):
        index = np.zeros(len(sizes), np.int64)
        for start in range(0, out.shape[1], TILE):
            count = min(TILE, out.shape[1] - start)
            _tile(keys[row, 0], keys[row, 1], words, count, index, sizes, strides, base)
            part = out[row, start : start + count]
            for i in range(count):
                part[i, 0] = y0[i]
                part[i, 1] = y1[i]


@jit
def fill_bits64(keys, sizes, strides, base, out):
    """64 bits: y0 above y1."""
    words = np.empty((2, TILE), np.uint32)
    y0, y1 = words[0], words[1]
    for row in range(keys.shape[0]):
        index = np.zeros(len(sizes), np.int64)
        for start in range(0, out.shape[1], TILE):
            count = min(TILE, out.shape[1] - start)
            _tile(keys[row, 0], keys[row, 1], words, count, index, sizes, strides, base)
            part = out[row, start : start + count]
            for i in range(count):
                part[i] = (np.uint64(y0[i]) << np.uint64(32)) | np.uint64(y1[i])


@jit
def _unit32(y0, y1):
    return F32(U32((U32(y0 ^ y1) >> U32(9)) | U32(0x3F800000)).view(np.float32) - F32(1))


@jit
def _unit64(y0, y1):
    word = (np.uint64(y0) << np.uint64(32)) | np.uint64(y1)
    return np.uint64((word >> np.uint64(12)) | np.uint64(0x3FF0000000000000)).view(np.float64) - 1.0


@jit
def fill_uniform32(keys, sizes, strides, base, out):
    words = np.empty((2, TILE), np.uint32)
    y0, y1 = words[0], words[1]
    for row in range(keys.shape[0]):
        index = np.zeros(len(sizes), np.int64)
        for start in range(0, out.shape[1], TILE):
            count = min(TILE, out.shape[1] - start)
            _tile(keys[row, 0], keys[row, 1], words, count, index, sizes, strides, base)
            part = out[row, start : start + count]
            for i in range(count):
                part[i] = _unit32(y0[i], y1[i])


@jit
def fill_uniform64(keys, sizes, strides, base, out):
    words = np.empty((2, TILE), np.uint32)
    y0, y1 = words[0], words[1]
    for row in range(keys.shape[0]):
        index = np.zeros(len(sizes), np.int64)
        for start in range(0, out.shape[1], TILE):
            count = min(TILE, out.shape[1] - start)
            _tile(keys[row, 0], keys[row, 1], words, count, index, sizes, strides, base)
            part = out[row, start : start + count]
            for i in range(count):
                part[i] = _unit64(y0[i], y1[i])


@jit
def fold(keys, data, out):
    """out[i] = T(keys[i]; 0, data[i])."""
    for i in range(keys.shape[0]):
        out[i, 0], out[i, 1] = _hash(keys[i, 0], keys[i, 1], U32(0), U32(data[i] & 0xFFFFFFFF))
