"""Draws the suite: speed-up over eager and first-call seconds, by model and backend.

Alone: ``python -m benchmarks.plot benchmarks/results/results.json``. The eight models get the
file ``results.png``, all other suites ``kernels.png`` beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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

from benchmarks.architecture import ADAMW, INFERENCE, TRAINING
from benchmarks.programs import EAGER
from benchmarks.record import Cell, Results, geometric_mean
from benchmarks.suites import SUITES

COLOURS = {
    "eager": "#8A8F98",
    "inductor": "#E07B39",
    "inductor_freezing": "#F2BC8F",
    "neuron": "#2F6DB5",
    "jax": "#5BA56B",
    "precompiled": "#7FAEDD",
}
_OTHER_COLOURS = ("#9B6BB3", "#C2A83E", "#5A5F66")
TEXT = "#33373D"
_GROUP_WIDTH = 0.84
_ROWS = ((INFERENCE, (INFERENCE,)), (TRAINING, (TRAINING, ADAMW)))
_MODELS = ("models",)

Entry = tuple[str, str, str]
"""Suite, model, mode: a group of bars."""


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each backend, the same in every figure."""
    others = [name for name in names if name not in COLOURS]
    spare = {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(others)}
    return {**COLOURS, **spare}


def _find(results: Results, entry: Entry, backend: str) -> Cell | None:
    return next((cell for cell in results.group(*entry) if cell.backend == backend), None)


def _positions(count: int, present: Sequence[str], backend: str) -> tuple[np.ndarray, float]:
    """The centres, on the x axis, of one backend's bars, and their width."""
    width = min(_GROUP_WIDTH / len(present), 0.28)
    return np.arange(count) + (present.index(backend) - (len(present) - 1) / 2) * width, width


def label(axes: Axes, x: float, y: float, text: str, size: float = 6.5) -> None:
    """A number above a bar, readable over grid lines and whiskers."""
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=size,
        color=TEXT,
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
        fontsize=7,
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


def _names(entries: Sequence[Entry]) -> list[str]:
    return [
        model.replace("_", "\n") + ("\nAdamW" if mode == ADAMW else "")
        for _, model, mode in entries
    ]


def _entries(results: Results, modes: Sequence[str]) -> list[Entry]:
    found = dict.fromkeys((cell.suite, cell.model, cell.mode) for cell in results.cells)
    return sorted(
        (entry for entry in found if entry[2] in modes), key=lambda entry: modes.index(entry[2])
    )


def _draw_speedups(
    axes: Axes, results: Results, entries: Sequence[Entry], backends: list[str], mean_of: str
) -> None:
    """Bars by entry; with a mode, the geometric means over its models at the right.

    Without one, programs of all kinds stand side by side: the axis is logarithmic, and bars begin
    at 1, upwards where the backend is faster than eager.
    """
    bars = [cell.speedup for entry in entries for cell in results.group(*entry) if cell.speedup]
    bottom = 0.0 if mean_of else 1.0
    # One cell's wide whisker must not flatten everybody's bars.
    tallest = 1.2 * max([1.0, *bars])
    ticks = _names(entries)
    for backend in backends:
        centres, width = _positions(len(entries) + 1, backends, backend)
        colour = colours(backends)[backend]
        for centre, entry in zip(centres, entries, strict=False):
            cell = _find(results, entry, backend)
            if cell is None:
                continue
            if cell.speedup is None:
                _mark_failure(axes, centre)
                continue
            below, above = _speedup_bounds(cell, _find(results, entry, EAGER))
            axes.bar(
                centre,
                cell.speedup - bottom,
                0.92 * width,
                bottom=bottom,
                color=colour,
                yerr=[[below], [above]],
                error_kw={"elinewidth": 0.8, "ecolor": TEXT},
            )
            # The label stands above the whisker, unless that would take it far from its bar.
            top = cell.speedup + (above if above < 0.1 * tallest else 0.0)
            label(
                axes, centre, max(top, bottom), f"{cell.speedup:.{2 if cell.speedup < 10 else 0}f}"
            )
        mean = geometric_mean(results.pairs("models", mean_of, backend)) if mean_of else None
        if mean is not None:
            axes.bar(centres[-1], mean.speedup, 0.92 * width, color=colour)
            label(axes, centres[-1], mean.speedup, f"{mean.speedup:.2f}")
    axes.axhline(1.0, color=TEXT, linewidth=1, linestyle="--", zorder=3)
    if mean_of:
        ticks.append("geometric\nmean" + ("\n(SGD)" if mean_of == TRAINING else ""))
        axes.axvline(len(entries) - 0.5, color="#C9CDD3", linewidth=1)
        axes.set_ylim(0, 1.07 * tallest)
    else:
        logarithmic(axes)
        axes.set_ylim(min([1.0, *bars]) / 1.3, 1.25 * tallest)
    axes.set_xticks(np.arange(len(ticks)), ticks)
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.set_ylabel("speed-up over eager (x)")


