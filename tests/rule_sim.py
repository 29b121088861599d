"""Check a rule by itself, without the engine: split one factor, run the blocks, put them together, compare.

`check(op, *args, **kwargs)` does it for every factor that may be split, every linear group, every shape-only operand
and the alternative, and returns the rule.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import spmdfn.partition.rules  # noqa: F401  (registers the rules)
from spmdfn.partition.rule import Call, Local, Operand, Result, Rule, rule_for


def make_call(op, args, kwargs) -> tuple[Call, list[torch.Tensor], list[torch.Tensor]]:
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    counter = itertools.count()
    marked = [
        Operand(next(counter), tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    call_args, call_kwargs = tree_unflatten(marked, tree)
    results = flat_results(op(*args, **kwargs))
    call = Call(
        op,
        tuple(call_args),
        call_kwargs,
        tuple(leaf for leaf in marked if isinstance(leaf, Operand)),
        tuple(Result(tuple(r.shape), r.dtype) for r in results),
    )
    return call, tensors, results


def flat_results(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class Block(Local):
    """Block `index` of `n` along one factor."""

    def __init__(self, rule: Rule, factor: str, n: int, index: int):
        self.rule, self.factor, self.n, self.index = rule, factor, n, index

    def size(self, factor):
        return self.rule.sizes[factor] // (self.n if factor == self.factor else 1) if factor in self.rule.sizes else 1

    def offset(self, factor):
        assert factor in self.rule.contiguous or factor not in self.rule.sizes, f"{factor} is not declared contiguous"
        return self.index * self.size(factor) if factor == self.factor else 0

    def is_split(self, factor):
        return factor == self.factor

    def blocks(self, factor):
        return ((self.size(factor), 1, self.index * self.size(factor) if factor == self.factor else 0),)

    def _shape(self, dims):
        return tuple(math.prod(self.size(name) for name in dim) for dim in dims)

    def in_shape(self, index):
        return self._shape(self.rule.ins[index])

    def out_shape(self, index=0):
        return self._shape(self.rule.outs[index])


def _axis(tensor, dims, sizes, factor):
    """View a tensor with one dim per factor; return it and the place of `factor` (None: it lacks it)."""
    names = [name for dim in dims for name in (dim or (None,))]
    return tensor.reshape([1 if name is None else sizes[name] for name in names]), (
        names.index(factor) if factor in names else None
    )


def take_block(tensor, dims, rule, factor, n, index):
    view, place = _axis(tensor, dims, rule.sizes, factor)
    if place is None:
        return tensor
    part = view.chunk(n, place)[index]
    shape = [math.prod(rule.sizes[f] // (n if f == factor else 1) for f in dim) for dim in dims]
    return part.reshape(shape)


def join_blocks(blocks, dims, rule, factor):
    n = len(blocks)
    names = [name for dim in dims for name in (dim or (None,))]
    if factor not in names:
        kind = rule.kind(factor)
        assert kind in ("sum", "max", "min"), f"a result lacks factor {factor} of kind {kind}"
        stacked = torch.stack(blocks)
        if kind == "sum":
            return stacked.sum(0).to(blocks[0].dtype)
        return stacked.amax(0) if kind == "max" else stacked.amin(0)
    local = {name: size // (n if name == factor else 1) for name, size in rule.sizes.items()}
    views = [b.reshape([1 if name is None else local[name] for name in names]) for b in blocks]
    whole = torch.cat(views, names.index(factor))
    return whole.reshape([math.prod(rule.sizes[f] for f in dim) for dim in dims])


def compare(got, want, what, exact=False):
    got, want = flat_results(got), flat_results(want)
    assert len(got) == len(want), f"{what}: {len(got)} results, wanted {len(want)}"
    for place, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == w.dtype, f"{what}: result {place} is {g.dtype}, wanted {w.dtype}"
        assert g.shape == w.shape, f"{what}: result {place} is {tuple(g.shape)}, wanted {tuple(w.shape)}"
        if exact:
            assert torch.equal(g, w), f"{what}: result {place} differs"
        else:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")


def run(call, rule, tensors, args, kwargs, local=None):
    """Run the op (or the rule's `local`) with other tensors in the operands' places."""
    replace = iter(tensors)
    args, kwargs = tree_map(lambda leaf: next(replace) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    if local is not None and rule.local is not None:
        return rule.local(local, *args, **kwargs)
    return call.op(*args, **kwargs)


def check(op, *args, meshes=(2, 4), must_split=None, **kwargs) -> Rule:
    """Check every promise of the rule for `op(*args, **kwargs)`. `must_split`: factors that have to be splittable
    (by name), if the test wants to be sure that the rule is not just "whole"."""
    call, tensors, want = make_call(op, args, kwargs)
    rule = rule_for(call)
    assert rule is not None, f"{op} has no rule"
    assert len(rule.ins) == len(tensors) and len(rule.outs) == len(want), "operand or result count"
    for tensor, dims in zip([*tensors, *want], [*rule.ins, *rule.outs], strict=True):
        assert tuple(tensor.shape) == tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims), (tensor.shape, dims)
    splittable = {f for f in rule.sizes if rule.kind(f) != "whole"}
    for factor in must_split or ():
        assert factor in splittable, f"{factor} cannot be split"
    for factor, n in itertools.product(sorted(splittable), meshes):
        if rule.sizes[factor] % n:
            continue
        blocks = []
        for index in range(n):
            ctx = Block(rule, factor, n, index)
            pieces = [take_block(t, dims, rule, factor, n, index) for t, dims in zip(tensors, rule.ins, strict=True)]
            blocks.append(flat_results(run(call, rule, pieces, args, kwargs, ctx)))
            for place, block in enumerate(blocks[-1]):
                shape, wanted = tuple(block.shape), ctx.out_shape(place)
                assert shape == wanted, f"{op} split on {factor}: block {shape}, wanted {wanted}"
        for place, dims in enumerate(rule.outs):
            got = join_blocks([b[place] for b in blocks], dims, rule, factor)
            compare(got, want[place], f"{op} split on {factor} by {n}, result {place}")
    for group in rule.linear:
        _check_linear(call, rule, group, tensors, args, kwargs, want)
    for index in rule.shape_only:
        other = [torch.zeros_like(t) if i == index else t for i, t in enumerate(tensors)]
        compare(run(call, rule, other, args, kwargs), want, f"{op}: operand {index} is not shape-only")
    if rule.alternative is not None:
        for n in meshes:
            splits = {f: n for f in rule.sizes if rule.kind(f) == "whole" and rule.sizes[f] % n == 0}
            if splits:
                compare(rule.alternative(splits, *args, **kwargs), want, f"{op}: alternative with {splits}")
    return rule


def _check_linear(call, rule, group, tensors, args, kwargs, want):
    assert len(want) == 1, "only single-result ops may be linear"
    parts = {i: torch.randn(tensors[i].shape).to(tensors[i].dtype) * 3 for i in group}
    for i in group:
        assert tensors[i].is_floating_point() or tensors[i].is_complex() or not want[0].is_floating_point(), (
            f"operand {i} is {tensors[i].dtype}"
        )
    first = [parts.get(i, t) for i, t in enumerate(tensors)]
    second = [t - parts[i] if i in parts else t for i, t in enumerate(tensors)]
    one, two = (flat_results(run(call, rule, parts, args, kwargs))[0] for parts in (first, second))
    compare([one + two], want, f"{call.op}: not linear in operands {sorted(group)}")
