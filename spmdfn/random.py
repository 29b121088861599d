"""Random numbers from explicit keys: the same values, to the bit, for any mesh, layout and number of devices.

Names, argument order and values are those of `jax.random` with its default generator. A key is a plain uint32 tensor of
shape (..., 2); it is used for one draw, and `split` or `fold_in` make more. Every sampler takes `spec=`: inside a
traced function it pins the layout of the draw, outside the result is an Array; each device computes its own block only.
Under `shard_map` it gives this device's block of the global draw, whose shape is then the one asked for.

The generator is threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
with an element's row-major index in the whole array as its counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import threefry as core
from ._compat import transforms_active
from .device_types import current_frame
from .jit import spmd_jit
from .movers import constrain
from .spec import Spec
from .threefry import key as key
from .threefry.keys import check_key, check_shape

Number = int | float | Tensor
Shape = int | Sequence[int]

__all__ = ["bernoulli", "bits", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]


def split(key: Tensor, num: Shape = 2, *, spec: Spec = None) -> Tensor:
    """New keys, uint32 (..., *num, 2), from each key of (..., 2): independent of it and of each other.

    `num`: an int or a shape. `split(key, n)[i]` equals `fold_in(key, i)`, so more keys never change the first ones.
    Raises SpecError for what is not a key. Use a key for one thing only: `bits(key, (n,), torch.uint64)` are the very
    words of `split(key, n)`.

    >>> import spmdfn as sp
    >>> a, b = sp.random.split(sp.random.key(0))
    >>> b
    tensor([ 928981903, 3453687069], dtype=torch.uint32)
    """
    return _draw(core.split, spec, key=key, num=check_shape(num, "split"))


def fold_in(key: Tensor, data: int | Tensor, *, spec: Spec = None) -> Tensor:
    """A new key from a key and a number, uint32 (..., 2): for a step, a layer, a position on the mesh.

    `data`: an int from 0 to 2**32 - 1, or an integer tensor (taken modulo 2**32), whose shape broadcasts with the key's
    leading dims: `fold_in(key, torch.arange(n))` is `split(key, n)`. Raises SpecError for other ints and for floats.

    >>> import spmdfn as sp
    >>> sp.random.fold_in(sp.random.key(42), 7)
    tensor([2547012911, 1371500959], dtype=torch.uint32)
    """
    return _draw(core.fold_in, spec, key=key, data=data)


def bits(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.uint32, *, spec: Spec = None) -> Tensor:
    """Random bits of shape (..., *shape), 8 to 64 each by the integer `dtype`. Raises SpecError for another dtype.

    >>> import spmdfn as sp
    >>> sp.random.bits(sp.random.key(42), (2,))
    tensor([2098992034, 2919706841], dtype=torch.uint32)
    """
    return _draw(core.bits, spec, key=key, shape=check_shape(shape, "bits"), dtype=dtype)


def uniform(
    key: Tensor,
    shape: Shape = (),
    dtype: torch.dtype = torch.float32,
    minval: Number = 0,
    maxval: Number = 1,
    *,
    spec: Spec = None,
) -> Tensor:
    """Floats in [minval, maxval) of shape (..., *shape).

    The bounds may be tensors that broadcast to the shape; gradients flow to them. Raises SpecError for a dtype that is
    no float of 16 to 64 bits.

    >>> import spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> with sp.set_mesh(mesh):
    ...     x = sp.random.uniform(sp.random.key(42), (8, 4), spec="(dp b) (tp d)")
    >>> x
    f32[8@dp, 4@tp]
    >>> torch.equal(x.unshard(), sp.random.uniform(sp.random.key(42), (8, 4)))
    True
    """
    sizes = check_shape(shape, "uniform")
    return _draw(core.uniform, spec, key=key, shape=sizes, dtype=dtype, minval=minval, maxval=maxval)


def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype = torch.float32, *, spec: Spec = None) -> Tensor:
    """Standard normals of shape (..., *shape).

    They are sqrt(2) * erfinv of a uniform draw on (-1, 1), so float32 values lie within +-5.42; erfinv in float32 is
    the polynomial of Giles, "Approximating the erfinv function" (GPU Computing Gems, 2012). Raises SpecError for a
    dtype that is no float of 16 to 64 bits.

    >>> import spmdfn as sp
    >>> sp.random.normal(sp.random.key(42), (3,))
    tensor([-0.0283,  0.4671,  0.2957])
    """
    return _draw(core.normal, spec, key=key, shape=check_shape(shape, "normal"), dtype=dtype)


def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None, *, spec: Spec = None) -> Tensor:
    """True with probability `p`: bool (..., *shape), by default of p's shape.

    A Python p draws float32, a tensor its own dtype. Raises SpecError for a p that is no float.

    >>> import spmdfn as sp
    >>> sp.random.bernoulli(sp.random.key(0), 0.3, (6,)).tolist()
    [False, False, False, False, False, True]
    """
    sizes = None if shape is None else check_shape(shape, "bernoulli")
    return _draw(core.bernoulli, spec, key=key, p=p, shape=sizes)


def randint(
    key: Tensor,
    shape: Shape,
    minval: int | Tensor,
    maxval: int | Tensor,
    dtype: torch.dtype = torch.int32,
    *,
    spec: Spec = None,
) -> Tensor:
    """Integers from minval up to, not including, maxval: (..., *shape) of the integer `dtype`.

    The bounds may be integer tensors that broadcast to the shape; where maxval <= minval the value is minval. Raises
    SpecError for floats.

    >>> import spmdfn as sp
    >>> sp.random.randint(sp.random.key(42), (6,), -5, 12).tolist()
    [-3, 4, 1, -3, 2, 1]
    """
    sizes = check_shape(shape, "randint")
    return _draw(core.randint, spec, key=key, shape=sizes, minval=minval, maxval=maxval, dtype=dtype)


def permutation(key: Tensor, x: int | Tensor, *, spec: Spec = None) -> Tensor:
    """x with its rows (dim 0) in random order, or the numbers 0 to x - 1 (int64) for an int x.

    The order is that of a stable sort by random words, repeated if they are few for so many rows. Every device of a
    mesh computes the whole of it. Raises SpecError for a tensor of shape ().

    >>> import spmdfn as sp
    >>> sp.random.permutation(sp.random.key(0), 7).tolist()
    [0, 1, 5, 6, 4, 3, 2]
    """
    return _draw(core.permutation, spec, key=key, x=x)


def _draw(sampler: Callable[..., Tensor], spec: Spec, **values: Any) -> Tensor:
    check_key(values["key"], sampler.__name__)
    if spec is None:
        return sampler(**values)
    frame = current_frame()
    if frame is not None:  # this device's block of the global draw
        return frame.globally(functools.partial(_draw, sampler, spec if frame.outer is None else None), values, spec)
    if transforms_active():
        return constrain(sampler(**values), spec)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    fixed = tuple((name, value) for name, value in values.items() if name not in tensors)
    result: Tensor = _placed(sampler, spec, fixed)(tensors)
    return result


@functools.lru_cache(maxsize=1024)
def _placed(sampler: Callable[..., Tensor], spec: Spec, fixed: tuple[tuple[str, Any], ...]) -> Any:
    def draw(tensors: dict[str, Tensor]) -> Tensor:
        return sampler(**tensors, **dict(fixed))

    draw.__name__ = f"random.{sampler.__name__}"
    return spmd_jit(draw, out_specs=spec)
