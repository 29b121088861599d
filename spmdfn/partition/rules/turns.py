"""Rules for ops that reverse or rotate dims: flip, roll, rot90. The dims that they turn stay whole."""

from __future__ import annotations

import torch

from spmdfn.partition.rule import Call, Rule, register

from ._factors import Factors, linear_groups, normal_dim

aten = torch.ops.aten
prims = torch.ops.prims


@register(aten.flip.default, aten.roll.default, prims.rev.default)
def flip(call: Call) -> Rule:
    """The flipped or rolled dims stay whole."""
    factors = Factors()
    shape = call.operands[0].shape
    moved = call.args[2] if call.op is aten.roll.default and len(call.args) > 2 else call.arg("dims")
    if call.op is aten.roll.default and not moved:
        moved = range(len(shape))
    dims = factors.dims("d", shape, whole=[normal_dim(dim, len(shape)) for dim in moved])
    return factors.rule([dims], [dims], linear=linear_groups(call, call.operands), elementwise=True)


@register(aten.rot90.default)
def rot90(call: Call) -> Rule:
    """The two turned dims stay whole; an odd number of turns swaps them."""
    factors = Factors()
    shape = call.operands[0].shape
    a, b = (normal_dim(dim, len(shape)) for dim in call.arg("dims"))
    ins = factors.dims("d", shape, whole=(a, b))
    outs = list(ins)
    if call.arg("k") % 2:
        outs[a], outs[b] = outs[b], outs[a]
    return factors.rule([ins], [outs], linear=linear_groups(call, call.operands), elementwise=True)
