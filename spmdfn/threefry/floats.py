"""From bits to floats, in torch ops. Every step is one correctly rounded IEEE operation (no fused multiply-add, no
libm), so the numba kernels, which take the same steps, give the same values to the bit, wherever an element lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .hash import LOW


@dataclass(frozen=True)
class Layout:
    """How a float is drawn: `bits` random bits, the top `mantissa` of them kept, under the pattern of 1.0."""

    bits: int
    mantissa: int
    one: int
    word: torch.dtype


LAYOUTS = {
    torch.float64: Layout(64, 52, 0x3FF0000000000000, torch.int64),
    torch.float32: Layout(32, 23, 0x3F800000, torch.int32),
    torch.float16: Layout(16, 10, 0x3C00, torch.int16),
    torch.bfloat16: Layout(8, 7, 0x3F80, torch.int16),  # 7 mantissa bits come out of 8
}


@dataclass(frozen=True)
class LogTable:
    """Constants of log for one width. `series`: log((1+s)/(1-s)) = s * (2 + z * series(z)), z = s * s, lowest first,
    by Chebyshev interpolation over the mantissas [sqrt(1/2), sqrt(2))."""

    shift: int
    bias: int
    root_half: int
    ln2_high: float  # its low bits are zero: times an exponent it is exact
    ln2_low: float
    series: tuple[float, ...]


LOG32 = LogTable(
    shift=23,
    bias=127,
    root_half=0x3F3504F3,
    ln2_high=0.693145751953125,
    ln2_low=1.4286068203094172e-06,
    series=(0.666666665540420124, 0.400001222118106494, 0.285507786331919654, 0.233316144718434992),
)
LOG64 = LogTable(
    shift=52,
    bias=1023,
    root_half=0x3FE6A09E667F3BCD,
    ln2_high=0.6931471803691238,
    ln2_low=1.9082149292705877e-10,
    series=(
        0.666666666666666971,
        0.399999999998988905,
        0.285714286262538376,
        0.222222110893794962,
        0.181828924325368712,
        0.153316117220550079,
        0.14617807153417325,
    ),
)

# Giles, "Approximating the erfinv function", GPU Computing Gems 2012: polynomials in w = -log(1 - x*x), highest first.
ERFINV32: tuple[tuple[float, ...], ...] = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503)
    + (-0.00417768164, 0.246640727, 1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613)
    + (0.00943887047, 1.00167406, 2.83297682),
)
ERFINV64: tuple[tuple[float, ...], ...] = (
    (-3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18, 1.115787767802518096e-17)
    + (-1.333171662854620906e-16, 2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14)
    + (-8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11)
    + (1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08, 4.2347877827932403518e-07)
    + (-1.3654692000834678645e-06, -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512)
    + (-0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356),
    (2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07, 1.8239629214389227755e-08)
    + (1.5027403968909827627e-06, -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05)
    + (-4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796)
    + (0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066, -0.0037512085075692412107)
    + (0.005370914553590063617, 1.0052589676941592334, 3.0838856104922207635),
    (-2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09, -3.7894654401267369937e-09)
    + (7.6157012080783393804e-09, -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08)
    + (2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05)
    + (7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026, 1.0103004648645343977)
    + (4.8499064014085844221,),
)

SQRT2 = math.sqrt(2.0)


def combine(y0: Tensor, y1: Tensor, width: int) -> Tensor:
    """The random bits of that width from both hash words, as the signed integer type of that width."""
    if width == 64:
        return (y0.to(torch.int64) << 32) | (y1.to(torch.int64) & LOW)
    both = y0 ^ y1
    if width == 32:
        return both
    # Brought into range before the cast, whose behaviour out of range is the device's own affair.
    spare = 32 - width
    return ((both << spare) >> spare).to(torch.int16 if width == 16 else torch.int8)


def uniform_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats in [0, 1) from signed integers of the layout's width: bitcast(top bits | pattern of 1.0) - 1."""
    layout = LAYOUTS[dtype]
    mantissa = (bits >> (layout.bits - layout.mantissa)) & ((1 << layout.mantissa) - 1)
    return (mantissa.to(layout.word) | layout.one).view(dtype) - 1


