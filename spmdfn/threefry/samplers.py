"""Samplers over whole arrays, in JAX's words, with the values of its default generator.

Every element depends on the key and on its own index alone. A key of shape (*batch, 2) gives (*batch, *shape).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError, message
from . import ops
from .floats import LAYOUTS, round_to
from .integers import draw
from .keys import check_key, check_shape, split

Number = int | float | Tensor
Shape = int | Sequence[int]


def bits(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Random bits of shape (..., *shape), 8 to 64 each by the integer `dtype`. Raises SpecError for another dtype.

    >>> bits(torch.tensor([0, 42], dtype=torch.uint32), (2,))
    tensor([2098992034, 2919706841], dtype=torch.uint32)
    """
    check_key(key, "bits")
    sizes = check_shape(shape, "bits")
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SpecError(message(f"random.bits: a key gives bits as integers, not {dtype}", fix="use torch.uint32"))
    return ops.random_bits(key, sizes, dtype)


def uniform(
    key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32, minval: Number = 0, maxval: Number = 1
) -> Tensor:
    """Floats in [minval, maxval) of shape (..., *shape).

    The bounds may be tensors that broadcast to the shape; gradients flow to them. Raises SpecError for a dtype that is
    no float of 16 to 64 bits.

    >>> uniform(torch.tensor([0, 42], dtype=torch.uint32), (2,), minval=-1)
    tensor([-0.0226,  0.3596])
    """
    check_key(key, "uniform")
    sizes = check_shape(shape, "uniform")
    _check_float(dtype, "uniform")
    unit = ops.random_uniform(key, sizes, dtype)
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor):
        low, high = round_to(minval, dtype), round_to(maxval, dtype)
        if low == 0 and high == 1:
            return unit
        return _affine(unit, round_to(high - low, dtype), low).clamp_min(low)
    low_end, high_end = (_bound(bound, dtype, sizes, key, "uniform") for bound in (minval, maxval))
    value = _affine(unit, high_end - low_end, low_end)
    return torch.where(value < low_end, low_end, value)


def _affine(unit: Tensor, span: float | Tensor, low: float | Tensor) -> Tensor:
    """unit * span + low, rounded once (the fused multiply-add of JAX), but twice for 16-bit floats, as JAX does too."""
    power_of_two = not isinstance(span, Tensor) and abs(math.frexp(span)[0]) == 0.5
    if power_of_two or unit.dtype in (torch.float16, torch.bfloat16):  # a product with a power of two is exact
        return unit * span + low
    if unit.dtype == torch.float32:
        span, low = (end.to(torch.float64) if isinstance(end, Tensor) else end for end in (span, low))
        return (unit.to(torch.float64) * span + low).to(torch.float32)
    return unit * span + low + _lost(unit.detach(), _detached(span), _detached(low))


