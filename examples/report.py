"""What the demo shows at its end: a few lines of text, and a picture of the two runs and of the sharding table."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import optree
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

import spmdfn as sp

if TYPE_CHECKING:
    from train_gpt import Run

matplotlib.use("agg")  # a picture in a file needs no window

INK, QUIET, RULE = "#1f2933", "#6b7785", "#d5dbe1"
SHARDED, SINGLE = "#2563b0", "#e8833a"


def largest_difference(a: Run, b: Run) -> float:
    """The largest difference between the losses of two runs at the same step."""
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def sharding_table(params: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """A row for each kind of parameter: its name, its shape, its spec, and the shape of one device's block.

    Layers are alike: they share rows, under the name `layers.*`.
    """
    rows = {}
    for path, leaf in zip(optree.tree_paths(params), optree.tree_leaves(params), strict=True):
        name = re.sub(r"\blayers\.\d+", "layers.*", ".".join(map(str, path)))
        axes = [[axis for axis in entry if leaf.mesh.shape[axis] > 1] for entry in leaf.spec.entries]
        axes += [[]] * (leaf.ndim - len(axes))
        split = " × ".join(" ".join(entry) or "—" for entry in axes)
        rows[name] = (name, _by(leaf.shape), split, _by(leaf.shards[0].shape))
    order = ("embed", "position", "layers", "norm")
    return sorted(rows.values(), key=lambda row: order.index(row[0].split(".")[0]))


def summary(mesh: sp.Mesh, sharded: Run, single: Run, path: Path) -> str:
    """The closing lines."""
    leaves = optree.tree_leaves(sharded.params)
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    held = sum(leaf.shards[0].numel() for leaf in leaves)
    step = list(sharded.validation)[-1]
    return "\n".join(
        [
            "",
            f"One GPT was trained twice for {len(sharded.losses)} steps, by the same functions, keys and batches:",
            f"  on {mesh.size} devices ({_axes(mesh)}): loss {sharded.losses[-1]:.4f}, "
            f"validation loss {sharded.validation[step]:.4f}, {sharded.tokens_per_second:,.0f} tokens/s",
            f"  on 1 device: loss {single.losses[-1]:.4f}, "
            f"validation loss {single.validation[step]:.4f}, {single.tokens_per_second:,.0f} tokens/s",
            f"Largest loss difference: {largest_difference(sharded, single):.1e}. The initial parameters and the",
            "dropout masks are equal to the bit; what is left is the order in which sums are rounded.",
            f"Of {total:,} parameters a device held {held:,} ({held / total:.0%}).",
            f"Curves and the sharding table: {path}",
        ]
    )


def save_picture(path: Path, mesh: sp.Mesh, sharded: Run, single: Run) -> Path:
    """Write the picture as a PNG, making its folder; return the path."""
    from matplotlib import pyplot

    style = {"font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context(style):
        figure, (curves, table) = pyplot.subplots(
            1, 2, figsize=(13.5, 5.4), width_ratios=[1, 1.12], layout="constrained"
        )
        _draw_curves(curves, sharded, single)
        _draw_table(table, mesh, sharding_table(sharded.params))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return path


def _draw_curves(axes: Axes, sharded: Run, single: Run) -> None:
    axes.plot(sharded.losses, color=SHARDED, linewidth=3.5, alpha=0.45, label=f"{sharded.name}, training")
    axes.plot(single.losses, color=SINGLE, linewidth=1.1, label=f"{single.name}, training")
    axes.plot(
        *zip(*sharded.validation.items(), strict=True), "o", color=SHARDED, ms=6, label=f"{sharded.name}, held out"
    )
    axes.plot(*zip(*single.validation.items(), strict=True), "x", color=SINGLE, ms=5, label=f"{single.name}, held out")
    axes.set_title(f"One training, on {sharded.name} and on {single.name}", loc="left", fontsize=12, fontweight="bold")
    axes.text(
        1.0, 1.02, f"largest difference {largest_difference(sharded, single):.1e}",
        transform=axes.transAxes, ha="right", color=QUIET,
    )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats a byte")
    axes.grid(color=RULE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(color=RULE, labelcolor=QUIET)
    axes.legend(frameon=False)


def _draw_table(axes: Axes, mesh: sp.Mesh, rows: list[tuple[str, str, str, str]]) -> None:
    axes.axis("off")
    axes.set_title(f"Where each parameter lives: {_axes(mesh)}", loc="left", fontsize=12, fontweight="bold")
    header = ("parameter", "shape", "dims split over", "on each device")
    table = axes.table([header, *rows], colWidths=[0.42, 0.17, 0.21, 0.20], cellLoc="left", bbox=Bbox.unit())
    table.auto_set_font_size(False)
    table.set_fontsize(10)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor(RULE)
        cell.visible_edges = "B"
        cell.PAD = 0.04
        if row == 0:
            cell.set_text_props(color=QUIET)
        elif column == 0:
            cell.set_text_props(family="monospace", fontsize=9.5)


def _axes(mesh: sp.Mesh) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def _by(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
