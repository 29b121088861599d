"""From a function over whole tensors to one functional aten graph: everything of torch.func has dissolved by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx

from .. import _compat
from .._compat import FakeTensor, FakeTensorMode, FunctionalTensor, FunctionalTensorMode
from ..device_types import Types
from ..errors import TracingError, message
from . import guards
from .indexing import without_value
from .lines import Lines, raising_line
from .simplify import simplify

_PLAIN = (torch.Tensor, torch.nn.Parameter, FunctionalTensor, FakeTensor)
_RECOMPUTE: ContextVar[Any] = ContextVar("spmdfn_recompute", default=None)


@dataclass
class Traced:
    """A traced function.

    graph      placeholders (the inputs, then the captured values), get_attr constants, aten calls, and as output a
               flat list. Every node has `meta["val"]` (a fake tensor, or a tuple of them), `meta["where"]` (the user's
               line) and `meta["backward"]`.
    constants  closed-over tensors by get_attr target, each object once
    captured   closed-over values that became inputs
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    captured: list[Any] = field(default_factory=list)


@contextmanager
def recomputing(tag: Any) -> Iterator[None]:
    """Mark the nodes traced inside with `meta["recompute"] = tag`, so that they are not merged with others."""
    token = _RECOMPUTE.set(tag)
    try:
        yield
    finally:
        _RECOMPUTE.reset(token)


def trace(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[torch.Tensor],
    *,
    names: Sequence[str],
    capture: Callable[[torch.Tensor], bool] | None = None,
) -> Traced:
    """Trace `function(*tensors) -> flat list` over the shapes, dtypes and device types of `inputs`; no data is read.

    `names` are the inputs' names in errors. `capture` says which closed-over tensors (of a subclass of torch.Tensor)
    become extra inputs; any other one becomes a constant. Raises TracingError for what has no meaning in a trace:
    values in Python, shapes from data, mutated inputs or closed-over tensors, draws from the global generator.

    >>> traced = trace(lambda x: [x.sin() * 2, "label"], [torch.ones(3)], names=["x"])
    >>> [str(node.target) for node in traced.graph.nodes]
    ['arg0_1', 'aten.sin.default', 'aten.mul.Tensor', 'output']
    >>> traced.graph.output_node().args[0][1]
    'label'
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    devices = [_compat.device_of_trace(x) for x in inputs]
    with fake:
        stand_ins = [torch.empty(x.shape, dtype=x.dtype, device=d) for x, d in zip(inputs, devices, strict=True)]
    session = _Session(fake, list(names), capture)
    outputs: list[Any] = []

    def body(*wrapped: FunctionalTensor) -> list[Any]:
        session.start(wrapped)
        with _Functions(session), _Ops(session):
            outputs.extend(session.swap(list(function(*wrapped))))
        session.finish()
        return [value for value in outputs if isinstance(value, torch.Tensor)]

    functional = _compat.dispatch_functionalize(body, FunctionalTensorMode())

    def typed(*fakes: torch.Tensor) -> Any:
        with Types():  # device types of values in a map; inside functionalization, so that writes are seen as values
            return functional(*fakes)

    # view replay: else writes to views trace to as_strided in a backward
    settings = (_compat.view_replay(True), _compat.compiling(), _compat.single_threaded_autograd())
    with ExitStack() as stack:
        for setting in (*settings, _compat.no_mkldnn(), _compat.quiet_grad_access()):
            stack.enter_context(setting)
        try:
            module = _compat.make_fx(typed, tracing_mode="real", _disable_torch_fn_metadata_mode=True)(*stand_ins)
        except Exception as error:
            _reraise(error, session)
    return _traced(module, session, outputs)


def _reraise(error: Exception, session: _Session) -> NoReturn:
    if session.refused is not None and error is not session.refused:
        raise session.refused from error
    if isinstance(error, TracingError):
        raise error
    where = raising_line(error.__traceback__) or ""
    clearer = guards.explained(error, where)
    if clearer is not None:
        raise clearer from error
    if guards.is_device_mix(error):
        error.add_note(f"while tracing {where}")
    raise error


def _traced(module: fx.GraphModule, session: _Session, outputs: list[Any]) -> Traced:
    graph = module.graph
    output = graph.output_node()
    tensors = iter(output.args[0])  # type: ignore[arg-type]
    output.args = ([next(tensors) if isinstance(value, torch.Tensor) else value for value in outputs],)
    constants = _constants(module, session.fake)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(places, session.names, strict=True):
        node.meta.update(where=name, backward=False)
    output.meta.update(val=None, where="", backward=False)
    for node in graph.nodes:
        if "where" not in node.meta:  # made when a pending write was brought up to date at the end
            earlier = node.all_input_nodes
            node.meta["where"] = earlier[0].meta["where"] if earlier else ""
            node.meta["backward"] = bool(earlier) and earlier[0].meta["backward"]
    simplify(graph, session.fake, constants)
    live = {node.target for node in graph.nodes if node.op == "get_attr"}
    return Traced(graph, {name: value for name, value in constants.items() if name in live}, session.captured)


def _constants(module: fx.GraphModule, fake: FakeTensorMode) -> dict[str, torch.Tensor]:
    constants: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if value.is_leaf and isinstance(value.grad, FunctionalTensor):
            value.grad = None  # what backward() left there is a value of the trace
            raise TracingError(
                message(
                    "backward() would mutate a closed-over tensor: it writes to its .grad",
                    f"value: {tuple(value.shape)}",
                    fix="torch.func.grad of a function that takes it as an argument",
                )
            )
        node.target = first.setdefault(id(value), node.target)
        value = constants.setdefault(node.target, value.detach())
        node.meta["val"] = fake.from_tensor(value)
    return constants


class _Session:
    """What the two modes of one trace share."""

    def __init__(self, fake: FakeTensorMode, names: list[str], capture: Callable[[torch.Tensor], bool] | None) -> None:
        self.fake, self.names, self.capture = fake, names, capture
        self.lines = Lines()
        self.captured: list[Any] = []
        self.refused: TracingError | None = None
        self._stand_ins: dict[int, FunctionalTensor] = {}
        self._inputs: list[FunctionalTensor] = []

    def start(self, wrapped: Sequence[FunctionalTensor]) -> None:
        self._inputs = list(wrapped)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Remember a refusal: Python's operators turn a TypeError of an operand into an attempt of something else."""
        try:
            yield
        except TracingError as error:
            self.refused = self.refused or error
            raise

    def finish(self) -> None:
        if self.refused is not None:
            raise self.refused
        guards.refuse_mutated(self._inputs, self.names, None, "")

    def check_inputs(self, op: Any, where: str) -> None:
        guards.refuse_mutated(self._inputs, self.names, op, where)

    def swap(self, value: Any) -> Any:
        """Put the stand-ins of captured tensors in their places, at any depth of lists, tuples and dicts."""
        kind = type(value)
        if kind in _PLAIN or self.capture is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if kind is list:
            return [self.swap(item) for item in value]
        if kind is tuple:
            return tuple([self.swap(item) for item in value])
        if kind is dict:
            return {key: self.swap(item) for key, item in value.items()}
        return value

    def _stand_in(self, value: torch.Tensor) -> torch.Tensor:
        found = self._stand_ins.get(id(value))
        if found is None:
            assert self.capture is not None
            if not self.capture(value):
                return value
            name = f"captured_{len(self.captured)}"
            found = self._stand_ins[id(value)] = _compat.add_placeholder(name, value, self.fake)
            self.captured.append(value)
            self._inputs.append(found)
            self.names.append(f"closed-over {type(value).__name__} of shape {tuple(value.shape)}")
        return found


