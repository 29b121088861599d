"""Rules for ops over lists: the whole list while nothing is split, else one op a position."""

from __future__ import annotations

import pytest
import torch
from rule_sim import check, compare, make_call
from torch.optim._functional import adam, adamw, sgd
from traced_calls import traced_calls

from spmdfn.partition.rule import rule_for
from spmdfn.partition.rules.optimizers import FUSED, POINTWISE, REDUCTIONS, functional

aten = torch.ops.aten
SHAPES = ((8, 4), (4,), (), (4, 1, 8))


def tensors(seed: int, shapes=SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1 for shape in shapes]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def foreach_args(op) -> tuple:
    """Arguments for any foreach op, by its schema."""
    made = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind == "List[Tensor]":
            made.append(tensors(place))
        elif kind == "Tensor":
            made.append(tensors(place, [(len(SHAPES),)])[0] if argument.name == "scalars" else number(0.7))
        elif kind == "List[number]":
            made.append([0.5, 2.0, 3.0, 0.25])
        elif kind == "number":
            made.append(2.0)
    return tuple(made)


FOREACH = list(functional(f"_foreach_{name}" for name in (*POINTWISE, *REDUCTIONS)))


@pytest.mark.parametrize("op", FOREACH, ids=str)
def test_foreach_position_by_position(op):
    args = foreach_args(op)
    rule = check(op, *args)
    assert rule.alternative is not None
    assert all(rule.kind(name) == "whole" for name in rule.sizes), "one axis could not split two positions"
    compare(rule.alternative({}, *args), op(*args), str(op))


@pytest.mark.parametrize("op", FOREACH, ids=str)
def test_the_ops_of_positions_are_no_list_ops(op):
    args = foreach_args(op)
    rule = rule_for(make_call(op, args, {})[0])
    names = [call[0]._schema.name for call in traced_calls(lambda *args: rule.alternative({}, *args), *args)]
    assert names and not any("_foreach_" in name for name in names)


def test_foreach_options_reach_every_position():
    first, second = tensors(1), tensors(2)
    check(aten._foreach_add.List, first, second, alpha=3)
    check(aten._foreach_sub.List, first, second, alpha=0.5)
    check(aten._foreach_addcmul.Scalar, first, second, tensors(3), 0.1)
    check(aten._foreach_norm.Scalar, first, float("inf"))
    check(aten._foreach_norm.Scalar, [t.float() for t in first], 1, torch.float64)
    check(aten._foreach_mul.List, first, [number(2.0) for _ in first])


def fused_args(name: str, shapes, amsgrad: bool = False) -> tuple[tuple, dict]:
    lists = [tensors(place, shapes) for place in range(4)]
    steps = [number(3.0) for _ in shapes]
    if name == "_fused_sgd":
        options = {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "is_first_step": False}
        return tuple(lists[:3]), {"lr": 0.1, "weight_decay": 0.01, "maximize": False, **options}
    if name == "_fused_adagrad":
        options = {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
        return (*lists[:3], steps), options
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    most = tensors(4, shapes) if amsgrad else []
    return (*lists, most, steps), {**options, "amsgrad": amsgrad}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_of_one_parameter_splits_every_dim(name, tensor_lr):
    args, kwargs = fused_args(name, [(8, 4)])
    if tensor_lr:
        kwargs["lr"] = number(kwargs["lr"])
    op = getattr(aten, name).tensor_lr if tensor_lr else getattr(aten, name).default
    if op == aten._fused_adagrad.default:  # returns its steps, which no dim of a parameter is in
        assert "full" in str([call[0] for call in traced_calls(lambda *a: check_alternative(op, a, kwargs), *args)])
    else:
        rule = check(op, *args, must_split=["p0", "p1"], **kwargs)
        assert rule.elementwise and rule.alternative is None


def check_alternative(op, args, kwargs):
    return rule_for(make_call(op, args, kwargs)[0]).alternative({}, *args, **kwargs)


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_of_many_parameters_goes_one_by_one(name, tensor_lr):
    args, kwargs = fused_args(name, SHAPES)
    if tensor_lr:
        kwargs["lr"] = number(kwargs["lr"])
    op = getattr(aten, name).tensor_lr if tensor_lr else getattr(aten, name).default
    rule = check(op, *args, **kwargs)
    assert all(rule.kind(factor) == "whole" for factor in rule.sizes)
    parts = [
        c
        for c in traced_calls(lambda *a: rule.alternative({}, *a, **kwargs), *args)
        if c[0]._schema.name == op._schema.name
    ]
    assert [[len(tensors) for tensors in part[1][:2]] for part in parts] == [[1, 1]] * len(SHAPES)


def test_fused_adam_with_amsgrad_scale_and_overflow():
    for found in (0.0, 1.0):
        args, kwargs = fused_args("_fused_adamw", [(8, 4)], amsgrad=True)
        kwargs |= {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(found)}
        args = tuple([t.float() for t in group] for group in args)
        check(aten._fused_adamw.default, *args, must_split=["p0", "p1"], **kwargs)
    args, kwargs = fused_args("_fused_adamw", SHAPES, amsgrad=True)
    check(aten._fused_adamw.default, *args, **kwargs)


def test_fused_sgd_without_momentum_has_no_buffers():
    args, kwargs = fused_args("_fused_sgd", SHAPES)
    kwargs["momentum"] = 0.0
    check(aten._fused_sgd.default, *args[:2], [], **kwargs)


def optimizer_step(kind: str):
    """A step of torch.optim's functional form on copies, as a user would write it in a pure function."""
    shared = {"foreach": True, "weight_decay": 0.1, "lr": 0.1, "maximize": False}

    def step(params, grads, moments, squares, steps):
        params, moments, squares, steps = ([t.clone() for t in group] for group in (params, moments, squares, steps))
        if kind == "sgd":
            sgd(params, grads, moments, momentum=0.9, dampening=0.0, nesterov=True, **shared)
            return params, moments
        options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8} | shared
        {"adam": adam, "adamw": adamw}[kind](params, grads, moments, squares, [], steps, **options)
        return params, moments, squares

    return step


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_foreach_steps_of_torch_optim_trace_to_ops_with_rules(kind):
    args = [tensors(place) for place in range(4)] + [[torch.tensor(2.0) for _ in SHAPES]]
    found = [
        call for call in traced_calls(optimizer_step(kind), *args) if call[0]._schema.name.startswith("aten::_foreach")
    ]
    assert found
    for op, op_args, op_kwargs in found:
        check(op, *op_args, **op_kwargs)


@pytest.mark.parametrize("name", FUSED)
def test_a_traced_fused_step_has_a_rule(name):
    """The in-place form fails inside tracing; the functional overload is what a pure function calls."""
    args, kwargs = fused_args(name, SHAPES)
    op = getattr(aten, name).default
    calls = list(traced_calls(lambda *args: op(*args, **kwargs), *args))
    assert [call[0] for call in calls] == [op]
    assert rule_for(make_call(*calls[0])[0]) is not None
