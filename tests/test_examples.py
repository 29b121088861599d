"""Every example of the device view equals the function of one device: values and gradients, op by op and as a program.

Each page also runs as a reader would run it.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import collective_matmul
import data_parallel
import moe
import pipeline
import pytest
import ring_attention
import tensor_parallel
import torch
import torch.nn.functional as F
from torch.func import grad_and_value
from torch.testing import assert_close

import spmdfn as sp
from spmdfn import P

F64 = torch.float64
WAYS = ("op by op", "as a program")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return sp.random.normal(sp.random.key(seed), shape, F64)


def run(f: Callable, mesh: sp.Mesh, way: str) -> Callable:
    """f itself, which runs op by op, or its program; whole tensors come back."""
    jitted = f if way == "op by op" else sp.spmd_jit(f, mesh=mesh)
    return lambda *args: sp.unshard(jitted(*args))


def check(f: Callable, plain: Callable, args: tuple, mesh: sp.Mesh, way: str, argnums: tuple[int, ...]) -> None:
    """A mapped function has the values of a plain one, and the gradients, taken outside the map."""
    seed = normal(99, *plain(*args).shape)

    def loss(g: Callable) -> Callable:
        return lambda *args: (g(*args) * seed).sum()

    assert_close(run(f, mesh, way)(*args), plain(*args))
    found = run(torch.func.grad(loss(f), argnums), mesh, way)(*args)
    assert_close(found, torch.func.grad(loss(plain), argnums)(*args))


# ---------------------------------------------------------------- data parallelism


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4])
def test_data_parallel(size: int, way: str) -> None:
    mesh = sp.make_mesh((size,), ("dp",))
    args = (data_parallel.init(sp.random.key(0), 5, 6, 2, F64), normal(1, 8, 5), normal(2, 8, 2))
    for step in data_parallel.make_steps(mesh):
        assert_close(run(step, mesh, way)(*args), data_parallel.one_device(*args))


@pytest.mark.parametrize("way", WAYS)
def test_a_second_mean_of_gradients_is_refused(way: str) -> None:
    mesh = sp.make_mesh((4,), ("dp",))
    args = (data_parallel.init(sp.random.key(0), 5, 6, 2, F64), normal(1, 8, 5), normal(2, 8, 2))
    with pytest.raises(sp.VaryingError, match="pmean over dp of a value that is already equal.*\n.*\n.*already summed"):
        run(data_parallel.make_wrong_step(mesh), mesh, way)(*args)


# ---------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel(size: int, way: str) -> None:
    mesh = sp.make_mesh((size,), ("tp",))
    w, x, target = tensor_parallel.init(sp.random.key(0), 6, 8, F64), normal(1, 3, 6), normal(2, 3, 6)
    expected = tensor_parallel.with_gradients(tensor_parallel.mlp)(w, x, target)
    found = tensor_parallel.with_gradients(tensor_parallel.make_by_hand(mesh))
    assert_close(run(found, mesh, way)(w, x, target), expected)


def test_both_views_of_tensor_parallelism_have_the_same_collectives() -> None:
    mesh = sp.make_mesh((4,), ("tp",))
    w, x, target = tensor_parallel.init(sp.random.key(0), 6, 8, F64), normal(1, 3, 6), normal(2, 3, 6)
    by_hand, global_view = tensor_parallel.make_steps(mesh)
    rows = tensor_parallel.collectives(by_hand.lower(w, x, target))
    assert rows == tensor_parallel.collectives(global_view.lower(w, x, target))
    assert rows == [("all_reduce", "sum", ("tp",), 2 * 3 * 6 * 8 * 3 // 4)] * 2
    assert_close(sp.unshard(by_hand(w, x, target)), sp.unshard(global_view(w, x, target)))


def test_a_mapped_function_amid_global_view_code() -> None:
    mesh = sp.make_mesh((4,), ("tp",))
    w, x = tensor_parallel.init(sp.random.key(0), 6, 8, F64), normal(1, 3, 6)
    mixed = sp.spmd_jit(tensor_parallel.make_mixed(mesh), mesh=mesh, in_specs=(tensor_parallel.WEIGHTS, P()))
    assert_close(mixed(w, x).unshard(), x + tensor_parallel.mlp(w, F.layer_norm(x, (6,))))


# ---------------------------------------------------------------- collective matmul


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["gather_first", "one_way", "two_way"])
def test_collective_matmul(name: str, size: int, way: str) -> None:
    mesh = sp.make_mesh((size,), ("ring",))
    product = collective_matmul.make(getattr(collective_matmul, name), mesh)
    check(product, torch.matmul, (normal(0, 8, 3), normal(1, 3, 8)), mesh, way, (0, 1))


def test_a_ring_moves_the_bytes_of_the_gather_in_hops() -> None:
    mesh = sp.make_mesh((4,), ("ring",))
    args = normal(0, 8, 3), normal(1, 3, 8)
    programs = {
        f.__name__: sp.spmd_jit(collective_matmul.make(f, mesh), mesh=mesh, in_specs=collective_matmul.IN).lower(*args)
        for f in (collective_matmul.gather_first, collective_matmul.one_way, collective_matmul.two_way)
    }
    rows = {name: [(row.op, row.bytes) for row in p.collectives] for name, p in programs.items()}
    assert rows == {
        "gather_first": [("all_gather", 144)],
        "one_way": [("permute", 48)] * 3,
        "two_way": [("permute", 24)] * 6,
    }


# ---------------------------------------------------------------- ring attention


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ring_attention(size: int, way: str) -> None:
    mesh = sp.make_mesh((size,), ("ring",))
    q, k, v = (normal(seed, 2, 2, 8, 4) for seed in range(3))
    check(ring_attention.make(mesh), ring_attention.one_device, (q, k, 30 * v), mesh, way, (0, 1, 2))


def test_ring_attention_of_large_scores_is_finite() -> None:
    mesh = sp.make_mesh((4,), ("ring",))
    q, k, v = (normal(seed, 1, 1, 8, 4) for seed in range(3))
    args = (100 * q, 100 * k, v)
    assert_close(ring_attention.make(mesh)(*args).unshard(), ring_attention.one_device(*args))


@pytest.mark.parametrize("way", WAYS)
def test_ring_attention_computed_again_in_the_backward(way: str) -> None:
    mesh = sp.make_mesh((4,), ("ring",))
    args = tuple(normal(seed, 2, 2, 8, 4) for seed in range(3))
    spec = ring_attention.SPLIT
    again = sp.shard_map(sp.remat(ring_attention.ring_attention), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    check(again, ring_attention.one_device, args, mesh, way, (0, 1, 2))


# ---------------------------------------------------------------- mixture of experts

TREE = ("router_DE", "up_EDH", "down_EHD")


def experts(f: Callable) -> Callable:
    """A function of params and tokens as one of tensors, for gradients of each."""
    return lambda router, up, down, x: f(dict(zip(TREE, (router, up, down), strict=True)), x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("capacity", [2, 12, None])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_moe(size: int, capacity: int | None, way: str) -> None:
    mesh = sp.make_mesh((size,), ("ep",))
    params, x = moe.init(sp.random.key(0), 4, 6, 4, F64), normal(1, 24, 4)
    one_device = partial(moe.one_device, k=2, capacity=capacity or 48, groups=size)
    args = (*params.values(), x)
    check(experts(moe.make(mesh, k=2, capacity=capacity)), experts(one_device), args, mesh, way, (0, 1, 2, 3))


def test_capacity_drops_and_dropless_does_not() -> None:
    params, x = moe.init(sp.random.key(0), 4, 6, 4, F64), normal(1, 24, 4)
    few, many, all_of_them = (moe.one_device(params, x, k=2, capacity=c, groups=2) for c in (2, 12, 24))
    assert not torch.allclose(few, many)
    assert_close(many, all_of_them)
    choices = torch.softmax(x @ params["router_DE"], -1).topk(2)
    direct = moe.experts(params, x.expand(4, -1, -1))
    chosen = direct[choices.indices, torch.arange(24)[:, None]]
    assert_close(many, (choices.values[..., None] * chosen).sum(1))


@pytest.mark.parametrize("way", WAYS)
def test_dropless_when_all_tokens_go_to_one_device(way: str) -> None:
    mesh = sp.make_mesh((4,), ("ep",))
    params, x = moe.init(sp.random.key(0), 4, 6, 4, F64), normal(1, 16, 4).abs()
    params["router_DE"] = torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=F64).expand(4, 4).contiguous()
    one_device = partial(moe.one_device, k=1, capacity=16, groups=1)
    assert_close(run(moe.make(mesh, k=1), mesh, way)(params, x), one_device(params, x))


# ---------------------------------------------------------------- pipeline


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 3), (4, 1), (4, 5)])
def test_pipeline(stages: int, microbatches: int, remat: bool, way: str) -> None:
    mesh = sp.make_mesh((stages,), ("pipe",))
    args = pipeline.init(sp.random.key(0), 4, 3, F64), normal(1, microbatches, 2, 3), normal(2, microbatches, 2, 3)
    expected = grad_and_value(pipeline.one_device, (0, 1))(*args)
    assert_close(run(grad_and_value(pipeline.make(mesh, remat=remat), (0, 1)), mesh, way)(*args), expected)


# ---------------------------------------------------------------- the pages

PAGES = ("data_parallel", "tensor_parallel", "collective_matmul", "ring_attention", "moe", "pipeline")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 130
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "bytes moved per device and call" in printed
    differences = re.findall(r"largest difference.*: (\S+e[-+]\d+)", printed)
    assert differences
    assert max(map(float, differences)) < 2e-5
