"""Meshes: interning, arithmetic against itertools.product, every error text, and the default mesh."""

import ast
import copy
import inspect
import itertools
import pickle
import threading
from datetime import timedelta

import pytest

from spmdfn import mesh as mesh_room
from spmdfn import pattern as pattern_room
from spmdfn import spec as spec_room
from spmdfn.errors import SpecError, SpmdError
from spmdfn.mesh import Mesh, current_mesh, make_mesh, resolve_mesh, set_mesh, unknown_axis

SHAPES = [(), (1,), (8,), (2, 4), (1, 3, 1), (2, 2, 2), (3, 1, 5, 2)]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.mark.parametrize("room", [mesh_room, spec_room, pattern_room])
def test_pure_arithmetic(room):
    for node in ast.walk(ast.parse(inspect.getsource(room))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] in ("torch", "optree", "numpy") for name in names)


def test_values():
    mesh = make_mesh((2, 4), ("dp", "tp"))
    assert mesh.axis_names == ("dp", "tp")
    assert mesh.shape == {"dp": 2, "tp": 4}
    assert list(mesh.shape) == ["dp", "tp"]
    assert (mesh.size, mesh.backend, tuple(mesh.devices)) == (8, "local", tuple(range(8)))
    assert repr(mesh) == "Mesh(dp=2, tp=4)"
    assert repr(make_mesh((), ())) == "Mesh()"
    assert make_mesh((), ()).size == 1


def test_interned():
    mesh = make_mesh((2, 4), ("dp", "tp"))
    assert make_mesh(iter([2, 4]), ["dp", "tp"], backend="local", timeout=timedelta(seconds=1), check=True) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert copy.deepcopy(mesh) is mesh
    assert {mesh: 1}[make_mesh((2, 4), ("dp", "tp"))] == 1
    others = [
        make_mesh((4, 2), ("dp", "tp")),
        make_mesh((2, 4), ("tp", "dp")),
        make_mesh((8,), ("dp",)),
        make_mesh((2, 4), ("dp", "tp"), backend="fake"),
    ]
    assert all(mesh != other for other in others)


def test_immutable():
    mesh = make_mesh((2,), ("dp",))
    with pytest.raises(AttributeError, match="immutable; make another with make_mesh"):
        mesh.size = 3
    with pytest.raises(AttributeError, match="immutable"):
        del mesh.shape
    with pytest.raises(TypeError):
        mesh.shape["dp"] = 3


def test_interned_across_threads():
    made, barrier = [], threading.Barrier(8)

    def make():
        barrier.wait()
        made.extend(make_mesh((3, n), ("racing", "axes")) for n in range(1, 50))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, made))) == 49


def test_a_fake_world_is_cheap():
    mesh = make_mesh((1 << 20, 1 << 20), ("a", "b"), backend="fake")
    assert mesh.devices == range(1 << 40)
    assert mesh.coordinates((1 << 40) - 1) == ((1 << 20) - 1,) * 2
    assert repr(mesh) == "Mesh(a=1048576, b=1048576, backend='fake')"


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_are_row_major(shape):
    mesh = make_mesh(shape, [f"a{i}" for i in range(len(shape))])
    expected = list(itertools.product(*map(range, shape)))
    assert [mesh.coordinates(i) for i in mesh.devices] == expected
    assert [mesh.index(c) for c in expected] == list(mesh.devices)


def test_axis_size():
    mesh = make_mesh((2, 3, 5), ("a", "b", "c"))
    table = {"a": 2, "c": 5, (): 1, ("b",): 3, ("c", "a"): 10, ("a", "b", "c"): 30}
    assert {axis: mesh.axis_size(axis) for axis in table} == table


def test_numpy_sizes():
    numpy = pytest.importorskip("numpy")
    assert make_mesh(numpy.array([2, 4]), ("dp", "tp")) is make_mesh((2, 4), ("dp", "tp"))


MESH = make_mesh((2, 4), ("dp", "tp"))

