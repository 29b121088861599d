"""`Array`: one global tensor, kept as the blocks that this process's devices hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ._compat import make_wrapper, no_dispatch_modes, no_functorch
from .backends.base import backend_of
from .blocks import assemble, global_shape
from .errors import SpecError, SpmdError, message
from .layout import Layout, from_entries
from .mesh import Mesh
from .spec import P, Resolved, Spec, describe, dtype_name, resolve


class Array(torch.Tensor):
    """A global tensor laid out over a mesh. `shards` are this process's blocks, row-major by mesh coordinate.

    Made by `shard`, `make_array`, `from_local`, `Array.from_shards` and transformed functions. It has the global
    `shape`; a torch operation on it outside a transform raises SpmdError.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("dp",))
    >>> x = sp.shard(torch.arange(4.), sp.P("dp"), mesh=mesh)
    >>> x
    f32[4@dp]
    >>> [block.tolist() for block in x.shards]
    [[0.0, 1.0], [2.0, 3.0]]
    >>> x.unshard().sum().item()
    6.0
    """

    _blocks: list[torch.Tensor] | None
    _layout: Layout
    _spec: P | None
    _device: torch.device
    # what a program is chosen by, kept ready for the next call
    _kind: tuple[Layout, torch.dtype, str]

    @staticmethod
    def __new__(cls, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None) -> Array:
        dtype, device = shards[0].dtype, shards[0].device
        with no_functorch():
            array = make_wrapper(cls, _like(layout.shape, dtype), device)
        array._blocks, array._layout, array._spec, array._device = list(shards), layout, spec, device
        array._kind = (layout, dtype, device.type)
        return array

    def __init__(self, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None):
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return args[0].device
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise SpmdError(
            message(
                f"{func} on an Array outside a transform",
                f"operands: {', '.join(map(repr, _arrays((*args, *(kwargs or {}).values()))))}",
                fix="put the operation in a function decorated with sp.spmd_jit, or take the tensor by sp.unshard(x)",
            )
        )

    @classmethod
    def from_shards(cls, shards: Sequence[torch.Tensor], spec: Spec, mesh: Mesh) -> Array:
        """The Array whose blocks are `shards`, one a device of this process, row-major by mesh coordinate.

        Over the axes of `unreduced` the blocks are summed; over any other axis that splits no dim they must be equal
        (not checked). Raises SpecError if their number, shapes or dtypes do not fit the spec.

        >>> import torch, spmdfn as sp
        >>> mesh = sp.make_mesh((2,), ("dp",))
        >>> sp.Array.from_shards([torch.zeros(1, 3), torch.ones(1, 3)], sp.P("dp"), mesh)
        f32[2@dp, 3]
        >>> sp.Array.from_shards([torch.ones(3), torch.ones(3)], sp.P(unreduced={"dp"}), mesh).unshard()
        tensor([2., 2., 2.])
        """
        backend_of(mesh)  # says so if it holds no data
        blocks = list(shards)
        if len(blocks) != mesh.size:
            raise SpecError(
                message(f"{len(blocks)} shards for {mesh.size} devices", f"mesh: {mesh!r}", fix="give one per device")
            )
        for place, block in enumerate(blocks):
            if not isinstance(block, torch.Tensor) or isinstance(block, Array):
                raise SpecError(
                    message(f"shard {place} is {block!r}, a {type(block).__name__}", fix="give plain torch tensors")
                )
        if len({(tuple(block.shape), block.dtype) for block in blocks}) != 1:
            raise SpecError(
                message(
                    "the shards differ in shape or dtype",
                    f"shards: {[(tuple(block.shape), str(block.dtype)) for block in blocks]}",
                    fix="every device's block has the same shape and dtype",
                )
            )
        shape = global_shape(blocks[0].shape, spec, mesh)
        resolved = resolve(spec, shape, mesh)
        return cls([block.detach() for block in blocks], from_entries(mesh, shape, *resolved), spec_of(resolved))

    @property
    def spec(self) -> P:
        """The layout as a `P`, one entry a dim: as it was asked for, axes of size 1 too, or as it came out."""
        if self._spec is None:
            assert self._layout.entries is not None
            self._spec = P(*self._layout.entries, unreduced=self._layout.pending_axes)
        return self._spec

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the blocks."""
        return self._device

    @property
    def mesh(self) -> Mesh:
        """The mesh that the Array lies on."""
        return self._layout.mesh

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This process's blocks, row-major by mesh coordinate. SpmdError once the Array was donated."""
        return tuple(blocks_of(self))

    def unshard(self) -> torch.Tensor:
        """The whole tensor, a new plain torch tensor; a pending sum is summed."""
        with no_functorch(), no_dispatch_modes(), torch.no_grad():  # a known value, also while something is traced
            return assemble(self.shards, self._layout)

    def item(self) -> Any:
        """The value of a one-element Array as a Python number; RuntimeError for more elements."""
        whole = self.unshard()
        with no_functorch(), no_dispatch_modes():
            return whole.item()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as a numpy array."""
        return self.unshard().numpy(force=force)

    def tolist(self) -> Any:
        """The whole tensor as nested lists of numbers."""
        whole = self.unshard()
        with no_functorch(), no_dispatch_modes():
            return whole.tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        whole = self.numpy()
        return whole if dtype is None else whole.astype(dtype)

    def __iter__(self) -> Iterator[Any]:
        raise SpmdError(
            message(
                "an Array cannot be iterated over outside a transform",
                f"array: {self!r}",
                fix="iterate in a function decorated with sp.spmd_jit, or over sp.unshard(x)",
            )
        )

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __format__(self, how: str) -> str:
        """A scalar's value, as torch has it (`f"{loss:.3f}"`); the text of `repr` for any other."""
        return format(repr(self) if self._layout.dims else self.item(), how)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        spec = self.spec
        return describe(spec.entries, self._layout.shape, str(self._kind[1]), spec.unreduced)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Array.from_shards, (list(self.shards), self.spec, self.mesh)

    def __deepcopy__(self, memo: Any) -> Array:
        copies = {id(block): block.clone() for block in self.shards}
        return Array([copies[id(block)] for block in self.shards], self._layout, self._spec)


