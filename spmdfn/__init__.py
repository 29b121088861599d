"""spmdfn: pure PyTorch functions on a mesh of devices, with the numbers of one device."""

from __future__ import annotations

from . import debug, optim, random
from .array import Array, typeof
from .debug import explain
from .errors import CollectiveError, ShardingError, SpecError, SpmdError, TracingError, VaryingError
from .jit import spmd_jit
from .mesh import Mesh, make_mesh, set_mesh
from .movers import constrain, from_local, make_array, shard, unshard
from .op_by_op import disable_jit
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
    "disable_jit",
    "from_local",
    "debug",
    "explain",
    "make_array",
    "make_mesh",
    "optim",
    "random",
    "set_mesh",
    "shard",
    "spmd_jit",
    "tree_specs",
    "typeof",
    "unshard",
]
