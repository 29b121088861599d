"""What an op costs in an eager map (types tracked, all devices in lock-step), next to torch's LocalTensor and DTensor.

    python benchmarks/eager_map_bench.py               # 4 and 8 devices; a few minutes, most of it LocalTensor's

Chains of one op over small blocks, so that the overhead shows. Times are CPU microseconds per op and device; "x" is the
ratio to the bare op on each block in turn. LocalTensor holds all ranks in one process, as an eager map does. DTensor
runs one rank of a fake process group, which moves nothing: its figure is the overhead of one process for its device.
The backward is torch.func.grad in the map, and `.backward()` in the others, of the whole chain: forward included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

import spmdfn as sp
from spmdfn import P

SIZE = 16
Op = Callable[[torch.Tensor], torch.Tensor]
POINTWISE: dict[str, Op] = {
    "mul": lambda x: x * 0.5,
    "add": lambda x: x + x,
    "tanh": torch.tanh,
    "matmul": lambda x: x @ x,
    "softmax": lambda x: x.softmax(-1),
}


def chain(op: Op, length: int) -> Op:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = op(x)
        return x

    return run


def per_op(run: Callable[[], object], ops: int, repeats: int) -> float:
    """The least CPU time of several runs, in microseconds per op."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times[1:]) * 1e6 / ops


def in_map(f: Op, n: int) -> Callable[[], object]:
    """A chain in a map; the borders of the map count too, once for the whole chain."""
    mesh = sp.make_mesh((n,), ("i",))
    x = sp.shard(torch.randn(n * SIZE, SIZE), P("i"), mesh=mesh)
    mapped = sp.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    return lambda: mapped(x)


def on_blocks(f: Op, n: int) -> Callable[[], object]:
    blocks = [torch.randn(SIZE, SIZE) for _ in range(n)]
    return lambda: [f(block) for block in blocks]


def backward(f: Op) -> Op:
    """The same with `.backward()` of the sum."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        f(x).sum().backward()
        assert x.grad is not None
        return x.grad

    return run


def on_local_tensors(f: Op, n: int) -> Callable[[], object] | None:
    """None where this torch has no LocalTensor."""
    try:
        from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    except ImportError:
        return None
    mode = LocalTensorMode(n)
    with mode:
        x = LocalTensor({rank: torch.randn(SIZE, SIZE) for rank in range(n)})

    def run() -> object:
        with mode:
            return f(x)

    return run


def on_dtensor(f: Op, n: int) -> Callable[[], object]:
    mesh = init_device_mesh("cpu", (n,))
    x = DTensor.from_local(torch.randn(SIZE, SIZE), mesh, [Shard(0)])
    return lambda: f(x)


def row(name: str, bare: float, others: dict[str, float | None]) -> None:
    shown = [f"{name:24}{bare:9.1f}"]
    for value in others.values():
        shown.append("          not run" if value is None else f"{value:9.1f} {value / bare:6.1f}x")
    print(" ".join(shown))


def measure(n: int, length: int, repeats: int) -> None:
    print(f"\n{n} devices, blocks of {SIZE}x{SIZE}, chains of {length}; microseconds per op and device")
    print(f"{'':24}{'bare op':>9} {'eager map':>17} {'LocalTensor':>17} {'DTensor':>17}")

    def cost(run: Callable[[], object] | None, devices: int = n) -> float | None:
        return None if run is None else per_op(run, length * devices, repeats)

    for name, op in POINTWISE.items():
        f = chain(op, length)
        bare = per_op(on_blocks(f, n), length * n, repeats)
        # over a split dim a matmul of two such blocks would communicate: DTensor takes a whole second operand instead
        spread = on_dtensor(f, n) if name != "matmul" else on_dtensor(chain(lambda x: x @ whole(n), length), n)
        row(name, bare, {"map": cost(in_map(f, n)), "local": cost(on_local_tensors(f, n)), "d": cost(spread, 1)})
    f = chain(torch.tanh, length)
    bare = per_op(on_blocks(backward(f), n), length * n, repeats)
    gradient = torch.func.grad(lambda x: sp.psum(f(x).sum(), "i"))
    others = {
        "map": cost(in_map(gradient, n)),
        "local": cost(on_local_tensors(backward(f), n)),
        "d": cost(on_dtensor(backward(f), n), 1),
    }
    row("tanh and its gradient", bare, others)
    row("all_reduce", *collectives(n, length, repeats, cost))


@cache
def whole(n: int) -> DTensor:
    return distribute_tensor(torch.eye(SIZE), init_device_mesh("cpu", (n,)))


def collectives(n: int, length: int, repeats: int, cost: Any) -> tuple[float, dict[str, float | None]]:
    """A sum over the devices. Bare: the blocks added up once, and every device given the result."""
    blocks = [torch.randn(SIZE, SIZE) for _ in range(n)]

    def bare() -> None:
        for _ in range(length):
            total = blocks[0].clone()
            for block in blocks[1:]:
                total += block

    def summed(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            y = sp.psum(x, "i")
        return sp.pcast(y, "i")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            y = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
            y = torch.ops._c10d_functional.wait_tensor(y)
        return y

    mesh = init_device_mesh("cpu", (n,))
    pending = DTensor.from_local(torch.randn(SIZE, SIZE), mesh, [Partial()])

    def redistributed() -> None:
        for _ in range(length):
            pending.redistribute(mesh, [Replicate()])

    others = {
        "map": cost(in_map(summed, n)),
        "local": cost(on_local_tensors(reduced, n)),
        "d": cost(redistributed, 1),
    }
    return per_op(bare, length * n, repeats), others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for n in options.devices:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
        try:
            measure(n, options.length, options.repeats)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
