"""What an operator on an Array costs next to torch's own and to a DTensor's: `python benchmarks/array_ops_bench.py`.

Small tensors, so that the numbers are overhead, in microseconds of CPU time, best of several runs. An Array of one
device and a DTensor on a gloo group of one process do the same: one local op. An Array of eight devices in this process
runs eight of them (its row is divided by nothing); DTensor needs eight processes for that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import spmdfn as sp
from spmdfn import P

OPS: dict[str, Callable[[Any], Any]] = {
    "x + x": lambda x: x + x,
    "x * 2.0": lambda x: x * 2.0,
    "x @ x": lambda x: x @ x,
    "x.sum(1)": lambda x: x.sum(1),
    "x.T": lambda x: x.T,
    "x.softmax(1)": lambda x: x.softmax(1),
    "x.add_(0)": lambda x: x.add_(0),
}


def best(run: Callable[[], object], repeats: int, loops: int) -> float:
    """The shortest of several runs, in microseconds a call."""
    for _ in range(10):
        run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(loops):
            run()
        times.append(time.process_time() - start)
    return min(times) / loops * 1e6


def dtensor(value: torch.Tensor) -> DTensor:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distribute_tensor(value, dist.device_mesh.init_device_mesh("cpu", (1,)), [Shard(0)])


def first(function: Callable[[Any], Any], x: Any) -> float:
    """The time of a call that has to build its program, in milliseconds."""
    start = time.process_time()
    function(x)
    return (time.process_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--loops", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    value = torch.randn(options.size, options.size)
    one = sp.shard(value, P("x"), mesh=sp.make_mesh((1,), ("x",)))
    eight = sp.shard(value, P("x"), mesh=sp.make_mesh((8,), ("x",)))
    whole = sp.shard(value, P(), mesh=sp.make_mesh((8,), ("x",)))
    other = dtensor(value)
    print(f"{'us':14}{'torch':>9}{'DTensor':>9}{'Array':>9}{'8 devices':>11}{'8, whole':>10}{'first call, ms':>16}")
    with torch.no_grad():
        for name, function in OPS.items():
            built = first(function, eight)
            row = [
                best(lambda f=function, x=x: f(x), options.repeats, options.loops)  # type: ignore[misc]
                for x in (value, other, one, eight, whole)
            ]
            print(f"{name:14}{row[0]:9.1f}{row[1]:9.1f}{row[2]:9.1f}{row[3]:11.1f}{row[4]:10.1f}{built:16.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
