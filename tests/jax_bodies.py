"""Bodies for shard_map, said once for both libraries: `lib` has the collectives, `np` the functions of tensors.

Run as a program with the path of an .npz file of inputs, it prints nothing and writes the answers of JAX beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy


class Body(NamedTuple):
    """A body `f(lib, np, *blocks)` with specs as tuples of axes a dim, over a mesh of named sizes, and whole inputs."""

    run: Callable[..., Any]
    mesh: dict[str, int]
    ins: list[tuple[Any, ...]]
    outs: tuple[Any, ...]
    shapes: list[tuple[int, ...]]
    gradients: bool = True
    checked: bool = True


LINE, SQUARE = {"i": 4}, {"x": 2, "y": 2}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def _in(axis: str, *shapes: tuple[int, ...]) -> dict[str, Any]:
    return {"mesh": LINE, "ins": [(axis,)] * len(shapes), "shapes": list(shapes)}


BODIES: dict[str, Body] = {
    "psum": Body(lambda lib, np, x: lib.psum(x * x, "i"), outs=(), **_in("i", (8, 3))),
    "pmean": Body(lambda lib, np, x: lib.pmean(np.sin(x), "i"), outs=(), **_in("i", (8, 3))),
    "pmax": Body(lambda lib, np, x: lib.pmax(x, "i"), outs=(), gradients=False, **_in("i", (8, 3))),
    "pmin": Body(lambda lib, np, x: lib.pmin(x, "i"), outs=(), gradients=False, **_in("i", (8, 3))),
    "all_gather": Body(
        lambda lib, np, x: np.sin(lib.all_gather(x, "i")).sum(0) * (1 + lib.axis_index("i")),
        outs=("i",),
        **_in("i", (8, 3)),
    ),
    "all_gather tiled": Body(
        lambda lib, np, x: np.cos(lib.all_gather(x, "i", axis=1, tiled=True)), outs=("i",), **_in("i", (8, 3))
    ),
    "psum_scatter": Body(
        lambda lib, np, x: lib.psum_scatter(np.sin(x), "i", scatter_dimension=0, tiled=True),
        outs=("i",),
        **_in("i", (16, 3)),
    ),
    "psum_scatter untiled": Body(
        lambda lib, np, x: lib.psum_scatter(x * x, "i", scatter_dimension=1), outs=("i",), **_in("i", (8, 4))
    ),
    "all_to_all tiled": Body(
        lambda lib, np, x: np.sin(lib.all_to_all(x, "i", 1, 0, tiled=True)), outs=(None, "i"), **_in("i", (8, 4))
    ),
    "all_to_all": Body(  # the gradient of JAX 0.10's raises: its dims are those of the operand
        lambda lib, np, x: lib.all_to_all(x, "i", 1, 2) ** 2, outs=("i",), gradients=False, **_in("i", (8, 4, 2))
    ),
    "all_to_all groups": Body(
        lambda lib, np, x: lib.all_to_all(x, "i", 1, 1, axis_index_groups=[[0, 2], [1, 3]]),
        outs=("i",),
        **_in("i", (4, 2)),
    ),
    "ppermute": Body(lambda lib, np, x: np.sin(lib.ppermute(x, "i", RING)), outs=("i",), **_in("i", (8, 3))),
    "ppermute partial": Body(
        lambda lib, np, x: lib.ppermute(x, "i", [(0, 1), (1, 2)]) * x, outs=("i",), **_in("i", (8, 3))
    ),
    "pshuffle": Body(lambda lib, np, x: lib.pshuffle(x, "i", [3, 1, 0, 2]) * x, outs=("i",), **_in("i", (8, 3))),
    "weights": Body(
        lambda lib, np, w, x: lib.psum((np.tanh(x @ w) ** 2).sum(), "i"),
        LINE,
        [(), ("i",)],
        (),
        [(3, 2), (8, 3)],
    ),
    "weights, mean": Body(
        lambda lib, np, w, x: lib.pmean((np.tanh(x @ w) ** 2).mean(0), "i"),
        LINE,
        [(), ("i",)],
        (),
        [(3, 2), (8, 3)],
    ),
    "tensor parallel": Body(
        lambda lib, np, x, up, down: lib.psum(np.tanh(x @ up) @ down, "i"),
        LINE,
        [(), (None, "i"), ("i",)],
        (),
        [(5, 3), (3, 8), (8, 2)],
    ),
    "two axes": Body(
        lambda lib, np, x, w: lib.psum(lib.all_gather(x, "x", tiled=True) @ w, "y") / (1 + lib.axis_index("x")),
        SQUARE,
        [("x", "y"), ("y",)],
        ("x",),
        [(4, 6), (6, 2)],
    ),
    "a tuple of axes": Body(
        lambda lib, np, x: lib.all_gather(x, ("y", "x"), tiled=True)[:2] * x,
        SQUARE,
        [(("x", "y"),)],
        (("y", "x"),),
        [(8, 3)],
    ),
    "tiles": Body(lambda lib, np, w: np.sin(w), LINE, [()], ("i",), [(2, 3)]),
    "unchecked psum": Body(lambda lib, np, x: lib.psum(x * x, "i"), outs=(), checked=False, **_in("i", (8, 3))),
    "unchecked gather": Body(
        lambda lib, np, x: np.sin(lib.all_gather(x, "i", tiled=True)), outs=(), checked=False, **_in("i", (8, 3))
    ),
    "unchecked gather, tiled out": Body(
        lambda lib, np, x: np.sin(lib.all_gather(x, "i", tiled=True)), outs=("i",), checked=False, **_in("i", (8, 3))
    ),
    "unchecked scatter": Body(
        lambda lib, np, x: np.sin(lib.psum_scatter(x, "i", scatter_dimension=0, tiled=True)),
        outs=("i",),
        checked=False,
        **_in("i", (16, 3)),
    ),
    "unchecked permute": Body(
        lambda lib, np, x: lib.ppermute(x, "i", RING) * x, outs=("i",), checked=False, **_in("i", (8, 3))
    ),
    "unchecked weights": Body(
        lambda lib, np, w, x: lib.pmean((np.tanh(x @ w) ** 2).sum(), "i"),
        LINE,
        [(), ("i",)],
        (),
        [(3, 2), (8, 3)],
        checked=False,
    ),
    "unchecked local loss": Body(
        lambda lib, np, w, x: (np.tanh(x @ w) ** 2).sum(), LINE, [(), ("i",)], (), [(3, 2), (8, 3)], checked=False
    ),
    "unchecked psum of an invariant value": Body(
        lambda lib, np, w: lib.psum(np.sin(w), "i"), LINE, [()], (), [(3, 2)], checked=False
    ),
    "unchecked, one of two axes": Body(
        lambda lib, np, x, w: lib.psum(x @ w, "y"),
        SQUARE,
        [("x", "y"), ("y",)],
        ("x",),
        [(4, 6), (6, 2)],
        checked=False,
    ),
    "a ring of products": Body(
        lambda lib, np, x, w: sum_ring(lib, x, w), LINE, [("i",), (None, "i")], (None, "i"), [(8, 3), (3, 8)]
    ),
}


def sum_ring(lib: Any, x: Any, w: Any) -> Any:
    """Each device's columns of x @ w, weighted by how far the rows have come."""
    total = 0
    for step in range(4):
        total = total + (1 + step) * (x @ w)
        x = lib.ppermute(x, "i", RING)
    return total


