"""Draws against torch's own generator, in one run: `python benchmarks/random_bench.py`.

Prints the best time of each and its ratio to torch.rand (for bits and uniform) or torch.randn (for normal).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from spmdfn import threefry
from spmdfn.threefry import blocks


def best(draw: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs, in milliseconds."""
    draw()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        draw()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log2-size", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = 1 << options.log2_size
    key = threefry.key(0)

    start = time.perf_counter()
    threefry.normal(key)
    print(f"first draw: {time.perf_counter() - start:.2f} s (kernels: {'numba' if blocks.kernels() else 'torch'})")

    rand, randn = best(lambda: torch.rand(n), options.repeats), best(lambda: torch.randn(n), options.repeats)
    print(f"{'2^' + str(options.log2_size) + ' elements':28} {'ms':>8}  ratio")
    print(f"{'torch.rand f32':28} {rand:8.2f}\n{'torch.randn f32':28} {randn:8.2f}")
    half = n // 2
    rows: list[tuple[str, Callable[[], object], float]] = [
        ("bits u32", lambda: threefry.bits(key, (n,)), rand),
        ("uniform f32", lambda: threefry.uniform(key, (n,)), rand),
        ("uniform f32 in [-1, 2)", lambda: threefry.uniform(key, (n,), minval=-1, maxval=2), rand),
        ("uniform bf16", lambda: threefry.uniform(key, (n,), torch.bfloat16), rand),
        ("bernoulli", lambda: threefry.bernoulli(key, 0.9, (n,)), rand),
        ("normal f32", lambda: threefry.normal(key, (n,)), randn),
        ("normal bf16", lambda: threefry.normal(key, (n,), torch.bfloat16), randn),
        ("normal f64", lambda: threefry.normal(key, (n,), torch.float64), randn),
        ("block, runs of 64", lambda: blocks.block_uniform(key, (n // 64, 64), (128, 1), 64, torch.float32), rand),
        ("block, runs of 4", lambda: blocks.block_uniform(key, (n // 4, 4), (8, 1), 4, torch.float32), rand),
        ("block, every second element", lambda: blocks.block_uniform(key, (half * 2,), (2,), 1, torch.float32), rand),
    ]
    for name, draw, reference in rows:
        took = best(draw, options.repeats)
        print(f"{name:28} {took:8.2f}  {took / reference:5.2f}")

    small = best(lambda: [blocks.block_uniform(key, (4, 4), (8, 1), 3, torch.float32) for _ in range(1000)], 5)
    plain = best(lambda: [torch.rand(4, 4) for _ in range(1000)], 5)
    print(f"a block of 16 elements: {small:.1f} us; torch.rand: {plain:.1f} us")


if __name__ == "__main__":
    main()
