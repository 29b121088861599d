"""`remat`: a function whose backward computes it again, instead of keeping what it computed.

One autograd.Function that saves the inputs and differentiates the function in its backward. Inside an
autograd.Function torch takes off the transforms and the function modes that are active: whatever of the user's runs
there gets them back, with the map that it belongs to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from . import _compat
from .device_types import Refused, current_frame, tensors_in
from .errors import SpmdError, message
from .partition.trace import recomputing
from .signature import Signature
from .tree import flatten, unflatten

Tensors = tuple[torch.Tensor, ...]
T = TypeVar("T")


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is computed again in the backward: only its inputs are kept. Also a decorator.

    Arguments and results are pytrees; arguments that are no tensors are static. Works under every torch.func
    transform, in global-view code and in maps, collectives included; a collective of `f` communicates again. Random
    numbers are the same again, since keys are explicit. Under forward mode nothing is saved, and nothing is recomputed.

    A closed-over tensor with respect to which a transform around differentiates (or over which it maps) raises
    SpmdError: it must be an argument. Other closed-over values are fine.

    >>> import torch, spmdfn as sp
    >>> layer = sp.remat(lambda w, x: torch.tanh(x @ w))
    >>> w, x = torch.zeros(3, 3), torch.ones(2, 3)
    >>> torch.func.grad(lambda w: layer(w, layer(w, x)).sum())(w)[0]
    tensor([0., 0., 0.])
    """
    label = Signature(f).label

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not places:
            return f(*args, **kwargs)
        frame = current_frame()
        tensors = [leaves[place] if frame is None else frame.inside(leaves[place]) for place in places]
        fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        result = _Result()

        def function(*tensors: torch.Tensor) -> Tensors:
            filled = list(fixed)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = unflatten(treedef, filled)
            return result.taken_apart(f(*args, **kwargs), tensors)

        return result.together(_Remat.apply(_Code.of(function, label), *tensors))

    return recomputed


class _Result:
    """The structure of a result, kept apart from its tensors."""

    def taken_apart(self, result: Any, inputs: Sequence[torch.Tensor]) -> Tensors:
        leaves, self.treedef = flatten(result)
        self.fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[place] for place in self.places]
        # an input that is a result is a value of its own for autograd; and an autograd.Function has a result
        apart = [x.view_as(x) if any(x is given for given in inputs) else x for x in tensors]
        return tuple(apart) or (inputs[0].new_empty(0),)

    def together(self, tensors: Tensors) -> Any:
        leaves = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        return unflatten(self.treedef, leaves)


@dataclass(frozen=True, eq=False)
class _Code:
    """A function of the user's, with what surrounded its call: context (the map), function modes, functorch levels.

    `taped`: torch's own tape may record what happens around the call.
    """

    function: Callable[..., Tensors]
    label: str
    context: Context
    modes: tuple[_compat.TorchFunctionMode, ...]
    layers: tuple[Any, ...]
    taped: bool

    @staticmethod
    def of(function: Callable[..., Tensors], label: str) -> _Code:
        layers = _compat.levels()
        taped = torch.is_grad_enabled() and not _compat.tracing() and not _compat.differentiates(layers)
        return _Code(function, label, copy_context(), _compat.function_modes(), layers, taped)

    def run(self, work: Callable[[], T], inputs: Sequence[torch.Tensor] | None = None) -> T:
        """Do some work in those surroundings. In the forward, `inputs` are the tensors that may need gradients."""
        return self.context.copy().run(self._run, work, inputs)

    def _run(self, work: Callable[[], T], inputs: Sequence[torch.Tensor] | None) -> T:
        active = _compat.function_modes()
        missing = [mode for mode in self.modes if not any(mode is other for other in active)]
        with _compat.as_many_levels(self.layers) as depth:
            guard = _ClosedOver(self, depth, inputs)
            with _compat.with_function_modes([guard, *missing] if guard.watches else missing):
                try:
                    return work()
                except Refused as refused:
                    raise refused.args[0] from refused.__cause__


