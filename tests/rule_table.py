"""What the tables of rule tests call for every line."""

from __future__ import annotations

import torch
from rule_sim import check
from rule_trace import verify

from spmdfn.partition.rule import Rule

_NUMBERS = torch.Generator().manual_seed(5)


def rand(*shape: int) -> torch.Tensor:
    """Normal numbers of float64, in which blocks and their combination agree to many digits."""
    return torch.randn(shape, dtype=torch.float64, generator=_NUMBERS)


def holds(op, *args, must_split=None, **kwargs) -> Rule:
    """Check the rule of `op(*args, **kwargs)`, and its `local`, if it has one, also as a graph; return the rule."""
    rule = check(op, *args, must_split=must_split, **kwargs)
    if rule.local is not None:
        verify(op, *args, must_split=must_split, **kwargs)
    return rule
