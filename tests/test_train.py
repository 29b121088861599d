"""Training the demo's model on many meshes gives the losses of one device."""

from __future__ import annotations

from functools import partial

import gpt
import optree
import pytest
import torch

import spmdfn as sp
from spmdfn import P, optim

CONFIG = gpt.Config(layers=2, width=64, heads=8, context=32, dropout=0.1)
STEPS = 30
MESHES = {
    "tp 2": ((1, 1, 2), False),
    "tp 4": ((1, 1, 4), False),
    "tp 8": ((1, 1, 8), False),
    "dp 8": ((8, 1, 1), False),
    "fsdp 8": ((1, 8, 1), False),
    "sequence-parallel": ((1, 1, 4), True),
    "dp 2 x fsdp 2 x tp 2": ((2, 2, 2), False),
    "dp 2 x fsdp 2 x tp 2, sequence-parallel": ((2, 2, 2), True),
}


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 256, (16, 5), generator=generator)  # repeated, so that there is something to learn
    order = torch.randint(0, 16, (steps, 8, 7), generator=generator)
    return [words[rows].flatten(1)[:, : CONFIG.context + 1] for rows in order]


def losses(shape: tuple[int, ...], config: gpt.Config, dtype: torch.dtype, steps: int = STEPS) -> torch.Tensor:
    mesh = sp.make_mesh(shape, gpt.AXES)
    specs = sp.tree_specs(gpt.shapes(config), gpt.LAYOUT)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))

    @sp.spmd_jit(mesh=mesh, out_specs=(specs, None))
    def init(key):
        params = optree.tree_map(lambda p: p.to(dtype), gpt.init(key, config))
        return params, optimizer.init(params)

    @sp.spmd_jit(mesh=mesh, in_specs=(specs, None, gpt.TOKENS, P()), out_specs=(specs, None, P()))
    def step(params, state, tokens, key):
        loss_fn = partial(gpt.loss, config=config, key=key)
        grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    key = sp.random.key(0)
    params, state = init(key)
    seen = []
    for i, tokens in enumerate(batches(steps)):
        params, state, loss = step(params, state, tokens, sp.random.fold_in(key, i))
        seen.append(loss.unshard())
    return torch.stack(seen)


_ONE: dict[torch.dtype, torch.Tensor] = {}


def one_device(dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _ONE:
        _ONE[dtype] = losses((1, 1, 1), CONFIG, dtype)
    return _ONE[dtype]


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float64, 1e-10)])
def test_thirty_steps_equal_one_device(name, dtype, bound):
    shape, sequence_parallel = MESHES[name]
    config = gpt.Config(**{**vars(CONFIG), "sequence_parallel": sequence_parallel})
    sharded = losses(shape, config, dtype)
    difference = (sharded - one_device(dtype)).abs().max().item()
    assert sharded[-1] < sharded[0] - 0.3  # it learns
    assert difference < bound, f"{name}: {difference}"
