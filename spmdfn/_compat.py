"""The one file that touches torch's private names: each gets a plain name here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize as dispatch_functionalize
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.compiler import _compile_session_context
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# Tracing: fake tensors, functionalization below autograd, proxies.
DataDependentOutput = DataDependentOutputException
DynamicOutputShape = DynamicOutputShapeException
view_replay = _force_original_view_tracking  # a backward through a view replays the view, instead of as_strided
compiling = _compile_session_context  # torch.compiler.is_compiling() is true inside
no_dispatch_modes = _disable_current_modes


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "only inside make_fx"
    return mode.tracer


def traced_graph() -> torch.fx.Graph:
    """The graph that the innermost make_fx is writing."""
    return _tracer().graph


def add_placeholder(name: str, value: torch.Tensor, fake: FakeTensorMode) -> FunctionalTensor:
    """Add an input of the shape and dtype of `value` to the graph being written, and return what stands for it.

    Works at any point of the trace, under functorch levels too.
    """
    tracer = _tracer()
    graph = tracer.graph
    first = next((node for node in graph.nodes if node.op != "placeholder"), graph._root)
    with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction():
        with no_dispatch_modes():
            device = device_of_trace(value)
            with fake:
                stand_in = torch.empty(value.shape, dtype=value.dtype, device=device)
        with graph.inserting_before(first):
            proxy = tracer.create_proxy("placeholder", name, (), {})
        track_tensor_tree(stand_in, proxy, constant=None, tracer=tracer)
        return FunctionalTensor.to_functional(stand_in)


def device_of_trace(value: torch.Tensor) -> torch.device:
    """The device to trace a tensor on: its own type, but cpu for a tensor without data."""
    return torch.device("cpu" if value.device.type == "meta" else value.device.type)


def data_mutated(value: FunctionalTensor) -> bool:
    """Whether the tensor, or a view of it, was written to since it was wrapped."""
    return torch._functionalize_has_data_mutation(value.elem)  # type: ignore[attr-defined]


def is_traced(value: Any) -> bool:
    """Whether a tensor stands for a value of the trace, under any number of functorch levels."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, (FunctionalTensor, FakeTensor))


def autograd_node() -> Any:
    """The autograd node that runs right now, or None in a forward."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()


@contextmanager
def quiet_grad_access() -> Iterator[None]:
    """Silence the warning that a fake copy of a closed-over tensor with a grad_fn looks at its .grad."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def single_threaded_autograd() -> Iterator[None]:
    """Run every backward in the calling thread, whatever the device."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def functional_pointwise_ops() -> list[torch._ops.OpOverload]:
    """Every aten and prims overload that torch tags pointwise, is deterministic, writes nothing and returns tensors."""
    found = []
    for full_name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims") or (name.endswith("_") and not name.endswith("__")):
            continue
        op = getattr(getattr(torch.ops, namespace), name, None)
        if op is None or (overload or "default") not in op.overloads():
            continue
        op = getattr(op, overload or "default")
        if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags or op._schema.is_mutable:
            continue
        if all(isinstance(result.type, torch.TensorType) for result in op._schema.returns):
            found.append(op)
    return found


@contextmanager
def no_mkldnn() -> Iterator[None]:
    """Keep oneDNN's fused ops (of LSTM) out of a trace."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def make_wrapper(cls: type, like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of class `cls` with the metadata of the meta tensor `like` that says it lives on `device`."""
    return torch.Tensor._make_subclass(cls, like, False, dispatch_device=True, device_for_backend_keys=device)


def transforms_active() -> bool:
    """Whether a functorch transform (grad, vmap, ...) or a make_fx trace is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None or get_proxy_mode() is not None


def is_functorch_wrapped(value: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)


def no_functorch() -> Any:
    """A context in which functorch levels do not see tensor operations."""
    return torch._C._DisableFuncTorch()


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that is the same for all tensors that look at one storage, while it lives."""
    return storage._cdata


def tracing() -> bool:
    """Whether a make_fx trace is running around the caller."""
    return get_proxy_mode() is not None


