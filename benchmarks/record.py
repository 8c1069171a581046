"""What a benchmark run measured: cells, their summaries, and the JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.architecture import ALL_MODES
from benchmarks.programs import EAGER

_RESAMPLES = 1000


@dataclass(frozen=True)
class Settings:
    """What must agree between two runs for their cells to stand in one file."""

    samples: int
    small: bool


@dataclass
class Cell:
    """One backend on one model in one mode; ``None`` stands for "not measured".

    ``samples_ms`` are milliseconds a call, each the mean of ``calls_per_sample`` calls (0 before
    that is known). ``speedup`` is the median of eager over the median of this backend. ``errors``
    holds maximal relative errors against eager (see ``harness.relative_errors``). ``graphs`` and
    ``graph_breaks`` count what Dynamo did in the first call (the first two with a compiled
    optimizer), ``recompilations`` the graphs it compiled after that. The operator counts are the
    neuron backend's, for the first call. ``other_load`` is how many cores other processes kept
    busy, on average, while the model and mode were timed.
    """

    model: str
    mode: str
    backend: str
    suite: str = "models"
    first_call_s: float | None = None
    calls_per_sample: int = 0
    samples_ms: list[float] = field(default_factory=list)
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    speedup: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    graphs: int | None = None
    graph_breaks: int | None = None
    recompilations: int = 0
    operators_on_device: int | None = None
    operators_in_fallback: int | None = None
    other_load: float | None = None
    error: str | None = None

    @property
    def max_error(self) -> float | None:
        """The largest of the relative errors."""
        return max(self.errors.values(), default=None)

    @property
    def suspicious(self) -> bool:
        """Whether the cell failed or is further from eager than rounding explains."""
        limit = 0.1 if self.suite == "autocast" else 1e-3
        return self.error is not None or (self.max_error or 0.0) > limit

    @property
    def iqr_ms(self) -> float | None:
        """The interquartile range of the samples, in milliseconds."""
        if self.quartiles_ms is None:
            return None
        return self.quartiles_ms[1] - self.quartiles_ms[0]

    @property
    def finished(self) -> bool:
        """Whether the cell holds a measurement (a cell with an error does not)."""
        return self.error is None and self.median_ms is not None

    def summarise(self) -> None:
        """Fills in median and quartiles from the samples (at least two)."""
        lower, middle, upper = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        self.median_ms = middle
        self.quartiles_ms = (lower, upper)


@dataclass(frozen=True)
class GeometricMean:
    """The geometric mean over models of one backend's speed-up over another.

    ``interval`` is the 95 % bootstrap interval over the samples of each cell: what the noise within
    the run leaves open. ``worst`` is the model with the smallest speed-up.
    """

    speedup: float
    interval: tuple[float, float]
    models: int
    worst: str
    worst_speedup: float


def geometric_mean(pairs: dict[str, tuple[Cell, Cell]]) -> GeometricMean | None:
    """Of ``{model: (base, measured)}``; ``None`` where there is no pair.

    A speed-up is the median of the base over the median of the measured cell.
    """
    ratios = {
        model: base.median_ms / cell.median_ms
        for model, (base, cell) in pairs.items()
        if base.median_ms and cell.median_ms
    }
    if not ratios:
        return None
    generator = np.random.default_rng(0)

    def medians(samples: list[float]) -> np.ndarray:
        drawn = generator.choice(np.array(samples), (_RESAMPLES, len(samples)))
        return np.log(np.median(drawn, axis=1))

    logs = [
        medians(base.samples_ms) - medians(cell.samples_ms)
        for model, (base, cell) in pairs.items()
        if model in ratios
    ]
    low, high = np.exp(np.quantile(np.mean(logs, axis=0), (0.025, 0.975)))
    worst = min(ratios, key=lambda model: ratios[model])
    mean = statistics.geometric_mean(ratios.values())
    return GeometricMean(mean, (float(low), float(high)), len(ratios), worst, ratios[worst])


@dataclass
class Results:
    """Everything that goes into ``results.json``."""

    settings: Settings
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def group(self, suite: str, model: str, mode: str) -> list[Cell]:
        """The cells of one model in one mode."""
        return [
            cell
            for cell in self.cells
            if (cell.suite, cell.model, cell.mode) == (suite, model, mode)
        ]

    def of_suites(self, suites: Iterable[str]) -> Results:
        """The same with the cells of some suites only."""
        chosen = set(suites)
        cells = [cell for cell in self.cells if cell.suite in chosen]
        return Results(self.settings, self.machine, cells)

    def replace(self, cells: list[Cell]) -> None:
        """Puts freshly measured cells of one model and mode where the earlier ones were."""
        group = (cells[0].suite, cells[0].model, cells[0].mode)
        others = [cell for cell in self.cells if (cell.suite, cell.model, cell.mode) != group]
        self.cells = [*others, *cells]

    def other_load(self) -> float:
        """The largest load by other processes while cells were timed, in cores."""
        return max((cell.other_load or 0.0 for cell in self.cells), default=0.0)

    def suites(self) -> list[str]:
        """Suite names in the order of the cells."""
        return list(dict.fromkeys(cell.suite for cell in self.cells))

    def models(self) -> list[str]:
        """Model names in the order of the cells."""
        return list(dict.fromkeys(cell.model for cell in self.cells))

    def backends(self) -> list[str]:
        """Backend names in the order of the cells."""
        return list(dict.fromkeys(cell.backend for cell in self.cells))

    def modes(self) -> list[str]:
        """The modes that have cells, in the order in which they are reported."""
        return [mode for mode in ALL_MODES if any(cell.mode == mode for cell in self.cells)]

    def sort(self, models: list[tuple[str, str]], backends: list[str]) -> None:
        """Puts the cells in a stable order: known (suite, model) first, by mode and backend."""

        def rank(names: list[Any], name: Any) -> int:
            return names.index(name) if name in names else len(names)

        self.cells.sort(
            key=lambda cell: (
                rank(models, (cell.suite, cell.model)),
                rank(list(ALL_MODES), cell.mode),
                rank(backends, cell.backend),
            )
        )

    def pairs(
        self, suite: str, mode: str, backend: str, base: str = EAGER
    ) -> dict[str, tuple[Cell, Cell]]:
        """By model, the finished cells of two backends: base, and the measured one."""
        found: dict[str, tuple[Cell, Cell]] = {}
        for model in self.of_suites([suite]).models():
            cells = {cell.backend: cell for cell in self.group(suite, model, mode)}
            first, second = cells.get(base), cells.get(backend)
            if first and second and first.finished and second.finished:
                found[model] = (first, second)
        return found

    def save(self, path: Path) -> None:
        """Writes the JSON file in one step, so that an interruption leaves the older one.

        A cell is a line, for the file is kept in the repository.
        """
        cells = ",\n  ".join(json.dumps(asdict(cell), allow_nan=False) for cell in self.cells)
        head = json.dumps({"settings": asdict(self.settings), "machine": self.machine}, indent=1)
        text = head.removesuffix("\n}") + ',\n "cells": [\n  ' + cells + "\n ]\n}\n"
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Results:
        """Reads a file written by ``save``."""
        data = json.loads(path.read_text())
        cells = [Cell(**cell) for cell in data["cells"]]
        for cell in cells:
            if cell.quartiles_ms is not None:
                cell.quartiles_ms = (cell.quartiles_ms[0], cell.quartiles_ms[1])
        return Results(Settings(**data["settings"]), data["machine"], cells)
