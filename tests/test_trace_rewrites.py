"""What the trace rewrites so that layouts can follow: counting indices, masks with known values, one_hot; names."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from sharded import moves, run_both
from torch import fx
from torch.func import grad, vmap

import spmdfn as sp
from spmdfn import P
from spmdfn.errors import TracingError
from spmdfn.partition.engine import identifier
from spmdfn.partition.trace import trace

MESH = sp.make_mesh((2, 2), ("a", "b"))
N, C = 8, 6


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def places(size: int, *shape: int) -> torch.Tensor:
    """Indices into a dim of that size, negative ones among them."""
    dice = random.Random(size)
    return torch.tensor([dice.randrange(-size, size) for _ in range(math.prod(shape))]).view(shape)


def ops(function, *inputs: torch.Tensor) -> set[str]:
    """The ops of the traced function, checked by value."""
    traced = trace(lambda *xs: [function(*xs)], inputs, names=[f"x{i}" for i in range(len(inputs))])
    traced.graph.lint()
    module = fx.GraphModule(dict(traced.constants), traced.graph)
    torch.testing.assert_close(fx.Interpreter(module).run(*inputs)[0], function(*inputs), rtol=1e-12, atol=1e-12)
    names = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    return {name.removeprefix("aten.").rsplit(".", 1)[0] for name in names}


# indices that count

COUNT = torch.arange(N)
X, Y = draw(N, C), places(C, N)
CUBE = draw(N, C, 5)
READS = {
    "one": lambda x: x[torch.arange(N), Y],
    "closed over": lambda x: x[COUNT, Y],
    "second": lambda x: x.t()[Y, torch.arange(N)],
    "negative from the end": lambda x: x[torch.arange(N), -1 - Y.abs() % C],
    "int32": lambda x: x[torch.arange(N, dtype=torch.int32), Y.int()],
    "column": lambda x: x[torch.arange(N)[:, None], places(C, N, 3)],
    "column of a view": lambda x: x[torch.arange(N).view(-1, 1), places(C, 3)],
    "row": lambda x: x[torch.arange(N), places(C, 3, N)],
    "both": lambda x: x[torch.arange(N)[:, None], torch.arange(C)],
    "both turned": lambda x: x[torch.arange(N), torch.arange(C)[:, None]],
    "scalar": lambda x: x[torch.arange(N), torch.tensor(-2)],
    "diagonal": lambda x: x[:C][torch.arange(C), torch.arange(C)],
    "kept behind": lambda x: (x.unsqueeze(-1) * CUBE)[torch.arange(N), Y],
    "kept between": lambda x: (x.unsqueeze(-1) * CUBE)[torch.arange(N), :, places(5, N)],
    "kept in front": lambda x: (x.unsqueeze(-1) * CUBE)[:, torch.arange(C), places(5, C)],
    "kept in front, wider": lambda x: (x.unsqueeze(-1) * CUBE)[:, torch.arange(C), places(5, 4, C)],
    "several": lambda x: (x.unsqueeze(-1) * CUBE)[torch.arange(N), Y, places(5, N)],
    "several, wider": lambda x: (x.unsqueeze(-1) * CUBE)[torch.arange(N)[:, None], places(C, N, 3), places(5, 3)],
    "two that count": lambda x: (x.unsqueeze(-1) * CUBE)[torch.arange(N)[:, None], torch.arange(C), places(5, N, C)],
}


@pytest.mark.parametrize("name", READS)
def test_an_index_that_counts_becomes_a_gather(name):
    read = READS[name]
    assert "index" not in ops(read, X)
    weight = read(X).cos().detach()
    backward = grad(lambda x: (read(x) * weight).sum())
    assert not {"index", "index_put"} & ops(backward, X)


NOT_ALL = {
    "part": lambda x: x[torch.arange(N - 1), Y[1:]],
    "from one": lambda x: x[torch.arange(1, N), Y[1:]],
    "steps": lambda x: x[torch.arange(0, N, 2), Y[::2]],
    "backwards": lambda x: x[torch.arange(N).flip(0), Y],
    "repeated": lambda x: x[torch.arange(4).repeat(2), Y],
    "cut": lambda x: x[torch.arange(2 * N)[:N], Y],
    "other constant": lambda x: x[COUNT.flip(0).contiguous(), Y],
}


@pytest.mark.parametrize("name", NOT_ALL)
def test_an_index_that_counts_less_stays(name):
    assert "index" in ops(NOT_ALL[name], X)


def written(accumulate: bool, value: torch.Tensor | float):
    def write(x, y):
        x = x.clone()
        if not accumulate:
            x[torch.arange(N), y] = value
            return x
        return x.index_put((torch.arange(N), y), torch.as_tensor(value, dtype=x.dtype).expand(N), accumulate=True)

    return write


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("value", [draw(N), 7.0])
def test_a_write_to_counted_places_becomes_a_scatter(accumulate, value):
    found = ops(written(accumulate, value), X, Y)
    assert "index_put" not in found and found & {"scatter", "scatter_add"}


def test_writes_to_all_places_that_count_are_no_scatter():
    def write(x):
        x = x.clone()
        x[torch.arange(N)[:, None], torch.arange(C)] += 2
        return x

    assert not {"index_put", "scatter", "scatter_add", "index", "gather"} & ops(write, X)


VMAPS = {
    "row": vmap(lambda x, i: x[i]),
    "column": lambda x, i: vmap(lambda x, i: x[:, i])(x.unsqueeze(-1) * CUBE, i % 5),
    "moved": lambda x, i: vmap(lambda x, i: x[i], in_dims=(1, 0))(x.t(), i),
    "slices": lambda x, i: vmap(lambda x, i: x[i, 1:3])(x.unsqueeze(-1) * CUBE, i),
    "twice": lambda x, i: vmap(vmap(lambda x, i: x[i]))((x.unsqueeze(-1) * CUBE), i.expand(C, N).t() % 5),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_of_an_index_becomes_a_gather(name):
    assert "index" not in ops(VMAPS[name], X, Y.abs() % 5)


SPECS = [P(), P("a"), P(("a", "b"))]


@pytest.mark.parametrize("spec", SPECS[1:])
@pytest.mark.parametrize("name", ["one", "column", "kept behind", "several", "scalar"])
def test_a_counted_dim_that_is_split_moves_nothing(name, spec):
    read = READS[name]
    program, error = run_both(read, MESH, (spec,), spec, (X,))
    assert moves(program) == [] and error < 1e-12
    program, error = run_both(grad(lambda x: (read(x) ** 2).sum()), MESH, (spec,), spec, (X,))
    assert moves(program) == [] and error < 1e-12


def test_a_cross_entropy_by_hand_costs_what_the_experts_does():
    def loss(w, x, y):
        return -F.log_softmax(x @ w, -1)[torch.arange(len(y)), y].mean()

    args = (draw(C, 4), draw(N, C), places(4, N))
    program, error = run_both(grad(loss), MESH, (P(), P(("a", "b")), P(("a", "b"))), P(), args)
    assert moves(program) == [("all_reduce", ("a", "b"))] and error < 1e-12  # the gradient's sum
    picked = lambda x, y: vmap(lambda x, i: x[i])(x, y)  # noqa: E731
    program, error = run_both(picked, MESH, (P("a"), P("a")), P("a"), (X, Y))
    assert moves(program) == [] and error == 0


@pytest.mark.parametrize("spec", [P(None, "a"), P("a", "b"), P(None, ("a", "b"))])
def test_the_picked_dim_may_be_split_too(spec):
    args = (draw(8, 12), places(12, 8))
    program, error = run_both(lambda x, y: x[torch.arange(8), y], MESH, (spec, P()), P(), args)
    assert {row.op for row in program.collectives} <= {"all_reduce", "all_gather"} and error < 1e-12
    assert all(row.bytes < 8 * 12 * 8 for row in program.collectives)  # never the table


# masks whose values are known, one_hot

MASK = torch.tensor([True, False, True, True, False, False, True, False])


def set_masked(x):
    x = x.clone()
    x[MASK, 1:3] = 5
    return x


MASKS = {
    "rows": lambda x: x[MASK],
    "columns": lambda x: x[:, MASK[:C]],
    "all": lambda x: x[(MASK[:, None] & MASK[:C])],
    "computed from it": lambda x: x[~MASK],
    "set": set_masked,
    "under grad": grad(lambda x: (x[MASK] ** 2).sum()),
    "under vmap": lambda x: vmap(lambda row: row[MASK[:C]])(x),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_with_known_values_keeps_its_shape(name):
    ops(MASKS[name], X)
    _, error = run_both(MASKS[name], MESH, (P("a", "b"),), P(), (X,))
    assert error == 0


@pytest.mark.parametrize("mask", [lambda x: x > 0, lambda x: torch.arange(N) > 3])
def test_a_mask_of_traced_values_is_refused(mask):
    with pytest.raises(TracingError, match="shape"):
        ops(lambda x: x[mask(x)], X)


@pytest.mark.parametrize("classes", [C, 1, 12])
def test_one_hot_under_transforms(classes):
    y = places(classes, N).abs() % classes
    assert F.one_hot(y, classes).dtype == torch.int64
    ops(lambda y: F.one_hot(y, classes), y)
    ops(grad(lambda x, y: (x.sum() * F.one_hot(y, classes)).cos().sum()), X, y)
    ops(vmap(lambda y: F.one_hot(y, num_classes=classes)), y)
    program, error = run_both(lambda y: F.one_hot(y, classes), MESH, (P("a"),), P("a"), (y,))
    assert error == 0 and moves(program) == []


# names


def test_identifiers():
    names = ["params['w']", "x", "batch[0].tokens", "0", "params['a.b']['c']", "été"]
    assert [identifier(name) for name in names] == ["params_w", "x", "batch_0_tokens", "arg_0", "params_a_b_c", "t"]


def test_programs_name_arguments_as_the_function_does():
    def function(params, lambda_, at_a, _blocks, torch_, aten_gelu):
        return F.gelu(params["w"]["weight"] + params["w_weight"] + lambda_ + at_a) + _blocks + torch_ + aten_gelu

    jitted = sp.spmd_jit(function, mesh=MESH, in_specs=P("a"))
    args = ({"w": {"weight": X}, "w_weight": X + 1}, X + 2, X + 3, X + 4, X + 5, X + 6)
    text = jitted.lower(*args).as_text()
    compile(text, "program", "exec")
    assert "params_w_weight, params_w_weight_1, lambda_1, at_a_1, blocks, torch_1, aten_gelu, = _blocks" in text
    torch.testing.assert_close(jitted(*args).unshard(), function(*args))


def test_names_are_unique_and_valid():
    names = ["in", "in", "x", "x_1", "x", "at_b", "f.g", "f_g"]
    values = [draw(4) + i for i in range(len(names))]

    def function(tree):
        return sum((i + 1) * value for i, value in enumerate(tree))

    jitted = sp.spmd_jit(function, mesh=MESH)
    text = jitted.lower(values).as_text()
    taken = text.split("= _blocks")[0].splitlines()[-1].split(",")[:-1]
    assert len({name.strip() for name in taken}) == len(values) and all(n.strip().isidentifier() for n in taken)
    torch.testing.assert_close(jitted(values).unshard(), function(values))


def test_every_pair_of_counting_and_other_indices():
    """All placements of one counting index among others, dims kept or not, over a tensor of four dims."""
    x = draw(3, 4, 3, 2)
    kinds = ["count", "other", "keep"]
    for combination in itertools.product(kinds, repeat=4):
        if "count" not in combination or "other" not in combination:
            continue
        index = tuple(
            torch.arange(n)[:, None] if kind == "count" else places(n, 1, 5) if kind == "other" else slice(None)
            for kind, n in zip(combination, x.shape, strict=True)
        )
        sizes = {n for kind, n in zip(combination, x.shape, strict=True) if kind == "count"}
        if len(sizes) == 1:
            assert "index" not in ops(lambda x: x[index], x)  # noqa: B023
            assert "index_put" not in ops(grad(lambda x: x[index].cos().sum()), x)  # noqa: B023
