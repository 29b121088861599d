"""A collective matmul: the all_gather that a product waits for, taken apart so that it overlaps with the product.

`x` is split by rows, `w` by columns, and every device wants all rows times its own columns. The plain way gathers `x`
first, and the matrix units idle meanwhile. But rows do not depend on one another: a device can multiply the block that
it has while the next one travels. So blocks go around a ring, one hop with `sp.ppermute` for every product:

    hop       device 0   device 1   device 2   device 3
    0         x0 @ w0    x1 @ w1    x2 @ w2    x3 @ w3     and meanwhile each block moves to the right
    1         x3 @ w0    x0 @ w1    x1 @ w2    x2 @ w3
    ...                                                    n-1 hops, the bytes of one all_gather

Links carry data both ways. With two rings, half of each block goes to the right and half to the left: the same bytes
in all, half of them over each direction of a link, and so half the time on the wire.

The gradient needs nothing: the transpose of a ppermute is the ppermute back, so `torch.func.grad` makes the rings run
the other way, and the gradient of `x` is reduced on its way home (a reduce_scatter taken apart).

Run it: `python examples/collective_matmul.py`
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import spmdfn as sp

# Suffixes of names are shapes: M rows, K summed over, N columns; m and n are one device's part; R devices in the ring.
IN, OUT = ("(ring m) k", "k (ring n)"), "m (ring n)"
RIGHT, LEFT = 1, -1


def gather_first(x_mK: Tensor, w_Kn: Tensor) -> Tensor:
    """The plain way: wait for all rows, then one product."""
    x_MK = sp.all_gather(x_mK, "ring", tiled=True)
    return x_MK @ w_Kn


def overlapped(x_mK: Tensor, w_Kn: Tensor, ways: tuple[int, ...]) -> Tensor:
    """The same, with a ring for each of `ways`; a part of each block travels on each."""
    size = sp.axis_size("ring")
    parts = list(x_mK.chunk(len(ways)))
    arrived: list[list[Tensor]] = [[] for _ in ways]  # products, in the order in which their rows came by
    for hop in range(size):
        sent = [
            sp.ppermute(part, "ring", [(i, (i + way) % size) for i in range(size)]) if hop < size - 1 else part
            for part, way in zip(parts, ways, strict=True)
        ]
        for products, part in zip(arrived, parts, strict=True):
            products.append(part @ w_Kn)  # does not depend on what was just sent
        parts = sent
    # The rows of device r came by at hop way * (here - r): put them in order. The index differs from device to device.
    here, device_R = sp.axis_index("ring"), torch.arange(size)
    ordered = [
        torch.stack(products)[way * (here - device_R) % size] for products, way in zip(arrived, ways, strict=True)
    ]
    return torch.cat(ordered, dim=1).flatten(0, 1)


def one_way(x_mK: Tensor, w_Kn: Tensor) -> Tensor:
    return overlapped(x_mK, w_Kn, (RIGHT,))


def two_way(x_mK: Tensor, w_Kn: Tensor) -> Tensor:
    return overlapped(x_mK, w_Kn, (RIGHT, LEFT))


def make(body: Callable, mesh: sp.Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of whole matrices: x @ w."""
    return sp.shard_map(body, mesh=mesh, in_specs=IN, out_specs=OUT)


def main() -> None:
    mesh = sp.make_mesh((4,), ("ring",))
    x_MK = sp.random.normal(sp.random.key(0), (32, 16))
    w_KN = sp.random.normal(sp.random.key(1), (16, 24))
    seed_MN = sp.random.normal(sp.random.key(2), (32, 24))

    def loss(product: Callable) -> Callable:
        return lambda x, w: (product(x, w) * seed_MN).sum()

    expected = torch.func.grad(loss(torch.matmul), argnums=(0, 1))(x_MK, w_KN)
    for body in (gather_first, one_way, two_way):
        product = make(body, mesh)
        print(f"\n{body.__name__}:")
        sp.explain(sp.spmd_jit(product, mesh=mesh, in_specs=IN))(x_MK, w_KN)
        y_MN = sp.unshard(product(x_MK, w_KN))
        print(f"largest difference from x @ w: {float((y_MN - x_MK @ w_KN).abs().max()):.1e}")
        found = torch.func.grad(loss(product), argnums=(0, 1))(x_MK, w_KN)
        difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        print(f"largest difference of a gradient: {difference:.1e}")


if __name__ == "__main__":
    main()