class _Functions(_compat.TorchFunctionMode):
    """Above autograd: brings captured tensors in, refuses `.numpy()`, needs no value for `x[i]`, tells `Lines`."""

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session = self.session
        if function in guards.TO_HOST:
            with session.refusing():
                guards.refuse_to_host(function, args, session.lines.place())
        if session.capture is not None:
            args, kwargs = session.swap(tuple(args)), session.swap(kwargs)
        kwargs = kwargs or {}
        instead = without_value(function, args, kwargs)
        result = function(*args, **kwargs) if instead is None else instead()
        session.lines.called()
        return result


class _Ops(_compat.TorchDispatchMode):
    """Below autograd and functorch: refuses what must not run, and writes the user's line into the nodes made."""

    def __init__(self, session: _Session) -> None:
        super().__init__()
        self.session = session
        self.graph = _compat.traced_graph()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        session, kwargs = self.session, kwargs or {}
        if session.capture is not None:  # those that a functorch transform took as an argument
            args, kwargs = session.swap(tuple(args)), session.swap(kwargs)
        if op is torch.ops.prim.device.default:
            return args[0].device
        if op is torch.ops.aten._linalg_check_errors.default:
            return None  # raises if a matrix is singular, and has no result
        if op is torch.ops.aten._has_same_storage_numel.default:
            return True  # forward mode asks if a tangent may be viewed like its primal; stand-ins have no storage
        where, backward = session.lines.here()
        if guards.profile(op).harmless:
            return self._run(op, args, kwargs, where, backward)
        with session.refusing():
            return self._run_guarded(op, args, kwargs, where, backward)

    def _run(self, op: Any, args: Any, kwargs: Any, where: str, backward: bool) -> Any:
        last: Any = next(iter(reversed(self.graph.nodes)), None)
        result = op(*args, **kwargs)
        self._mark(last, where, backward)
        return result

    def _run_guarded(self, op: Any, args: Any, kwargs: Any, where: str, backward: bool) -> Any:
        guards.refuse(op, args, kwargs, where)
        facts = guards.profile(op)
        if facts.data_dependent and not guards.any_traced(args):
            with _compat.no_dispatch_modes():  # the value of a closed-over tensor is known
                return op(*args, **kwargs)
        try:
            result = self._run(op, args, kwargs, where, backward)
        except RuntimeError as error:
            clearer = guards.explained(error, where, args)
            if clearer is None:
                raise
            raise clearer from error
        if facts.writes:
            self.session.check_inputs(op, where)
        return result

    def _mark(self, last: fx.Node, where: str, backward: bool) -> None:
        recompute = _RECOMPUTE.get()
        for node in reversed(self.graph.nodes):
            if node is last:
                return
            node.meta.update(where=where, backward=backward)
            if recompute is not None:
                node.meta["recompute"] = recompute