def _detached(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _lost(unit: Tensor, span: float | Tensor, low: float | Tensor) -> Tensor:
    """What `unit * span + low` loses by rounding twice: Dekker's exact product and Knuth's exact sum."""
    product = unit * span
    unit_high, unit_low = _halves(unit)
    span_high, span_low = _halves(span)
    rest = ((product - unit_high * span_high) - unit_low * span_high) - unit_high * span_low
    in_product = unit_low * span_low - rest
    total = product + low
    part = total - product
    return ((product - (total - part)) + (low - part)) + in_product


def _halves(value: Any) -> tuple[Any, Any]:
    shifted = value * 134217729.0
    high = shifted - (shifted - value)
    return high, value - high


def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normals of shape (..., *shape).

    They are sqrt(2) * erfinv of a uniform draw on (-1, 1), so float32 values lie within +-5.42. Raises SpecError for a
    dtype that is no float of 16 to 64 bits.

    >>> normal(torch.tensor([0, 42], dtype=torch.uint32), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    check_key(key, "normal")
    sizes = check_shape(shape, "normal")
    _check_float(dtype, "normal")
    return ops.random_normal(key, sizes, dtype)


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """True with probability `p`: bool (..., *shape), by default of p's shape.

    A Python p draws float32, a tensor its own dtype. Raises SpecError for a p that is no float.

    >>> bernoulli(torch.tensor([0, 0], dtype=torch.uint32), 0.3, (6,)).tolist()
    [False, False, False, False, False, True]
    """
    check_key(key, "bernoulli")
    if not isinstance(p, Tensor):
        sizes = () if shape is None else check_shape(shape, "bernoulli")
        return uniform(key, sizes) < round_to(p, torch.float32)
    _check_float(p.dtype, "bernoulli")
    sizes = tuple(p.shape) if shape is None else check_shape(shape, "bernoulli")
    _check_broadcast(p, sizes, "bernoulli")
    return uniform(key, sizes, p.dtype) < p


def randint(
    key: Tensor, shape: Shape, minval: int | Tensor, maxval: int | Tensor, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Integers from minval up to, not including, maxval: (..., *shape) of the integer `dtype`.

    The bounds may be integer tensors that broadcast to the shape; where maxval <= minval the value is minval. Raises
    SpecError for floats.

    >>> randint(torch.tensor([0, 42], dtype=torch.uint32), (6,), -5, 12).tolist()
    [-3, 4, 1, -3, 2, 1]
    """
    check_key(key, "randint")
    sizes = check_shape(shape, "randint")
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise SpecError(message(f"random.randint: a key gives integers, not {dtype}", fix="use torch.int32"))
    low, high = (_integer_bound(bound, sizes) for bound in (minval, maxval))
    return draw(split(key), sizes, low, high, dtype)


def permutation(key: Tensor, x: int | Tensor) -> Tensor:
    """x with its rows (dim 0) in random order, or the numbers 0 to x - 1 (int64) for an int x.

    Every device of a mesh computes the whole order. Raises SpecError for a tensor of shape ().

    >>> permutation(torch.tensor([0, 0], dtype=torch.uint32), 7).tolist()
    [0, 1, 5, 6, 4, 3, 2]
    """
    check_key(key, "permutation")
    if isinstance(x, Tensor):
        if x.dim() == 0:
            raise SpecError(message("random.permutation: x has shape (), no rows to order", fix="pass an int or rows"))
        return x[_order(key, x.shape[0])]
    if isinstance(x, Sequence):
        raise SpecError(
            message("random.permutation: x is neither an int nor a tensor", f"x: {x!r}", fix="pass a tensor")
        )
    return _order(key, *check_shape(x, "permutation"))


def _order(key: Tensor, count: int) -> Tensor:
    rounds = math.ceil(3 * math.log(max(1, count)) / math.log((1 << 32) - 1))
    order = None
    for _ in range(rounds):
        pair = split(key)
        key, sub = pair[..., 0, :], pair[..., 1, :]
        # int32 holds the same bits; flipping the sign bit orders them as unsigned numbers.
        keys = ops.random_bits(sub, (count,), torch.int32) ^ -(1 << 31)
        step = torch.sort(keys, dim=-1, stable=True).indices
        order = step if order is None else order.gather(-1, step)
    if order is None:
        return torch.arange(count, device=key.device).expand(*key.shape[:-1], count)
    return order


def _bound(value: Number, dtype: torch.dtype, sizes: tuple[int, ...], key: Tensor, where: str) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((), round_to(value, dtype), dtype=dtype, device=key.device)
    _check_broadcast(value, sizes, where)
    return value.to(dtype)


def _integer_bound(value: int | Tensor, sizes: tuple[int, ...]) -> int | Tensor:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            raise SpecError(message(f"random.randint: a bound is a {value.dtype} tensor", fix="use an integer tensor"))
        _check_broadcast(value, sizes, "randint")
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise SpecError(message("random.randint: a bound is no int", f"bound: {value!r}", fix="use an int")) from None


def _check_broadcast(value: Tensor, sizes: tuple[int, ...], where: str) -> None:
    try:
        fits = torch.broadcast_shapes(tuple(value.shape), sizes) == sizes
    except RuntimeError:
        fits = False
    if not fits:
        what = f"random.{where}: a parameter does not broadcast to the shape drawn for the key"
        details = f"parameter's shape: {tuple(value.shape)}", f"shape: {sizes}"
        raise SpecError(message(what, *details, fix=f"pass shape={tuple(value.shape)}, or a smaller parameter"))


def _check_float(dtype: torch.dtype, where: str) -> None:
    if dtype not in LAYOUTS:
        names = ", ".join(str(name) for name in LAYOUTS)
        raise SpecError(message(f"random.{where}: a key gives no {dtype}", fix=f"use one of {names}"))
