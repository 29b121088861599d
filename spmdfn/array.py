"""`Array`: one global tensor, kept as the blocks that this process's devices hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._compat import disabled_torch_function, make_wrapper, no_dispatch_modes, no_functorch
from .backends.base import backend_of
from .blocks import assemble, cuts, global_shape, take
from .device_types import typed
from .dispatch import Strides, like
from .errors import SpecError, SpmdError, message
from .layout import Layout, from_entries
from .mesh import Mesh
from .operators import Source
from .spec import P, Resolved, Spec, describe, resolve
from .ways import operate


class Array(torch.Tensor):
    """A global tensor laid out over a mesh. `shards` are this process's blocks, row-major by mesh coordinate.

    Made by `shard`, `make_array`, `from_local`, `Array.from_shards` and transformed functions. It has the global
    `shape`, and torch functions and operators work on it, those of torch.func too: each runs as a program of one op,
    laid out as in a traced function, and its results are never pending sums. A plain tensor that meets an Array counts
    as whole on every device. A gradient lies like what it is the gradient of.

    A view that needs no communication shares its memory with the tensor, and may be written to in place; any other is
    a copy, and refuses. Random ops refuse (they need a key: `sp.random`), as do results whose shape depends on data.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("dp",))
    >>> x = sp.shard(torch.arange(4.), sp.P("dp"), mesh=mesh)
    >>> x
    f32[4@dp]
    >>> [block.tolist() for block in x.shards]
    [[0.0, 1.0], [2.0, 3.0]]
    >>> x.unshard().sum().item()
    6.0
    >>> (x * 2).sum(), x[1:3].tolist()
    (f32[], [1.0, 2.0])
    """

    _blocks: list[torch.Tensor] | None
    _layout: Layout
    _spec: P | None = None
    _device: torch.device
    # what a program is chosen by, kept ready for the next call
    _kind: tuple[Layout, torch.dtype, str]
    _strides: Strides
    _writes: list[int]  # how often its memory was written to: one counter for all that look at it
    _source: Source | None = None  # what it was made from, if it is a view that is a copy
    _locked: str | None = None  # what it is, if it must not be written to

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None) -> Array:
        with no_functorch():  # a level that is on would wrap it
            array = cls._of(list(shards), layout, like(layout.shape, shards[0].dtype, None))
        array._spec = spec
        return array

    def __init__(self, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None):
        pass

    @classmethod
    def _of(cls, blocks: list[torch.Tensor], layout: Layout, meta: torch.Tensor, strides: Strides = None) -> Array:
        """An Array of these very blocks, with the metadata of a meta tensor."""
        device = blocks[0].device
        array: Array = make_wrapper(cls, meta, device)
        array._blocks, array._layout, array._device = blocks, layout, device
        array._kind, array._strides, array._writes = (layout, meta.dtype, device.type), strides, [0]
        return array

    @classmethod
    def _cut(cls, whole: torch.Tensor, layout: Layout) -> Array:
        """A plain tensor laid out: copies of its parts."""
        with no_functorch():
            return cls(take(whole.detach(), layout, copy=True), layout)

    def _alias(self, locked: str | None = None) -> Array:
        """Another Array of the same blocks."""
        meta = like(self._layout.shape, self._kind[1], self._strides)
        with no_functorch():
            array = self._of(self._current(), self._layout, meta, self._strides)
        array._spec, array._writes, array._source = self._spec, self._writes, self._source
        array._locked = self._locked or locked
        return array

    def _become(self, view: Array) -> None:
        """Take the blocks and the layout of a view of itself."""
        self._blocks, self._layout, self._spec = view._blocks, view._layout, None
        self._kind, self._strides = view._kind, view._strides

    def _current(self) -> list[torch.Tensor]:
        """The blocks as they are now. SpmdError once the Array was donated."""
        if self._blocks is None:
            raise SpmdError(
                message(
                    "this Array was donated to a call and holds no data any more",
                    f"array: {self!r}",
                    fix="use the function's result instead, or leave the argument out of donate_argnums",
                )
            )
        if self._source is not None:
            self._source.refresh()
        return self._blocks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if len(types) > 1 and any(not issubclass(kind, cls) for kind in types):
            return NotImplemented  # another subclass that knows Arrays, perhaps
        return operate(cls, func, args, kwargs or {})

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
        layout = from_entries(mesh, shape, *resolved)
        return cls(_apart([block.detach() for block in blocks], layout), layout, spec_of(resolved))

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
        array = Array([copies[id(block)] for block in self.shards], self._layout, self._spec)
        array.__dict__.update({name: value for name, value in self.__dict__.items() if name not in array.__dict__})
        array.requires_grad_(self.requires_grad)
        return array


def _apart(blocks: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """The blocks, copied where one memory stands for different parts: a write to one must not be seen in the other."""
    owner: dict[int, Any] = {}
    parts = zip(blocks, cuts(layout), layout.mesh.devices, strict=True)
    keys = [(block, (cut, device if layout.pending else 0)) for block, cut, device in parts]
    return [block if owner.setdefault(block.data_ptr(), key) == key else block.clone() for block, key in keys]


def layout_of(array: Array) -> Layout:
    """The layout behind an Array's spec: axes of size 1 are left out."""
    return array._layout


def spec_of(resolved: Resolved) -> P:
    """The spec that an Array laid out so has: one entry a dim."""
    return P(*resolved.entries, unreduced=resolved.unreduced)


def blocks_of(array: Array) -> list[torch.Tensor]:
    """A new list of this process's blocks; SpmdError once the Array was donated."""
    return list(array._current())


def donate(array: Array) -> list[torch.Tensor]:
    """Take the blocks out of an Array for good."""
    blocks = blocks_of(array)
    array._blocks = None
    return blocks


def typeof(x: Any) -> str:
    """The dtype, shape and layout of a tensor as one word; in a map, of a block and the axes over which it varies.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 4), ("dp", "tp"))
    >>> sp.typeof(sp.shard(torch.zeros(64, 128), sp.P("dp", "tp"), mesh=mesh))
    'f32[64@dp, 128@tp]'
    >>> sp.typeof(torch.zeros(2, 3))
    'f32[2, 3]'
    >>> kinds = []
    >>> f = sp.shard_map(lambda x: kinds.append(sp.typeof(x)), mesh=mesh, in_specs=sp.P("dp"), out_specs=None)
    >>> f(torch.zeros(6)), kinds
    (None, ['f32[3]{V:dp}'])
    """
    return repr(x) if isinstance(x, Array) else typed(x)