class _ClosedOver(_compat.TorchFunctionMode):
    """Below the modes of the call: what the function meets of transforms that were taken off is closed over.

    A value on which they do not act is taken out of them; another one raises, for its gradient would be lost.
    """

    def __init__(self, code: _Code, depth: int, inputs: Sequence[torch.Tensor] | None):
        super().__init__()
        self.code, self.depth = code, depth
        self.levels = range(depth + 1, len(code.layers) + 1)
        taped = code.taped and inputs is not None
        self.inputs = {id(_compat.innermost(x)) for x in inputs or ()} if taped else None

    @property
    def watches(self) -> bool:
        return bool(self.levels) or self.inputs is not None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        found = tensors_in((args, kwargs))
        inside = {id(x): y for x in found if (y := self._inside(x, function)) is not x}
        if inside:
            args, kwargs = _put(args, inside), _put(kwargs, inside)
        return function(*args, **kwargs)

    def _inside(self, x: torch.Tensor, function: Any) -> torch.Tensor:
        detached = function in (torch.Tensor.detach, torch.detach)
        if self.levels and _compat.level_of(x):
            if _compat.level_of(x) in self.levels:
                x, by = _compat.below(x, self.depth, self.code.layers, detach=detached)
                if by:
                    raise self._refusal(x, f"torch.func.{by}")
            elif any(_compat.level_of(under) in self.levels for under in _compat.wrapped_in(x)):
                raise self._refusal(x, "a transform")
        if self.inputs is not None and not torch.is_grad_enabled() and not detached:
            base = _compat.innermost(x)
            if base.requires_grad and id(base) not in self.inputs:
                raise self._refusal(x, "backward()")
        return x

    def _refusal(self, x: torch.Tensor, by: str) -> SpmdError:
        does = "maps over" if by.endswith("vmap") else "differentiates with respect to"
        return SpmdError(
            message(
                f"remat of {self.code.label}: it closes over a tensor that {by} around it {does}",
                f"tensor: shape {tuple(x.shape)}, {x.dtype}",
                "what is closed over is no input of the recomputation, and its gradient would be lost",
                fix="pass it to the function as an argument"
                + ("" if by.endswith("vmap") else ", or close over x.detach() if it needs no gradient"),
            )
        )


def _put(structure: Any, instead: dict[int, torch.Tensor]) -> Any:
    if isinstance(structure, torch.Tensor):
        return instead.get(id(structure), structure)
    if isinstance(structure, dict):
        return {key: _put(item, instead) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        items = [_put(item, instead) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure


class _Remat(torch.autograd.Function):
    spmd_own = True

    @staticmethod
    def forward(code: _Code, *tensors: torch.Tensor) -> Tensors:
        return code.run(lambda: code.function(*tensors), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.code, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        tensors, code = ctx.saved_tensors, ctx.code
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        given = [place for place, g in enumerate(cotangents) if g is not None and _has_derivative(g)]
        gradients: list[Any] = [None] * (1 + len(tensors))
        if not wanted or not given:
            return tuple(gradients)

        def part(*chosen: torch.Tensor) -> Tensors:
            results = code.function(*_with(tensors, wanted, chosen))
            return tuple(results[place] for place in given)

        def again() -> Tensors:
            with recomputing(object()):  # a tag of its own: nothing merges these nodes with others
                pull = torch.func.vjp(part, *[tensors[place] for place in wanted])[1]
            return pull(tuple(cotangents[place] for place in given))

        for place, gradient in zip(wanted, code.run(again), strict=True):
            gradients[1 + place] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        tensors, code = ctx.saved_tensors, ctx.code
        moving = [place for place, tangent in enumerate(tangents) if tangent is not None]
        smooth: list[int] = []
        count = 0

        def part(*chosen: torch.Tensor) -> Tensors:
            nonlocal smooth, count
            results = code.function(*_with(tensors, moving, chosen))
            smooth, count = [place for place, x in enumerate(results) if _has_derivative(x)], len(results)
            return tuple(results[place] for place in smooth)

        def push() -> Tensors:
            primals = tuple(tensors[place] for place in moving)
            return torch.func.jvp(part, primals, tuple(tangents[place] for place in moving))[1]

        pushed = code.run(push)
        found = dict(zip(smooth, pushed, strict=True))
        return tuple(found.get(place) for place in range(count))

    @staticmethod
    def vmap(info: Any, in_dims: Any, code: _Code, *tensors: torch.Tensor) -> tuple[Tensors, int]:
        mapped = torch.func.vmap(code.function, tuple(in_dims[1:]), randomness=info.randomness)
        return _Remat.apply(replace(code, function=mapped), *tensors), 0


def _has_derivative(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _with(tensors: Sequence[torch.Tensor], places: Sequence[int], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = list(tensors)
    for place, other in zip(places, others, strict=True):
        result[place] = other
    return result
