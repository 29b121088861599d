"""Small models of other kinds through spmd_jit: convolutions with batch norm, a mixer in einsum, recurrent cells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange, reduce
from sharded import moves, run_both, tally
from torch.func import functional_call, grad_and_value

import spmdfn as sp
from spmdfn import P

DP, TP = sp.make_mesh((4,), ("dp",)), sp.make_mesh((4,), ("tp",))
GRID = sp.make_mesh((2, 4), ("dp", "tp"))


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


# convolutions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.out = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.out(x.flatten(1))


torch.manual_seed(0)
NET = Net().double().train()
PARAMS = parameters(NET)
BUFFERS = {name: value.clone() for name, value in NET.named_buffers()}
IMAGES, LABELS = draw(8, 3, 16, 16), torch.arange(8) % 10


def net_step(params, buffers, images, labels):
    def loss(params):
        new = {name: value.clone() for name, value in buffers.items()}
        return F.cross_entropy(functional_call(NET, (params, new), (images,)), labels), new

    grads, (value, buffers) = grad_and_value(loss, has_aux=True)(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}, buffers, value


def test_data_parallel_batch_norm_takes_the_statistics_of_the_whole_batch():
    specs = (P(), P(), P("dp"), P("dp"))
    program, error = run_both(net_step, DP, specs, P(), (PARAMS, BUFFERS, IMAGES, LABELS))
    assert program.unruled == () and error < 1e-14
    # a gradient each (those of a norm are its backward's sums), a norm's mean and variance, the loss and its count
    assert tally(program) == {("all_reduce", "dp"): len(PARAMS) + 2 * 2 + 2}
    assert max(row.bytes for row in program.collectives) == 2 * 3 * PARAMS["conv2.weight"].numel() * 8 // 4


def test_channels_split_over_tp():
    params = sp.tree_specs(PARAMS, {"conv1.*": "(tp n) ...", "norm[12].*": "(tp n)", "conv2.weight": "(tp n) ...",
                                    "out.weight": "k (tp n)"})  # fmt: skip
    buffers = sp.tree_specs(BUFFERS, {"*.running_*": "(tp n)"})
    specs = (params, buffers, P(), P())
    program, error = run_both(net_step, TP, specs, (params, buffers, P()), (PARAMS, BUFFERS, IMAGES, LABELS))
    assert program.unruled == () and error < 1e-14
    # conv1 and both norms are local; conv2 meets split channels in its input, and its weight moves to them and back
    moved = {row.where.rpartition(":")[2] for row in program.collectives if row.op != "all_reduce"}
    assert moved <= lines_of("self.conv2(x)", "- 0.1 * grads")
    assert all(row.bytes < IMAGES.numel() * 64 for row in program.collectives)
    alone = sp.spmd_jit(lambda x, w: F.relu(F.conv2d(x, w)), mesh=TP, in_specs=(P(), "(tp n) c h w"))
    assert moves(alone.lower(IMAGES, PARAMS["conv1.weight"])) == []
    assert alone(IMAGES, PARAMS["conv1.weight"]).spec == P(None, "tp", None, None)


def lines_of(*texts: str) -> set[str]:
    lines = Path(__file__).read_text().splitlines()
    return {str(number) for number, line in enumerate(lines, 1) if any(text in line for text in texts)}


def test_evaluation_is_local():
    NET.eval()
    try:
        function = lambda params, buffers, x: functional_call(NET, (params, buffers), (x,))  # noqa: E731
        program, error = run_both(function, DP, (P(), P(), P("dp")), P("dp"), (PARAMS, BUFFERS, IMAGES))
    finally:
        NET.train()
    assert moves(program) == [] and program.unruled == () and error < 1e-15


# a mixer


def mixer(params, images):
    x = rearrange(images, "b c (h p) (w q) -> b (h w) (c p q)", p=4, q=4)
    x = torch.einsum("btk,kd->btd", x, params["embed"])
    for layer in params["layers"]:
        y = rearrange(F.layer_norm(x, x.shape[-1:]), "b t d -> b d t")
        y = torch.einsum("bds,st->bdt", F.gelu(torch.einsum("bdt,ts->bds", y, layer["mix"])), layer["unmix"])
        x = x + rearrange(y, "b d t -> b t d")
        y = F.gelu(torch.einsum("btd,dh->bth", F.layer_norm(x, x.shape[-1:]), layer["up"]))
        x = x + torch.einsum("bth,hd->btd", y, layer["down"])
    return torch.einsum("bd,dk->bk", reduce(x, "b t d -> b d", "mean"), params["head"])


def mixer_loss(params, images, labels):
    return F.cross_entropy(mixer(params, images), labels)


LAYER = {"mix": draw(16, 24) / 4, "unmix": draw(24, 16) / 5, "up": draw(32, 64) / 6, "down": draw(64, 32) / 8}
MIXER = {"embed": draw(48, 32) / 7, "head": draw(32, 10) / 6, "layers": [LAYER, LAYER]}


@pytest.mark.parametrize("name", ["dp", "grid"])
def test_a_mixer_in_einsum(name):
    mesh = {"dp": DP, "grid": GRID}[name]
    rules = {"*.mix": "t (tp s)", "*.unmix": "(tp s) t", "*.up": "d (tp h)", "*.down": "(tp h) d"}
    specs = sp.tree_specs(MIXER, rules if name == "grid" else {})
    args = (MIXER, IMAGES, LABELS)
    program, error = run_both(grad_and_value(mixer_loss), mesh, (specs, P("dp"), P("dp")), (specs, P()), args)
    assert program.unruled == () and error < 1e-14
    expected = {("all_reduce", "dp"): 2 + 4 * 2 + 2}
    if name == "grid":  # a column and a row each: one sum forward, one backward
        expected["all_reduce", "tp"] = 2 * 2 * 2
    assert tally(program) == expected


# recurrent cells

SEQUENCE = draw(8, 5, 6)


def lstm_cell(params, x):
    h = c = x.new_zeros(x.shape[0], 8)
    outputs = []
    for t in range(x.shape[1]):
        gates = (x[:, t] @ params["input"] + h @ params["hidden"] + params["bias"]).unflatten(-1, (4, 8))
        i, f, o, u = gates.unbind(-2)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1).square().mean()


def test_an_lstm_cell_in_a_loop_sums_each_gradient_once():
    params = {"input": draw(6, 32) / 3, "hidden": draw(8, 32) / 3, "bias": draw(32)}
    program, error = run_both(grad_and_value(lstm_cell), DP, (P(), P("dp")), P(), (params, SEQUENCE))
    assert tally(program) == {("all_reduce", "dp"): 4} and program.unruled == () and error < 1e-15


def final(module: nn.Module):
    def loss(params, x):
        output, state = functional_call(module, params, (x,))
        return output.square().mean() + sum(value.sum() for value in (state if type(state) is tuple else (state,)))

    return grad_and_value(loss)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(6, 8, num_layers=2, batch_first=True),
        nn.LSTM(6, 8, batch_first=True, bidirectional=True),
        nn.GRU(6, 8, batch_first=True),
        nn.RNN(6, 8, batch_first=True),
    ],
    ids=["lstm", "lstm both ways", "gru", "rnn"],
)
def test_recurrent_modules(module):
    module = module.double()
    params = parameters(module)
    program, error = run_both(final(module), DP, (P(), P("dp")), P(), (params, SEQUENCE))
    assert program.unruled == () and error < 1e-13
    assert {row.op for row in program.collectives} == {"all_reduce"}
    assert len(program.collectives) <= len(params) + 3


def test_a_transformer_encoder_layer():
    module = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).double()
    params, x = parameters(module), draw(8, 5, 16)
    step = grad_and_value(lambda params, x: functional_call(module, params, (x,)).square().mean())
    program, error = run_both(step, DP, (P(), P("dp")), P(), (params, x))
    assert tally(program) == {("all_reduce", "dp"): len(params) + 1} and program.unruled == () and error < 1e-14
    specs = sp.tree_specs(params, {"linear1.*": "(tp n) ...", "linear2.weight": "d (tp n)"})
    program, error = run_both(step, TP, (specs, P()), (specs, P()), (params, x))
    assert moves(program) == [("all_reduce", ("tp",))] * 2 and error < 1e-14
