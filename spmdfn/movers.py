"""Into Arrays and out of them: `shard`, `unshard`, `from_local`, `make_array`; and `constrain`, the same in a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._compat import innermost, is_functorch_wrapped, is_traced, tracing
from .array import Array, layout_of, spec_of
from .backends.base import backend_of
from .constrain import pin
from .device_types import current_frame, typed
from .errors import SpecError, TracingError, message
from .layout import from_entries
from .mesh import Mesh, current_mesh, resolve_mesh
from .operators import moved
from .spec import Resolved, Spec, resolve, with_context
from .tree import broadcast_specs, flatten, leaf_paths, unflatten


def constrain(x: Any, spec: Spec, *, mesh: Mesh | None = None) -> Any:
    """Pin the layout of a value in a traced function; the identity on the value and on its cotangent.

    Outside a trace an Array is laid out so, and a plain tensor passes unchanged: it is on no mesh. So does inside a
    closed-over plain tensor: a constant is whole on every device. SpecError if the spec does not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((4,), ("tp",))
    >>> f = sp.spmd_jit(lambda x: sp.constrain(x * 2, sp.P("tp")), mesh=mesh)
    >>> f(torch.ones(8))
    f32[8@tp]
    """
    if not isinstance(x, torch.Tensor):
        raise SpecError(message(f"constrain: {x!r} is a {type(x).__name__}, not a tensor", fix="constrain each leaf"))
    _refuse_manual(x, spec)
    outer = current_mesh()
    if not tracing():
        base = innermost(x)
        if not isinstance(base, Array):
            return x
        if base is x and not x.requires_grad:
            return shard(x, spec, mesh=mesh)
        outer = base.mesh
    if outer is None or not (is_traced(x) or isinstance(innermost(x), Array)):
        return x
    if mesh is not None and mesh is not outer:
        raise SpecError(
            message("constrain: another mesh than the function's", f"mesh: {mesh!r}", f"the function's: {outer!r}")
        )
    try:
        resolved = resolve(spec, x.shape, outer)
    except SpecError as error:
        raise with_context(error, "in sp.constrain") from None
    return pin(x.view_as(x) if tracing() and isinstance(x, Array) else x, resolved)


def _refuse_manual(x: torch.Tensor, spec: Spec) -> None:
    frame = current_frame()
    if frame is None:
        return
    resolved = resolve(spec, x.shape, frame.mesh)
    for axis in (*(axis for axes in resolved.entries for axis in axes), *resolved.unreduced):
        if axis in frame.manual:
            raise SpecError(
                message(
                    f"constrain in {frame.label}: the axis {axis!r} is manual in this map",
                    f"spec: {spec!r}, block: {typed(x)}",
                    fix="a value there is this device's block already; constrain names axes of the global view",
                )
            )


def shard(tree: Any, specs: Any, *, mesh: Mesh | None = None) -> Any:
    """Lay the tensors of a tree out over a mesh: plain tensors are cut into blocks (copies), Arrays are resharded.

    `specs` is a prefix of the tree; a None spec leaf keeps an Array's layout and leaves a plain tensor whole. An Array
    moves to another mesh if one is given. Leaves that are no tensors pass unchanged. Results are Arrays. SpecError,
    with the path, if a spec does not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 4), ("dp", "tp"))
    >>> sp.shard({"w": torch.zeros(8, 8), "n": None}, {"w": "(dp m) (tp n)", "n": None}, mesh=mesh)
    {'w': f32[8@dp, 8@tp], 'n': None}
    """
    return _each("shard", tree, specs, lambda leaf, spec, path: _shard_leaf(leaf, spec, path, mesh))


def from_local(tree: Any, specs: Any, *, mesh: Mesh) -> Any:
    """Arrays from blocks that exist already: the inverse of taking `.shards`. Nothing is moved or checked for equality.

    With all devices in this process (the local backend) each leaf has one extra leading dim of size `mesh.size`: block
    i belongs to device i, row-major by mesh coordinate. Leaves that are no tensors pass unchanged. SpecError, with the
    path, if the blocks do not fit.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> sp.from_local({"x": torch.arange(4.).reshape(4, 1)}, sp.P(("dp", "tp")), mesh=mesh)["x"].unshard()
    tensor([0., 1., 2., 3.])
    """
    mesh = resolve_mesh(mesh)

    def one(leaf: torch.Tensor, spec: Spec, path: str) -> Array:
        if isinstance(leaf, Array) or not leaf.dim() or leaf.shape[0] != mesh.size:
            what = f"the Array {leaf!r}" if isinstance(leaf, Array) else f"a tensor of shape {tuple(leaf.shape)}"
            raise SpecError(
                message(
                    f"from_local: {what} is not {mesh.size} blocks",
                    _leaf(path),
                    f"mesh: {mesh!r}",
                    fix=f"stack the blocks of all devices along a new dim 0 of size {mesh.size}",
                )
            )
        return _told(lambda: Array.from_shards(leaf.unbind(0), spec, mesh), path)

    return _each("from_local", tree, specs, one)


def unshard(tree: Any) -> Any:
    """The tree with every Array as one whole torch tensor; anything else passes unchanged.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2,), ("dp",))
    >>> sp.unshard({"x": sp.shard(torch.arange(4), sp.P("dp"), mesh=mesh), "lr": 0.1, "n": None})
    {'x': tensor([0, 1, 2, 3]), 'lr': 0.1, 'n': None}
    """
    leaves, treedef = flatten(tree)
    return unflatten(treedef, [leaf.unshard() if isinstance(leaf, Array) else leaf for leaf in leaves])


def make_array(
    shape: Sequence[int],
    spec: Spec,
    callback: Callable[[tuple[slice, ...]], Any],
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
) -> Array:
    """An Array whose blocks a callback makes: it gets a tuple of slices, once per distinct block of this process.

    `dtype`: what the callback's tensors are cast to (default: as they are). Raises SpecError if a block has another
    shape or dtype than the others.

    >>> import torch, spmdfn as sp
    >>> mesh = sp.make_mesh((2, 2), ("dp", "tp"))
    >>> sp.make_array((4,), sp.P("dp"), lambda index: torch.arange(4.)[index], mesh=mesh)
    f32[4@dp]
    """
    mesh, shape = resolve_mesh(mesh), tuple(shape)
    backend_of(mesh)
    resolved = resolve(spec, shape, mesh)
    if resolved.unreduced:
        raise SpecError(message("make_array makes no pending sums", f"spec: {spec!r}", fix="leave out unreduced"))
    layout = from_entries(mesh, shape, *resolved)
    made: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
    blocks = []
    for device in mesh.devices:
        boxes = iter(layout.box(mesh.coordinates(device)))
        index = tuple((0, 1) if not dim else next(boxes) for dim in layout.dims)  # a dim of size 1 has no factor
        if index not in made:
            made[index] = _block(callback, tuple(slice(i, i + n) for i, n in index), dtype, layout.local_shape)
        blocks.append(made[index])
    dtypes = {block.dtype for block in blocks}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise SpecError(message(f"make_array: the callback made blocks of several dtypes: {names}", fix="pass dtype="))
    return Array(blocks, layout, spec_of(resolved))


def _block(
    callback: Callable[..., Any], index: tuple[slice, ...], dtype: torch.dtype | None, shape: tuple[int, ...]
) -> torch.Tensor:
    block = torch.as_tensor(callback(index), dtype=dtype).detach()
    if tuple(block.shape) != shape:
        raise SpecError(
            message(
                f"make_array: the callback made a block of shape {tuple(block.shape)}, not {shape}",
                f"index: {index}",
                fix="return the part of the tensor that the slices name",
            )
        )
    return block


def _each(name: str, tree: Any, specs: Any, move: Callable[[torch.Tensor, Spec, str], Any]) -> Any:
    """Move every tensor of a tree, with its spec and its path."""
    if tracing():
        raise TracingError(
            message(
                f"{name} is called in a function that is being traced",
                fix="move Arrays outside; inside, lay a value out by sp.constrain(x, spec)",
            )
        )
    leaves, treedef = flatten(tree)
    if any(isinstance(leaf, torch.Tensor) and is_functorch_wrapped(leaf) for leaf in leaves):
        raise SpecError(
            message(
                f"{name} of a value inside a transform of torch.func: no gradient would pass",
                fix="move Arrays outside; inside, lay a value out by sp.constrain(x, spec)",
            )
        )
    try:
        given = broadcast_specs(specs, tree, name="specs")
    except SpecError as error:
        raise with_context(error, f"function: {name}") from None
    moved = [
        move(leaf, spec, path) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, spec, path in zip(leaves, given, leaf_paths(treedef), strict=True)
    ]
    return unflatten(treedef, moved)


def _leaf(path: str) -> str:
    return f"leaf: {path}" if path else ""


def _told(action: Callable[[], Any], path: str) -> Any:
    """The action's result; its SpecError with the path of the leaf."""
    try:
        return action()
    except SpecError as error:
        raise with_context(error, *([_leaf(path)] if path else [])) from None


def _shard_leaf(leaf: torch.Tensor, spec: Spec, path: str, mesh: Mesh | None) -> Array:
    if isinstance(leaf, Array):
        mesh = leaf.mesh if mesh is None else resolve_mesh(mesh)
        if spec is None:
            spec = leaf.spec
    mesh = resolve_mesh(mesh)
    backend_of(mesh)
    resolved: Resolved = _told(lambda: resolve(spec, leaf.shape, mesh), path)
    layout, exact = from_entries(mesh, leaf.shape, *resolved), spec_of(resolved)
    if not isinstance(leaf, Array):
        array = Array._cut(leaf, layout)
    elif leaf.mesh is not mesh:
        array = Array._cut(leaf.unshard(), layout)
    elif layout_of(leaf) is not layout:
        array = moved(Array, leaf, layout)
    elif leaf.spec is exact:
        return leaf
    else:
        array = leaf._alias()
    array._spec = exact
    return array
