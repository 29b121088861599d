"""Optimizers as pairs of pure functions: `init(params)` makes a state, `update(grads, state, params)` new updates.

A state is a pytree; each tensor in it is laid out like the parameter that it belongs to. Updates are *added* to the
parameters. An ingredient (`scale_by_adam`) does one thing; a recipe (`adamw`) is a `chain` of ingredients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

PyTree: TypeAlias = Any
Schedule: TypeAlias = Callable[[Tensor], Tensor]


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into updates.

    `init(params)` gives the first state; `update(grads, state, params)` gives `(updates, state)`.
    Updates have the tree, shapes and dtypes of the gradients.

    >>> def update(grads, state, params):
    ...     return {name: -0.1 * grad.sign() for name, grad in grads.items()}, state
    >>> rule = GradientTransformation(lambda params: (), update)
    >>> rule.update({"w": torch.tensor([3.0, -4.0])}, rule.init({}), {})[0]["w"]
    tensor([-0.1000,  0.1000])
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class MomentumState(NamedTuple):
    """The decaying sum of past gradients, a tree like the parameters."""

    momentum: PyTree


class AdamState(NamedTuple):
    """The number of updates so far (int32, rank 0) and both moments, trees like the parameters."""

    step: Tensor
    mean: PyTree
    square: PyTree


class ScheduleState(NamedTuple):
    """The number of updates so far: int32, rank 0."""

    step: Tensor


# ---------------------------------------------------------------- ingredients


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Scale all gradients by one factor, so that their joint 2-norm is at most `max_norm`.

    The factor is that of `torch.nn.utils.clip_grad_norm_`. Raises `ValueError` if `max_norm` is not positive.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"w": torch.tensor([3.0, 4.0])}, clip.init({}), {})[0]["w"]
    tensor([0.6000, 0.8000])
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {max_norm!r}")

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = optree.tree_leaves(grads)
        if not leaves:
            return grads, state
        # One root of one sum, so that sharded parameters need one reduction and not one each.
        norm = reduce(torch.add, map(_sum_of_squares, leaves)).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return _scaled(factor, grads), state

    return GradientTransformation(_no_state, update)


def scale_by_momentum(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Replace a gradient by the decaying sum of all so far: `m = decay * m + g`, or `g + decay * m` with `nesterov`.

    As in torch.optim.SGD, after Sutskever et al., "On the importance of initialization and momentum" (ICML 2013).

    >>> rule = scale_by_momentum(0.5)
    >>> updates, state = rule.update(torch.ones(2), rule.init(torch.zeros(2)), torch.zeros(2))
    >>> rule.update(torch.ones(2), state, torch.zeros(2))[0]
    tensor([1.5000, 1.5000])
    """

    def init(params: PyTree) -> MomentumState:
        return MomentumState(optree.tree_map(torch.zeros_like, params))

    def update(grads: PyTree, state: MomentumState, params: PyTree) -> tuple[PyTree, MomentumState]:
        momentum = optree.tree_map(lambda m, g: decay * m + g, state.momentum, grads)
        updates = optree.tree_map(lambda m, g: g + decay * m, momentum, grads) if nesterov else momentum
        return updates, MomentumState(momentum)

    return GradientTransformation(init, update)


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Divide the running mean of the gradients by the root of their running mean square, both without their bias to 0.

    Algorithm 1 of Kingma and Ba, "Adam" (arXiv 1412.6980), before its learning rate. Moments have the dtypes of the
    parameters.

    >>> rule = scale_by_adam()
    >>> rule.update(torch.tensor([5.0, -0.1]), rule.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([ 1., -1.])
    """

    def init(params: PyTree) -> AdamState:
        zeros = optree.tree_map(torch.zeros_like, params)
        return AdamState(_zero_step(params), zeros, optree.tree_map(torch.zeros_like, params))

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        step = state.step + 1
        mean = optree.tree_map(lambda m, g: torch.lerp(m, g, 1 - b1), state.mean, grads)
        square = optree.tree_map(lambda v, g: torch.lerp(v, g * g, 1 - b2), state.square, grads)
        # In float64: 0.999 ** step is 1 in bfloat16.
        mean_part = 1 - b1 ** step.double()
        square_part = 1 - b2 ** step.double()

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return ((m / mean_part) / ((v / square_part).sqrt() + eps)).to(m.dtype)

        return optree.tree_map(direction, mean, square), AdamState(step, mean, square)

    return GradientTransformation(init, update)


def add_decayed_weights(weight_decay: float) -> GradientTransformation:
    """Add `weight_decay` times the parameter to its update.

    >>> rule = add_decayed_weights(0.5)
    >>> rule.update(torch.zeros(2), (), torch.ones(2))[0]
    tensor([0.5000, 0.5000])
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        return optree.tree_map(lambda g, p: g + weight_decay * p, grads, params), state

    return GradientTransformation(_no_state, update)


def scale_by_learning_rate(lr: float | Schedule) -> GradientTransformation:
    """Multiply by `-lr`; a schedule is called with the number of updates so far (int32, rank 0), first with 0.

    >>> rule = scale_by_learning_rate(lambda step: 0.5 / (step + 1))
    >>> _, state = rule.update(torch.ones(2), rule.init(torch.ones(2)), torch.ones(2))
    >>> rule.update(torch.ones(2), state, torch.ones(2))[0]
    tensor([-0.2500, -0.2500])
    """
    if not callable(lr):
        return GradientTransformation(_no_state, lambda grads, state, params: (_scaled(-lr, grads), state))

    def init(params: PyTree) -> ScheduleState:
        return ScheduleState(_zero_step(params))

    def update(grads: PyTree, state: ScheduleState, params: PyTree) -> tuple[PyTree, ScheduleState]:
        return _scaled(-lr(state.step), grads), ScheduleState(state.step + 1)

    return GradientTransformation(init, update)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after another; the state is the tuple of theirs.

    ValueError if a state of another length is given.

    >>> rule = chain(clip_by_global_norm(1.0), sgd(0.1))
    >>> rule.update(torch.tensor([3.0, 4.0]), rule.init(torch.zeros(2)), torch.zeros(2))[0]
    tensor([-0.0600, -0.0800])
    """

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(each.init(params) for each in transformations)

    def update(grads: PyTree, state: tuple[PyTree, ...], params: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        states = []
        for each, old in zip(transformations, state, strict=True):
            grads, new = each.update(grads, old, params)
            states.append(new)
        return grads, tuple(states)

    return GradientTransformation(init, update)


# ---------------------------------------------------------------- recipes


def sgd(lr: float | Schedule, momentum: float = 0.0, nesterov: bool = False) -> GradientTransformation:
    """Gradient descent, with the momentum of `torch.optim.SGD`.

    Raises `ValueError` for `nesterov` without momentum.

    >>> rule = sgd(0.1)
    >>> rule.update(torch.ones(2), rule.init(torch.ones(2)), torch.ones(2))[0]
    tensor([-0.1000, -0.1000])
    """
    if momentum == 0.0:
        if nesterov:
            raise ValueError("sgd: nesterov=True needs a momentum above 0, as in sgd(lr, momentum=0.9, nesterov=True)")
        return scale_by_learning_rate(lr)
    return chain(scale_by_momentum(momentum, nesterov), scale_by_learning_rate(lr))


def adamw(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> GradientTransformation:
    """Adam with weight decay kept apart from the gradient, as `torch.optim.AdamW`.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101).

    >>> rule = adamw(0.1, weight_decay=0.5)
    >>> rule.update(torch.ones(2), rule.init(torch.ones(2)), torch.ones(2))[0]
    tensor([-0.1500, -0.1500])
    """
    return chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to parameters, leaf by leaf; each parameter keeps its dtype.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)})
    {'w': tensor([0.5000, 0.5000])}
    """
    return optree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


# ---------------------------------------------------------------- helpers


def _no_state(params: PyTree) -> tuple[()]:
    return ()


def _zero_step(params: PyTree) -> Tensor:
    leaves = optree.tree_leaves(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def _scaled(factor: float | Tensor, tree: PyTree) -> PyTree:
    # A rank-0 factor promotes nothing but rank-0 leaves: those keep their dtype too.
    return optree.tree_map(lambda leaf: (factor * leaf).to(leaf.dtype), tree)


def _sum_of_squares(leaf: Tensor) -> Tensor:
    """At least in float32: the squares of many small half-precision numbers vanish in a half-precision sum."""
    wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    return (wide * wide).sum()
