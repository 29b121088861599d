"""Wrong input is told, not guessed: every row is a mistake, the class of its error, and what the message must say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import spmdfn as sp
from spmdfn import P
from spmdfn.errors import ShardingError, SpecError, SpmdError, TracingError

HERE = Path(__file__).name
MESH = sp.make_mesh((2, 4), ("dp", "tp"))
LINE = sp.make_mesh((2,), ("x",))
X = torch.arange(32.0).reshape(8, 4)
W = torch.ones(4, 16)
KEY = sp.random.key(0)


def step(x, w=None):
    return x * 2


def jit(function, **options):
    return sp.spmd_jit(function, **{"mesh": MESH, "in_specs": P("dp"), **options})


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def mutates(params):
    params["w"].add_(1)
    return params["w"] * 2


def mutates_a_view(x):
    x.view(-1)[0] = 3
    return x


CLOSED = torch.ones(4)


def mutates_closed_over(x):
    CLOSED.mul_(2)
    return x * CLOSED


def batch_norm(x, mean):
    return F.batch_norm(x, mean, torch.ones(4), training=True)


@dataclass
class Config:
    sizes: list = field(default_factory=lambda: [1, 2])


def shares(x: Annotated[torch.Tensor, "(dp b) t"], y: Annotated[torch.Tensor, "(dp b) s"]):
    return x.sum() + y.sum()


def on(spec, mesh=MESH):
    return sp.shard(X, spec, mesh=mesh)


def twice(x):
    array = on(P("dp"))
    return sp.spmd_jit(lambda a, b: a + b, mesh=MESH, donate_argnums=(0, 1))(array, array)


def adds(array):
    return lambda x: array + x


def adds_into(array):
    return lambda x: array.add_(x)


def donated_and_closed_over(x):
    array = on(P("dp"))
    return sp.spmd_jit(lambda a: a + array, mesh=MESH, donate_argnums=0)(array)


AXES = "the mesh's axes: dp=2, tp=4"

# The name of a row: what is wrong, a call with that mistake, the class of the error, the words of its message.
ROWS = {
    # ------------------------------------------------ specs and patterns
    "axes do not divide a dim": (
        lambda: jit(step)(torch.ones(3, 4)),
        SpecError,
        [
            "dim 0 has size 3",
            "do not divide: dp=2",
            "argument: x",
            "function: step",
            "Mesh(dp=2, tp=4)",
            "pad dim 0 to 4",
        ],
    ),
    "two axes do not divide": (
        lambda: jit(step, in_specs="((dp tp) b) t")(X[:4]),
        SpecError,
        ["dim 0 has size 4", "dp=2 * tp=4 = 8", '"((dp tp) b) t"', "argument: x", "pad dim 0 to 8"],
    ),
    "unknown axis": (
        lambda: jit(step, in_specs=P("dpp"))(X),
        SpecError,
        ["unknown axis 'dpp'", AXES, "'dp' is close", "argument: x", "function: step"],
    ),
    "repeated axis": (
        lambda: P("dp", "dp"),
        SpecError,
        ["axis 'dp' is used twice", "P('dp', 'dp')"],
    ),
    "repeated axis in a pattern": (
        lambda: jit(step, in_specs="(dp b) (dp c)")(X),
        SpecError,
        ["axis 'dp' is used twice", '"(dp b) (dp c)"', "argument: x"],
    ),
    "two free names in a group": (
        lambda: jit(step, in_specs="(dp b c) t")(X),
        SpecError,
        ["two free names in the group (dp b c): 'b', 'c'", '"(dp c)"', "argument: x", "function: step"],
    ),
    "an axis alone": (
        lambda: jit(step, in_specs="dp t")(X),
        SpecError,
        ["dim 0 has size 8", "exactly 2", '"(dp b)"'],
    ),
    "a name binds two sizes": (
        lambda: jit(lambda x, y: x, in_specs=("(dp b) t", "(tp b) s"))(X, W),
        SpecError,
        ["the name 'b' binds two sizes: 4 in the argument x, 1 in the argument y", '"(tp b) s"', '"_"'],
    ),
    "a name binds two sizes, Annotated": (
        lambda: sp.spmd_jit(shares, mesh=MESH)(X, y=W),
        SpecError,
        ["shares: the name 'b' binds two sizes", "4 in the argument x", "2 in the argument y"],
    ),
    "a name binds two sizes in one pattern": (
        lambda: jit(step, in_specs="b b")(X),
        SpecError,
        ["the name 'b' binds two sizes: 8 and 4", "argument: x"],
    ),
    "a spec longer than the rank": (
        lambda: jit(step)(torch.tensor(1.0)),
        SpecError,
        ["the spec is longer than the rank: 1 entries for the shape ()", "a scalar's spec is P()", "argument: x"],
    ),
    "a pattern of another rank": (
        lambda: jit(step, in_specs="(dp b)")(X),
        SpecError,
        ["the pattern has 1 dim", "(8, 4) has 2", "argument: x"],
    ),
    # ------------------------------------------------ trees of specs
    "a spec tree with a key missing": (
        lambda: jit(lambda params: params["w"], in_specs=({"w": P("dp")},))({"w": X, "b": X}),
        SpecError,
        ["in_specs[0]: the specs lack 'b'; they have 'w'", "argument: params", "function: <lambda>"],
    ),
    "a spec tree of another kind": (
        lambda: jit(lambda params: params, in_specs={"params": {"a": [P("dp")]}})(params={"a": (X,)}),
        SpecError,
        ["in_specs['params']['a']: the value is a tuple of 1, the specs have a list of 1", "argument: params"],
    ),
    "something that is no spec": (
        lambda: jit(lambda params: params, in_specs=({"a": 3},))({"a": X}),
        SpecError,
        ["in_specs[0]['a']: 3 is a int, not a spec", "argument: params"],
    ),
    "in_specs of another length": (
        lambda: jit(step, in_specs=(P("dp"), None, None))(X),
        SpecError,
        ["step: in_specs has 3 entries for 1 positional arguments", "parameters: x, w"],
    ),
    "in_specs that names no parameter": (
        lambda: jit(step, in_specs={"y": P("dp")})(X),
        SpecError,
        ["step: in_specs names 'y', no parameters", "parameters: x, w"],
    ),
    "in_specs as a list": (
        lambda: jit(step, in_specs=[P("dp")])(X),
        SpecError,
        ["step: in_specs is a list", "write a tuple"],
    ),
    "out_specs of another structure": (
        lambda: jit(lambda x: (x, x), out_specs=(P("dp"),))(X),
        SpecError,
        ["out_specs: the value is a tuple of 2, the specs have a tuple of 1", "function: <lambda>"],
    ),
    "out_specs, in a tree": (
        lambda: jit(lambda x: {"a": [x]}, out_specs={"a": [None], "b": P()})(X),
        SpecError,
        ["out_specs: the specs have 'b', which the value lacks"],
    ),
    "out_specs that do not fit a result": (
        lambda: jit(lambda x: {"loss": (x, x.sum())}, out_specs=P("dp"))(X),
        SpecError,
        ["longer than the rank", "result: out_specs['loss'][1]", "function: <lambda>", "shape: ()"],
    ),
    "an annotated result that does not fit": (
        lambda: sp.spmd_jit(annotated_result, mesh=MESH)(X),
        SpecError,
        ["dim 1 has size 4", "(tp 2 n) does not divide", "result: out_specs", "function: annotated_result"],
    ),
    "constrain with a spec that does not fit": (
        lambda: jit(lambda x: sp.constrain(x, P(None, None, "tp")))(X),
        SpecError,
        ["longer than the rank", "in sp.constrain"],
    ),
    # ------------------------------------------------ meshes and options
    "arguments on two meshes": (
        lambda: sp.spmd_jit(lambda a, tree: a)(on(P("dp")), {"b": on(P("x"), LINE)}),
        SpecError,
        [
            "arguments on two meshes",
            "argument tree['b'] is on Mesh(x=2)",
            "argument a is on Mesh(dp=2, tp=4)",
            "sp.shard",
        ],
    ),
    "an argument on another mesh than the function's": (
        lambda: jit(step)(on(P("x"), LINE)),
        SpecError,
        ["step: arguments on two meshes", "argument x is on Mesh(x=2)", "the function's mesh Mesh(dp=2, tp=4)"],
    ),
    "a closed-over Array on another mesh": (
        lambda: jit(adds(on(P("x"), LINE)))(X),
        SpecError,
        ["a closed-over Array is on another mesh", "f32[8@x, 4] is on Mesh(x=2)"],
    ),
    "a nested function on another mesh": (
        lambda: jit(lambda x: sp.spmd_jit(step, mesh=LINE)(x))(X),
        SpecError,
        ["step: its mesh is another one", "Mesh(x=2)", "Mesh(dp=2, tp=4)"],
    ),
    "no mesh": (lambda: sp.spmd_jit(step)(X), SpecError, ["no mesh", "function: step", "sp.set_mesh"]),
    "a mesh that is none": (lambda: jit(step, mesh="dp"), SpecError, ["'dp' is a str, not a Mesh"]),
    "reshard of another word": (
        lambda: jit(step, reshard="never"),
        SpecError,
        ["reshard is 'never'", '"auto" or "error"'],
    ),
    "static_argnums out of range": (
        lambda: jit(step, static_argnums=2),
        SpecError,
        ["step has no such parameter: static_argnums has 2", "parameters: x, w"],
    ),
    "static_argnames unknown": (
        lambda: jit(step, static_argnames=("how",)),
        SpecError,
        ["step has no such parameter: static_argnames has 'how'", "parameters: x, w"],
    ),
    "donate_argnums out of range": (
        lambda: jit(step, donate_argnums=-3),
        SpecError,
        ["step has no such parameter: donate_argnums has -3"],
    ),
    "a function that is none": (lambda: jit(3), SpecError, ["3 is a int, not a function"]),
    # ------------------------------------------------ static arguments
    "a static argument that cannot be hashed": (
        lambda: jit(step, static_argnums=1)(X, [1, 2]),
        TracingError,
        ["step: the static argument w cannot be hashed", "[1, 2], a list", "a tuple for a list"],
    ),
    "a leaf that cannot be hashed": (
        lambda: jit(lambda x, o: x)(X, {"config": Config()}),
        TracingError,
        ["the static argument o['config'] cannot be hashed", "Config"],
    ),
    "a numpy array": (
        lambda: jit(step)(np.ones(3)),
        TracingError,
        ["the static argument x cannot be hashed", "a ndarray", "torch.as_tensor"],
    ),
    "a tensor as a static argument": (
        lambda: jit(step, static_argnames="w")(X, w=W),
        TracingError,
        ["step: the static argument w is a tensor", "static_argnums"],
    ),
    # ------------------------------------------------ what cannot be traced
    "a boolean mask": (
        lambda: jit(lambda x: x[x > 0])(X),
        TracingError,
        ["shape", "depends on data", "boolean mask", "torch.where", HERE, "function: <lambda>"],
    ),
    "nonzero": (lambda: jit(lambda x: x.nonzero())(X), TracingError, ["shape", "nonzero", HERE]),
    "unique": (lambda: jit(lambda x: torch.unique(x))(X), TracingError, ["shape", "unique", HERE]),
    "masked_select": (lambda: jit(lambda x: x.masked_select(x > 0))(X), TracingError, ["shape", HERE]),
    "a branch": (
        lambda: jit(branch)(X),
        TracingError,
        ["torch.where", "if x.sum() > 0:", "function: branch", HERE],
    ),
    "item": (lambda: jit(lambda x: x * x.sum().item())(X), TracingError, ["item()", "torch.where", HERE]),
    "float": (lambda: jit(lambda x: x * float(x.sum()))(X), TracingError, ["value of a traced tensor", HERE]),
    "numpy": (lambda: jit(lambda x: x.numpy())(X), TracingError, ["numpy()", HERE]),
    "a range": (lambda: jit(lambda x: sum(range(x.sum().int())))(X), TracingError, ["value of a traced tensor", HERE]),
    "a branch under grad": (lambda: jit(grad(lambda x: branch(x).sum()))(X), TracingError, ["torch.where", HERE]),
    "a branch under vmap": (lambda: jit(vmap(branch))(X), TracingError, ["torch.where", HERE]),
    "a mutated input": (
        lambda: jit(mutates)({"w": X}),
        TracingError,
        ["input params['w'] is mutated", "add_", 'params["w"].add_(1)', "function: mutates", "clone", HERE],
    ),
    "an input mutated through a view": (
        lambda: jit(mutates_a_view)(X),
        TracingError,
        ["input x is mutated", "function: mutates_a_view", "clone"],
    ),
    "a mutated closed-over tensor": (
        lambda: jit(mutates_closed_over)(X),
        TracingError,
        ["mutate a closed-over tensor", "mul_", "function: mutates_closed_over", "CLOSED.mul_(2)", "input", HERE],
    ),
    "a mutated closed-over Array": (
        lambda: jit(adds_into(on(P("dp"))))(X),
        TracingError,
        ["closed-over Array of shape (8, 4) is mutated", "input", HERE],
    ),
    "running statistics": (
        lambda: jit(batch_norm, in_specs=None)(X, torch.ones(4)),
        TracingError,
        ["input mean is mutated", "functional_call"],
    ),
    "randn": (
        lambda: jit(lambda x: x + torch.randn(4))(X),
        TracingError,
        ["global generator", "key", "sp.random", HERE],
    ),
    "dropout": (lambda: jit(lambda x: F.dropout(x, 0.5))(X), TracingError, ["key", "sp.random.bernoulli", HERE]),
    "randn_like in a backward": (
        lambda: jit(grad(lambda x: (x * torch.rand_like(x)).sum()))(X),
        TracingError,
        ["global generator", "key", HERE],
    ),
    # ------------------------------------------------ keys
    "a key of another dtype": (
        lambda: jit(lambda k: sp.random.normal(k, (8,)), in_specs=None)(torch.zeros(2)),
        SpecError,
        ["key", "uint32", "float32"],
    ),
    "a key of another shape": (
        lambda: sp.random.uniform(torch.zeros(3, dtype=torch.uint32), (8,)),
        SpecError,
        ["key", "(3,)", "(..., 2)"],
    ),
    "a number as a key": (lambda: sp.random.normal(0, (8,)), SpecError, ["key", "sp.random.key"]),
    "a float seed": (lambda: sp.random.key(0.5), SpecError, ["seed", "0.5"]),
    "a negative fold": (lambda: sp.random.fold_in(KEY, -1), SpecError, ["fold_in", "-1"]),
    # ------------------------------------------------ communication that was not asked for
    "strict, an input in another layout": (
        lambda: jit(step, reshard="error")(on(P(None, "tp"))),
        ShardingError,
        ["all_gather over tp", "bytes", "why: input", "function: step", "in_specs", 'reshard="auto"'],
    ),
    "strict, a gather inside": (
        lambda: jit(lambda x: x.flip(0) + x.cumsum(0), reshard="error")(X),
        ShardingError,
        ["of 64 bytes", "all_gather over dp", HERE, "sp.constrain"],
    ),
    # ------------------------------------------------ donation
    "an Array donated twice": (
        lambda: twice(X),
        SpmdError,
        ["the same Array is donated and used twice", "uses: a, b", "f32[8@dp, 4]"],
    ),
    "an Array donated and closed over": (
        lambda: donated_and_closed_over(X),
        SpmdError,
        ["the same Array is donated and used twice", "uses: a, a closed-over variable"],
    ),
    "static and donated": (
        lambda: jit(step, static_argnums=1, donate_argnums=1),
        SpecError,
        ["step: argument 1 is both static and donated"],
    ),
}


def annotated_result(x) -> Annotated[torch.Tensor, "b (tp 2 n)"]:
    return x


@pytest.mark.parametrize("name", ROWS)
def test_message(name):
    call, kind, words = ROWS[name]
    with pytest.raises(SpmdError) as found:
        call()
    assert type(found.value) is kind
    text = str(found.value)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert "fix: " in text or name in NO_FIX, text


NO_FIX = {"static and donated"}


def test_errors_of_python_and_of_the_user_pass_unchanged():
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        jit(step)()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        jit(step)(X, z=1)

    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jit(fails)(X)
    with pytest.raises(RuntimeError, match="reduction dim|cannot be multiplied"):
        jit(lambda x: x @ x)(X)


def test_an_error_is_told_again_at_the_next_call():
    jitted = jit(branch)
    for _ in range(2):
        with pytest.raises(TracingError, match="torch.where"):
            jitted(X)


def test_an_annotation_that_cannot_be_evaluated():
    def f(x: Annotated[torch.Tensor, missing]):  # noqa: F821
        return x

    with pytest.raises(SpecError, match=r"the annotation of x cannot be evaluated[^$]*give in_specs"):
        sp.spmd_jit(f, mesh=MESH)(X)
    assert repr(jit(f)(X)) == "f32[8@dp, 4]"
