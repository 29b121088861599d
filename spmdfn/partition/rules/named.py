"""The ops of a device-view body, for the axes that stay in the global view: dims pass but for those that they cut."""

from __future__ import annotations

import torch

from spmdfn.partition.rule import Call, Rule, register

ops = torch.ops.spmdfn


def _rule(call: Call, *whole: int) -> Rule:
    dims = tuple((f"d{i}",) if size != 1 else () for i, size in enumerate(call.operands[0].shape))
    out = tuple(() if call.results[0].shape[i] == 1 else dim or (f"d{i}",) for i, dim in enumerate(dims))
    sizes = {f"d{i}": size for i, size in enumerate(call.operands[0].shape) if size != 1 and i not in whole}
    for i in whole:  # its size changes, so operand and result have factors of their own
        dims = (*dims[:i], (f"in{i}",) if call.operands[0].shape[i] != 1 else (), *dims[i + 1 :])
        out = (*out[:i], (f"out{i}",) if call.results[0].shape[i] != 1 else (), *out[i + 1 :])
        sizes |= {f"in{i}": call.operands[0].shape[i], f"out{i}": call.results[0].shape[i]}
    kinds = {name: "whole" for i in whole for name in (f"in{i}", f"out{i}")}
    sizes = {name: size for name, size in sizes.items() if size != 1}
    return Rule(ins=(dims,), outs=(out,), sizes=sizes, kinds=kinds, linear=(frozenset([0]),))


@register(ops.all_reduce.default, ops.permute.default, ops.broadcast.default)
@register(ops.pcast.default, ops.keep_source.default)
def same(call: Call) -> Rule:
    return _rule(call)


@register(ops.all_gather.default, ops.reduce_scatter.default, ops.own_slice.default)
def one_dim(call: Call) -> Rule:
    return _rule(call, call.arg("dim"))


@register(ops.all_to_all.default)
def two_dims(call: Call) -> Rule:
    return _rule(call, *sorted({call.arg("split_dim"), call.arg("concat_dim")}))


@register(ops.axis_index.default)
def index(call: Call) -> Rule:
    like = tuple((f"d{i}",) if size != 1 else () for i, size in enumerate(call.operands[0].shape))
    sizes = {f"d{i}": size for i, size in enumerate(call.operands[0].shape) if size != 1}
    return Rule(ins=(like,), outs=((),), sizes=sizes, shape_only=frozenset([0]))


@register(ops.ragged_all_to_all.default)
def ragged(call: Call) -> Rule:
    """Rows are whole; the other dims of operand and output pass together."""
    rest = tuple((f"d{i}",) if n != 1 else () for i, n in enumerate(call.results[0].shape) if i)
    sizes = {f"d{i}": n for i, n in enumerate(call.results[0].shape) if i}
    sizes |= {"rows": call.operands[0].shape[0], "out": call.results[0].shape[0]}
    counts = [(((f"n{i}",) if operand.shape[0] != 1 else ()),) for i, operand in enumerate(call.operands[2:])]
    sizes |= {f"n{i}": operand.shape[0] for i, operand in enumerate(call.operands[2:])}
    rows = ("rows",) if sizes["rows"] != 1 else ()
    out = ("out",) if sizes["out"] != 1 else ()
    return Rule(
        ins=((rows, *rest), (out, *rest), *counts),
        outs=((out, *rest),),
        sizes={name: n for name, n in sizes.items() if n != 1},
        kinds={name: "whole" for name in sizes if not name.startswith("d")},
    )
