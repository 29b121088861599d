"""The threefry-2x32 hash in torch ops: the reference for every kernel, and what runs where there is none.

Words are int32 tensors: torch's unsigned types have no arithmetic, and int32 wraps around the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
LOW = 0xFFFFFFFF


def threefry(k0: Tensor, k1: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC'11) of int32 words that broadcast together.

    >>> zero = torch.tensor(0, dtype=torch.int32)
    >>> [f"{int(word) & 0xFFFFFFFF:08x}" for word in threefry(zero, zero, zero, zero)]
    ['6b200159', '99ba4efe']
    """
    keys = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = c0 + k0, c1 + k1
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate(x1, rotation) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (group + 1)
    return x0, x1


def _rotate(x: Tensor, by: int) -> Tensor:
    # int32 shifts right arithmetically; the mask clears the copies of the sign.
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))


def counters(sizes: Sequence[int], strides: Sequence[int], base: int, device: torch.device) -> Tensor:
    """The counters `base + sum(strides[i] * index[i])` of a box: int64, shape `sizes`.

    >>> counters((2, 3), (10, 1), 100, torch.device("cpu")).tolist()
    [[100, 101, 102], [110, 111, 112]]
    """
    total = torch.full((1,) * len(sizes), base, dtype=torch.int64, device=device)
    for dim, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64, device=device) * stride
        total = total + steps.reshape((size,) + (1,) * (len(sizes) - dim - 1))
    return total


def words(key: Tensor, sizes: Sequence[int], strides: Sequence[int], base: int) -> tuple[Tensor, Tensor]:
    """Both hash words of every counter of a box, for keys of shape [*batch, 2]: int32, shape [*batch, *sizes]."""
    counter = counters(sizes, strides, base, key.device)
    pair = key.view(torch.int32)
    ones = (1,) * len(sizes)
    k0, k1 = (pair[..., i].reshape((*key.shape[:-1], *ones)) for i in (0, 1))
    return threefry(k0, k1, (counter >> 32).to(torch.int32), low_word(counter))


def low_word(value: Tensor) -> Tensor:
    """The low 32 bits of an integer tensor, as int32.

    >>> low_word(torch.tensor([2**32 - 1, 2**32 + 5])).tolist()
    [-1, 5]
    """
    value = value.to(torch.int64) & LOW
    # In range of int32 before the cast: what a cast does out of range is the device's own affair.
    return (value - ((value >> 31) << 32)).to(torch.int32)
