"""Keys: where randomness comes from. A key is a uint32 tensor of shape (..., 2); every draw names the key it uses."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError, message
from . import ops

WORD = 1 << 32


def key(seed: int | Tensor) -> Tensor:
    """A new key, uint32 (2,), from an integer seed: its high and its low 32 bits.

    Seeds from -2**63 to 2**64 - 1 (negative ones by two's complement), or an integer tensor of shape (). Raises
    SpecError for anything else, a float above all.

    >>> key(42)
    tensor([ 0, 42], dtype=torch.uint32)
    """
    if isinstance(seed, Tensor):
        if seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool or seed.dim() != 0:
            raise _bad_seed(f"a {seed.dtype} tensor of shape {tuple(seed.shape)}", "an integer tensor of shape ()")
        wide = seed.to(torch.int64)
        return torch.stack([(wide >> 32) & (WORD - 1), wide & (WORD - 1)]).to(torch.uint32)
    try:
        number = operator.index(seed)
    except TypeError:
        raise _bad_seed(f"{type(seed).__name__} {seed!r}", "an int, as in sp.random.key(0)") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise _bad_seed(str(number), "an int that fits 64 bits")
    return torch.tensor([(number >> 32) & (WORD - 1), number & (WORD - 1)], dtype=torch.uint32)


def _bad_seed(got: str, fix: str) -> SpecError:
    return SpecError(message("random.key: the seed must be an integer", f"seed: {got}", fix=fix))


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """New keys, uint32 (..., *num, 2), from each key of (..., 2): independent of it and of each other.

    `num`: an int or a shape. `split(key, n)[i]` equals `fold_in(key, i)`, so more keys never change the first ones.
    Raises SpecError for what is not a key. Use a key for one thing only: `bits(key, (n,), torch.uint64)` are the very
    words of `split(key, n)`.

    >>> a, b = split(key(0))
    >>> b
    tensor([ 928981903, 3453687069], dtype=torch.uint32)
    """
    check_key(key, "split")
    return ops.threefry(key, check_shape(num, "split"), 0)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number, uint32 (..., 2): for a step, a layer, a position on the mesh.

    `data`: an int from 0 to 2**32 - 1, or an integer tensor (taken modulo 2**32), whose shape broadcasts with the key's
    leading dims: `fold_in(key, torch.arange(n))` is `split(key, n)`. Raises SpecError for other ints and for floats.

    >>> fold_in(key(42), 7)
    tensor([2547012911, 1371500959], dtype=torch.uint32)
    """
    check_key(key, "fold_in")
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise _bad_data(f"a {data.dtype} tensor", "fold in an integer tensor")
        shape = torch.broadcast_shapes(key.shape[:-1], data.shape)
        pairs = key if key.shape[:-1] == shape else key.expand(*shape, 2)
        return ops.fold_in(pairs, data if data.shape == shape else data.expand(shape))
    try:
        number = operator.index(data)
    except TypeError:
        raise _bad_data(f"{type(data).__name__} {data!r}", "fold in an int, as a step or a layer's index") from None
    if not 0 <= number < WORD:
        raise _bad_data(str(number), "fold in twice: the high 32 bits, then the low ones")
    return ops.threefry(key, (), number)


def _bad_data(got: str, fix: str) -> SpecError:
    what = "random.fold_in: what is folded into a key must be an integer from 0 to 2**32 - 1, not negative"
    return SpecError(message(what, f"data: {got}", fix=fix))


def check_key(value: Any, where: str) -> None:
    """Raise SpecError, with the way to make a key, unless the value is a uint32 tensor of shape (..., 2)."""
    if isinstance(value, Tensor) and value.dtype == torch.uint32 and value.dim() and value.shape[-1] == 2:
        return
    if isinstance(value, Tensor):
        got, fix = f"a {value.dtype} tensor of shape {tuple(value.shape)}", "make one with sp.random.key(seed)"
    elif isinstance(value, int):
        got, fix = f"the int {value}", f"sp.random.key({value})"
    else:
        got, fix = f"{type(value).__name__} {value!r}", "make one with sp.random.key(seed)"
    wanted = "wanted: a uint32 tensor of shape (..., 2)"
    raise SpecError(message(f"random.{where}: the first argument is not a key", f"got: {got}", wanted, fix=fix))


def check_shape(shape: int | Sequence[int], where: str) -> tuple[int, ...]:
    """A shape as a tuple of ints that are not negative; an int stands for one dim. Raises SpecError otherwise.

    >>> check_shape(3, "bits"), check_shape([2, 3], "bits")
    ((3,), (2, 3))
    """
    try:
        sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or math.prod(sizes) >= 1 << 63:
        fix = "use a tuple of ints, none negative"
        raise SpecError(message(f"random.{where}: no shape to draw for the key", f"shape: {shape!r}", fix=fix))
    return sizes
