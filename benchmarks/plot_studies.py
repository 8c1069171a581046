"""Draws the studies beside the suite: depth, peak memory, cold and warm start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks import depth, warm_start
from benchmarks.plot import TEXT, colours, decorate, label, legend, logarithmic_seconds
from benchmarks.study import Row


def _write(drawing: Figure, path: Path) -> None:
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def draw_depth(rows: Sequence[Row], path: Path) -> None:
    """Seconds of the first call over layers, with the least-squares lines."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    fitted = depth.lines(rows)
    drawing, grid = plt.subplots(1, 2, figsize=(11, 4.2), squeeze=False, layout="constrained")
    for axes, mode in zip(grid.flat, depth.MODES, strict=True):
        for backend in backends:
            points = [
                (row["layers"], row["first_call_s"])
                for row in rows
                if (row["mode"], row["backend"]) == (mode, backend) and "first_call_s" in row
            ]
            if not points:
                continue
            layers, seconds = zip(*points, strict=True)
            colour = colours(backends)[backend]
            axes.plot(layers, seconds, "o", color=colour, markersize=5)
            line = fitted.get((mode, backend))
            if line is not None:
                ends = np.array([0, max(layers)])
                text = (
                    f"{backend}: {line.slope:.2f} s a layer, {line.intercept:+.1f} s, "
                    f"R² {line.r_squared:.4f}"
                )
                axes.plot(
                    ends, line.slope * ends + line.intercept, color=colour, linewidth=1, label=text
                )
        axes.set_title(f"{mode.capitalize()}: first call by depth")
        axes.set_xlabel("layers")
        axes.set_ylabel("first call (s)")
        axes.set_xlim(0)
        axes.set_ylim(0)
        if any(key[0] == mode for key in fitted):
            axes.legend(frameon=False, fontsize=9, loc="upper left")
        decorate(axes)
    _write(drawing, path)


def draw_memory(rows: Sequence[Row], path: Path) -> None:
    """What is resident between steps, and on top of it the peak within a step."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    drawing, grid = plt.subplots(
        len(modes), 1, figsize=(9, 3.6 * len(modes)), squeeze=False, layout="constrained"
    )
    width = 0.84 / len(backends)
    for axes, mode in zip(grid.flat, modes, strict=True):
        models = list(dict.fromkeys(row["model"] for row in rows if row["mode"] == mode))
        for row in rows:
            if row["mode"] != mode or "peak_mib" not in row:
                continue
            place = backends.index(row["backend"]) - (len(backends) - 1) / 2
            centre = models.index(row["model"]) + place * width
            colour = colours(backends)[row["backend"]]
            axes.bar(centre, row["steady_mib"], 0.92 * width, color=colour)
            above = row["peak_mib"] - row["steady_mib"]
            axes.bar(
                centre,
                above,
                0.92 * width,
                bottom=row["steady_mib"],
                color=colour,
                alpha=0.45,
                hatch="////",
                edgecolor="white",
            )
            label(axes, centre, row["peak_mib"], f"{row['steady_mib']:.0f}\n+ {above:.0f}", 7)
        axes.set_xticks(np.arange(len(models)), models)
        axes.set_ylabel("resident memory (MiB)")
        axes.set_ylim(0, 1.2 * axes.dataLim.ymax)
        axes.set_title(f"{mode.capitalize()}: between steps, and (hatched) the peak above that")
        decorate(axes)
    legend(drawing, backends)
    _write(drawing, path)


def draw_warm_start(rows: Sequence[Row], path: Path) -> None:
    """Cold bars, pale, and warm ones in front of them, from nothing to the end of a first call."""
    found = warm_start.summary(rows)
    backends = list(dict.fromkeys(row["backend"] for row in found))
    modes = list(dict.fromkeys(row["mode"] for row in found))
    drawing, grid = plt.subplots(
        len(modes), 1, figsize=(11, 3.6 * len(modes)), squeeze=False, layout="constrained"
    )
    width = 0.84 / len(backends)
    for axes, mode in zip(grid.flat, modes, strict=True):
        mine = [row for row in found if row["mode"] == mode]
        models = list(dict.fromkeys(row["model"] for row in mine))
        for row in mine:
            place = backends.index(row["backend"]) - (len(backends) - 1) / 2
            centre = models.index(row["model"]) + place * width
            colour = colours(backends)[row["backend"]]
            if row["backend"] != warm_start.EAGER:
                axes.bar(centre, row["cold_s"], 0.92 * width, color=colour, alpha=0.35)
                label(axes, centre, row["cold_s"], f"{row['cold_s']:.1f}")
            axes.bar(centre, row["warm_s"], 0.92 * width, color=colour)
            label(axes, centre, row["warm_s"], f"{row['warm_s']:.1f}")
        logarithmic_seconds(axes, [row[name] for row in mine for name in ("cold_s", "warm_s")])
        axes.set_xticks(np.arange(len(models)), models)
        axes.set_ylabel("until the first result (s, log)")
        axes.set_title(f"{mode.capitalize()}: a fresh process, cold (pale) and warm")
        decorate(axes)
    legend(drawing, backends)
    note = "eager: Dynamo with the backend of that name, which every backend pays"
    drawing.supxlabel(note, fontsize=9, color=TEXT)
    _write(drawing, path)