@lru_cache(maxsize=4096)
def _like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with no_dispatch_modes(), torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="meta")


def _arrays(values: Sequence[Any]) -> list[Array]:
    found = []
    for value in values:
        if isinstance(value, Array):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _arrays(value)
    return found


def layout_of(array: Array) -> Layout:
    """The layout behind an Array's spec: axes of size 1 are left out."""
    return array._layout


def spec_of(resolved: Resolved) -> P:
    """The spec that an Array laid out so has: one entry a dim."""
    return P(*resolved.entries, unreduced=resolved.unreduced)


def blocks_of(array: Array) -> list[torch.Tensor]:
    """A new list of this process's blocks; SpmdError once the Array was donated."""
    if array._blocks is None:
        raise SpmdError(
            message(
                "this Array was donated to a call and holds no data any more",
                f"array: {array!r}",
                fix="use the function's result instead, or leave the argument out of donate_argnums",
            )
        )
    return list(array._blocks)


def donate(array: Array) -> list[torch.Tensor]:
    """Take the blocks out of an Array for good."""
    blocks = blocks_of(array)
    array._blocks = None
    return blocks


def typeof(x: Any) -> str:
    """The dtype, shape and layout of a tensor as one word.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 4), ("dp", "tp"))
    >>> sp.typeof(sp.shard(torch.zeros(64, 128), sp.P("dp", "tp"), mesh=mesh))
    'f32[64@dp, 128@tp]'
    >>> sp.typeof(torch.zeros(2, 3))
    'f32[2, 3]'
    """
    if isinstance(x, Array):
        return repr(x)
    return f"{dtype_name(str(x.dtype))}[{', '.join(map(str, x.shape))}]"
