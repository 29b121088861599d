"""`spec=`: the same numbers to the bit for any mesh and layout, each device making its own block only."""

from __future__ import annotations

import pytest
import torch

import spmdfn as sp
from spmdfn.errors import SpecError

MESHES = {
    "1": sp.make_mesh((1,), ("dp",)),
    "2": sp.make_mesh((2,), ("dp",)),
    "8": sp.make_mesh((8,), ("dp",)),
    "2x4": sp.make_mesh((2, 4), ("dp", "tp")),
    "2x2x2": sp.make_mesh((2, 2, 2), ("dp", "fsdp", "tp")),
}
LAYOUTS = [
    ("1", "(dp b) n"),
    ("2", "b (dp n)"),
    ("8", "(dp b) n"),
    ("8", "b (dp n)"),
    ("2x4", "(dp b) (tp n)"),
    ("2x4", "(tp dp b) n"),
    ("2x2x2", "(dp fsdp b) (tp n)"),
    ("2x2x2", "b (tp fsdp dp n)"),
    ("2x2x2", "(fsdp b) n"),
]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DRAWS = {
    "bits": lambda key, **spec: sp.random.bits(key, (16, 24), torch.uint8, **spec),
    "uniform": lambda key, **spec: sp.random.uniform(key, (16, 24), torch.bfloat16, **spec),
    "uniform bounds": lambda key, **spec: sp.random.uniform(key, (16, 24), torch.float64, -1.3, 0.4, **spec),
    "normal": lambda key, **spec: sp.random.normal(key, (16, 24), **spec),
    "normal f64": lambda key, **spec: sp.random.normal(key, (16, 24), torch.float64, **spec),
    "bernoulli": lambda key, **spec: sp.random.bernoulli(key, 0.3, (16, 24), **spec),
    "randint": lambda key, **spec: sp.random.randint(key, (16, 24), -5, 12, **spec),
    "permutation": lambda key, **spec: sp.random.permutation(key, torch.arange(384).reshape(16, 24), **spec),
}


def equal(got, want):
    size = want.element_size()
    assert got.dtype == want.dtype and torch.equal(got.view(BITS[size]), want.view(BITS[size]))


@pytest.mark.parametrize(("mesh", "spec"), LAYOUTS)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_layouts_do_not_change_the_numbers(draw, mesh, spec):
    key = sp.random.key(3)
    with sp.set_mesh(MESHES[mesh]):
        drawn = draw(key, spec=spec)
        assert isinstance(drawn, sp.Array) and drawn.shards[0].numel() * MESHES[mesh].size >= drawn.numel()
        equal(drawn.unshard(), draw(key))
        traced = sp.spmd_jit(lambda key: draw(key, spec=spec))(key)
        equal(traced.unshard(), draw(key))
        assert traced.shards[0].shape == drawn.shards[0].shape


def test_each_device_draws_its_own_block_without_communication():
    with sp.set_mesh(MESHES["2x4"]):
        f = sp.spmd_jit(lambda key: sp.random.normal(key, (8, 16), spec="(dp b) (tp n)"))
        program = f.lower(sp.random.key(0))
    assert not program.collectives
    assert "block_normal(key, (4, 4, ), (16, 1, )" in program.as_text()


def test_a_mask_takes_the_layout_of_what_it_meets():
    with sp.set_mesh(MESHES["2x4"]):
        f = sp.spmd_jit(
            lambda x, key: torch.where(sp.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0),
            in_specs=("(dp b) (tp n)", sp.P()),
        )
        x, key = torch.randn(8, 16), sp.random.key(5)
        assert not f.lower(x, key).collectives
        equal(f(x, key).unshard(), torch.where(sp.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0))


def test_keys_with_a_spec():
    key = sp.random.key(3)
    with sp.set_mesh(MESHES["8"]):
        keys = sp.random.split(key, 16, spec=sp.P("dp"))
        assert keys.shards[3].shape == (2, 2)
        equal(keys.unshard(), sp.random.split(key, 16))
        equal(sp.random.fold_in(key, torch.arange(16), spec=sp.P("dp")).unshard(), sp.random.split(key, 16))


def test_tensor_parameters_with_a_spec():
    key, p, high = sp.random.key(3), torch.linspace(0, 1, 24), torch.arange(1, 25)
    with sp.set_mesh(MESHES["8"]):
        drawn = sp.random.bernoulli(key, p, (16, 24), spec="b (dp n)")
        equal(drawn.unshard(), sp.random.bernoulli(key, p, (16, 24)))
        drawn = sp.random.randint(key, (16, 24), 0, high, spec="(dp b) n")
        equal(drawn.unshard(), sp.random.randint(key, (16, 24), 0, high))


def test_errors():
    with sp.set_mesh(MESHES["2"]):
        with pytest.raises(SpecError, match=r"not a key(.|\n)*sp.random.key\(7\)"):
            sp.random.normal(7, (4,), spec="(dp b)")
        with pytest.raises(SpecError, match="3"):
            sp.random.normal(sp.random.key(0), (3,), spec="(dp b)")
        with pytest.raises(SpecError, match=r"key(.|\n)*int 7"):
            sp.spmd_jit(lambda x: x + sp.random.normal(7, (4,)))(torch.ones(4))
