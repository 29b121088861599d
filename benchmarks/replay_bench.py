"""What replaying costs: a GPT's train step as a Program against the plain function, and 8 virtual devices against one.

    python benchmarks/replay_bench.py              # widths 64 and 256, four layers; about a minute

Runs alternate, and the least CPU time of each counts. The plain function runs `torch.func.grad_and_value` eagerly.
The local backend runs its devices one after the other in one thread, so 8 devices do 8 shares of the work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

import spmdfn as sp
from spmdfn import P, bindings, optim


def best(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The CPU time of the shortest of several alternating runs of each, in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: min(found) * 1e3 for name, found in times.items()}


def step_of(config: gpt.Config) -> Callable[..., Any]:
    """A train step by AdamW with clipping, without dropout: draws are measured by random_bench.py."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, b2=0.99, weight_decay=0.1))

    def step(params: Any, state: Any, tokens: torch.Tensor) -> Any:
        grads, loss = torch.func.grad_and_value(partial(gpt.loss, config=config))(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    return step


def measure(width: int, layers: int, batch: int, repeats: int) -> None:
    config = gpt.Config(layers=layers, width=width, dropout=0.0)
    step = step_of(config)
    params = gpt.init(sp.random.key(0), config)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, b2=0.99, weight_decay=0.1))
    state = optimizer.init(params)
    tokens = torch.arange(batch * (config.context + 1)).view(batch, -1) * 7919 % config.vocabulary
    specs = sp.tree_specs(gpt.shapes(config), gpt.LAYOUT)

    def jitted(shape: tuple[int, ...]) -> Callable[[], object]:
        mesh = sp.make_mesh(shape, gpt.AXES)
        run = sp.spmd_jit(step, mesh=mesh, in_specs=(specs, None, gpt.TOKENS), out_specs=(specs, None, P()))
        placed = sp.shard(params, specs, mesh=mesh)
        moments = sp.spmd_jit(optimizer.init, mesh=mesh)(placed)
        run(placed, moments, tokens)
        return lambda: run(placed, moments, tokens)

    def plain() -> object:
        with torch.no_grad():
            return step(params, state, tokens)

    with mock.patch.dict(bindings.TEMPLATES, clear=True), mock.patch.dict(bindings.BINDINGS, clear=True):
        overloads = jitted((1, 1, 1))
    runs = {"plain": plain, "1 device": jitted((1, 1, 1)), "1, by overloads": overloads, "8 devices": jitted((2, 2, 2))}
    times = best(runs, repeats)
    print(f"{layers} layers of width {width}, {batch} sequences of {config.context}")
    for name, took in times.items():
        print(f"  {name:18} {took:9.1f} ms   {took / times['plain']:5.2f} of plain")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for width in (64, 256):
        measure(width, args.layers, args.batch, args.repeats)


if __name__ == "__main__":
    main()
