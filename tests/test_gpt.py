"""The demo's model on plain tensors: one device, no mesh. What sharded runs must equal is defined here."""

from __future__ import annotations

import math
from functools import partial

import gpt
import numpy as np
import optree
import pytest
import torch
import train_gpt

import spmdfn as sp
from spmdfn import optim

CONFIG = gpt.Config()
SMALL = gpt.Config(layers=2, width=32, heads=4, context=16)


def tokens_for(config: gpt.Config, sequences: int = 4) -> torch.Tensor:
    text, _ = train_gpt.read_text()
    return train_gpt.draw_batch(text, sequences, config.context, (0, 0))


def test_about_a_million_parameters():
    sizes = [leaf.numel() for leaf in optree.tree_leaves(gpt.shapes(CONFIG))]
    assert 0.9e6 < sum(sizes) < 1.2e6


def test_init_has_the_declared_shapes_and_comes_from_the_key():
    params = gpt.init(sp.random.key(0), SMALL)
    same = optree.tree_map(lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype), params, gpt.shapes(SMALL))
    assert all(optree.tree_leaves(same))
    again, other = gpt.init(sp.random.key(0), SMALL), gpt.init(sp.random.key(1), SMALL)
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, params, again)))
    assert not torch.equal(params["embed"]["weight"], other["embed"]["weight"])
    q, k = (params["layers"][0]["attention"][name]["weight"] for name in "qk")
    assert not torch.equal(q, k)


def test_every_matrix_is_split_by_a_rule_and_norms_are_whole():
    specs = sp.tree_specs(gpt.shapes(CONFIG), gpt.LAYOUT)
    for leaf, spec in zip(optree.tree_leaves(gpt.shapes(CONFIG)), optree.tree_leaves(specs), strict=True):
        assert isinstance(spec, str) == (leaf.ndim == 2)


def test_the_first_loss_is_that_of_a_uniform_guess():
    params = gpt.init(sp.random.key(0), CONFIG)
    assert abs(float(gpt.loss(params, tokens_for(CONFIG), CONFIG)) - math.log(256)) < 0.3


def test_the_model_is_causal():
    params, tokens = gpt.init(sp.random.key(0), SMALL), tokens_for(SMALL)[:, :-1]
    changed = tokens.clone()
    changed[:, 9] = 255 - changed[:, 9]
    before, after = gpt.forward(params, tokens, SMALL), gpt.forward(params, changed, SMALL)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


def test_gradients_are_finite_and_none_is_missing():
    loss = partial(gpt.loss, config=SMALL, key=sp.random.key(1))
    grads = torch.func.grad(loss)(gpt.init(sp.random.key(0), SMALL), tokens_for(SMALL))
    for path, grad in zip(optree.tree_paths(grads), optree.tree_leaves(grads), strict=True):
        assert grad.isfinite().all() and grad.abs().max() > 0, path


def test_dropout_comes_from_the_key_alone():
    x = torch.ones(64, 64)
    key, other = sp.random.key(0), sp.random.key(1)
    dropped = gpt.dropout(x, 0.25, key)
    assert torch.equal(dropped, gpt.dropout(x, 0.25, key))
    assert not torch.equal(dropped, gpt.dropout(x, 0.25, other))
    torch.testing.assert_close(dropped.unique(), torch.tensor([0, 1 / 0.75]))
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.03
    assert gpt.dropout(x, 0.25, None) is x
    assert gpt.dropout(x, 0.0, key) is x


def test_layers_draw_different_masks():
    key = sp.random.key(0)
    keys = gpt._subkeys(key, 4)
    assert len({tuple(k.tolist()) for k in keys if k is not None}) == 4


def test_twenty_plain_steps_lower_the_loss():
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-3))
    params, tokens = gpt.init(sp.random.key(0), SMALL), tokens_for(SMALL, sequences=8)
    state, losses = optimizer.init(params), []
    for step in range(20):
        loss_fn = partial(gpt.loss, config=SMALL, key=sp.random.fold_in(sp.random.key(1), step))
        grads, loss = torch.func.grad_and_value(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1


def test_the_schedule_warms_up_and_ends_at_zero():
    optimizer = train_gpt.make_optimizer(steps=100, peak=1.0, warm=10)
    params = {"w": torch.zeros(4)}
    state, sizes = optimizer.init(params), []
    for _ in range(101):
        updates, state = optimizer.update({"w": torch.ones(4)}, state, params)
        sizes.append(float(updates["w"].abs().max()))
    assert sizes[0] == pytest.approx(0.1, rel=1e-3)
    assert sizes[9] == max(sizes) == pytest.approx(1, rel=0.05)
    assert sizes[100] < 1e-6


def test_the_text_is_the_same_each_time_and_held_out_files_are_apart():
    (training, held_out), (again, _) = train_gpt.read_text(), train_gpt.read_text()
    assert np.array_equal(training, again)
    assert training.dtype == np.uint8 and 1e6 < len(training) < 1e7
    assert 1e5 < len(held_out) < len(training) / 3
    assert b"def " in training.tobytes() and b"def " in held_out.tobytes()


def test_batches_come_from_the_seed():
    text, _ = train_gpt.read_text()
    first, again, other = (train_gpt.draw_batch(text, 4, 16, (0, 1, step)) for step in (0, 0, 1))
    assert first.shape == (4, 17) and first.dtype == torch.int64
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert bytes(first[0].tolist()) in text.tobytes()


def test_mesh_argument():
    assert train_gpt.parse_args([]).mesh == (2, 2, 2)
    assert train_gpt.parse_args(["--mesh", "dp=4,tp=2"]).mesh == (4, 1, 2)


@pytest.mark.parametrize("text", ["pp=2", "dp", "dp=0", "dp=two", ""])
def test_mesh_argument_that_cannot_be_read(text, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse_args(["--mesh", text])
    assert "write axis=size, with an axis of ('dp', 'fsdp', 'tp')" in capsys.readouterr().err
