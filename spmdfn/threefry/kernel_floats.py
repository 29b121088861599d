"""The CPU kernels that turn uniform draws into other floats, in numba, in place; the steps of `floats.py`, bit for bit.

A kernel calls only what its own file defines, because numba's disk cache watches no other.
"""

from __future__ import annotations

import numpy as np

from .floats import ERFINV32, ERFINV64, LOG32, LOG64, SQRT2
from .kernel import F32, jit

I32 = np.int32
_HALF32, _ONE32, _TWO32 = F32(0.5), F32(1), F32(2)
_LOG32 = tuple(F32(c) for c in LOG32.series)
_NEAR32, _FAR32 = (tuple(F32(c).view(I32) for c in row) for row in ERFINV32)
_LN2_HIGH32, _LN2_LOW32, _ROOT_HALF32 = F32(LOG32.ln2_high), F32(LOG32.ln2_low), I32(LOG32.root_half)
_LOWEST32, _SQRT2_32 = F32(-1 + 2.0**-24), F32(SQRT2)


@jit
def table(values, out, shift):
    """Any sampler of 16-bit floats: they have so few mantissas that it is a table, picked by bits that `out` holds."""
    mask = len(values) - 1
    for i in range(len(out)):
        out[i] = values[(out[i] >> shift) & mask]


@jit
def _log32(t):
    u = _ONE32 - t
    lost = (_ONE32 - u) - t
    word = F32(u).view(np.int32)
    k = I32(I32(word - _ROOT_HALF32) >> I32(23))
    m = np.int32(word - I32(k << I32(23))).view(np.float32)
    scale = np.int32(I32(I32(127) - k) << I32(23)).view(np.float32)
    f = (m - _ONE32) + lost * scale
    s = f / (f + _TWO32)
    z = s * s
    c0, c1, c2, c3 = _LOG32
    series = (((z * c3 + c2) * z + c1) * z + c0) * z
    half = f * f * _HALF32
    e = F32(k)
    return -(e * _LN2_HIGH32 - ((half - (s * (half + series) + e * _LN2_LOW32)) - f))


@jit
def _pick(near, a, b):
    return np.int32(b ^ I32(near & I32(a ^ b))).view(np.float32)


@jit
def normal32(out):
    """Both sides of Giles' branch share one polynomial, whose coefficients are picked by a mask: a branch, or an `if`
    expression, of which LLVM makes one again, would keep the loop from vectorising."""
    for i in range(len(out)):
        x = out[i] * _TWO32 + _LOWEST32
        w = _log32(x * x)
        near = I32(np.float32(w - F32(5)).view(np.int32) >> I32(31))
        v = _pick(near, np.float32(w - F32(2.5)).view(np.int32), np.float32(F32(np.sqrt(w)) - F32(3)).view(np.int32))
        p = _pick(near, _NEAR32[0], _FAR32[0]) * v + _pick(near, _NEAR32[1], _FAR32[1])
        p = p * v + _pick(near, _NEAR32[2], _FAR32[2])
        p = p * v + _pick(near, _NEAR32[3], _FAR32[3])
        p = p * v + _pick(near, _NEAR32[4], _FAR32[4])
        p = p * v + _pick(near, _NEAR32[5], _FAR32[5])
        p = p * v + _pick(near, _NEAR32[6], _FAR32[6])
        p = p * v + _pick(near, _NEAR32[7], _FAR32[7])
        p = p * v + _pick(near, _NEAR32[8], _FAR32[8])
        out[i] = p * x * _SQRT2_32


_ROOT_HALF64, _LOWEST64 = np.int64(LOG64.root_half), -1 + 2.0**-53
_LN2_HIGH64, _LN2_LOW64, _LOG64 = LOG64.ln2_high, LOG64.ln2_low, LOG64.series
_NEAR64, _MIDDLE64, _FAR64 = ERFINV64


@jit
def _log64(t):
    u = 1.0 - t
    lost = (1.0 - u) - t
    word = np.float64(u).view(np.int64)
    k = (word - _ROOT_HALF64) >> 52
    m = np.int64(word - (k << 52)).view(np.float64)
    scale = np.int64((1023 - k) << 52).view(np.float64)
    f = (m - 1.0) + lost * scale
    s = f / (f + 2.0)
    z = s * s
    c0, c1, c2, c3, c4, c5, c6 = _LOG64
    series = ((((((z * c6 + c5) * z + c4) * z + c3) * z + c2) * z + c1) * z + c0) * z
    half = f * f * 0.5
    e = np.float64(np.int32(k))
    return -(e * _LN2_HIGH64 - ((half - (s * (half + series) + e * _LN2_LOW64)) - f))


@jit
def _near64(w):
    c, v = _NEAR64, w - 3.125  # unrolled: a loop over coefficients keeps the loop over elements from vectorising
    p = (((v * c[0] + c[1]) * v + c[2]) * v + c[3]) * v + c[4]
    p = (((p * v + c[5]) * v + c[6]) * v + c[7]) * v + c[8]
    p = (((p * v + c[9]) * v + c[10]) * v + c[11]) * v + c[12]
    p = (((p * v + c[13]) * v + c[14]) * v + c[15]) * v + c[16]
    p = (((p * v + c[17]) * v + c[18]) * v + c[19]) * v + c[20]
    return (p * v + c[21]) * v + c[22]


@jit
def _tail64(w):
    if w < 6.25:
        return _near64(w)
    c = _MIDDLE64 if w < 16.0 else _FAR64 + (0.0, 0.0)
    count = 19 if w < 16.0 else 17
    v = np.sqrt(w) - (3.25 if w < 16.0 else 5.0)
    p = v * c[0] + c[1]
    for i in range(2, count):
        p = p * v + c[i]
    return p


TAILS = 1024


@jit
def normal64(out):
    """The near polynomial for all, which vectorises; then the other two for the one element in 1000 that needs them."""
    tails, where = np.empty(TAILS), np.empty(TAILS, np.int64)
    for start in range(0, len(out), TAILS):
        part = out[start : start + TAILS]
        found = 0
        for i in range(len(part)):
            if abs(part[i] - 0.5) > 0.499:  # w < 6.25 holds up to 0.4995
                where[found] = i
                tails[found] = part[i] * 2.0 + _LOWEST64
                found += 1
        for i in range(len(part)):
            x = part[i] * 2.0 + _LOWEST64
            part[i] = _near64(_log64(x * x)) * x * SQRT2
        for i in range(found):
            part[where[i]] = _tail64(_log64(tails[i] * tails[i])) * tails[i] * SQRT2
