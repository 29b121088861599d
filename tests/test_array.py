"""Arrays: into blocks and back by every mover, what an Array tells of itself, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import spmdfn as sp
from spmdfn import P
from spmdfn.array import layout_of
from spmdfn.blocks import assemble, take
from spmdfn.errors import SpecError, TracingError
from spmdfn.layout import Layout, from_entries

MESH = sp.make_mesh((2, 4), ("dp", "tp"))
LINE = sp.make_mesh((4,), ("x",))
X = torch.arange(32.0).reshape(8, 4)

SPECS = [
    P(),
    P("dp"),
    P("tp"),
    P(None, "tp"),
    P("dp", "tp"),
    P("tp", "dp"),
    P(("dp", "tp")),
    P(("tp", "dp")),
    P("dp", unreduced={"tp"}),
    P(unreduced={"dp", "tp"}),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_blocks_and_back(spec):
    array = sp.shard(X, spec, mesh=MESH)
    assert len(array.shards) == 8 and array.mesh is MESH and array.shape == X.shape
    assert {tuple(block.shape) for block in array.shards} == {layout_of(array).local_shape}
    assert torch.equal(array.unshard(), X)
    assert torch.equal(sp.Array.from_shards(array.shards, array.spec, MESH).unshard(), X)


@pytest.mark.parametrize("source", SPECS, ids=repr)
@pytest.mark.parametrize("target", SPECS, ids=repr)
def test_every_layout_to_every_other(source, target):
    moved = sp.shard(sp.shard(X, source, mesh=MESH), target)
    assert torch.equal(moved.unshard(), X)
    assert moved.spec.unreduced == target.unreduced
    assert moved.spec.entries == target.entries + ((),) * (2 - len(target.entries))


def test_major_axes_come_first():
    mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    blocks = [block.tolist() for block in sp.shard(torch.arange(8), P(("tp", "dp")), mesh=mesh).shards]
    assert blocks == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_factored_dims():
    two = sp.make_mesh((2,), ("x",))
    merged = Layout(two, [(*from_entries(two, (3,), ((),)).dims[0], *from_entries(two, (4,), (("x",),)).dims[0])])
    blocks = take(torch.arange(12), merged)
    assert blocks[1].tolist() == [2, 3, 6, 7, 10, 11] and assemble(blocks, merged).tolist() == list(range(12))


def test_shard_copies_and_unshard_copies():
    x = X.clone()
    arrays = [sp.shard(x, spec, mesh=MESH) for spec in SPECS]
    x.zero_()
    for array in arrays:
        array.unshard().zero_()
        assert torch.equal(array.unshard(), X)


def test_shard_a_tree():
    tree = {"w": X, "n": None, "k": 3, "s": (X, "text")}
    arrays = sp.shard(tree, {"w": "(dp b) t", "n": None, "k": None, "s": P("tp")}, mesh=MESH)
    assert arrays["n"] is None and arrays["k"] == 3 and arrays["s"][1] == "text"
    assert list(map(repr, (arrays["w"], arrays["s"][0]))) == ["f32[8@dp, 4]", "f32[8@tp, 4]"]
    same = sp.shard(arrays, None)
    assert same["w"] is arrays["w"]
    back = sp.unshard(arrays)
    assert torch.equal(back["w"], X) and back["k"] == 3 and type(back["w"]) is torch.Tensor
    assert sp.unshard(X) is X and sp.unshard(3.0) == 3.0 and sp.unshard(None) is None
    assert repr(sp.shard({"a": X, "n": None}, P("dp"), mesh=MESH)["a"]) == "f32[8@dp, 4]"


def test_shard_moves_between_meshes():
    array = sp.shard(X, P("dp", "tp"), mesh=MESH)
    moved = sp.shard(array, P("x"), mesh=LINE)
    assert moved.mesh is LINE and repr(moved) == "f32[8@x, 4]" and torch.equal(moved.unshard(), X)
    half = sp.make_mesh((2, 2), ("dp", "tp"))
    assert repr(sp.shard(array, None, mesh=half)) == "f32[8@dp, 4@tp]"
    with pytest.raises(SpecError, match="unknown axis 'dp'"):
        sp.shard(array, None, mesh=LINE)


def test_scalars_and_empty_tensors():
    for spec in ("", P(), None):
        assert repr(sp.shard(torch.tensor(2.5), spec, mesh=MESH)) == "f32[]"
    pending = sp.shard(torch.tensor(2.5), P(unreduced={"dp"}), mesh=MESH)
    assert repr(pending) == "f32[]{+dp}" and pending.item() == 2.5
    empty = sp.shard(torch.zeros(0, 4), P(None, "tp"), mesh=MESH)
    assert empty.unshard().shape == (0, 4)
    assert sp.shard(torch.ones(1, 4), P(None, "tp"), mesh=MESH).unshard().shape == (1, 4)


def test_from_local():
    blocks = torch.arange(16.0).reshape(4, 2, 2)
    arrays = sp.from_local({"a": blocks, "k": 1}, {"a": P("x"), "k": None}, mesh=LINE)
    assert repr(arrays["a"]) == "f32[8@x, 2]" and arrays["k"] == 1
    assert torch.equal(arrays["a"].unshard(), torch.arange(16.0).reshape(8, 2))
    assert torch.equal(sp.from_local(blocks, "a (x b)", mesh=LINE).unshard(), torch.cat(list(blocks), 1))
    assert torch.equal(sp.from_local(blocks, P(unreduced={"x"}), mesh=LINE).unshard(), blocks.sum(0))
    assert repr(sp.from_local(torch.ones(4), "", mesh=LINE)) == "f32[]"
    for wrong in (torch.ones(3, 2), torch.tensor(1.0), arrays["a"]):
        with pytest.raises(SpecError, match=r"is not 4 blocks[^$]*leaf: \['w'\][^$]*new dim 0 of size 4"):
            sp.from_local({"w": wrong}, P("x"), mesh=LINE)
    with pytest.raises(SpecError, match=r"longer than the rank[^$]*leaf: \['w'\]"):
        sp.from_local({"w": torch.ones(4, 2)}, P("x", None), mesh=LINE)


def test_from_shards_refuses_what_does_not_fit():
    four = [torch.ones(2)] * 4
    cases = [
        (four[:3], P("x"), "3 shards for 4 devices"),
        ([*four[:3], torch.ones(3)], P("x"), "differ in shape or dtype"),
        ([*four[:3], 1.0], P("x"), "shard 3 is 1.0, a float"),
        (four, P("y"), "unknown axis 'y'"),
        (four, "(x a) b", "the pattern has 2 dims"),
        (four, P(None, "x"), "longer than the rank"),
        (four, "x", "exactly 4"),
    ]
    for shards, spec, words in cases:
        with pytest.raises(SpecError, match=words):
            sp.Array.from_shards(shards, spec, LINE)
    assert repr(sp.Array.from_shards([torch.ones(1)] * 4, "x", LINE)) == "f32[4@x]"
    assert repr(sp.Array.from_shards([torch.ones(2, 3, 4)] * 8, "(dp b) ... (tp d)", MESH)) == "f32[4@dp, 3, 16@tp]"


def test_make_array():
    calls = []

    def callback(index):
        calls.append(index)
        return X.numpy()[index]

    for spec, count in ((P(), 1), ("(dp b) t", 2), (P("dp", "tp"), 8), (P(("tp", "dp")), 8)):
        calls.clear()
        array = sp.make_array((8, 4), spec, callback, mesh=MESH)
        assert torch.equal(array.unshard(), X) and len(calls) == count
    assert array.dtype is torch.float32
    assert sp.make_array((8, 4), P("dp"), callback, mesh=MESH, dtype=torch.float64).dtype is torch.float64
    assert calls[-1] == (slice(4, 8), slice(0, 4))
    with sp.set_mesh(MESH):
        ones = sp.make_array((1, 4), P(None, "tp"), lambda index: torch.ones(1, 4)[index])
    assert repr(ones) == "f32[1, 4@tp]"
    assert sp.make_array((), "", lambda index: 3.0, mesh=MESH).item() == 3
    with pytest.raises(SpecError, match=r"a block of shape \(8, 4\), not \(4, 4\)"):
        sp.make_array((8, 4), P("dp"), lambda index: X, mesh=MESH)
    with pytest.raises(SpecError, match="several dtypes"):
        sp.make_array((4,), P("tp"), lambda i: torch.ones(1, dtype=torch.int if i[0].start else None), mesh=MESH)
    with pytest.raises(SpecError, match="no pending sums"):
        sp.make_array((4,), P(unreduced={"tp"}), lambda index: torch.ones(4), mesh=MESH)
    with pytest.raises(SpecError, match="which its axes do not divide"):
        sp.make_array((3,), P("tp"), lambda index: torch.ones(1), mesh=MESH)


def test_what_an_array_tells_of_itself():
    array = sp.shard(X, P("dp", "tp"), mesh=MESH)
    assert repr(array) == str(array) == sp.typeof(array) == f"{array}" == "f32[8@dp, 4@tp]"
    assert f"{array:>20}" == "     f32[8@dp, 4@tp]"
    assert (array.ndim, array.numel(), array.dtype, len(array)) == (2, 32, torch.float32, 8)
    assert array.device == torch.device("cpu") and not array.requires_grad and array.is_leaf
    assert array.spec is P("dp", "tp") and hash(array) == hash(array)
    assert np.array_equal(array.numpy(), X.numpy()) and np.array_equal(np.asarray(array), X.numpy())
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert array.tolist() == X.tolist()
    assert sp.typeof(torch.zeros(2, dtype=torch.bfloat16)) == "bf16[2]"


def test_scalar_arrays_are_numbers():
    loss, three = sp.shard((torch.tensor(1.23456), torch.tensor(3)), P(), mesh=MESH)
    assert f"{loss:.3f}" == "1.235" and f"{three}" == "3" and f"{three:04d}" == "0003"
    assert float(loss) == pytest.approx(1.23456) and int(three) == 3 and complex(loss).imag == 0
    assert bool(three) and [10, 11, 12, 13][three] == 13 and three.item() == 3
    assert type(loss.item()) is float and type(three.item()) is int
    with pytest.raises(RuntimeError, match="32 elements"):
        sp.shard(X, P("dp"), mesh=MESH).item()


def test_copies_and_pickles():
    for spec in SPECS:
        array = sp.shard(X, spec, mesh=MESH)
        through = io.BytesIO()
        torch.save(array, through)
        through.seek(0)
        loaded = torch.load(through, weights_only=False)
        for other in (copy.deepcopy(array), copy.copy(array), pickle.loads(pickle.dumps(array)), loaded):
            assert other is not array and other.spec is array.spec and other.mesh is MESH
            assert torch.equal(other.unshard(), X)
    deep = copy.deepcopy({"a": array, "b": array})
    assert deep["a"] is deep["b"]
    deep["a"].shards[0].zero_()
    assert torch.equal(array.unshard(), X)


def test_movers_inside_a_trace():
    array = sp.shard(X, P("dp"), mesh=MESH)
    for mover in (lambda x: sp.shard(x, P("tp")), lambda x: sp.from_local(x, P("tp"), mesh=MESH)):
        with pytest.raises(TracingError, match=r"in a function that is being traced[^$]*sp.constrain"):
            sp.spmd_jit(mover, mesh=MESH)(X)
    whole = sp.spmd_jit(lambda x: x + sp.unshard(array), mesh=MESH)(X)
    assert torch.equal(whole.unshard(), X + X)


def test_shard_names_the_leaf():
    with pytest.raises(SpecError, match=r"dim 0 has size 3[^$]*leaf: \['a'\]\[1\]"):
        sp.shard({"a": [X, torch.ones(3)]}, P("dp"), mesh=MESH)
    with pytest.raises(SpecError, match=r"specs\['a'\]: the value is a list of 1, the specs have a tuple of 1"):
        sp.shard({"a": [X]}, {"a": (P(),)}, mesh=MESH)
    with pytest.raises(SpecError, match="no mesh"):
        sp.shard(X, P())
