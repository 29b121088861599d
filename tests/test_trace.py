"""The traced graph computes what the function computes, knows the user's lines, and refuses what has no meaning."""

from __future__ import annotations

import inspect
import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

from spmdfn.errors import TracingError
from spmdfn.partition.trace import Traced, recomputing, trace

HERE = Path(__file__).name

# torch's own, at the first jvp of a process.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def run(traced: Traced, *inputs):
    return fx.Interpreter(fx.GraphModule(dict(traced.constants), traced.graph)).run(*inputs)


def checked(function, *inputs, tolerance=0.0, **options) -> Traced:
    """Trace, replay on real tensors, compare with the function, and check what every node must carry."""
    traced = trace(lambda *xs: [function(*xs)], inputs, names=[f"x{i}" for i in range(len(inputs))], **options)
    for node in traced.graph.nodes:
        assert isinstance(node.meta["where"], str) and isinstance(node.meta["backward"], bool), node
        assert "val" in node.meta, node
        if node.op == "call_function":
            assert HERE in node.meta["where"] or "transformers" in node.meta["where"], (node, node.meta["where"])
            assert "as_strided" not in str(node.target) and "prims" not in str(node.target), node
    traced.graph.lint()
    result, wanted = run(traced, *inputs)[0], function(*inputs)
    assert result.dtype == wanted.dtype
    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    return traced


def ops(traced: Traced) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]


def count(traced: Traced, name: str) -> int:
    return sum(op.startswith(f"aten.{name}.") for op in ops(traced))


def traced_of(function, *inputs, **options) -> Traced:
    names = [f"x{i}" for i in range(len(inputs))]
    return trace(lambda *xs: [function(*xs)], inputs, names=names, **options)


def line_of(text: str) -> str:
    """Where this file has a line with that text."""
    lines = Path(__file__).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    assert len(found) == 1, (text, found)
    return f"{HERE}:{found[0]}"


torch.manual_seed(0)
LINEAR = torch.nn.Linear(3, 3, bias=False)
X = torch.randn(4, 3)
W = torch.randn(3, 3)
V = torch.randn(3)


def mlp_loss(w, x):
    return (torch.tanh(x @ w) @ w.t()).square().mean()


def writes(x):
    y = x * 2
    y[1:3] = x[:2]
    y[:, 0] += 1
    y.t()[1].mul_(3)
    z = y.view(-1)
    z[::2].sin_()
    return y.exp().sum()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x * x


class OldCube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x**2


def set_row(y, i):
    y[i] = y[0] + 1
    y[i, 1] = 5
    return y


