"""A `Program`: one device's straight line of torch ops and collectives, the same on every device of a kind.

It is kept as an FX graph over local shapes and replayed as generated Python. The generated function is a generator:
it takes the device's coordinates and its blocks, and yields at each collective, where devices meet; a backend answers.
Every value is deleted at its last use.
"""

from __future__ import annotations

import keyword
import linecache
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from .bindings import Namespace
from .collectives import COLLECTIVES
from .layout import Layout
from .mesh import Mesh
from .partition.engine import Partitioned


@dataclass(frozen=True)
class Row:
    """One collective of a Program.

    op      "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute" or "broadcast"
    reduce  "sum", "max", "min", or None for an op that does not reduce
    axes    the mesh axes of its group, major first
    bytes   what each device moves: (n-1)/n of the full size for gather and scatter, twice that for all_reduce,
            (n-1)/n of the local size for all_to_all, the block for permute
    where   "file:line" of the user
    why     what asked for it
    """

    op: str
    reduce: str | None
    axes: tuple[str, ...]
    bytes: int
    where: str | None
    why: str


class Program:
    """A partitioned function, ready to run. Made by `spmd_jit(f).lower(*args)`.

    `graph` is the FX graph over local shapes, `collectives` its rows in program order.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("dp",))
    >>> program = sp.spmd_jit(lambda x: x.sum(), mesh=mesh, in_specs=sp.P("dp")).lower(torch.empty(8, device="meta"))
    >>> [(row.op, row.bytes) for row in program.collectives]
    [('all_reduce', 6)]
    >>> print(program.as_text())  # doctest: +ELLIPSIS
    def program(at_dp, ...):
        ...
        sum_default = x.sum()...
        del x
        all_reduce_default = yield 0, sum_default  # all_reduce over dp: sum of sum...
        del sum_default
        return [all_reduce_default]
    <BLANKLINE>
    """

    def __init__(self, partitioned: Partitioned):
        self.graph: fx.Graph = partitioned.graph
        self.mesh: Mesh = partitioned.mesh
        self.constants: dict[str, torch.Tensor] = partitioned.constants
        self.inputs: tuple[Layout, ...] = partitioned.inputs
        self.outputs: tuple[Layout | None, ...] = partitioned.outputs
        self.unruled: tuple[tuple[str, str | None], ...] = partitioned.unruled
        self.dtypes: tuple[torch.dtype, ...] = partitioned.dtypes
        self.coordinates: frozenset[str] = frozenset(partitioned.coordinates)
        self.meets: tuple[fx.Node, ...] = tuple(node for node in self.graph.nodes if node.target in COLLECTIVES)

    @cached_property
    def collectives(self) -> tuple[Row, ...]:
        """A row for every collective, in program order."""
        return tuple(Row(**node.meta["row"]) for node in self.meets)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether a device's results depend on its blocks alone: not on its place, nor on other devices."""
        places = [node for node in self.graph.nodes if node.name in self.coordinates]
        return not self.meets and not any(node.users for node in places)

    @cached_property
    def _generated(self) -> tuple[str, Namespace]:
        return _generate(self.graph, self.constants, len(self.mesh.axis_names))

    def as_text(self) -> str:
        """The program as the Python that runs: one line an op, `yield` at each collective."""
        return self._generated[0]

    @cached_property
    def function(self) -> Callable[..., Generator[Any, Any, list[Any]]]:
        """The generated function: (coordinates..., blocks) -> a generator that yields (number, block) to meet."""
        source, namespace = self._generated
        filename = f"<spmdfn program {id(self):x}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None)
        scope = dict(namespace.values)
        exec(compile(source, filename, "exec"), scope)
        return scope["program"]

    def __repr__(self) -> str:
        ops = sum(node.op in ("call_function", "call_method") for node in self.graph.nodes) - len(self.meets)
        return f"<Program of {ops} ops and {len(self.meets)} collective{'s' * (len(self.meets) != 1)} on {self.mesh}>"


def _generate(graph: fx.Graph, constants: dict[str, torch.Tensor], axes: int) -> tuple[str, Namespace]:
    namespace = Namespace(constants, [node.name for node in graph.nodes])
    lines: list[str] = []
    names: dict[fx.Node, str] = {}
    dying = last_uses(graph)
    coordinates: list[str] = []
    inputs: list[str] = []
    meets = 0

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return names[argument]
        if isinstance(argument, list):
            return "[" + ", ".join(map(text, argument)) + "]"
        if isinstance(argument, tuple):
            return "(" + "".join(text(item) + ", " for item in argument) + ")"
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{key!r}: {text(item)}" for key, item in argument.items()) + "}"
        return namespace.literal(argument)

    for node in graph.nodes:
        names[node] = name = f"{node.name}_" if keyword.iskeyword(node.name) else node.name
        note = f"  # {node.meta['where']}" if node.meta.get("where") else ""
        if node.op == "placeholder":
            (coordinates if len(coordinates) < axes else inputs).append(name)
        elif node.op == "get_attr":
            names[node] = namespace.constant(node.target)
        elif node.op == "output":
            lines.append(f"return {text(list(node.args[0]))}")
        else:
            if node.target in COLLECTIVES:
                row = node.meta["row"]
                value = f"yield {meets}, {text(tensors_of(node))}"
                note = f"  # {row['op']} over {', '.join(row['axes'])}: {row['why']}{' at' + note[3:] if note else ''}"
                meets += 1
            elif node.op == "call_method":
                args = ", ".join([*map(text, node.args[1:]), *(f"{k}={text(v)}" for k, v in node.kwargs.items())])
                value = f"{text(node.args[0])}.{node.target}({args})"
            else:
                value = namespace.call(
                    node.target, [text(a) for a in node.args], {k: text(v) for k, v in node.kwargs.items()}
                )
            lines.append(f"{name} = {value}{note}")
        if dead := dying.get(node):
            lines.append("del " + ", ".join(names[d] for d in dead))
    takes = "".join(f"{name}, " for name in inputs)
    unpack = [f"{takes}= _blocks", "_blocks.clear()"] if inputs else []
    header = f"def program({', '.join([*coordinates, '_blocks'])}):\n"
    unreached = "    if False:\n        yield\n" if not meets else ""
    return header + unreached + "".join(f"    {line}\n" for line in [*unpack, *lines]), namespace


def tensors_of(node: fx.Node) -> Any:
    """What a device brings to a collective: a tensor, or a tuple of them."""
    count = _axes_place(node)
    return node.args[0] if count == 1 else tuple(node.args[:count])


def axes_and_rest(node: fx.Node) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The axes of a collective, and its arguments after them."""
    place = _axes_place(node)
    return tuple(node.args[place]), node.args[place + 1 :]  # type: ignore[arg-type]


def _axes_place(node: fx.Node) -> int:
    return next(i for i, argument in enumerate(node.args) if not isinstance(argument, fx.Node))


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the values that no later node uses."""
    seen: set[fx.Node] = set()
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        dead = [value for value in dict.fromkeys(node.all_input_nodes) if value not in seen and value.op != "get_attr"]
        seen.update(dead)
        if node not in seen and node.op not in ("placeholder", "get_attr"):
            dead.append(node)
        if dead:
            dying[node] = dead
    return dying
