"""Language models through spmd_jit: the values of one device, and the collectives that an expert would have written."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from llama import (
    GROUPS,
    HEADS,
    MEGATRON,
    ZERO3,
    block,
    loss,
    rotate_complex,
    rotate_real,
    spread_expand,
    spread_interleave,
    weights,
)
from sharded import difference, run_both, tally
from torch.func import functional_call, grad, grad_and_value

import spmdfn as sp
from spmdfn import P

MESHES = {
    "tp": sp.make_mesh((4,), ("tp",)),
    "dp": sp.make_mesh((4,), ("dp",)),
    "fsdp": sp.make_mesh((4,), ("fsdp",)),
    "dp tp": sp.make_mesh((2, 4), ("dp", "tp")),
    "dp fsdp tp": sp.make_mesh((2, 2, 2), ("dp", "fsdp", "tp")),
}
LAYERS = 2
TOKENS = torch.arange(72).reshape(8, 9) * 7 % 48


def on(mesh: sp.Mesh, rules: dict[str, str]) -> dict[str, str]:
    """The rules without the axes that the mesh lacks."""
    for axis in {"dp", "fsdp", "tp"} - set(mesh.axis_names):
        rules = {name: re.sub(rf"\({axis} (\w+)\)", r"\1", pattern) for name, pattern in rules.items()}
    return rules


def batch(mesh: sp.Mesh) -> P:
    axes = tuple(axis for axis in mesh.axis_names if axis != "tp")
    return P(axes) if axes else P()


def llama(name: str, rotate, spread, rules=ZERO3):
    mesh, params = MESHES[name], weights(LAYERS)
    specs = sp.tree_specs(params, on(mesh, rules))
    function = grad_and_value(functools.partial(loss, rotate=rotate, spread=spread))
    program, error = run_both(function, mesh, (specs, batch(mesh)), (specs, P()), (params, TOKENS))
    assert program.unruled == () and error < 1e-14
    return program


# For tp: the embedding, two a block forward and two backward, the logits' backward, and four numbers a token of the
# cross-entropy. Weights are gathered at each use (the embedding at three); a gradient is reduced once.
BLOCK_WEIGHTS, NORMS = 7 * LAYERS, 2 * LAYERS + 1
TENSOR = 1 + 4 * LAYERS + 1 + 4
GATHERS, SCATTERS = 2 * BLOCK_WEIGHTS + 3, BLOCK_WEIGHTS + 1
EXPECTED = {
    "tp": {("all_reduce", "tp"): TENSOR},
    "dp": {("all_reduce", "dp"): BLOCK_WEIGHTS + 1 + NORMS + 2},
    "fsdp": {
        ("all_gather", "fsdp"): GATHERS,
        ("reduce_scatter", "fsdp"): SCATTERS,
        ("all_reduce", "fsdp"): NORMS + 2,
    },
    "dp tp": {("all_reduce", "tp"): TENSOR, ("all_reduce", "dp"): BLOCK_WEIGHTS + 1 + NORMS + 2},
    "dp fsdp tp": {
        ("all_gather", "fsdp"): GATHERS,
        ("reduce_scatter", "fsdp"): SCATTERS,
        ("all_reduce", "dp"): SCATTERS,
        ("all_reduce", "dp", "fsdp"): NORMS + 2,
        ("all_reduce", "tp"): TENSOR,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_llama(name):
    assert tally(llama(name, rotate_real, spread_interleave)) == EXPECTED[name]


@pytest.mark.parametrize(("rotate", "spread"), [(rotate_real, spread_expand), (rotate_complex, spread_interleave)])
@pytest.mark.parametrize("name", ["dp tp", "fsdp"])
def test_llama_otherwise_written(name, rotate, spread):
    assert tally(llama(name, rotate, spread)) == EXPECTED[name]


def test_llama_never_gathers_its_vocabulary_or_reduces_more_than_activations():
    program = llama("tp", rotate_real, spread_expand, MEGATRON)
    activation = 8 * 8 * 32 * 8
    assert {row.bytes for row in program.collectives} == {2 * 3 * activation // 4, 2 * 3 * 8 * 8 * 8 // 4}


@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
def test_llama_halves_cost_one_all_reduce_each_way(rotate):
    """Attention and the gated half: forward one sum each, and backward one each, whatever q, k and v do."""
    params = weights(1)["layers"][0]
    mesh = MESHES["tp"]
    specs = sp.tree_specs(params, {name.removeprefix("*."): p for name, p in MEGATRON.items() if name != "embed"})
    x = torch.randn(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forward = functools.partial(block, rotate=rotate)
    program, error = run_both(forward, mesh, (specs, P()), P(), (params, x))
    assert tally(program) == {("all_reduce", "tp"): 2} and error < 1e-13
    backward = grad(lambda params, x: forward(params, x).square().sum(), argnums=(0, 1))
    program, error = run_both(backward, mesh, (specs, P()), (specs, P()), (params, x))
    assert tally(program) == {("all_reduce", "tp"): 4} and error < 1e-13


def test_more_devices_than_groups_costs_gathers_of_k_and_v():
    """tp 8 splits the eight heads, and cuts each of the four groups of k and v in two."""
    mesh, params = sp.make_mesh((2 * GROUPS,), ("tp",)), weights(1)
    assert mesh.size == HEADS
    specs = sp.tree_specs(params, MEGATRON)
    jitted = sp.spmd_jit(grad_and_value(loss), mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P()))
    assert difference(jitted(params, TOKENS), grad_and_value(loss)(params, TOKENS)) < 1e-14
    moved = [row for row in jitted.lower(params, TOKENS).collectives if row.op != "all_reduce"]
    assert {row.op for row in moved} == {"all_gather"} and all("llama.py" in row.where for row in moved)


# Hugging Face


def hugging_face(kind: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=48, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    model = model.double()

    def step(params, tokens):
        return grad_and_value(
            lambda params: functional_call(model, params, (tokens,), {"labels": tokens, "use_cache": False}).loss
        )(params)

    return step, {name: value.detach().clone() for name, value in model.named_parameters()}


LAYOUTS = {
    "llama": {
        "*embed_tokens.weight": "(tp v) (fsdp d)",
        "lm_head.weight": "(tp v) (fsdp d)",
        "*.[qkv]_proj.weight": "(tp n) (fsdp d)",
        "*.o_proj.weight": "(fsdp d) (tp n)",
        "*.gate_proj.weight": "(tp n) (fsdp d)",
        "*.up_proj.weight": "(tp n) (fsdp d)",
        "*.down_proj.weight": "(fsdp d) (tp n)",
    },
    "gpt2": {  # the fused c_attn, (3 h d), is stored split over fsdp only
        "*wte.weight": "(tp v) (fsdp d)",
        "*wpe.weight": "t (fsdp d)",
        "*.c_attn.weight": "(fsdp d) n",
        "*.attn.c_proj.weight": "n (fsdp d)",
        "*.c_fc.weight": "(fsdp d) (tp n)",
        "*.c_fc.bias": "(tp n)",
        "*.mlp.c_proj.weight": "(tp n) (fsdp d)",
    },
}


def run_hugging_face(kind: str, name: str, rules: dict[str, str]):
    step, params = hugging_face(kind)
    mesh = MESHES[name]
    specs = sp.tree_specs(params, on(mesh, rules))
    jitted = sp.spmd_jit(step, mesh=mesh, in_specs=(specs, batch(mesh)), out_specs=(specs, P()))
    error = difference(jitted(params, TOKENS), step(params, TOKENS))
    program = jitted.lower(params, TOKENS)
    assert program.unruled == () and error < 1e-6  # the loss is computed in float32
    return program


@pytest.mark.parametrize("name", ["tp", "fsdp", "dp fsdp tp"])
def test_hugging_face_llama(name):
    """As the Llama above, and with an lm_head of its own: one more scatter, and as many gathers."""
    expected = dict(EXPECTED[name])
    for key in expected:
        expected[key] += key in (("reduce_scatter", "fsdp"), ("all_reduce", "dp"))
    assert tally(run_hugging_face("llama", name, LAYOUTS["llama"])) == expected


@pytest.mark.parametrize("name", ["dp", "tp", "fsdp", "dp fsdp tp"])
def test_hugging_face_gpt2(name):
    counts = tally(run_hugging_face("gpt2", name, LAYOUTS["gpt2"]))
    weights, vectors = 4 * LAYERS, 8 * LAYERS + 2  # vectors: biases and norms
    if name == "dp":
        assert counts == {("all_reduce", "dp"): weights + 2 + vectors + 2}
    elif name == "tp":  # the mlp's pair, the embedding and the cross-entropy; attention is whole on every device
        assert counts == {("all_reduce", "tp"): 2 * LAYERS + 2 + 4}
    else:  # the position's gradient is summed over the batch before it is spread over its table's rows
        assert counts["all_gather", "fsdp"] == 2 * weights + 4
        assert counts["reduce_scatter", "fsdp"] == weights + 1


def test_a_fused_projection_split_over_heads_is_gathered_and_explained():
    """GPT-2's c_attn, (3 h d): its blocks are not whole heads, so q, k and v must be gathered."""
    rules = LAYOUTS["gpt2"] | {"*.c_attn.weight": "(fsdp d) (tp n)", "*.c_attn.bias": "(tp n)"}
    program = run_hugging_face("gpt2", "tp", rules)
    gathers = [row for row in program.collectives if row.op == "all_gather"]
    assert any(row.why == "operand 0 of split" and "modeling_gpt2.py" in row.where for row in gathers)
    text = str(sp.explain(sp.spmd_jit(lambda x: x.split(32, -1)[0], mesh=MESHES["tp"], in_specs="b (tp n)"))(
        torch.ones(2, 96)
    ))  # fmt: skip
    assert "all_gather" in text and "operand 0 of split" in text
