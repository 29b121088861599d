"""What lowering costs: the demo's train step (AdamW, clipping, dropout) traced and partitioned, by depth and by mesh.

    python benchmarks/lower_bench.py                 # both tables; about two minutes
    python benchmarks/lower_bench.py --layers 5      # one row

Nothing is computed: arguments are meta tensors and meshes have no data. Each row runs in a process of its own, so that
nothing is remembered from the row before. Times are CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

import spmdfn as sp
import spmdfn.jit
from spmdfn import P, optim

LAYERS = (2, 4, 8, 16, 32)
MESHES = ((1, 1, 1), (2, 2, 2), (4, 4, 4), (16, 8, 8), (64, 16, 16))


def lower(layers: int, shape: tuple[int, ...], *, wide: bool) -> dict[str, Any]:
    """Lower one train step; `wide` for sizes that the largest mesh divides."""
    sizes = {"width": 1024, "heads": 16} if wide else {}
    config = gpt.Config(layers=layers, **sizes)
    mesh = sp.make_mesh(shape, gpt.AXES, backend="fake")
    specs = sp.tree_specs(gpt.shapes(config), gpt.LAYOUT)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, b2=0.99, weight_decay=0.1))

    @sp.spmd_jit(mesh=mesh, in_specs=(specs, None, gpt.TOKENS, P()), out_specs=(specs, None, P()))
    def step(params: Any, state: Any, tokens: torch.Tensor, key: torch.Tensor) -> Any:
        loss_fn = partial(gpt.loss, config=config, key=key)
        grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    params = gpt.shapes(config)
    tokens = torch.empty((1024 if wide else 16, config.context + 1), dtype=torch.int64, device="meta")
    key = torch.empty(2, dtype=torch.uint32, device="meta")
    found: dict[str, Any] = {}
    traced_by = spmdfn.jit.trace_call

    def timed(*args: Any) -> Any:
        start = time.process_time()
        traced = traced_by(*args)
        found["trace"] = time.process_time() - start
        found["traced"] = len(traced.traced.graph.nodes)
        return traced

    state = optimizer.init(params)
    gc.collect()
    with mock.patch.object(spmdfn.jit, "trace_call", timed):
        start = time.process_time()
        program = step.lower(params, state, tokens, key)
        total = time.process_time() - start
    start = time.process_time()
    program.as_text()
    found |= {"after": total - found["trace"], "text": time.process_time() - start}
    return found | {"nodes": len(program.graph.nodes), "collectives": len(program.collectives)}


def measure(layers: int, shape: tuple[int, ...], *, wide: bool) -> dict[str, Any]:
    """`lower` in a fresh process."""
    text = json.dumps({"layers": layers, "shape": shape, "wide": wide})
    done = subprocess.run([sys.executable, __file__, "--row", text], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(request: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    warm = sp.spmd_jit(torch.func.grad(lambda x: x.sin().sum()), mesh=sp.make_mesh((1,), ("a",), backend="fake"))
    warm.lower(torch.ones(2))  # what torch imports at its first trace is not ours
    given = json.loads(request)
    return lower(given["layers"], tuple(given["shape"]), wide=given["wide"])


HEADER = f"{'':>14} {'traced':>7} {'program':>8} {'moves':>6} {'trace':>8} {'after':>8} {'text':>8} {'after/trace':>12}"


def line(name: str, row: dict[str, Any]) -> str:
    times = " ".join(f"{row[part]:7.2f}s" for part in ("trace", "after", "text"))
    ratio = (row["after"] + row["text"]) / row["trace"]
    return f"{name:>14} {row['traced']:>7} {row['nodes']:>8} {row['collectives']:>6} {times} {ratio:>12.2f}"


def by_depth(layers: tuple[int, ...]) -> None:
    print(f"by depth, on 2 x 2 x 2 devices\n{HEADER} {'ms a layer':>11}")
    before: tuple[int, float] | None = None
    for count in layers:
        row = measure(count, (2, 2, 2), wide=False)
        total = row["trace"] + row["after"] + row["text"]
        each = "" if before is None else f"{1000 * (total - before[1]) / (count - before[0]):>11.0f}"
        print(line(f"{count} layers", row), each, flush=True)
        before = (count, total)


def by_mesh(layers: int) -> None:
    print(f"\nby mesh, {layers} layers of width 1024\n{HEADER}")
    for shape in MESHES:
        size = shape[0] * shape[1] * shape[2]
        print(line(f"{size:,} devices", measure(layers, shape, wide=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="one row of the first table")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print(json.dumps(row_of(args.row)))
    elif args.layers is not None:
        by_depth((args.layers,))
    else:
        by_depth(LAYERS)
        by_mesh(5)


if __name__ == "__main__":
    main()
