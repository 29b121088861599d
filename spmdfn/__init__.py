"""spmdfn: pure PyTorch functions on a mesh of devices, with the numbers of one device."""

from __future__ import annotations

from . import random
from .array import Array, make_array, typeof
from .errors import CollectiveError, ShardingError, SpecError, SpmdError, TracingError, VaryingError
from .jit import constrain, shard, spmd_jit, unshard
from .mesh import Mesh, make_mesh, set_mesh
from .program import Program
from .spec import P
from .tree import tree_specs

__version__ = "0.1.0"

__all__ = [
    "Array",
    "CollectiveError",
    "Mesh",
    "P",
    "Program",
    "ShardingError",
    "SpecError",
    "SpmdError",
    "TracingError",
    "VaryingError",
    "constrain",
    "make_array",
    "make_mesh",
    "random",
    "set_mesh",
    "shard",
    "spmd_jit",
    "tree_specs",
    "typeof",
    "unshard",
]
