"""Rules of fused attention: batch, heads, shared heads of k and v, and queries where nothing is causal."""

from __future__ import annotations

import pytest
import torch
from rule_sim import make_call
from rule_table import holds as check
from rule_table import rand

from spmdfn.partition.rule import rule_for

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


HEADS = [(4, 4), (4, 2), (8, 2), (4, 1), (1, 1), (3, 3)]
LENGTHS = [(8, 8), (4, 8), (1, 8), (5, 7)]


@pytest.mark.parametrize(("heads", "shared"), HEADS)
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_attention(heads, shared, queries, keys):
    q, k, v = rand(2, heads, queries, 16), rand(2, shared, keys, 16), rand(2, shared, keys, 16)
    split = ["b"] + ["g"] * (shared > 1) + ["r"] * (heads > shared)
    free = split + ["s"] * (queries > 1)
    masks = [None, (queries, keys), (2, 1, queries, keys), (1, heads, queries, keys), (2, heads, 1, keys)]
    for causal, mask in [(True, None)] * (queries == keys) + [(False, mask) for mask in masks]:
        options = {} if mask is None else {"attn_mask": rand(*mask)}
        must_split = split if causal else free
        check(FORWARD, q, k, v, 0.0, causal, must_split=must_split, **options)
        out, logsumexp = FORWARD(q, k, v, 0.0, causal, **options)
        args = (torch.randn_like(out), q, k, v, out, logsumexp, 0.0, causal)
        rule = check(BACKWARD, *args, must_split=must_split, **options)
        assert rule.kind("s") == ("whole" if causal else "sum")
    check(aten._scaled_dot_product_attention_math.default, q, k, v, enable_gqa=True, must_split=free)


def test_dropout_has_no_rule():
    q = rand(2, 4, 8, 16)
    call, _, _ = make_call(aten._scaled_dot_product_attention_math.default, (q, q, q, None, 0.5), {})
    assert rule_for(call) is None


# ---------------------------------------------------------------- ops of other devices: shapes only


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


def rule_of(op, *args):
    call, _, _ = make_call(op, args, {})
    rule = rule_for(call)
    assert rule is not None
    for shape, dims in zip(
        [o.shape for o in call.operands] + [r.shape for r in call.results], [*rule.ins, *rule.outs], strict=True
    ):
        assert len(shape) == len(dims)
    assert {rule.kind(name) for name in "std"} == {"whole"}
    return rule


@pytest.mark.parametrize("shared", [4, 2])
def test_attention_on_other_devices(shared):
    q, k = meta(2, 4, 8, 16), meta(2, shared, 8, 16)
    heads = ("g",) if shared == 4 else ("g", "r")
    for op, rest in (
        (aten._scaled_dot_product_flash_attention, ()),
        (aten._scaled_dot_product_cudnn_attention, (None, True)),
        (aten._scaled_dot_product_efficient_attention, (meta(2, 4, 8, 8), True)),
        (aten._scaled_dot_product_fused_attention_overrideable, ()),
    ):
        rule = rule_of(op.default, q, k, k, *rest)
        assert rule.outs[0][:2] == (("b",), heads)
        assert rule.kind("b") == rule.kind("g") == "max"  # seeds are the same everywhere


def test_attention_backward_on_other_devices():
    q, bias = meta(2, 4, 8, 16), meta(2, 4, 8, 8)
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, q, q)
    args = (q, q, q, q, out, lse, None, None, 8, 8, 0.0, False, seed, offset)
    rule = rule_of(aten._scaled_dot_product_flash_attention_backward.default, *args)
    assert len(rule.shape_only) == 2
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, bias, True)
    args = (q, q, q, q, bias, out, lse, seed, offset, 0.0)
    for mask in ([True] * 4, [True, True, True, False]):
        rule = rule_of(aten._scaled_dot_product_efficient_attention_backward.default, *args, mask)
        assert len(rule.outs) == sum(mask)
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
    args = (q, q, q, q, out, lse, seed, offset, None, None, None, 8, 8, 0.0, False)
    rule = rule_of(aten._scaled_dot_product_cudnn_attention_backward.default, *args)
    assert rule.kind("b") == "sum"
