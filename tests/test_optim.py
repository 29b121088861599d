"""Every optimizer against torch's own, and the properties that all of them share, from one table."""

from __future__ import annotations

import optree
import pytest
import torch

from spmdfn import optim

# Name → (ours, torch's counterpart over a list of tensors).
OPTIMIZERS = {
    "sgd": (optim.sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "momentum": (optim.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    ),
    "adamw": (optim.adamw(0.01), lambda ps: torch.optim.AdamW(ps, 0.01)),
    "adamw tuned": (
        optim.adamw(0.02, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
}
RULES = {name: ours for name, (ours, _) in OPTIMIZERS.items()} | {
    "clip": optim.clip_by_global_norm(0.1),
    "clipped adamw": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.01)),
    "scheduled": optim.adamw(lambda step: 0.1 / (step + 1)),
    "decayed": optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1)),
    "empty chain": optim.chain(),
}


def draw(seed: int, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"w": normal(4, 3), "layers": [{"b": normal(3)}, {"b": normal(3)}], "scale": normal()}


def run(rule: optim.GradientTransformation, params: dict, steps: int = 5) -> tuple[dict, object]:
    state = rule.init(params)
    for step in range(steps):
        updates, state = rule.update(draw(step + 1, params["w"].dtype), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch_over_several_steps(name):
    ours, make_reference = OPTIMIZERS[name]
    got, _ = run(ours, draw(0), steps=7)
    leaves = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(draw(0))]
    reference = make_reference(leaves)
    for step in range(7):
        for leaf, grad in zip(leaves, optree.tree_leaves(draw(step + 1)), strict=True):
            leaf.grad = grad
        reference.step()
    for mine, theirs in zip(optree.tree_leaves(got), leaves, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 4.0, 1e6])
def test_clipping_equals_torch(max_norm):
    grads = draw(3)
    clip = optim.clip_by_global_norm(max_norm)
    got, _ = clip.update(grads, clip.init(grads), grads)
    leaves = [torch.zeros_like(leaf).requires_grad_() for leaf in optree.tree_leaves(grads)]
    for leaf, grad in zip(leaves, optree.tree_leaves(grads), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    for mine, leaf in zip(optree.tree_leaves(got), leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-13, atol=0)


def test_clipping_sums_half_precision_in_float32():
    grads = torch.full((4096,), 0.01, dtype=torch.bfloat16)
    clip = optim.clip_by_global_norm(0.32)
    got, _ = clip.update(grads, (), grads)
    assert got.dtype == torch.bfloat16
    assert abs(got.double().norm().item() - 0.32) < 2e-3


def test_a_schedule_is_called_with_the_updates_so_far():
    seen = []

    def schedule(step: torch.Tensor) -> torch.Tensor:
        seen.append((step.item(), step.dtype, step.shape))
        return 0.1 * (step + 1)

    got, _ = run(optim.sgd(schedule), draw(0), steps=3)
    assert seen == [(i, torch.int32, ()) for i in range(3)]
    want = draw(0)["w"] - sum(0.1 * (i + 1) * draw(i + 1)["w"] for i in range(3))
    torch.testing.assert_close(got["w"], want, rtol=1e-6, atol=1e-6)


def test_a_constant_schedule_equals_the_number():
    plain, _ = run(optim.adamw(0.25), draw(0))
    scheduled, _ = run(optim.adamw(lambda step: torch.full_like(step, 0.25, dtype=torch.float64)), draw(0))
    assert optree.tree_all(optree.tree_map(torch.equal, plain, scheduled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_trees_shapes_and_dtypes_are_kept(name, dtype):
    params = draw(0, dtype)
    got, state = run(RULES[name], params)
    assert optree.tree_structure(got) == optree.tree_structure(params)
    assert [(leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(got)] == [
        (leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(params)
    ]
    first = RULES[name].init(params)
    assert optree.tree_structure(first) == optree.tree_structure(state)
    assert [(leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(first)] == [
        (leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(state)
    ]


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_mutated(name):
    params, rule, grads = draw(0), RULES[name], draw(1)
    _, state = run(rule, params, steps=2)
    before = optree.tree_map(torch.clone, (grads, state, params))
    rule.update(grads, state, params)
    assert optree.tree_all(optree.tree_map(torch.equal, before, (grads, state, params)))


@pytest.mark.parametrize("name", RULES)
def test_update_is_a_function_that_vmap_takes(name):
    rule = RULES[name]
    stacked = [optree.tree_map(lambda *xs: torch.stack(xs), draw(i), draw(i + 10)) for i in range(2)]
    both = torch.func.vmap(lambda grads, params: rule.update(grads, rule.init(params), params)[0])(*stacked[::-1])
    for i, seed in enumerate((0, 10)):
        one, _ = rule.update(draw(seed + 1), rule.init(draw(seed)), draw(seed))
        for got, want in zip(optree.tree_leaves(both), optree.tree_leaves(one), strict=True):
            torch.testing.assert_close(got[i], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_tree_without_leaves(name):
    rule = RULES[name]
    updates, _ = rule.update({}, rule.init({}), {})
    assert updates == {}


def test_descent_reaches_the_minimum():
    target = torch.tensor([1.0, -2.0, 3.0])
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1, weight_decay=0.0))
    params, grad = torch.zeros(3), torch.func.grad(lambda x: (x - target).square().sum())
    state = rule.init(params)
    for _ in range(300):
        updates, state = rule.update(grad(params), state, params)
        params = optim.apply_updates(params, updates)
    torch.testing.assert_close(params, target, atol=1e-2, rtol=0)


def test_messages():
    with pytest.raises(ValueError, match="nesterov=True needs a momentum above 0"):
        optim.sgd(0.1, nesterov=True)
    with pytest.raises(ValueError, match="max_norm must be positive, got -1"):
        optim.clip_by_global_norm(-1)