def innermost(value: Any) -> Any:
    """The tensor under all functorch levels: a plain, fake or wrapper tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def is_function_apply(function: Any) -> bool:
    """Whether a call is how functorch applies an autograd.Function."""
    return function is custom_function_call


from torch._functorch.autograd_function import custom_function_call as custom_function_call  # noqa: E402


@contextmanager
def below_dispatch() -> Iterator[None]:
    """Run ops on a wrapper itself, past its __torch_dispatch__: changes its own metadata."""
    python = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    with torch._C._ExcludeDispatchKeyGuard(python | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)):
        yield


def own_binding(name: str) -> Callable[..., Any] | None:
    """The function by which torch itself offers an aten op to Python, if it does: cheaper to call than an overload."""
    return getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C._nn, name, None)


disabled_torch_function = torch._C._disabled_torch_function_impl
graph_task_id = torch._C._current_graph_task_id  # a number for the backward that runs, -1 outside


def unwrapped(value: torch.Tensor) -> torch.Tensor:
    """What a functorch wrapper holds, one level down."""
    return torch._C._functorch.get_unwrapped(value)


def is_composite(op: Any) -> bool:
    """Whether an op is only a name for others: it gets to a subclass where autograd is off, as in inference mode."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def no_function_modes() -> Any:
    """A context in which torch functions go straight to dispatch."""
    return torch._C.DisableTorchFunction()


# Running a user's function inside an autograd.Function: functorch levels and function modes are taken off there.


def levels() -> tuple[tuple[Any, Any], ...]:
    """The running functorch transforms, outermost first: the kind of each, and what stands for it."""
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    with temporarily_clear_interpreter_stack() as stack:
        return tuple(zip(kinds, reversed(stack), strict=True))


def function_modes() -> tuple[TorchFunctionMode, ...]:
    """The active function modes, outermost first."""
    return tuple(_get_current_function_mode_stack())


@contextmanager
def with_function_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Make these modes active, past their own `__enter__`: they were entered before."""
    pushed = 0
    try:
        for mode in modes:
            _push_mode(mode)
            pushed += 1
        yield
    finally:
        for _ in range(pushed):
            _pop_mode()


@contextmanager
def as_many_levels(layers: Sequence[Any]) -> Iterator[int]:
    """Give the transforms that start inside other levels than those in `layers`; yields how many run outside.

    So a tensor of a transform that was taken off can be told from one of a transform that starts here.
    """
    outside = torch._C._functorch.maybe_current_level() or 0
    pushed = 0
    try:
        for _ in range(len(layers) - outside):  # a vmap that nothing is mapped by changes no result
            torch._C._functorch._vmap_increment_nesting(1, "same")
            pushed += 1
        yield outside
    finally:
        for _ in range(pushed):
            torch._C._functorch._vmap_decrement_nesting()


def level_of(value: torch.Tensor) -> int:
    """The functorch level that a tensor belongs to, 0 for none; a wrapper of a transform that has ended has none."""
    return max(torch._C._functorch.maybe_get_level(torch._C._functorch.unwrap_if_dead(value)), 0)


def below(value: torch.Tensor, level: int, layers: Sequence[Any], *, detach: bool = False) -> tuple[torch.Tensor, str]:
    """A tensor without its levels above `level`, and what one of them does with it: "grad", "jvp", "vmap" or "".

    `layers` are the transforms that the levels stand for. `detach`: derivatives do not matter.
    """
    value = torch._C._functorch.unwrap_if_dead(value)
    while (at := torch._C._functorch.maybe_get_level(value)) > level:
        if torch._C._functorch.is_batchedtensor(value):
            return value, "vmap"
        if value.requires_grad and not detach:
            return value, "grad"
        if not detach and at <= len(layers) and layers[at - 1][0] == TransformType.Jvp:
            stack = [layer for _, layer in reversed(layers[:at])]
            restored = temporarily_restore_interpreter_stack(stack)
            with _set_fwd_grad_enabled(True), temporarily_clear_interpreter_stack(), restored:
                tangent = torch._VF._unpack_dual(value, 0)[1]
            if tangent is not None:
                return value, "jvp"
        value = torch._C._functorch.unwrap_if_dead(torch._C._functorch.get_unwrapped(value))
    return value, ""


def differentiates(layers: Sequence[Any]) -> bool:
    """Whether one of the transforms is a reverse-mode derivative."""
    return any(kind == TransformType.Grad for kind, _ in layers)


def wrapped_in(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor and what it holds at each functorch level under it."""
    yield value
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
        yield value


def is_batched(value: torch.Tensor) -> bool:
    """Whether a vmap maps over a tensor, at any level."""
    return any(torch._C._functorch.is_batchedtensor(x) for x in wrapped_in(value))


from torch._C._functorch import TransformType  # noqa: E402
from torch._functorch.pyfunctorch import (  # noqa: E402
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled  # noqa: E402
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode  # noqa: E402


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging an error that a fake tensor raises: it is raised, that is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    silent = logging.Filter("nobody")
    logger.addFilter(silent)
    try:
        yield
    finally:
        logger.removeFilter(silent)


def modes_active() -> bool:
    """Whether any dispatch mode is on: much cheaper than to ask which."""
    return torch._C._len_torch_dispatch_stack() > 0


set_grad_enabled = torch._C._set_grad_enabled  # a tenth of what `with torch.no_grad()` costs
