"""What one device holds, by liveness of the Program."""

from __future__ import annotations

import gpt
import optree
import pytest
import torch
from torch.func import grad_and_value

import spmdfn as sp
from spmdfn import P, collectives
from spmdfn.debug import peak_memory
from spmdfn.program import last_uses

FSDP = sp.make_mesh((8,), ("fsdp",))


def gathered_alive(program) -> int:
    """The most bytes of all-gathered values that are alive at one time."""
    dying = last_uses(program.graph)
    rows = {node: node.meta["row"] for node in program.graph.nodes if node.target is collectives.all_gather}
    alive, most = 0, 0
    for node in program.graph.nodes:
        alive += full_bytes(rows[node]) if node in rows else 0
        most = max(most, alive)
        alive -= sum(full_bytes(rows[dead]) for dead in dying.get(node, ()) if dead in rows)
    return most


def full_bytes(row) -> int:
    return row["bytes"] * 8 // 7  # the row counts (n - 1) / n of it


def zero3_program(layers: int, width: int = 64):
    config = gpt.Config(layers=layers, width=width, heads=4, context=32, dropout=0.0)
    shapes = gpt.shapes(config)
    specs = optree.tree_map(lambda leaf: P("fsdp") if leaf.ndim == 2 else P(), shapes)

    def step(params, tokens):
        grads, loss = grad_and_value(gpt.loss)(params, tokens, config)
        return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss

    jitted = sp.spmd_jit(step, mesh=FSDP, in_specs=(specs, "(fsdp b) t"), out_specs=(specs, P()))
    return jitted.lower(shapes, torch.empty(8, 33, dtype=torch.int64, device="meta"))


def test_zero3_keeps_at_most_one_layers_weights_gathered():
    program = zero3_program(layers=6)
    one_layer = 12 * 64 * 64 * 4
    assert 0 < gathered_alive(program) <= one_layer


def test_zero3_keeps_nothing_gathered_from_forward_to_backward():
    program = zero3_program(layers=3)
    gathers = [row for row in program.collectives if row.op == "all_gather"]
    weights = 2 + 6 * 3
    # position is not read backward; the embedding is read by the lookup and by the head, which alone is backward too
    assert len(gathers) == 1 + 3 + 2 * 6 * 3 and len({row.where for row in gathers}) < weights


def test_zero3_peak_grows_with_depth_by_shards_and_activations_only():
    shallow, deep = (peak_memory(zero3_program(layers)) for layers in (4, 12))
    weights = 12 * 64 * 64 * 4  # of one layer
    growth = (deep.bytes - shallow.bytes) / 8
    # a layer's shards, its new shards, and about 45 activations of (32 tokens, 64) on this device
    assert growth < 2 * weights / 8 + 45 * 32 * 64 * 4 and growth < weights


def test_values_die_at_their_last_use():
    mesh = sp.make_mesh((1,), ("dp",))
    chain = sp.spmd_jit(lambda x: x.sin().cos().exp().tanh().sum(), mesh=mesh)
    assert peak_memory(chain.lower(torch.empty(1000, device="meta"))).bytes == 3 * 4000


def test_views_cost_nothing_and_inputs_are_counted():
    mesh = sp.make_mesh((4,), ("dp",))
    view = sp.spmd_jit(lambda x: x.view(-1).view(4, -1).t().unsqueeze(0), mesh=mesh, in_specs=P("dp"))
    peak = peak_memory(view.lower(torch.empty(8, 10, device="meta")))
    assert (peak.bytes, peak.inputs) == (80, 80)


def test_random_values_are_never_whole():
    """A dropout mask and an initial weight are drawn block by block."""
    mesh = sp.make_mesh((8,), ("dp",))
    draw = sp.spmd_jit(lambda key: sp.random.normal(key, (8, 1000)), mesh=mesh, out_specs=P("dp"))
    assert peak_memory(draw.lower(sp.random.key(0))).bytes < 3 * 4000
    drop = sp.spmd_jit(lambda x, key: x * sp.random.bernoulli(key, 0.9, x.shape), mesh=mesh, in_specs=(P("dp"), None))
    assert peak_memory(drop.lower(torch.empty(8, 1000, device="meta"), sp.random.key(0))).bytes < 4 * 4000


@pytest.mark.parametrize("donate", [False, True])
def test_a_donated_argument_is_freed_inside(donate):
    mesh = sp.make_mesh((1,), ("dp",))
    jitted = sp.spmd_jit(lambda x: x * 2, mesh=mesh, donate_argnums=(0,) if donate else ())
    x = sp.shard(torch.ones(4), P(), mesh=mesh)
    assert jitted(x).unshard().tolist() == [2.0] * 4
    if donate:
        with pytest.raises(sp.SpmdError, match="donated"):
            x.unshard()
    else:
        assert x.unshard().sum() == 4
