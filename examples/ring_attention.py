"""Ring attention: exact causal attention over a sequence that no device could hold.

The sequence is split over the devices of a ring, queries, keys and values alike. Queries stay where they are; blocks of
keys and values travel around, one hop with `sp.ppermute` each step, so every query meets every key after n steps. A
device never holds more than its own block and the one passing by, nor a matrix of all scores. (A backward pass keeps
what it needs of each step; `sp.remat` trades that for a second forward.)

The softmax over all keys is kept up to date as blocks arrive. For each query we hold the largest score so far, the sum
of exponentials relative to it, and the values weighted by those exponentials. A block with a larger score rescales what
was summed before; in the end one division makes it the softmax. This is exact, not an approximation.

Which keys are in the past depends on where a block came from. After `hop` hops device i holds the keys of device
`i - hop`: `sp.axis_index` is a tensor that differs from device to device, and so are positions made from it.

The backward is `torch.func.grad`: the transpose of a ppermute is the ppermute back, so gradients of keys and values
travel home around the ring. The largest score is a shift that cancels in the result, hence the `detach`.

Run it: `python examples/ring_attention.py`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import spmdfn as sp

# Suffixes of names are shapes: B batch, H heads, T positions (of one device), S positions of the block passing by,
# D features of a head.
SPLIT = "b h (ring t) d"


def one_device(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """What a single device would do, with the whole sequence."""
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def ring_attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
    """Causal attention for a block of positions: the body of a map over the axis "ring"."""
    size, here = sp.axis_size("ring"), sp.axis_index("ring")
    length = q_BHTD.shape[2]
    within_T = torch.arange(length)
    to_the_right = [(i, (i + 1) % size) for i in range(size)]

    q_BHTD = q_BHTD * q_BHTD.shape[-1] ** -0.5
    top_BHT = torch.full_like(q_BHTD[..., 0], float("-inf"))
    total_BHT = torch.zeros_like(top_BHT)
    out_BHTD = torch.zeros_like(q_BHTD)

    for hop in range(size):
        source = (here - hop) % size  # whose keys these are
        allowed_TS = (here * length + within_T)[:, None] >= (source * length + within_T)[None, :]
        scores_BHTS = (q_BHTD @ k_BHSD.mT).masked_fill(~allowed_TS, float("-inf"))

        # Hop 0 is the device's own block, where every query sees itself: `top` is finite from then on.
        new_top_BHT = torch.maximum(top_BHT, scores_BHTS.amax(-1).detach())
        weights_BHTS = torch.exp(scores_BHTS - new_top_BHT[..., None])
        rescale_BHT = torch.exp(top_BHT - new_top_BHT)
        total_BHT = total_BHT * rescale_BHT + weights_BHTS.sum(-1)
        out_BHTD = out_BHTD * rescale_BHT[..., None] + weights_BHTS @ v_BHSD
        top_BHT = new_top_BHT

        if hop < size - 1:
            k_BHSD, v_BHSD = sp.ppermute((k_BHSD, v_BHSD), "ring", to_the_right)
    return out_BHTD / total_BHT[..., None]


def make(mesh: sp.Mesh) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention over whole sequences, computed around the ring."""
    return sp.shard_map(ring_attention, mesh=mesh, in_specs=(SPLIT, SPLIT, SPLIT), out_specs=SPLIT)


def with_gradients(attention: Callable, seed_BHTD: Tensor) -> Callable:
    """(q, k, v) -> the gradients of all three, for a loss that weights each output."""
    return torch.func.grad(lambda q, k, v: (attention(q, k, v) * seed_BHTD).sum(), argnums=(0, 1, 2))


def main() -> None:
    mesh = sp.make_mesh((4,), ("ring",))
    q, k, v, seed = sp.random.normal(sp.random.key(0), (4, 2, 3, 32, 8))  # batch 2, 3 heads, 32 positions, 8 features
    attention = make(mesh)

    print("a call, 8 positions on each device:")
    sp.explain(sp.spmd_jit(attention, mesh=mesh, in_specs=SPLIT))(q, k, v)

    out = attention(q, k, v)  # op by op: print and pdb work in the body
    print(f"\nlaid out as {out}")
    print(f"largest difference from one device: {float((sp.unshard(out) - one_device(q, k, v)).abs().max()):.1e}")

    gradients = sp.spmd_jit(with_gradients(attention, seed), mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    expected = with_gradients(one_device, seed)(q, k, v)
    for name, found, value in zip("qkv", gradients(q, k, v), expected, strict=True):
        print(f"largest difference of the gradient of {name}: {float((found.unshard() - value).abs().max()):.1e}")


if __name__ == "__main__":
    main()
