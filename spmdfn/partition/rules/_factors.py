"""Building blocks of rules that are made dim by dim: fresh factors, and which operands a pending sum may pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from spmdfn.partition.rule import Call, Dims, Local, Operand, Rule

Dim = tuple[str, ...]

# torch has no sum kernel for these on every device, and a sum of bools is not a bool
UNSUMMABLE = frozenset({torch.bool, torch.uint16, torch.uint32, torch.uint64})


class Factors:
    """The factors of one rule while it is being made.

    >>> factors = Factors()
    >>> factors.new("b", 4), factors.new("i", 1), factors.whole("k", 3)
    (('b',), (), ('k',))
    >>> factors.sizes, factors.kinds
    ({'b': 4, 'k': 3}, {'k': 'whole'})
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.kinds: dict[str, str] = {}

    def new(self, name: str, size: int, kind: str = "pass") -> Dim:
        """A dim (or a piece of one) of this size; it has no factor when the size is 1."""
        if size == 1:
            return ()
        self.sizes[name] = size
        if kind != "pass":
            self.kinds[name] = kind
        return (name,)

    def whole(self, name: str, size: int) -> Dim:
        """A dim that must not be split."""
        return self.new(name, size, "whole")

    def dims(self, prefix: str, shape: Sequence[int], whole: Iterable[int] = ()) -> list[Dim]:
        """One factor for every dim of a shape; the dims listed in `whole` must not be split."""
        keep = set(whole)
        return [self.new(f"{prefix}{i}", size, "whole" if i in keep else "pass") for i, size in enumerate(shape)]

    def rule(self, ins: Iterable[Sequence[Dim]], outs: Iterable[Sequence[Dim]], **options: Any) -> Rule:
        """The rule over these factors."""
        return Rule(ins=_freeze(ins), outs=_freeze(outs), sizes=self.sizes, kinds=self.kinds, **options)


def _freeze(tensors: Iterable[Sequence[Dim]]) -> tuple[Dims, ...]:
    return tuple(tuple(dims) for dims in tensors)


def keeps_sums(operand: torch.dtype, result: torch.dtype) -> bool:
    """Whether a sum of values of the first dtype is kept when each is first converted to the second.

    >>> keeps_sums(torch.bfloat16, torch.float32), keeps_sums(torch.float32, torch.bfloat16)
    (True, False)
    >>> keeps_sums(torch.int64, torch.float32), keeps_sums(torch.float32, torch.complex64)
    (False, True)
    """
    if not UNSUMMABLE.isdisjoint((operand, result)):
        return False
    a, b = operand.to_real(), result.to_real()
    if a == b:
        return True
    if a.is_floating_point and b.is_floating_point:
        return torch.finfo(b).eps <= torch.finfo(a).eps and torch.finfo(b).max >= torch.finfo(a).max
    # unsigned sums wrap around at another place once they are widened
    both_signed = not (a.is_floating_point or b.is_floating_point) and a.is_signed and b.is_signed
    return both_signed and torch.iinfo(b).bits >= torch.iinfo(a).bits


def linear_groups(call: Call, *groups: Iterable[Operand | None]) -> tuple[frozenset[int], ...]:
    """The groups of operands in which the call is linear, without those whose sums the result's dtype would not keep.

    A group with a member that is no tensor is dropped: `x + 1` is not linear in x.
    """
    if len(call.results) != 1:
        return ()
    result = call.results[0].dtype
    found = []
    for group in map(list, groups):
        operands = [operand for operand in group if isinstance(operand, Operand)]
        if len(operands) == len(group) and all(keeps_sums(operand.dtype, result) for operand in operands):
            found.append(frozenset(operand.index for operand in operands))
    return tuple(found)


def make(ctx: Local, factors: Iterable[str], op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op without tensor operands, or write the call down where a graph is being written.

    With no tensor among its arguments, only the place of this device's block tells which; `factors` are the result's.
    """
    starts = [start for name in factors for _, _, start in ctx.blocks(name)]
    for start in starts:
        if isinstance(start, torch.fx.Proxy):
            return start.tracer.create_proxy("call_function", op, args, kwargs)
    return op(*args, **kwargs)


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


class Cut:
    """One dim seen as (parts g) in tensors that have different numbers of parts.

    The parts stay whole, g passes: where (3 n) comes from dims 3 and n, its three pieces keep the axes that n has.
    """

    def __init__(self, factors: Factors, *multiples: int) -> None:
        self.factors = factors
        self.unit = math.gcd(*multiples)
        self.minor = factors.new("g", self.unit) if self.unit else ()

    def dim(self, name: str, size: int) -> Dim:
        return self.factors.whole(name, size // self.unit if self.unit else size) + self.minor

    def local(self, ctx: Local, size: int) -> int:
        """A length or position along the dim, on this device."""
        return size // self.unit * ctx.size(self.minor[0]) if self.minor else size


def with_cut(factors: Factors, shape: Sequence[int], dim: int, cut: Dim) -> list[Dim]:
    """One factor for every dim, but `cut` for the one that is cut."""
    return [cut if i == dim else factors.new(f"d{i}", size) for i, size in enumerate(shape)]
