"""Train a byte-level GPT on a mesh of devices, again on one device, and compare.

The text is the Python sources of the running interpreter's own standard library. Run it as

    python examples/train_gpt.py                                      # 8 virtual devices: dp 2, fsdp 2, tp 2
    python examples/train_gpt.py --mesh dp=4,tp=2 --explain           # another mesh, and what it communicates
    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh dp=2     # real processes

Both runs call the same functions (`gpt.py`) with the same keys and batches. Only the mesh differs.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import report
import torch
from torch import Tensor
from tqdm import tqdm

import spmdfn as sp
from spmdfn import P, optim

# ---------------------------------------------------------------- data


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's top-level modules: for training, and every tenth file for validation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    held_out = [i % 10 == 9 for i in range(len(texts))]
    training = np.concatenate([text for text, held in zip(texts, held_out, strict=True) if not held])
    return training, np.concatenate([text for text, held in zip(texts, held_out, strict=True) if held])


def draw_batch(text: np.ndarray, sequences: int, context: int, seed: tuple[int, ...]) -> Tensor:
    """Random windows of a text as token numbers: int64, (sequences, context + 1)."""
    starts = np.random.default_rng(seed).integers(len(text) - context, size=sequences)
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


# ---------------------------------------------------------------- training


def make_optimizer(steps: int, peak: float = 1.5e-3, warm: int = 30) -> optim.GradientTransformation:
    """AdamW after clipping; the learning rate rises for the first `warm` steps, then follows a cosine down to 0."""

    def schedule(step: Tensor) -> Tensor:
        warmup = (step + 1) / warm
        cosine = 0.5 * (1 + torch.cos(math.pi * step / steps))
        return peak * torch.minimum(warmup, cosine)

    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, b2=0.99, weight_decay=0.1))


def make_steps(mesh: sp.Mesh, config: gpt.Config, optimizer: optim.GradientTransformation) -> tuple[Callable, ...]:
    """The three functions of a run, written over whole tensors: `init(key)`, `train_step(...)`, `evaluate(...)`."""
    specs = sp.tree_specs(gpt.shapes(config), gpt.LAYOUT)

    @sp.spmd_jit(mesh=mesh, out_specs=specs)
    def init(key: Tensor) -> gpt.Params:
        return gpt.init(key, config)

    @sp.spmd_jit(mesh=mesh, in_specs=(specs, None, gpt.TOKENS, P()), out_specs=(specs, None, P()))
    def train_step(params: gpt.Params, state: Any, tokens: Tensor, key: Tensor) -> tuple[gpt.Params, Any, Tensor]:
        loss_fn = partial(gpt.loss, config=config, key=key)
        grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    @sp.spmd_jit(mesh=mesh, in_specs=(specs, gpt.TOKENS), out_specs=P())
    def evaluate(params: gpt.Params, tokens: Tensor) -> Tensor:
        return gpt.loss(params, tokens, config)

    return init, train_step, evaluate


@dataclass
class Run:
    """What one training run leaves behind."""

    name: str
    params: gpt.Params = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0


def train(name: str, mesh: sp.Mesh, args: argparse.Namespace, explain: bool = False) -> Run:
    """Train from the seed to the last step on `mesh`."""
    config = gpt.Config(dropout=args.dropout, sequence_parallel=args.sequence_parallel)
    optimizer = make_optimizer(args.steps)
    init, train_step, evaluate = make_steps(mesh, config, optimizer)
    training, held_out = read_text()
    validation_tokens = draw_batch(held_out, 2 * args.batch, config.context, (args.seed, 0))
    init_key, dropout_key = sp.random.split(sp.random.key(args.seed))

    params = init(init_key)  # drawn in place: no device ever holds a whole weight
    state = sp.spmd_jit(optimizer.init, mesh=mesh)(params)  # laid out like the parameters
    run, start = Run(name), 0.0
    bar = tqdm(range(args.steps), name, unit="step", disable=not is_first_process())
    for step in bar:
        tokens = draw_batch(training, args.batch, config.context, (args.seed, 1, step))
        key = sp.random.fold_in(dropout_key, step)
        if explain and step == 0 and is_first_process():
            sp.explain(train_step)(params, state, tokens, key)
        params, state, loss = train_step(params, state, tokens, key)
        run.losses.append(float(loss))
        if step % args.validate_every == 0 or step == args.steps - 1:
            run.validation[step] = float(evaluate(params, validation_tokens))
        if step == 0:
            start = time.perf_counter()  # the first step traces
        else:
            run.tokens_per_second = step * args.batch * config.context / (time.perf_counter() - start)
        bar.set_postfix_str(
            f"loss {run.losses[-1]:.3f}, val loss {list(run.validation.values())[-1]:.3f}, "
            f"{run.tokens_per_second:,.0f} tokens/s"
        )
    run.params = params
    return run


# ---------------------------------------------------------------- command line


def is_first_process() -> bool:
    """True but for the other processes of a torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


def parse_mesh(text: str) -> tuple[int, ...]:
    """`dp=4,tp=2` as the size of each of the model's axes; one that is not named has size 1."""
    sizes = dict.fromkeys(gpt.AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: write axis=size, with an axis of {gpt.AXES}")
        sizes[axis] = int(size)
    return tuple(sizes.values())


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, default="dp=2,fsdp=2,tp=2", help="sizes of axes (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step (%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="fraction dropped (%(default)s)")
    parser.add_argument("--sequence-parallel", action="store_true", help="split positions over tp between matmuls")
    parser.add_argument("--explain", action="store_true", help="list what a train step communicates, and why")
    parser.add_argument("--validate-every", type=int, default=10, help="steps between validations (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches and dropout (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train twice, compare, draw."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # a step is many small operations: more threads mostly wait for each other
    mesh = sp.make_mesh(args.mesh, gpt.AXES)
    one = sp.make_mesh((1,) * len(gpt.AXES), gpt.AXES, backend="local")
    sharded = train(f"{mesh.size} devices", mesh, args, explain=args.explain)
    single = train("1 device", one, args)
    if is_first_process():
        path = report.save_picture(args.out / "train_gpt.png", mesh, sharded, single)
        print(report.summary(mesh, sharded, single, path))


if __name__ == "__main__":
    main()
