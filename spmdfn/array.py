"""`Array`: one global tensor, kept as the blocks that this process's devices hold, and the movers in and out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._compat import make_wrapper, no_functorch
from .errors import SpecError, SpmdError, message
from .layout import Layout, from_entries
from .mesh import Mesh, resolve_mesh
from .spec import P, Spec, describe, dtype_name, resolve


class Array(torch.Tensor):
    """A global tensor laid out over a mesh. `shards` are this process's blocks, row-major by mesh coordinate.

    Made by `shard`, `make_array`, `Array.from_shards` and transformed functions. It has the global `shape`.

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

    @staticmethod
    def __new__(cls, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None) -> Array:
        with no_functorch():
            like = torch.empty(layout.shape, dtype=shards[0].dtype, device="meta")
            array = make_wrapper(cls, like, shards[0].device)
        array._blocks, array._layout, array._spec, array._device = list(shards), layout, spec, shards[0].device
        return array

    def __init__(self, shards: Sequence[torch.Tensor], layout: Layout, spec: P | None = None):
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise SpmdError(
            message(
                f"{func} on an Array outside a transform",
                *(f"operand: {a!r}" for a in args if isinstance(a, Array)),
                fix="put the operation in a function decorated with sp.spmd_jit, or take the tensor by sp.unshard(x)",
            )
        )

    @classmethod
    def from_shards(cls, shards: Sequence[torch.Tensor], spec: Spec, mesh: Mesh) -> Array:
        """The Array whose blocks are `shards`, one a device of this process, row-major by mesh coordinate.

        Raises SpecError if their number, shapes or dtypes do not fit the spec.

        >>> import torch, spmdfn as sp
        >>> mesh = sp.make_mesh((2,), ("dp",))
        >>> sp.Array.from_shards([torch.zeros(1, 3), torch.ones(1, 3)], sp.P("dp"), mesh)
        f32[2@dp, 3]
        """
        shards = list(shards)
        if len(shards) != mesh.size:
            raise SpecError(
                message(f"{len(shards)} shards for {mesh.size} devices", f"mesh: {mesh!r}", fix="give one per device")
            )
        if len({(tuple(s.shape), s.dtype) for s in shards}) != 1:
            raise SpecError(
                message(
                    "the shards differ in shape or dtype",
                    f"shards: {[(tuple(s.shape), str(s.dtype)) for s in shards]}",
                    fix="every device's block has the same shape and dtype",
                )
            )
        shape = _global_shape(tuple(shards[0].shape), spec, mesh)
        resolved = resolve(spec, shape, mesh)
        return cls(shards, from_entries(mesh, shape, *resolved), P(*resolved.entries, unreduced=resolved.unreduced))

    @property
    def spec(self) -> P:
        """The layout as a `P`, one entry a dim."""
        if self._spec is not None:
            return self._spec
        entries = self._layout.entries
        assert entries is not None
        return P(*entries, unreduced=self._layout.pending_axes)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def mesh(self) -> Mesh:
        return self._layout.mesh

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This process's blocks, row-major by mesh coordinate. SpmdError once the Array was donated."""
        if self._blocks is None:
            raise SpmdError(
                message(
                    "this Array was donated to a call and holds no data any more",
                    f"array: {self!r}",
                    fix="use the function's result instead, or leave the argument out of donate_argnums",
                )
            )
        return tuple(self._blocks)

    def unshard(self) -> torch.Tensor:
        """The whole tensor, a plain torch tensor; a pending sum is summed."""
        return assemble(self.shards, self._layout)

    def item(self) -> Any:
        """The value of a one-element Array as a Python number."""
        return self.unshard().item()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as a numpy array."""
        return self.unshard().numpy(force=force)

    def tolist(self) -> Any:
        return self.unshard().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how and not self.shape else format(repr(self), how)

    def __repr__(self, **_: Any) -> str:
        return describe(self.spec.entries, self.shape, str(self.dtype), self.spec.unreduced)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Array.from_shards, (list(self.shards), self.spec, self.mesh)

    def __deepcopy__(self, memo: Any) -> Array:
        return Array([block.clone() for block in self.shards], self._layout, self._spec)


def layout_of(array: Array) -> Layout:
    return array._layout


def donate(array: Array) -> list[torch.Tensor]:
    """Take the blocks out of an Array for good."""
    blocks = list(array.shards)
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


def make_array(
    shape: Sequence[int],
    spec: Spec,
    callback: Callable[[tuple[slice, ...]], torch.Tensor],
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
) -> Array:
    """An Array whose blocks a callback makes: it gets a tuple of slices, once per distinct block of this process.

    `dtype`: what the callback's tensors are cast to (default: as they are). Raises SpecError if a block has another shape.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> sp.make_array((4,), sp.P("dp"), lambda index: torch.arange(4.)[index], mesh=mesh)
    f32[4@dp]
    """
    mesh = resolve_mesh(mesh)
    shape = tuple(shape)
    resolved = resolve(spec, shape, mesh)
    if resolved.unreduced:
        raise SpecError(message("make_array makes no pending sums", f"spec: {spec!r}", fix="leave out unreduced"))
    layout = from_entries(mesh, shape, resolved.entries)
    made: dict[tuple[slice, ...], torch.Tensor] = {}
    blocks = []
    for device in mesh.devices:
        boxes = iter(layout.box(mesh.coordinates(device)))
        index = tuple(slice(start, start + n) for start, n in ((0, 1) if not d else next(boxes) for d in layout.dims))
        if index not in made:
            block = torch.as_tensor(callback(index), dtype=dtype)
            if tuple(block.shape) != layout.local_shape:
                raise SpecError(
                    message(
                        f"the callback made a block of shape {tuple(block.shape)}, not {layout.local_shape}",
                        f"index: {index}",
                        f"shape: {shape}",
                        fix="return the part of the tensor that the slices name",
                    )
                )
            made[index] = block
        blocks.append(made[index])
    return Array(blocks, layout, P(*resolved.entries))


def take(tensor: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The blocks of a whole tensor, one a device: views of it. A pending sum lies on the first device of its axes."""
    factors = [factor.size for factor in layout.factors]
    whole = tensor.reshape(factors)
    mesh = layout.mesh
    blocks = []
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        block = whole
        for dim, (start, length) in enumerate(layout.box(coordinates)):
            if length != factors[dim]:
                block = block.narrow(dim, start, length)
        block = block.reshape(layout.local_shape)
        place = dict(zip(mesh.axis_names, coordinates, strict=True))
        blocks.append(torch.zeros_like(block) if any(place[axis] for axis in layout.pending_axes) else block)
    return blocks


