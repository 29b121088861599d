"""`peak_memory`: what one device holds at most while a Program runs, by liveness. Nothing runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._compat import FakeTensorMode, storage_id
from ..program import Program, last_uses


@dataclass(frozen=True)
class Peak:
    """The most bytes that one device holds, and when.

    bytes    inputs included: they are the caller's
    inputs   bytes of the device's input blocks
    where    the user's line at the peak
    values   the largest values alive then, as (name, bytes), largest first
    """

    bytes: int
    inputs: int
    where: str | None
    values: tuple[tuple[str, int], ...]


def peak_memory(program: Program, *, shown: int = 8) -> Peak:
    """The peak of a Program's live bytes on one device. Views count as the storage they look at.

    `shown` is how many of the largest values alive then are listed. What a backend adds, such as a kernel's workspace,
    is not counted.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("dp",))
    >>> f = sp.spmd_jit(lambda x: (x * 2).sum(), mesh=mesh, in_specs=sp.P("dp"))
    >>> sp.debug.peak_memory(f.lower(torch.ones(1024))).bytes  # a block of 1 KiB, its double, and the sum
    2052
    """
    uses = last_uses(program.graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        return _Walk(program, fake, uses).run(shown)


class _Walk:
    def __init__(self, program: Program, fake: FakeTensorMode, uses: dict[fx.Node, list[fx.Node]]):
        self.program, self.fake, self.uses = program, fake, uses
        self.values: dict[fx.Node, Any] = {}
        self.holders: dict[int, int] = {}  # storage -> how many live values look at it
        self.sizes: dict[int, int] = {}
        self.live = 0

    def run(self, shown: int) -> Peak:
        peak = Peak(0, 0, None, ())
        inputs = iter(zip(self.program.inputs, self.program.dtypes, strict=True))
        for node in self.program.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                value = 0 if node.name in self.program.coordinates else self._input(*next(inputs))
            elif node.op == "get_attr":
                value = self.fake.from_tensor(self.program.constants[node.target])
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
                method = node.op == "call_method"
                value = getattr(args[0], node.target)(*args[1:], **kwargs) if method else node.target(*args, **kwargs)
            self.values[node] = value
            self._hold(value, 1)
            if node.op == "placeholder":
                peak = Peak(self.live, self.live, None, ())
            elif self.live > peak.bytes:
                peak = Peak(self.live, peak.inputs, node.meta.get("where"), self._largest(shown))
            for dead in self.uses.get(node, ()):
                if dead.op != "placeholder":  # an input stays with the caller
                    self._hold(self.values.pop(dead), -1)
        return peak

    def _input(self, layout: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(layout.local_shape, dtype=dtype)

    def _hold(self, value: Any, change: int) -> None:
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            key = storage_id(storage)
            self.holders[key] = self.holders.get(key, 0) + change
            if change > 0 and self.holders[key] == 1:
                self.sizes[key] = storage.nbytes()
                self.live += self.sizes[key]
            elif self.holders[key] == 0:
                self.live -= self.sizes.pop(key)
                del self.holders[key]

    def _largest(self, shown: int) -> tuple[tuple[str, int], ...]:
        sizes = {node.name: sum(t.untyped_storage().nbytes() for t in _tensors(v)) for node, v in self.values.items()}
        return tuple(sorted(sizes.items(), key=lambda item: -item[1])[:shown])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
