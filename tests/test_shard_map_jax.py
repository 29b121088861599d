"""shard_map against JAX's, live, on virtual CPU devices in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax_bodies
import numpy
import pytest
import torch
from jax_bodies import BODIES
from mapped import MODES, whole
from torch.func import grad

import spmdfn as sp
from spmdfn import P

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What JAX answers. The number of devices is fixed before it starts, so another process asks."""
    path = tmp_path_factory.mktemp("jax") / "answers.npz"
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, str(Path(jax_bodies.__file__)), str(path)]
    subprocess.run(program, env=os.environ | settings, check=True, capture_output=True)
    return numpy.load(path)


class Ours:
    """Our collectives under JAX's names of arguments, where those differ."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sp, name)

    @staticmethod
    def all_gather(x: Any, axis_name: Any, *, axis: int = 0, tiled: bool = False) -> Any:
        return sp.all_gather(x, axis_name, dim=axis, tiled=tiled)

    @staticmethod
    def psum_scatter(x: Any, axis_name: Any, *, scatter_dimension: int = 0, tiled: bool = False) -> Any:
        return sp.psum_scatter(x, axis_name, scatter_dim=scatter_dimension, tiled=tiled)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BODIES)
def test_values_and_gradients_are_those_of_jax(name: str, mode: str, theirs: Any):
    body = BODIES[name]
    mesh = sp.make_mesh(tuple(body.mesh.values()), tuple(body.mesh))
    ins = tuple(P(*spec) for spec in body.ins)
    run = lambda *blocks: body.run(Ours(), torch, *blocks)  # noqa: E731
    f = sp.shard_map(run, mesh=mesh, in_specs=ins, out_specs=P(*body.outs), check_vma=body.checked)
    args = [torch.from_numpy(value) for value in jax_bodies.inputs(name)]

    def close(got: torch.Tensor, key: str) -> None:
        want = torch.from_numpy(theirs[key])
        assert got.dtype == want.dtype and got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), (got, want)

    close(whole(mode, f, mesh)(*args), name)
    if body.gradients:
        ramp = torch.from_numpy(jax_bodies.ramp(theirs[name].shape))
        loss = lambda *args: (f(*args) * ramp).sum()  # noqa: E731
        for place, gradient in enumerate(whole(mode, grad(loss, tuple(range(len(args)))), mesh)(*args)):
            close(gradient, f"{name}/{place}")
