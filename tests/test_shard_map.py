"""The collectives under shard_map: their answers on every mesh and dtype, eager and traced, and the facts of JAX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_table import TABLE, numbers, placed, reference
from mapped import CUBE, LINE, MESHES, MODES, SQUARE, mapped, same, whole
from torch.func import grad, hessian, vmap

import spmdfn as sp
from spmdfn import P

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_collectives_of_every_dtype(name: str, mesh: sp.Mesh):
    row = TABLE[name]
    f = placed(row, mesh)
    inputs = [numbers((mesh.size * mesh.size * 2, 3), dtype) for dtype in DTYPES]
    want = [reference(row, mesh)(x) for x in inputs]
    for mode in MODES:
        same(whole(mode, lambda *xs: [f(x) for x in xs], mesh)(*inputs), want)
