"""The rules of the random ops: every block of a draw is that block of the whole, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from rule_sim import Block, check, make_call

from spmdfn.partition.rule import rule_for
from spmdfn.threefry import key, ops, split

SAMPLERS = [
    (ops.random_bits, torch.uint8),
    (ops.random_bits, torch.int32),
    (ops.random_bits, torch.uint64),
    (ops.random_uniform, torch.float32),
    (ops.random_uniform, torch.bfloat16),
    (ops.random_normal, torch.float32),
    (ops.random_normal, torch.float64),
]


def ids(value):
    return str(value).removeprefix("spmdfn.").removeprefix("torch.")


@pytest.mark.parametrize(("op", "dtype"), SAMPLERS, ids=ids)
def test_drawn_dims_are_free(op, dtype):
    rule = check(op, key(3), [8, 1, 12], dtype, must_split=["d0", "d2"])
    assert rule.elementwise and rule.kind("old") == "whole"
    assert rule.outs == ((("d0",), (), ("d2",)),)


@pytest.mark.parametrize(("op", "dtype"), SAMPLERS, ids=ids)
def test_batch_dims_are_shared_with_the_key(op, dtype):
    rule = check(op, split(key(3), (4, 1, 2)), [8, 4], dtype, must_split=["b0", "b2", "d0", "d1"])
    assert rule.ins == ((("b0",), (), ("b2",), ("old",)),)


def test_a_scalar_draw():
    assert check(ops.random_normal, key(3), [], torch.float32).outs == ((),)


def test_new_keys():
    rule = check(ops.threefry, split(key(3), 4), [8, 4], 5, must_split=["b0", "d0", "d1"])
    assert rule.kind("new") == "whole"
    check(ops.threefry, key(3), [], 7)


def test_fold_in():
    rule = check(ops.fold_in, split(key(3), (4, 2)), torch.arange(8).reshape(4, 2), must_split=["b0", "b1"])
    assert rule.kind("old") == rule.kind("new") == "whole"


class Pieces(Block):
    """A device of a mesh on which several pieces of a factor are split."""

    def __init__(self, rule, pieces, coordinate):
        super().__init__(rule, "", 1, 0)
        self.pieces, self.coordinate = pieces, coordinate

    def blocks(self, factor):
        if factor not in self.pieces:
            return ((self.rule.sizes[factor], 1, 0),)
        result, inner = [], 1
        for size, axis in reversed(self.pieces[factor]):
            n = 2 if axis is not None else 1
            result.append((size // n, inner, self.coordinate[axis] * (size // n) if axis is not None else 0))
            inner *= size
        return tuple(reversed(result))

    def size(self, factor):
        whole = super().size(factor)
        for _, axis in self.pieces.get(factor, ()):
            whole //= 2 if axis is not None else 1
        return whole


LAYOUTS = [
    {"d0": [(12, 0)], "d1": [(8, 1)]},
    {"d0": [(3, None), (4, 0)]},
    {"d0": [(2, 0), (3, None), (2, 1)], "d1": [(2, None), (4, 2)]},
    {"d0": [(4, 1), (3, None)], "d1": [(2, 0), (2, None), (2, 2)]},
]


def local_blocks(op, args, pieces, call_local):
    call, _, _ = make_call(op, args, {})
    rule = rule_for(call)
    for coordinate in itertools.product(range(2), repeat=3):
        yield coordinate, call_local(rule, Pieces(rule, pieces, coordinate))


def expected(whole, pieces, coordinate):
    """The same block, cut out of the whole value."""
    dims = [pieces.get(f"d{dim}", [(size, None)]) for dim, size in enumerate(whole.shape)]
    view = whole.reshape([size for dim in dims for size, _ in dim])
    for place, (size, axis) in enumerate(piece for dim in dims for piece in dim):
        if axis is not None:
            view = view.narrow(place, coordinate[axis] * (size // 2), size // 2)
    lengths = [torch.Size([size // (2 if axis is not None else 1) for size, axis in dim]).numel() for dim in dims]
    return view.reshape(lengths)


@pytest.mark.parametrize("pieces", LAYOUTS)
@pytest.mark.parametrize(("op", "dtype"), SAMPLERS, ids=ids)
def test_dims_of_several_factors(op, dtype, pieces):
    args = (key(9), [12, 8], dtype)
    whole = op(*args)
    for coordinate, got in local_blocks(op, args, pieces, lambda rule, ctx: rule.local(ctx, *args)):
        assert torch.equal(got, expected(whole, pieces, coordinate))


@pytest.mark.parametrize("pieces", LAYOUTS)
def test_local_is_one_leaf_of_a_graph(pieces):
    """With proxies for the key and the offsets, `local` writes one call and, for merged dims, a reshape."""
    args = (key(9), [12, 8], torch.float32)
    whole = ops.random_normal(*args)

    call, _, _ = make_call(ops.random_normal, args, {})
    rule = rule_for(call)
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = [torch.fx.Proxy(graph.placeholder(name), tracer) for name in ("key", "x", "y", "z")]
    result = rule.local(Pieces(rule, pieces, proxies[1:]), proxies[0], *args[1:])
    graph.output(result.node)
    run = torch.fx.GraphModule({}, graph)
    calls = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]
    assert calls.count("block_normal") == 1 and set(calls) <= {"block_normal", "mul", "add"}
    for coordinate in itertools.product(range(2), repeat=3):
        assert torch.equal(run(args[0], *coordinate), expected(whole, pieces, coordinate))