def assemble(blocks: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor from every device's block: the inverse of `take`."""
    if layout.is_whole:
        return blocks[0].clone()
    mesh = layout.mesh
    whole = blocks[0].new_empty([factor.size for factor in layout.factors])
    matter = layout.axes | layout.pending_axes
    for device, block in zip(mesh.devices, blocks, strict=True):
        place = dict(zip(mesh.axis_names, mesh.coordinates(device), strict=True))
        if any(at for axis, at in place.items() if axis not in matter):
            continue
        boxes = layout.box(mesh.coordinates(device))
        target = whole
        for dim, (start, length) in enumerate(boxes):
            target = target.narrow(dim, start, length)
        block = block.reshape([length for _, length in boxes])
        if any(place[axis] for axis in layout.pending_axes):
            target += block
        else:
            target.copy_(block)
    return whole.reshape(layout.shape)


def _global_shape(local: tuple[int, ...], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The global shape of which every block has the given shape. A pattern is fitted dim by dim."""
    if not isinstance(spec, str):
        entries = (spec.entries if spec is not None else ()) + ((),) * len(local)
        return tuple(n * math.prod(mesh.shape[a] for a in axes) for n, axes in zip(local, entries, strict=False))
    from .pattern import read

    before, after = read(spec, mesh)
    terms = list(before) + [None] * (len(local) - len(before) - len(after or ())) + list(after or ())
    return tuple(n * math.prod(mesh.shape[a] for a in (t.axes if t else ())) for n, t in zip(local, terms, strict=True))
