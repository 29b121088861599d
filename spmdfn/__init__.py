"""spmdfn: pure PyTorch functions on a mesh of devices, with the numbers of one device."""

from __future__ import annotations

from . import debug, optim, random
from .array import Array, typeof
from .control import cond, scan
from .debug import explain
from .errors import CollectiveError, ShardingError, SpecError, SpmdError, TracingError, VaryingError
from .jit import spmd_jit
from .mesh import Mesh, make_mesh, set_mesh
from .movers import constrain, from_local, make_array, shard, unshard
from .named import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    ragged_all_to_all,
)
from .op_by_op import disable_jit
from .program import Program
from .remat import remat
from .shard_map import shard_map
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
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "cond",
    "constrain",
    "disable_jit",
    "debug",
    "explain",
    "from_local",
    "make_array",
    "make_mesh",
    "optim",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
    "random",
    "remat",
    "scan",
    "set_mesh",
    "shard",
    "shard_map",
    "spmd_jit",
    "tree_specs",
    "typeof",
    "unshard",
]
