"""The samplers as torch ops over whole arrays, batched over the leading dims of the key: `torch.ops.spmdfn.random_*`.

They have no autograd: a key is an integer, and nothing flows to it. Under vmap over keys each stays one op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import blocks

Op = Callable[..., Tensor]
_LIBRARY = torch.library.Library("spmdfn", "FRAGMENT")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array of that shape.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _bits(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return blocks.block_bits(key, shape, row_major(shape), 0, dtype)


def _uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return blocks.block_uniform(key, shape, row_major(shape), 0, dtype)


def _normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return blocks.block_normal(key, shape, row_major(shape), 0, dtype)


def _threefry(key: Tensor, shape: Sequence[int], base: int) -> Tensor:
    return blocks.block_threefry(key, shape, row_major(shape), base)


def _fake_sample(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


def _fake_threefry(key: Tensor, shape: Sequence[int], base: int) -> Tensor:
    return key.new_empty((*key.shape[:-1], *shape, 2))


def _fake_fold(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty(key.shape)


def _define(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor], batch: Callable[..., Any]) -> Op:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmdfn::{name}", fake, lib=_LIBRARY)
    op: Op = getattr(torch.ops.spmdfn, name).default
    torch.library.register_vmap(f"spmdfn::{name}", lambda *args: batch(op, *args), lib=_LIBRARY)
    return op


def _batch_key(op: Op, info: Any, dims: tuple[int | None, ...], key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return op(_front(key, dims[0]), *rest), 0


def _batch_fold(op: Op, info: Any, dims: tuple[int | None, ...], key: Tensor, data: Tensor) -> tuple[Tensor, int]:
    key = key.expand(info.batch_size, *key.shape) if dims[0] is None else _front(key, dims[0])
    data = data.expand(info.batch_size, *data.shape) if dims[1] is None else _front(data, dims[1])
    return op(key, data), 0


def _front(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if not dim else tensor.movedim(dim, 0)


random_bits = _define(
    "random_bits(Tensor key, int[] shape, ScalarType dtype) -> Tensor", _bits, _fake_sample, _batch_key
)
random_uniform = _define(
    "random_uniform(Tensor key, int[] shape, ScalarType dtype) -> Tensor", _uniform, _fake_sample, _batch_key
)
random_normal = _define(
    "random_normal(Tensor key, int[] shape, ScalarType dtype) -> Tensor", _normal, _fake_sample, _batch_key
)
threefry = _define("threefry(Tensor key, int[] shape, int base) -> Tensor", _threefry, _fake_threefry, _batch_key)
fold_in = _define("threefry_fold_in(Tensor key, Tensor data) -> Tensor", blocks.fold, _fake_fold, _batch_fold)
