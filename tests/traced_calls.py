"""What a function becomes in a trace, and with which values its ops are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmdfn._compat import dispatch_functionalize, make_fx


class _Recorder(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule):
        super().__init__(module)
        self.calls: list[tuple[Any, tuple, dict]] = []

    def call_function(self, target, args, kwargs):
        if isinstance(target, torch._ops.OpOverload):
            self.calls.append((target, args, kwargs))
        return super().call_function(target, args, kwargs)


def traced_calls(function: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, tuple, dict]]:
    """Every call of an aten op in the functionalized fake trace of a function, with the values of a real run."""
    make = make_fx(dispatch_functionalize(function), tracing_mode="fake", _allow_non_fake_inputs=True)
    recorder = _Recorder(make(*args))
    recorder.run(*torch.utils._pytree.tree_leaves(args))
    yield from recorder.calls