WRONG = [
    (lambda: make_mesh((2, 4), ("dp",)), "2 axis_shapes for 1 axis_names", "(2, 4)", "('dp',)", "one size for each"),
    (lambda: make_mesh(8, ("dp",)), "axis_shapes is 8, not a tuple", "make_mesh((8,), ('dp',))"),
    (lambda: make_mesh((8,), "dp"), "axis_names is 'dp', not a tuple", "make_mesh((8,), ('dp',))"),
    (lambda: make_mesh("8", ("dp",)), "axis_shapes is '8', not a tuple"),
    (lambda: make_mesh((0,), ("dp",)), "axis_shapes (0,) are not all positive ints", "1 is allowed"),
    (lambda: make_mesh((2, -1), ("dp", "tp")), "axis_shapes (2, -1) are not all positive ints"),
    (lambda: make_mesh((2.0,), ("dp",)), "axis_shapes (2.0,) are not all positive ints"),
    (lambda: make_mesh((True,), ("dp",)), "axis_shapes (True,) are not all positive ints"),
    (lambda: make_mesh((2, 2), ("dp", "dp")), "axis name 'dp' is repeated", "('dp', 'dp')"),
    (lambda: make_mesh((2,), ("d p",)), "axis name 'd p' is not an identifier", "underscores"),
    (lambda: make_mesh((2,), ("",)), "axis name '' is not an identifier"),
    (lambda: make_mesh((2,), ("_",)), "axis name '_' is not an identifier"),
    (lambda: make_mesh((2,), (3,)), "axis name 3 is not an identifier"),
    (lambda: make_mesh((2,), ("dp",), backend="mpi"), "unknown backend 'mpi'", "'local', 'fake', 'gloo', 'nccl'"),
    (lambda: MESH.coordinates(8), "no device 8", "Mesh(dp=2, tp=4)", "0 to 7"),
    (lambda: MESH.coordinates(-1), "no device -1"),
    (lambda: MESH.index((0, 4)), "no device at coordinates (0, 4)", "Mesh(dp=2, tp=4)", "(2, 4)"),
    (lambda: MESH.index((0,)), "no device at coordinates (0,)"),
    (lambda: MESH.index((0, -1)), "no device at coordinates (0, -1)"),
    (lambda: MESH.axis_size("pp"), "unknown axis 'pp'", "the mesh's axes: dp=2, tp=4"),
    (lambda: MESH.axis_size(("dp", "x")), "unknown axis 'x'", "add the axis in make_mesh"),
    (lambda: resolve_mesh(None), "no mesh", "pass mesh=", "sp.set_mesh(mesh)"),
    (lambda: resolve_mesh((2, 4)), "mesh: (2, 4) is a tuple, not a Mesh", "sp.make_mesh((2, 4), ('dp', 'tp'))"),
    (lambda: set_mesh(None).__enter__(), "set_mesh: None is a NoneType, not a Mesh"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_errors(case):
    call, *texts = case
    with pytest.raises(SpecError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "asked"),
    [
        ({"backend": "gloo"}, "backend 'gloo'"),
        ({"backend": "nccl"}, "backend 'nccl'"),
        ({"device_mesh": 1}, "device_m"),
    ],
)
def test_process_groups_are_not_available(kwargs, asked):
    with pytest.raises(SpmdError) as caught:
        make_mesh((2,), ("dp",), **kwargs)
    for text in (asked, "process groups, which are not available yet in this version", "backend='local'"):
        assert text in str(caught.value)


def test_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SpmdError, match="default backend under torchrun needs process groups"):
        make_mesh((2,), ("dp",))
    assert make_mesh((2,), ("dp",), backend="local").backend == "local"


def test_unknown_axis_without_axes():
    assert "the mesh's axes: none" in unknown_axis("x", make_mesh((), ()))


def test_set_mesh_nests_and_restores():
    inner = make_mesh((3,), ("x",))
    assert current_mesh() is None
    with set_mesh(MESH) as entered:
        assert entered is current_mesh() is resolve_mesh(None) is MESH
        with pytest.raises(RuntimeError, match="out"), set_mesh(inner):
            assert current_mesh() is inner
            assert resolve_mesh(MESH) is MESH
            raise RuntimeError("out")
        assert current_mesh() is MESH
    assert current_mesh() is None


def test_a_thread_starts_without_a_mesh():
    seen: list[Mesh | None] = []
    with set_mesh(MESH):
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]