def inputs(name: str) -> list[numpy.ndarray]:
    generator = numpy.random.default_rng(len(name))
    return [generator.normal(size=shape) for shape in BODIES[name].shapes]


def ramp(shape: tuple[int, ...]) -> numpy.ndarray:
    return numpy.linspace(-1, 1, int(numpy.prod(shape))).reshape(shape)


def answers_of_jax() -> dict[str, numpy.ndarray]:
    """For every body its result, and the gradients of a loss of it taken outside the map."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    found: dict[str, numpy.ndarray] = {}
    with jax.enable_x64(True):
        for name, body in BODIES.items():
            kinds = (AxisType.Auto,) * len(body.mesh)
            mesh = jax.make_mesh(tuple(body.mesh.values()), tuple(body.mesh), axis_types=kinds)
            f = jax.shard_map(
                lambda *blocks, body=body: body.run(jax.lax, jnp, *blocks),
                mesh=mesh,
                in_specs=tuple(PartitionSpec(*spec) for spec in body.ins),
                out_specs=PartitionSpec(*body.outs),
                check_vma=body.checked,
            )
            args = [jnp.asarray(value) for value in inputs(name)]
            found[name] = numpy.asarray(f(*args))
            if body.gradients:
                loss = lambda *args, f=f: (f(*args) * ramp(jax.eval_shape(f, *args).shape)).sum()  # noqa: E731
                for place, value in enumerate(jax.grad(loss, tuple(range(len(args))))(*args)):
                    found[f"{name}/{place}"] = numpy.asarray(value)
    return found


if __name__ == "__main__":
    import sys

    numpy.savez(sys.argv[1], **answers_of_jax())
