"""The picture the demonstration draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from examples.common import COMPILED, EAGER

SMOOTHING = 21
COLORS = {EAGER: "#e07b39", COMPILED: "#1f5fa8"}
# Eager lies below, wide and pale, so that it stays visible where both curves coincide.
SMOOTHED: dict[str, dict[str, Any]] = {
    EAGER: {"linewidth": 5.0, "alpha": 0.55, "solid_capstyle": "round"},
    COMPILED: {"linewidth": 1.8, "alpha": 1.0},
}


def plot_losses(
    losses: dict[str, list[float]], accuracies: dict[str, float], backend: str, path: Path
) -> None:
    """Draw the raw and the smoothed loss of each step into the PNG file `path`."""
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = {EAGER: "eager", COMPILED: f'torch.compile(backend="{backend}")'}
    for name, values in losses.items():
        _draw(axes, name, values, f"{labels[name]}: test accuracy {accuracies[name]:.1%}")
    axes.set_yscale("log")
    axes.set_xlim(1, max(map(len, losses.values())))
    axes.set_xlabel("training step (64 images each)")
    axes.set_ylabel("cross-entropy loss (log scale)")
    axes.set_title(
        "Digits CNN: training loss, eager and compiled, same weights and batches",
        loc="left",
        fontweight="bold",
    )
    axes.grid(which="major", color="#d9d9d9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"thin: each step; thick: mean of {SMOOTHING} steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, name: str, values: list[float], label: str) -> None:
    steps = np.arange(1, len(values) + 1)
    axes.plot(steps, values, color=COLORS[name], linewidth=0.6, alpha=0.35)
    axes.plot(steps, smooth(values), color=COLORS[name], label=label, **SMOOTHED[name])


def smooth(values: list[float]) -> np.ndarray:
    """Return the mean over a centred window, which shrinks towards both ends."""
    window = np.ones(SMOOTHING)
    counts = np.convolve(np.ones(len(values)), window, mode="same")
    return np.convolve(values, window, mode="same") / counts