def _draw_first_calls(
    axes: Axes, results: Results, entries: Sequence[Entry], backends: list[str]
) -> None:
    seconds: list[float] = []
    for backend in backends:
        centres, width = _positions(len(entries), backends, backend)
        for centre, entry in zip(centres, entries, strict=True):
            cell = _find(results, entry, backend)
            if cell is None:
                continue
            if cell.first_call_s is None:
                _mark_failure(axes, centre)
                continue
            axes.bar(centre, cell.first_call_s, 0.92 * width, color=colours(backends)[backend])
            label(axes, centre, cell.first_call_s, f"{cell.first_call_s:.2g}")
            seconds.append(cell.first_call_s)
    logarithmic_seconds(axes, seconds)
    axes.set_xticks(np.arange(len(entries)), _names(entries))
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.set_ylabel("first call (s, log scale)")


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def logarithmic_seconds(axes: Axes, seconds: Sequence[float]) -> None:
    """The same, around some values."""
    logarithmic(axes)
    if seconds:
        axes.set_ylim(min(seconds) / 2.5, max(seconds) * 1.8)


def decorate(axes: Axes) -> None:
    """The look of every figure: horizontal lines behind the bars, no frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0, labelsize=8.5)


def legend(drawing: Figure, names: Sequence[str]) -> None:
    """The backends' colours above all panels."""
    drawing.legend(
        handles=[Patch(color=colours(names)[name], label=name) for name in names],
        loc="outside upper center",
        ncols=max(len(names), 1),
        frameon=False,
        fontsize=11,
    )


def _caption(results: Results) -> str:
    computer = results.machine
    size = "small" if results.settings.small else "full"
    return (
        f"{computer['processor']}, {computer['usable_cores']} cores · PyTorch "
        f"{computer['versions']['torch']} · {size}-size models, "
        f"{results.settings.samples} samples a cell\nwhiskers: interquartile range · "
        f"load by other processes at most {results.other_load():.2f} cores"
    )


def figure(results: Results, with_means: bool) -> Figure:
    """Rows of panels: speed-ups of inference and of training, then first calls of both."""
    backends = [backend for backend in results.backends() if backend != EAGER]
    rows = [(mode, _entries(results, modes)) for mode, modes in _ROWS]
    rows = [(mode, entries) for mode, entries in rows if entries]
    widest = max(len(entries) for _, entries in rows)
    bars = max((len(entries) + with_means) * len(backends) for _, entries in rows)
    drawing, grid = plt.subplots(
        2 * len(rows),
        1,
        figsize=(min(max(9.0, 0.9 * widest, 0.32 * bars), 18.0), 3.4 * 2 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    for index, (mode, entries) in enumerate(rows):
        upper, lower = grid[index, 0], grid[index + len(rows), 0]
        # A backend that takes no part in training must not leave gaps there.
        present = [
            backend for backend in backends if any(_find(results, e, backend) for e in entries)
        ]
        name = "Inference" if mode == INFERENCE else "Training step"
        _draw_speedups(upper, results, entries, present, mode if with_means else "")
        upper.set_title(f"{name}: speed-up over eager (higher is better)")
        _draw_first_calls(lower, results, entries, present)
        lower.set_title(f"{name}: first call, compilation included (lower is better)")
    for axes in grid.flat:
        decorate(axes)
    legend(drawing, backends)
    drawing.supxlabel(_caption(results), fontsize=9, color=TEXT)
    return drawing


def save(results: Results, folder: Path) -> list[Path]:
    """Writes ``results.png`` and ``kernels.png``, where there is a backend beside eager."""
    written = []
    kernels = tuple(suite for suite in SUITES if suite not in _MODELS)
    for name, suites in (("results.png", _MODELS), ("kernels.png", kernels)):
        part = results.of_suites(suites)
        if any(cell.backend != EAGER for cell in part.cells):
            drawing = figure(part, with_means=suites == _MODELS)
            drawing.savefig(folder / name, dpi=120)
            plt.close(drawing)
            written.append(folder / name)
    return written


if __name__ == "__main__":
    source = Path(sys.argv[1])
    save(Results.load(source), source.parent)
