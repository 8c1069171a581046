"""Draws ``results.png``: speed-up over eager and first-call seconds, by model and backend.

Alone: ``python -m benchmarks.plot benchmarks/results/results.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.record import MODES, REFERENCE, Cell, Results

_COLOURS = {"inductor": "#E07B39", "neuron": "#2F6DB5", "aot_eager": "#8A8F98"}
_OTHER_COLOURS = ("#5BA56B", "#9B6BB3", "#C2A83E")
_TEXT = "#33373D"
_GROUP_WIDTH = 0.8
_MEAN = "geometric\nmean"


def _colours(backends: list[str]) -> dict[str, str]:
    others = [backend for backend in backends if backend not in _COLOURS]
    spare = {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(others)}
    return {backend: _COLOURS.get(backend) or spare[backend] for backend in backends}


def _find(results: Results, model: str, mode: str, backend: str) -> Cell | None:
    cells = (cell for cell in results.group(model, mode) if cell.backend == backend)
    return next(cells, None)


def _positions(groups: int, backends: int, index: int) -> np.ndarray:
    """The centres, on the x axis, of one backend's bars."""
    width = _GROUP_WIDTH / backends
    return np.arange(groups) + (index - (backends - 1) / 2) * width


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7.5,
        color=_TEXT,
        zorder=4,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _mark_failure(axes: Axes, x: float) -> None:
    axes.annotate(
        "failed",
        (x, 0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=7.5,
        color="#B3261E",
    )


def _speedup_bounds(cell: Cell, eager: Cell | None) -> tuple[float, float]:
    """Distances from the speed-up down and up to those at the backend's quartiles."""
    if eager is None or eager.median_ms is None or cell.quartiles_ms is None:
        return 0.0, 0.0
    speedup = cell.speedup or 0.0
    lower, upper = cell.quartiles_ms
    # Rounding could make the distances negative, which Matplotlib refuses.
    below, above = speedup - eager.median_ms / upper, eager.median_ms / lower - speedup
    return max(below, 0.0), max(above, 0.0)


def _draw_speedups(axes: Axes, results: Results, mode: str, backends: list[str]) -> None:
    models = results.models()
    means = {(mean.mode, mean.backend): mean.speedup for mean in results.geometric_means()}
    colours = _colours(backends)
    width = _GROUP_WIDTH / max(len(backends), 1)
    bars = [cell.speedup for cell in results.cells if cell.mode == mode and cell.speedup]
    # One cell's wide whisker must not flatten everybody's bars.
    tallest = 1.2 * max([1.0, *bars])
    for index, backend in enumerate(backends):
        centres = _positions(len(models) + 1, len(backends), index)
        for centre, model in zip(centres, models, strict=False):
            cell = _find(results, model, mode, backend)
            if cell is None:
                continue
            if cell.speedup is None:
                _mark_failure(axes, centre)
                continue
            below, above = _speedup_bounds(cell, _find(results, model, mode, REFERENCE))
            axes.bar(
                centre,
                cell.speedup,
                0.92 * width,
                color=colours[backend],
                yerr=[[below], [above]],
                error_kw={"elinewidth": 0.8, "ecolor": _TEXT},
            )
            # The label stands above the whisker, unless that would take it far from its bar.
            top = cell.speedup + (above if above < 0.1 * tallest else 0.0)
            _label(axes, centre, top, f"{cell.speedup:.2f}")
        mean = means.get((mode, backend))
        if mean is not None:
            axes.bar(centres[-1], mean, 0.92 * width, color=colours[backend])
            _label(axes, centres[-1], mean, f"{mean:.2f}")
    axes.axhline(1.0, color=_TEXT, linewidth=1, linestyle="--", zorder=3)
    axes.axvline(len(models) - 0.5, color="#C9CDD3", linewidth=1)
    axes.set_xticks(np.arange(len(models) + 1), [*models, _MEAN])
    axes.set_ylim(0, 1.07 * tallest)
    axes.set_xlim(-0.6, len(models) + 0.6)
    axes.set_ylabel("speed-up over eager (x)")
    axes.set_title(f"{mode.capitalize()}: speed-up over eager (higher is better)")


def _draw_first_calls(axes: Axes, results: Results, mode: str, backends: list[str]) -> None:
    models = results.models()
    colours = _colours(backends)
    width = _GROUP_WIDTH / max(len(backends), 1)
    seconds: list[float] = []
    for index, backend in enumerate(backends):
        centres = _positions(len(models), len(backends), index)
        for centre, model in zip(centres, models, strict=True):
            cell = _find(results, model, mode, backend)
            if cell is None:
                continue
            if cell.first_call_s is None:
                _mark_failure(axes, centre)
                continue
            axes.bar(centre, cell.first_call_s, 0.92 * width, color=colours[backend])
            _label(axes, centre, cell.first_call_s, f"{cell.first_call_s:.1f}")
            seconds.append(cell.first_call_s)
    axes.set_yscale("log")
    if seconds:
        axes.set_ylim(min(seconds) / 2.5, max(seconds) * 1.8)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(np.arange(len(models)), models)
    axes.set_xlim(-0.6, len(models) - 0.4)
    axes.set_ylabel("first call (s, log scale)")
    axes.set_title(f"{mode.capitalize()}: first call, compilation included (lower is better)")


def _decorate(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)


def _caption(results: Results) -> str:
    computer = results.machine
    size = "small" if results.settings.small else "full"
    return (
        f"{computer['processor']}, {computer['usable_cores']} cores · PyTorch "
        f"{computer['versions']['torch']} · float32, {size}-size models, "
        f"{results.settings.samples} samples a cell · whiskers: interquartile range · "
        f"load by other processes at most {results.other_load():.2f} cores"
    )


def figure(results: Results) -> Figure:
    """The figure of four panels: speed-ups above first calls, inference beside training."""
    backends = [backend for backend in results.backends() if backend != REFERENCE]
    modes = [mode for mode in MODES if any(cell.mode == mode for cell in results.cells)]
    wide = max(6.0, 0.85 * (len(results.models()) + 1) * max(len(backends), 2) / 2)
    drawing, grid = plt.subplots(
        2, len(modes), figsize=(wide * len(modes), 8), squeeze=False, layout="constrained"
    )
    for column, mode in enumerate(modes):
        _draw_speedups(grid[0, column], results, mode, backends)
        _draw_first_calls(grid[1, column], results, mode, backends)
    for axes in grid.flat:
        _decorate(axes)
    colours = _colours(backends)
    drawing.legend(
        handles=[Patch(color=colours[backend], label=backend) for backend in backends],
        loc="outside upper center",
        ncols=max(len(backends), 1),
        frameon=False,
        fontsize=11,
    )
    drawing.supxlabel(_caption(results), fontsize=9, color=_TEXT)
    return drawing


def save(results: Results, path: Path) -> None:
    """Writes the PNG file; does nothing where there is no backend beside eager."""
    if all(cell.backend == REFERENCE for cell in results.cells):
        return
    drawing = figure(results)
    drawing.savefig(path, dpi=140)
    plt.close(drawing)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    save(Results.load(source), source.with_suffix(".png"))