def plain_autograd(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(OldCube.apply(x).sum(), x)[0]


VALUES = {
    "mlp grad": (lambda w, x: grad(mlp_loss)(w, x), (W, X)),
    "grad of grad": (lambda x: grad(lambda y: grad(lambda z: z.sin().sum())(y).square().sum())(x), (V,)),
    "vmap of grad": (lambda w, x: vmap(grad(mlp_loss), (None, 0))(w, x[:, None]), (W, X)),
    "vjp": (lambda x: vjp(lambda y: y.cos() @ y, x)[1](torch.ones(()))[0], (V,)),
    "jvp": (lambda x, t: jvp(lambda y: y.sin() * y, (x,), (t,))[1], (X, X + 1)),
    "jvp of writes": (lambda x: jvp(writes, (x,), (x,))[1], (X,)),
    "jacrev": (lambda x: jacrev(lambda y: y.cos() * y.sum())(x), (V,)),
    "hessian": (lambda x: hessian(lambda y: (y.sin() * y.roll(1)).sum())(x), (V,)),
    "hessian of writes": (lambda x: hessian(writes)(x), (X,)),
    "writes": (writes, (X,)),
    "grad of writes": (grad(writes), (X,)),
    "grad of a Function": (grad(lambda x: Cube.apply(x).sum()), (X,)),
    "grad of grad of a Function": (grad(lambda y: grad(lambda x: Cube.apply(x).sum())(y).sum()), (X,)),
    "old Function, plain autograd": (plain_autograd, (X,)),
    "list indexing": (grad(lambda x: x[[0, 2, 0]].square().sum()), (X,)),
    "masked writes": (lambda x: grad(lambda y: (y * 1).masked_fill_(y > 0, 2).sum())(x), (X,)),
    "boolean write": (lambda x: x.clone().index_put_((x > 0,), torch.zeros(())), (X,)),
    "bf16 autocast": (
        grad(lambda x: torch.autocast("cpu", torch.bfloat16)(lambda y: (y @ W).float().sum())(x)),
        (X,),
    ),
    "no_grad": (lambda x: torch.no_grad()(lambda y: y * y)(x), (X,)),
    "traced scalar index": (
        lambda x, i: grad(lambda y: y[i].sin().sum() + y[i, 1] * y[i - 3, i - 4])(x),
        (X, torch.tensor(2)),
    ),
    "write at a traced scalar": (lambda x, i: set_row(x.clone(), i), (X, torch.tensor(2))),
    "vmapped scalar index": (lambda x, i: vmap(lambda j: x[j] * 2)(i), (X, torch.tensor([2, 0]))),
    "inverse": (grad(lambda x: torch.linalg.inv(x.t() @ x + 1).sum()), (X[:, :2],)),
    "integers": (lambda i: F.one_hot(i, 5).cumsum(0), (torch.tensor([1, 0, 4]),)),
}


@pytest.mark.parametrize("name", VALUES)
def test_graph_computes_the_same(name):
    function, inputs = VALUES[name]
    checked(function, *inputs, tolerance=1e-6)


def gpt_loss(p, tokens):
    x = p["emb"][tokens[:, :-1]]
    y = F.layer_norm(x, (8,), p["ln"], None)
    q, k, v = F.linear(y, p["qkv"]).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(a.transpose(1, 2).reshape(2, 5, 8), p["out"])
    x = x + F.linear(F.gelu(F.linear(x, p["up"])), p["down"])
    return F.cross_entropy((x @ p["emb"].t()).flatten(0, 1), tokens[:, 1:].flatten())


def test_gpt_block_step():
    shapes = {"emb": (11, 8), "ln": (8,), "qkv": (24, 8), "out": (8, 8), "up": (16, 8), "down": (8, 16)}
    params = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    tokens = torch.randint(0, 11, (2, 6))

    def step(*xs):
        p = dict(zip(params, xs, strict=False))
        grads, loss = grad_and_value(gpt_loss)(p, xs[-1])
        return [*(p[name] - 0.1 * grads[name] for name in p), loss]

    inputs = [*params.values(), tokens]
    traced = trace(step, inputs, names=[*params, "tokens"])
    for got, wanted in zip(run(traced, *inputs), step(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    for node in traced.graph.nodes:
        if node.op == "call_function":
            assert HERE in node.meta["where"], node
    flash = [node for node in traced.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert [node.meta["backward"] for node in flash] == [False, True]
    assert {node.meta["where"].rpartition("/")[2] for node in flash} == {
        line_of("a = F.scaled_dot_product_attention(q")
    }


def test_shapes_stand_for_data():
    meta = torch.empty(4, 3, device="meta")
    traced = traced_of(lambda x: x @ W, meta)
    assert traced.graph.output_node().args[0][0].meta["val"].device.type == "cpu"
    torch.testing.assert_close(run(traced, X)[0], X @ W)


def test_outputs_keep_python_values_and_inputs():
    traced = trace(lambda x, y: [x, 3, "s", None, x, y + 1, W], [X, X], names=["a", "b"])
    leaves = traced.graph.output_node().args[0]
    assert leaves[1:4] == [3, "s", None] and leaves[0] is leaves[4] and leaves[0].op == "placeholder"
    assert leaves[6].op == "get_attr" and traced.constants[leaves[6].target].data_ptr() == W.data_ptr()
    assert [node.meta["where"] for node in traced.graph.nodes if node.op == "placeholder"] == ["a", "b"]


# ---- source lines


def test_lines_forward_and_backward():
    def loss(w, x):
        hidden = x @ w  # the matmul
        hidden = F.layer_norm(hidden, (3,))  # the norm
        hidden = hidden * 1
        hidden[1:] += 1  # the write
        return hidden.sin().sum()  # the sine

    traced = traced_of(grad(loss), W, X)
    lines = {}
    for node in traced.graph.nodes:
        if node.op == "call_function":
            lines.setdefault((str(node.target), node.meta["backward"]), node.meta["where"].rpartition("/")[2])
    assert lines["aten.mm.default", False] == lines["aten.mm.default", True] == line_of("# the matmul")
    assert lines["aten.native_layer_norm.default", False] == line_of("# the norm")
    assert lines["aten.native_layer_norm_backward.default", True] == line_of("# the norm")
    assert lines["aten.slice_scatter.default", False] == line_of("# the write")
    assert lines["aten.slice.Tensor", True] == line_of("# the write")
    assert lines["aten.cos.default", True] == line_of("# the sine")


def test_lines_of_second_order_and_of_functions():
    def inner(x):
        return (x.exp() * x).sum()  # the inner sum

    traced = traced_of(lambda x: grad(lambda y: grad(inner)(y).sum())(x), X)
    backward = [node for node in traced.graph.nodes if node.meta["backward"] and node.op == "call_function"]
    assert line_of("# the inner sum") in {node.meta["where"].rpartition("/")[2] for node in backward}
    traced = traced_of(grad(lambda x: Cube.apply(x).sum()), X)
    where = {(node.meta["where"].rpartition("/")[2], node.meta["backward"]) for node in traced.graph.nodes}
    assert (line_of("return x * x * x"), False) in where and (line_of("return cotangent * 3 * x * x"), True) in where


def test_line_is_relative_when_that_is_shorter(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    node = traced_of(lambda x: x + 1, X).graph.output_node().args[0][0]
    assert node.meta["where"].startswith(f"{HERE}:")


# ---- merging


def test_common_subexpressions_are_merged():
    assert count(traced_of(lambda x: (x @ W).view(12) + (x @ W).view(12), X), "mm") == 1
    assert count(traced_of(lambda x: x.sin() + x.sin().cos(), X), "sin") == 1
    assert count(traced_of(lambda x: (x * 1) + (x * 1.0) + (x * True), X), "mul") == 3
    assert count(traced_of(lambda x: x.div(0.0) + x.div(-0.0), X), "div") == 2
    assert count(traced_of(lambda x: x.sum(0) + x.sum(1).sum(), X), "sum") == 3


def test_forward_and_backward_are_merged():
    traced = traced_of(lambda x: grad(lambda y: y.sigmoid().square().sum())(x) + x.sigmoid(), X)
    assert count(traced, "sigmoid") == 1


def test_recomputed_nodes_stay_apart():
    def function(x):
        first = x.sin()
        with recomputing(1):
            again, twice = x.sin(), x.sin()
        with recomputing(2):
            other = x.sin()
        return first + again * twice + other * 2

    traced = traced_of(function, X)
    tags = [node.meta.get("recompute") for node in traced.graph.nodes if "sin" in str(node.target)]
    assert tags == [None, 1, 2]
    torch.testing.assert_close(run(traced, X)[0], function(X))


def test_identities_leave_no_node():
    def function(x):
        y = x.detach().alias() if hasattr(x, "alias") else x.detach()
        y = y.view(4, 3).expand(4, 3).contiguous().to(torch.float32).clone()
        return y.view(12).view(4, 3).t().t().transpose(0, 1).transpose(0, 1)

    assert ops(traced_of(function, X)) == []


def test_sizes_are_written_out():
    traced = traced_of(lambda x: x.view(-1) + x.view(12), X)
    assert count(traced, "view") == 1
    assert next(node for node in traced.graph.nodes if "view" in str(node.target)).args[1] == [12]


def test_dead_code_goes():
    traced = traced_of(lambda x: (x @ W, x + 1)[1], X)
    assert ops(traced) == ["aten.add.Tensor"] and traced.constants == {}


def test_writes_leave_plain_slices():
    def function(x):
        y = x * 2
        y[1:3] = x[:2]
        y[1:3] = x[1:3]
        return y

    assert ops(traced_of(function, X)) == ["aten.mul.Tensor", "aten.slice.Tensor", "aten.slice_scatter.default"]
    assert not any("copy" in op or "empty" in op for op in ops(traced_of(grad(writes), X)))


def test_order_is_kept():
    traced = traced_of(lambda x: x.sin() + x.cos().exp(), X)
    assert ops(traced) == ["aten.sin.default", "aten.cos.default", "aten.exp.default", "aten.add.Tensor"]


# ---- constants and captured values


def test_closed_over_tensors_are_constants_once():
    parameter = torch.nn.Parameter(V.clone())
    traced = checked(lambda x: x * V + parameter + V.sin() + parameter, X)
    assert len(traced.constants) == 2
    assert not any(value.requires_grad for value in traced.constants.values())
    assert {value.data_ptr() for value in traced.constants.values()} == {V.data_ptr(), parameter.data_ptr()}


def test_scalar_constants_are_folded_by_value():
    traced = checked(lambda x: x * torch.tensor(3.0) + torch.tensor(3.0) * torch.tensor([1.0, 2, 3]), X)
    assert count(traced, "lift_fresh_copy") == 0 and len(traced.constants) == 2


def test_value_of_a_closed_over_tensor_may_be_used():
    scale = torch.tensor(2.5)
    traced = checked(lambda x: x * float(scale) if scale > 1 else x, X)
    assert traced.constants == {} and ops(traced) == ["aten.mul.Tensor"]
    index = torch.tensor([True, False, True, True])
    checked(lambda x: x[index.nonzero()[:, 0]], X)
    checked(lambda x: x * torch.tensor(3.0).item(), X)


class Sealed(torch.Tensor):
    """A tensor whose data must not be touched."""

    @staticmethod
    def __new__(cls, *shape):
        meta = torch.empty(shape, device="meta")
        return torch.Tensor._make_subclass(cls, meta, False, dispatch_device=True, device_for_backend_keys="cpu")

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.prim.device.default:
            return torch.device("cpu")
        raise AssertionError(f"{op} read a sealed tensor")


def is_sealed(value):
    return isinstance(value, Sealed)


CAPTURES = {
    "operator": lambda x, a, b: x @ a,
    "left operand": lambda x, a, b: a.t() @ x.t(),
    "two, one twice": lambda x, a, b: (x @ a) @ b + x @ a,
    "in a list": lambda x, a, b: torch.cat([x, a, b]),
    "under grad": lambda x, a, b: grad(lambda y: (y @ a).sin().sum())(x),
    "as grad's argument": lambda x, a, b: grad(lambda w, y: (y @ w @ b).sin().sum())(a, x),
    "grad of grad": lambda x, a, b: grad(lambda w: grad(lambda y: (y @ w).exp().sum())(x).sum())(a),
    "under vmap": lambda x, a, b: vmap(lambda y: y @ a)(x),
    "as vmap's argument": lambda x, a, b: vmap(lambda row: x @ row)(a),
    "as jvp's argument": lambda x, a, b: jvp(lambda w: (x @ w).sin(), (a,), (b,))[1],
    "hessian": lambda x, a, b: hessian(lambda w: (x @ w).sin().sum())(a),
    "jacrev": lambda x, a, b: jacrev(lambda y: (y @ a).sin())(x),
    "functional_call": lambda x, a, b: functional_call(LINEAR, {"weight": a}, x),
    "shape and device": lambda x, a, b: x.new_zeros(a.shape, device=a.device) + a.shape[0] + a * a.dim(),
    "returned": lambda x, a, b: a,
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_tensors_become_inputs(name):
    function = CAPTURES[name]
    a, b = Sealed(3, 3), Sealed(3, 3)
    traced = trace(lambda x: [function(x, a, b)], [X], names=["x"], capture=is_sealed)
    data = {id(a): torch.randn(3, 3), id(b): torch.randn(3, 3)}
    assert len({id(value) for value in traced.captured}) == len(traced.captured) > 0
    places = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert len(places) == 1 + len(traced.captured) and list(traced.graph.nodes)[: len(places)] == places
    assert traced.constants == {}
    got = run(traced, X, *(data[id(value)] for value in traced.captured))[0]
    torch.testing.assert_close(got, function(X, data[id(a)], data[id(b)]), rtol=1e-6, atol=1e-6)
    assert all(node.meta["where"].startswith("closed-over Sealed") for node in places[1:])


def test_mutating_a_captured_tensor_is_refused():
    a = Sealed(3, 3)
    with pytest.raises(TracingError, match=r"closed-over Sealed of shape \(3, 3\) is mutated in place by add_"):
        trace(lambda x: [a.add_(1) + x], [X[:3]], names=["x"], capture=is_sealed)


# ---- refusals


def refused(function, *inputs, names=None) -> str:
    with pytest.raises(TracingError) as caught:
        trace(lambda *xs: [function(*xs)], inputs, names=names or [f"x{i}" for i in range(len(inputs))])
    text = str(caught.value)
    assert "fix: " in text
    assert HERE in text or "transformers" in text, text
    return text


DATA_SHAPES = {
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "where": lambda x: torch.where(x > 0)[0],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()[:, 0], dim=0),
    "under grad": grad(lambda x: x[x > 0].sum()),
    "under vmap": vmap(lambda row: row[row > 0]),
    "masked_select under vmap": vmap(lambda row: row.masked_select(row > 0)),
    "nonzero under vmap": vmap(lambda row: row.nonzero()),
}


@pytest.mark.parametrize("name", DATA_SHAPES)
def test_shapes_from_data_are_refused(name):
    text = refused(DATA_SHAPES[name], X)
    assert "shape" in text and "depends on data" in text and "torch.where" in text and "where: " in text


def branch(x):
    if x.sum() > 0:
        return x
    return -x


NEEDS_VALUE = {
    "branch": branch,
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x.sum()),
    "int": lambda x: x * int(x.sum()),
    "bool": lambda x: x if bool((x > 0).all()) else -x,
    "tolist": lambda x: torch.tensor(x.tolist()),
    "len of arange": lambda x: torch.arange(x.sum().long()),
    "slice": lambda x: x[: x.sum().long()],
    "equal": lambda x: x if torch.equal(x, x + 1) else -x,
    "allclose": lambda x: x if torch.allclose(x, x + 1) else -x,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "asarray": lambda x: torch.from_numpy(x.__array__()),
    "branch under grad": grad(lambda x: branch(x).sum()),
    "numpy under grad": grad(lambda x: x.sum() * float(x.detach().numpy().sum())),
    "branch under vmap": vmap(branch),
    "item under vmap": vmap(lambda row: row * row.sum().item()),
    "tolist under grad": grad(lambda x: x.sum() * x.tolist()[0][0]),
}


@pytest.mark.parametrize("name", NEEDS_VALUE)
def test_values_in_python_are_refused(name):
    text = refused(NEEDS_VALUE[name], X)
    assert "Python needs the value of a traced tensor" in text and "torch.where" in text and "static" in text


def test_error_quotes_line_and_values():
    text = refused(branch, X)
    assert f"{line_of('if x.sum() > 0:')}  `if x.sum() > 0:`" in text
    assert "values: bool ()" in text


def mutate_view(x):
    x.t()[0].view(-1).add_(1)
    return x


MUTATIONS = {
    "add_": lambda p: p.add_(1),
    "operator": lambda p: operator.iadd(p, 1),
    "setitem": lambda p: p.__setitem__(0, 0),
    "view": mutate_view,
    "detach": lambda p: p.detach().mul_(2),
    "no_grad": lambda p: torch.no_grad()(lambda q: q.copy_(q + 1))(p),
    "under grad": grad(lambda p: p.mul_(2).sum()),
    "out": lambda p: torch.add(p, 1, out=p),
    "foreach": lambda p: torch._foreach_add_([p * 1, p], 1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_inputs_are_named(name):
    before = X.clone()
    text = refused(MUTATIONS[name], X, names=["params['w']"])
    if name == "under grad":
        assert "an input of the function or a closed-over tensor is mutated in place" in text and "clone" in text
    else:
        assert "the input params['w'] is mutated in place by " in text and "clone" in text
    assert torch.equal(X, before)


def test_batch_norm_buffers_as_inputs():
    norm = torch.nn.BatchNorm1d(3)
    names = [name for name, _ in norm.named_buffers()]
    buffers = dict(norm.named_buffers())

    def function(x, *values):
        return functional_call(norm, dict(zip(names, values, strict=True)), x)

    text = refused(function, X, *buffers.values(), names=["x", *(f"buffers['{name}']" for name in names)])
    assert "the input buffers['num_batches_tracked'] is mutated" in text or "buffers['running_mean']" in text
    assert "clone" in text and "return" in text

    def cloned(x, *values):
        state = {name: value.clone() for name, value in zip(names, values, strict=True)}
        return [functional_call(norm, state, x), *state.values()]

    inputs = [X, *(value.clone() for value in buffers.values())]
    traced = trace(cloned, inputs, names=["x", *names])
    for got, wanted in zip(run(traced, *inputs), cloned(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


CLOSED = torch.ones(3)
NORM = torch.nn.BatchNorm1d(3)
BARE_NORM = torch.nn.BatchNorm1d(3)
BARE_NORM.num_batches_tracked = None
CLOSED_MUTATIONS = {
    "add_": lambda x: CLOSED.add_(1) + x,
    "add_ of traced": lambda x: CLOSED.add_(x[0]),
    "view": lambda x: x + CLOSED[1:].zero_().sum(),
    "setitem": lambda x: CLOSED.__setitem__(0, x[0, 0]),
    "operator": lambda x: operator.iadd(CLOSED, 1) + x,
    "under grad": grad(lambda x: (x * CLOSED.mul_(2)).sum()),
    "out": lambda x: torch.sin(x[0], out=CLOSED),
    "foreach": lambda x: torch._foreach_mul_([CLOSED], 2),
    "copy_": lambda x: CLOSED.copy_(x[0]),
    "t_": lambda x: x + CLOSED.unsqueeze_(0),
    "BatchNorm": lambda x: NORM(x),
    "BatchNorm, statistics only": lambda x: BARE_NORM(x),
}


@pytest.mark.parametrize("name", CLOSED_MUTATIONS)
def test_mutated_closed_over_tensors_are_refused_before_they_change(name):
    text = refused(CLOSED_MUTATIONS[name], X)
    assert ("would mutate" in text or name == "under grad") and "a closed-over tensor" in text
    assert "clone" in text and "return" in text
    assert torch.equal(CLOSED, torch.ones(3)) and CLOSED.shape == (3,)
    assert NORM.num_batches_tracked == 0 and torch.equal(NORM.running_mean, torch.zeros(3))
    assert torch.equal(BARE_NORM.running_mean, torch.zeros(3))


def test_backward_into_a_closed_over_parameter_is_refused():
    parameter = torch.nn.Parameter(V.clone())

    def function(x):
        (x * parameter).sum().backward()
        return x

    with pytest.raises(
        TracingError, match=r"backward\(\) would mutate a closed-over tensor.*\n.*\n  fix: torch.func.grad"
    ):
        trace(lambda x: [function(x)], [X], names=["x"])
    assert parameter.grad is None


def test_batch_norm_in_eval_mode_traces():
    norm = torch.nn.BatchNorm1d(3).eval()
    checked(lambda x: norm(x), X, tolerance=1e-6)


def init(x):
    linear = torch.empty_like(x)
    torch.nn.init.normal_(linear)
    return linear + x


Q = torch.randn(1, 2, 4, 8)
DRAWS = {
    "rand": lambda x: x + torch.rand(3),
    "randn": lambda x: x + torch.randn(4, 3),
    "randint": lambda x: x + torch.randint(0, 3, (3,)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout module": lambda x: torch.nn.Dropout(0.1)(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda x: torch.rand_like(x),
    "normal_": lambda x: torch.empty(3).normal_() + x,
    "normal": lambda x: torch.normal(x, 1.0),
    "uniform_": lambda x: x.new_empty(3).uniform_() + x,
    "randperm": lambda x: x[torch.randperm(4)],
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 1),
    "init": init,
    "constructor": lambda x: torch.nn.Linear(3, 3)(x),
    "own generator": lambda x: x + torch.rand(3, generator=torch.Generator()),
    "under grad": grad(lambda x: (x * torch.rand(3)).sum()),
    "under vmap": vmap(lambda row: row * torch.rand(3)),
    "dropout under vmap": vmap(lambda row: F.dropout(row)),
    "sdpa": lambda x: F.scaled_dot_product_attention(Q * x[0, 0], Q, Q, dropout_p=0.1),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_the_global_generator_are_refused(name):
    state = torch.get_rng_state()
    text = refused(DRAWS[name], X)
    assert "global generator" in text and "key" in text and "sp.random" in text
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_draw_passes():
    checked(lambda x: F.dropout(x, 0.5, training=False), X)
    checked(lambda x: F.scaled_dot_product_attention(Q * x[0, 0], Q, Q), X, tolerance=1e-6)
    checked(lambda x: F.rrelu(x, training=False), X)


def test_errors_of_the_user_pass_unchanged():
    error = KeyError("mine")

    def fails(x):
        raise error

    with pytest.raises(KeyError) as caught:
        traced_of(fails, X)
    assert caught.value is error and not hasattr(error, "__notes__")
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        traced_of(lambda x: x @ x, X)


def test_two_devices_are_torchs_error_with_the_line():
    other = torch.empty(4, 3, device="meta")
    with pytest.raises(RuntimeError, match="same device|different devices") as caught:
        traced_of(lambda x: x + other, X)
    assert any(HERE in note for note in caught.value.__notes__)


def test_nothing_is_left_behind():
    assert not torch.compiler.is_compiling()
    before = torch._C._get_mkldnn_enabled()
    seen = []
    traced_of(lambda x: seen.append(torch.compiler.is_compiling()) or x + 1, X)
    with pytest.raises(TracingError):
        traced_of(branch, X)
    assert seen == [True] and not torch.compiler.is_compiling()
    assert torch._C._get_mkldnn_enabled() == before
    assert not (X + 1).requires_grad and type(X + 1) is torch.Tensor


def test_lstm_traces_without_mkldnn():
    lstm = torch.nn.LSTM(3, 4)
    traced = checked(lambda x: lstm(x)[0], X, tolerance=1e-6)
    assert not any("mkldnn" in op for op in ops(traced))


def test_custom_ops_stay_nodes():
    twice = torch.library.custom_op(
        "spmdfn_test::twice", lambda x, names: x * 2, mutates_args=(), schema="(Tensor x, str[] names) -> Tensor"
    )
    twice.register_fake(lambda x, names: torch.empty_like(x))
    traced = checked(lambda x: twice(x, ["a"]) + twice(x, ["a"]) * twice(x, ["b"]), X)
    assert ops(traced).count("spmdfn_test.twice.default") == 2


# ---- models


def language_model(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_hugging_face_models(kind):
    model = language_model(kind)
    params = {name: value.detach() for name, value in model.named_parameters()}
    tokens = torch.randint(0, 64, (2, 9))

    def loss(p, tokens):
        logits = functional_call(model, p, (), {"input_ids": tokens[:, :-1]}).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(*xs):
        grads, value = grad_and_value(loss)(dict(zip(params, xs, strict=False)), xs[-1])
        return [value, *grads.values()]

    inputs = [*params.values(), tokens]
    traced = trace(step, inputs, names=[*params, "tokens"])
    for got, wanted in zip(run(traced, *inputs), step(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    lines = [node.meta["where"] for node in traced.graph.nodes if node.op == "call_function"]
    assert all("transformers" in line or HERE in line for line in lines)
    assert any("modeling_" in line for line in lines)
    assert any("modeling_" in node.meta["where"] for node in traced.graph.nodes if node.meta["backward"])


def test_source_is_this_file():
    assert HERE in inspect.getsourcefile(test_source_is_this_file)