def normal_from_uniform(f: Tensor) -> Tensor:
    """Standard normals from floats in [0, 1): sqrt(2) * erfinv(u), u = 2 f + lo, lo the float after -1."""
    dtype = f.dtype
    if dtype in (torch.float32, torch.float64):
        # u's span 1 - lo rounds to 2, so the product is exact and u is rounded once.
        return erfinv(f * 2 + lowest(dtype)) * SQRT2
    u = (f.float() * 2 + lowest(dtype)).to(dtype)
    return erfinv(u.float()).to(dtype) * round_to(SQRT2, dtype)


def lowest(dtype: torch.dtype) -> float:
    """The float of that type that follows -1 towards zero."""
    return torch.finfo(dtype).eps / 2 - 1.0


def round_to(value: float, dtype: torch.dtype) -> float:
    """A Python number rounded to a float type, without making a tensor (which a trace would record).

    >>> round_to(0.1, torch.bfloat16), round_to(1e6, torch.float16)
    (0.10009765625, inf)
    """
    value = float(value)
    if dtype == torch.float64 or value == 0 or not math.isfinite(value):
        return value
    info = torch.finfo(dtype)
    exponent = max(math.frexp(value)[1] - 1, math.frexp(info.tiny)[1] - 1)
    step = math.ldexp(info.eps, exponent)
    rounded = round(value / step) * step  # exact: both are powers of two apart; round is half to even
    return rounded if abs(rounded) <= info.max else math.copysign(math.inf, value)


def erfinv(x: Tensor) -> Tensor:
    """The inverse error function on (-1, 1), float32 or float64, by Giles' polynomials."""
    w = minus_log1m(x * x)
    if x.dtype == torch.float32:
        near, far = ERFINV32
        p = torch.where(w < 5, horner(near, w - 2.5), horner(far, square_root(w) - 3))
    else:
        near, middle, far = ERFINV64
        root = square_root(w)
        p = torch.where(w < 16, horner(middle, root - 3.25), horner(far, root - 5))
        p = torch.where(w < 6.25, horner(near, w - 3.125), p)
    return p * x


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded square root of ordinary positive floats; torch's own is an ulp off for one value in six
    on CPUs where it comes from a vector math library."""
    if x.dtype == torch.float32:
        return x.double().sqrt().float()
    root = x.sqrt()
    high = root * 134217729.0  # Veltkamp's splitting: the two halves' products are exact
    high = high - (high - root)
    low = root - high
    square = root * root
    lost = ((high * high - square) + high * low * 2) + low * low
    return root + ((x - square) - lost) / (root * 2)


def minus_log1m(t: Tensor) -> Tensor:
    """-log(1 - t) for t in [0, 1), float32 or float64, within an ulp or so."""
    table, word = (LOG32, torch.int32) if t.dtype == torch.float32 else (LOG64, torch.int64)
    u = 1 - t
    lost = (1 - u) - t  # what rounding u lost, exactly
    shifted = u.view(word) - table.root_half
    k = shifted >> table.shift  # u = m * 2**k with m in [sqrt(1/2), sqrt(2))
    m = (u.view(word) - (k << table.shift)).view(t.dtype)
    scale = ((table.bias - k) << table.shift).view(t.dtype)
    f = (m - 1) + lost * scale
    s = f / (f + 2)
    z = s * s
    series = horner(table.series[::-1], z) * z
    half = f * f * 0.5
    exponent = k.to(t.dtype)
    # log(1 + f) = f - (half - s * (half + series)), the largest terms added last
    return -(exponent * table.ln2_high - ((half - (s * (half + series) + exponent * table.ln2_low)) - f))


def horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """A polynomial, highest coefficient first, each step a product and then a sum."""
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total
