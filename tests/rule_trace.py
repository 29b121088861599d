"""Check that a rule's `local` can be written down as a graph, with proxies for its tensors and offsets."""

from __future__ import annotations

import torch
from rule_sim import Block, check, compare, make_call, run, take_block
from torch.utils._pytree import tree_map

from spmdfn.partition.rule import Rule, rule_for


class TracedBlock(Block):
    """A block whose offset along the split factor is not known yet."""

    def __init__(self, rule, factor, n, offset):
        super().__init__(rule, factor, n, 0)
        self.proxy = offset

    def offset(self, factor):
        known = super().offset(factor)
        return self.proxy if factor == self.factor else known

    def blocks(self, factor):
        ((size, stride, start),) = super().blocks(factor)
        return ((size, stride, self.proxy if factor == self.factor else start),)


def trace_local(rule, factor, n, tensors, args, kwargs) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    inputs = iter([torch.fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(tensors))])
    offset = torch.fx.Proxy(graph.placeholder("offset"), tracer)
    args, kwargs = tree_map(lambda leaf: next(inputs) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    result = rule.local(TracedBlock(rule, factor, n, offset), *args, **kwargs)
    graph.output(tree_map(lambda leaf: leaf.node if isinstance(leaf, torch.fx.Proxy) else leaf, result))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def verify(op, *args, n=2, must_split=None, **kwargs) -> Rule:
    """`check`, and the same blocks again through the traced `local`."""
    rule = check(op, *args, must_split=must_split, **kwargs)
    call, tensors, _ = make_call(op, args, kwargs)
    assert rule_for(call) == rule or rule.local is not None
    if rule.local is None:
        return rule
    for factor, size in rule.sizes.items():
        if rule.kind(factor) == "whole" or size % n:
            continue
        traced = trace_local(rule, factor, n, tensors, args, kwargs)
        for index in range(n):
            pieces = [take_block(t, dims, rule, factor, n, index) for t, dims in zip(tensors, rule.ins, strict=True)]
            want = run(call, rule, pieces, args, kwargs, Block(rule, factor, n, index))
            compare(traced(*pieces, index * (size // n)), want, f"{op} traced, split on {factor}")
    return rule
