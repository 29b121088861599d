"""The expert's collectives and no others: what each layout of a model must cost, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sharded import moves, run_both, tally
from torch.func import grad, grad_and_value

import spmdfn as sp
from spmdfn import P

TP, DP, FSDP = (sp.make_mesh((4,), (axis,)) for axis in ("tp", "dp", "fsdp"))
CUBE = sp.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"))


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 1000 + sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def mlp(params, x):
    return F.gelu(x @ params["up"]) @ params["down"]


def mlp_loss(params, x):
    return (mlp(params, x) ** 2).sum()


def mlp_step(params, x):
    grads, loss = grad_and_value(mlp_loss)(params, x)
    return {name: params[name] - 0.1 * grads[name] for name in params}, loss


MLP = {"up": draw(16, 32), "down": draw(32, 16)}
X = draw(8, 4, 16)


def test_column_then_row_costs_one_all_reduce_forward():
    specs = {"up": "d (tp h)", "down": "(tp h) d"}
    program, error = run_both(mlp, TP, (specs, P()), P(), (MLP, X))
    assert moves(program) == [("all_reduce", ("tp",))] and error < 1e-12


def test_column_then_row_costs_one_all_reduce_backward():
    specs = {"up": "d (tp h)", "down": "(tp h) d"}
    program, error = run_both(grad(mlp_loss, argnums=(0, 1)), TP, (specs, P()), (specs, P()), (MLP, X))
    # forward: the output is needed for its square; backward: the input's gradient
    assert moves(program) == [("all_reduce", ("tp",))] * 2 and error < 1e-12


def test_layouts_that_need_no_communication_have_none():
    program, error = run_both(mlp, DP, (P(), "(dp b) t d"), "(dp b) t d", (MLP, X))
    assert moves(program) == [] and error < 1e-12
    column = sp.spmd_jit(lambda x, w: F.gelu(x @ w), mesh=TP, in_specs=(P(), P(None, "tp")))
    assert moves(column.lower(X, MLP["up"])) == []
    assert column(X, MLP["up"]).spec == P(None, None, "tp")


def adam(p, m, v, g):
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (v.sqrt() + 1e-8), m, v


def adam_step(params, moments, x):
    grads, loss = grad_and_value(mlp_loss)(params, x)
    new = {name: adam(params[name], *moments[name], grads[name]) for name in params}
    return {n: new[n][0] for n in new}, {n: new[n][1:] for n in new}, loss


MOMENTS = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in MLP.items()}


def test_data_parallel_reduces_each_gradient_once_though_adam_uses_it_twice():
    program, error = run_both(adam_step, DP, (P(), P(), "(dp b) t d"), P(), (MLP, MOMENTS, X))
    assert tally(program) == {("all_reduce", "dp"): 3} and error < 1e-11  # two gradients and the loss


def test_zero1_reduces_to_the_moments_layout_and_gathers_the_update():
    moments = {"up": P("dp"), "down": P("dp")}
    program, error = run_both(adam_step, DP, (P(), moments, "(dp b) t d"), (P(), moments, P()), (MLP, MOMENTS, X))
    assert tally(program) == {("reduce_scatter", "dp"): 2, ("all_gather", "dp"): 2, ("all_reduce", "dp"): 1}
    assert error < 1e-11


@pytest.mark.parametrize("step", [mlp_step, adam_step])
def test_zero3_gathers_at_each_use_and_scatters_each_gradient(step):
    specs = {"up": P("fsdp"), "down": P("fsdp")}
    if step is mlp_step:
        args, ins, outs = (MLP, X), (specs, "(fsdp b) t d"), (specs, P())
    else:
        args, ins, outs = (MLP, MOMENTS, X), (specs, specs, "(fsdp b) t d"), (specs, specs, P())
    program, error = run_both(step, FSDP, ins, outs, args)
    # up is not needed backward: the input has no gradient
    assert tally(program) == {("all_gather", "fsdp"): 3, ("reduce_scatter", "fsdp"): 2, ("all_reduce", "fsdp"): 1}
    assert error < 1e-11


def test_a_reduction_over_two_axes_to_one_layout_is_one_collective():
    mesh = sp.make_mesh((2, 2), ("a", "b"))
    program, error = run_both(lambda x: x.sum(0), mesh, (P(("a", "b")),), P(), (X,))
    assert moves(program) == [("all_reduce", ("a", "b"))] and error < 1e-12
    program, error = run_both(lambda x: x.sum((0, 1)), mesh, (P("a", "b"),), P(), (X,))
    assert moves(program) == [("all_reduce", ("a", "b"))] and error < 1e-12


def test_three_axes_combine_zero3_megatron_and_data_parallel():
    specs = {"up": "(fsdp d) (tp h)", "down": "(tp h) (fsdp d)"}
    program, error = run_both(mlp_step, CUBE, (specs, "(dp fsdp b) t d"), (specs, P()), (MLP, X))
    assert tally(program) == {
        ("all_gather", "fsdp"): 3,
        ("all_reduce", "tp"): 1,
        ("all_reduce", "dp", "fsdp"): 1,  # the loss
        ("reduce_scatter", "fsdp"): 2,
        ("all_reduce", "dp"): 2,
    }
    assert error < 1e-11


def test_dp_times_fsdp_scatters_first_and_reduces_the_smaller_rest():
    mesh = sp.make_mesh((2, 2), ("dp", "fsdp"))
    specs = {"up": P("fsdp"), "down": P("fsdp")}
    program, error = run_both(mlp_step, mesh, (specs, "((dp fsdp) b) t d"), (specs, P()), (MLP, X))
    gradients = [row for row in program.collectives if row.why == "sum of mm"]
    assert [(row.op, row.axes, row.bytes) for row in gradients] == [
        ("reduce_scatter", ("fsdp",), 2048),
        ("all_reduce", ("dp",), 2048),
    ] * 2
    assert error < 1e-11


def test_sequence_parallel_where_bytes_favour_it():
    x, up, down = draw(2, 8, 16), draw(16, 32), draw(32, 16)
    specs = (P(None, "tp"), P(None, "tp"), P("tp"))
    program, error = run_both(lambda x, a, b: F.gelu(x @ a) @ b, TP, specs, P(None, "tp"), (x, up, down))
    assert moves(program) == [("all_gather", ("tp",)), ("reduce_scatter", ("tp",))] and error < 1e-12


def pinned_block(x, norm, up, down):
    h = sp.constrain(F.layer_norm(x, (16,), norm), P())
    return sp.constrain(x + F.gelu(h @ up) @ down, P(None, "tp"))


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_sequence_parallel_by_constrain_at_any_size(batch):
    args = (draw(batch, 8, 16), draw(16), draw(16, 32), draw(32, 16))
    specs = (P(None, "tp"), P(), P(None, "tp"), P("tp"))
    program, error = run_both(pinned_block, TP, specs, P(None, "tp"), args)
    assert moves(program) == [("all_gather", ("tp",)), ("reduce_scatter", ("tp",))] and error < 1e-12
    backward = grad(lambda *args: (pinned_block(*args) ** 2).sum(), argnums=(0, 1, 2, 3))
    program, error = run_both(backward, TP, specs, specs, args)
    assert tally(program) == {("all_gather", "tp"): 2, ("reduce_scatter", "tp"): 2, ("all_reduce", "tp"): 1}
    assert error < 1e-11  # the all_reduce is that of the norm's weight


def test_constrain_does_not_pin_the_cotangent():
    """A pinned cotangent would reduce the gradient to the replicated layout and slice it."""

    def loss(w, x):
        return ((x @ sp.constrain(w, P())) ** 2).sum()

    program, error = run_both(grad(loss), FSDP, (P("fsdp"), P("fsdp")), P("fsdp"), (draw(16, 8), draw(8, 16)))
    assert moves(program) == [("all_gather", ("fsdp",)), ("reduce_scatter", ("fsdp",))] and error < 1e-11


def language_model(embed, tokens, targets):
    hidden = torch.tanh(F.embedding(tokens, embed))
    return F.cross_entropy((hidden @ embed.T).flatten(0, 1), targets.flatten())


def test_vocabulary_parallel_never_gathers_the_vocabulary():
    tokens, targets = torch.arange(24).reshape(4, 6) * 7 % 32, torch.arange(24).reshape(4, 6) * 5 % 32
    args = (draw(32, 16), tokens, targets)
    program, error = run_both(grad_and_value(language_model), TP, ("(tp v) d", P(), P()), ("(tp v) d", P()), args)
    assert error < 1e-13
    assert {row.op for row in program.collectives} == {"all_reduce"}
    logits = 24 * 32 * 8
    assert all(row.bytes < logits for row in program.collectives)
    rows = [row.bytes for row in program.collectives if row.bytes < 24 * 16 * 8]
    assert len(rows) == 4 and max(rows) <= 24 * 8 * 1.5  # one number a token: max, sum, gather; and one backward


def test_a_tied_embedding_is_reduced_once():
    tokens, targets = torch.arange(48).reshape(8, 6) * 7 % 32, torch.arange(48).reshape(8, 6) * 5 % 32
    args = (draw(32, 16), tokens, targets)
    specs = (P(), "(dp b) t", "(dp b) t")
    program, error = run_both(grad(language_model), DP, specs, P(), args)
    full = 32 * 16 * 8
    assert sum(row.bytes >= full for row in program.collectives) == 1 and error < 1e-13


def test_attention_projections_share_one_reduction_backward():
    def attention(params, x):
        q, k, v = ((x @ params[n]).unflatten(-1, (4, 4)).transpose(1, 2) for n in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2) @ params["o"]

    params = {n: draw(16, 16) + i for i, n in enumerate("qkvo")}
    specs = {"q": P(None, "tp"), "k": P(None, "tp"), "v": P(None, "tp"), "o": P("tp")}
    backward = grad(lambda params, x: (attention(params, x) ** 2).sum(), argnums=(0, 1))
    program, error = run_both(backward, TP, (specs, P()), (specs, P()), (params, X / 8))
    assert moves(program) == [("all_reduce", ("tp",))] * 2 and error < 1e-6


def test_rows_tell_where_and_why():
    program, _ = run_both(mlp, TP, ({"up": P(None, "tp"), "down": P("tp")}, P()), P(), (MLP, X))
    (row,) = program.collectives
    assert row.where.endswith("test_collectives.py:24") and row.why == "sum of mm"
    assert (row.reduce, row.bytes) == ("sum", 2 * 3 * 8 * 4 * 16 * 8 // 4)


def test_clipping_by_the_global_norm_costs_one_scalar():
    def clip(gradients):
        return sp.optim.clip_by_global_norm(1.0).update(gradients, (), None)[0]

    gradients = {"a": draw(8, 4), "b": draw(4, 8) * 3, "c": draw(6), "d": draw(8, 8, 2)}
    specs = {"a": P("fsdp", "tp"), "b": P("tp"), "c": P(), "d": P(("dp", "fsdp"))}
    program, error = run_both(clip, CUBE, (specs,), specs, (gradients,))
    assert moves(program) == [("all_reduce", ("dp", "fsdp", "tp"))] and error < 1e-15
    assert program.collectives[0].bytes == 14


def test_a_sum_of_scalars_of_any_layout_is_exact_where_one_is_infinite():
    def total(x, y):
        return x.sum() + y.sum()

    x, y = draw(8), torch.tensor([1.0, float("inf")], dtype=torch.float64)
    program, _ = run_both(total, TP, (P("tp"), P()), P(), (x, y))
    assert sp.spmd_jit(total, mesh=TP, in_specs=(P("tp"), P()))(x, y).item() == float("inf")
    assert moves(program) == [("all_reduce", ("tp",))]


def test_optimizer_state_made_with_the_parameters_takes_their_layout():
    specs = {"a": P("fsdp", "tp"), "b": P(None, "dp")}
    shapes = {"a": (4, 8), "b": (3, 2)}

    def init(key):
        params = {name: sp.random.normal(key, shape) for name, shape in shapes.items()}
        return params, {name: torch.zeros_like(p) for name, p in params.items()}

    _, state = sp.spmd_jit(init, mesh=CUBE, out_specs=(specs, None))(sp.random.key(0))
    assert {name: leaf.spec for name, leaf in state.items()} == specs
