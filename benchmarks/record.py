"""What a benchmark run measured: cells, the machine, summaries, and their files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REFERENCE = "eager"
MODES = ("inference", "training")
HEADERS = (
    "model",
    "mode",
    "backend",
    "first call (s)",
    "median (ms)",
    "IQR (ms)",
    "speed-up",
    "max rel. error",
    "on device / fallback",
)
_PACKAGES = ("torch", "torch-mlir", "jax", "jaxlib", "numpy", "transformers", "neuron-compile")
_ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "XLA_FLAGS",
)


@dataclass(frozen=True)
class Settings:
    """What must agree between two runs for their cells to stand in one file."""

    samples: int
    small: bool


@dataclass
class Cell:
    """One backend on one model in one mode; ``None`` stands for "not measured".

    ``speedup`` is the median of eager over the median of this backend. ``errors`` holds maximal
    relative errors against eager (see ``harness.relative_errors``). ``graphs`` and
    ``graph_breaks`` count what Dynamo did in the first call, ``recompilations`` the graphs it
    compiled after that. The operator counts are the neuron backend's, for the first call.
    ``other_load`` is how many cores other processes kept busy, on average, while the model and
    mode were timed.
    """

    model: str
    mode: str
    backend: str
    first_call_s: float | None = None
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
    """The geometric mean over models of one backend's speed-ups in one mode."""

    mode: str
    backend: str
    speedup: float
    models: int


@dataclass
class Results:
    """Everything that goes into ``results.json``."""

    settings: Settings
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def group(self, model: str, mode: str) -> list[Cell]:
        """The cells of one model in one mode."""
        return [cell for cell in self.cells if (cell.model, cell.mode) == (model, mode)]

    def replace(self, model: str, mode: str, cells: list[Cell]) -> None:
        """Puts freshly measured cells where the group's earlier ones were."""
        others = [cell for cell in self.cells if (cell.model, cell.mode) != (model, mode)]
        self.cells = [*others, *cells]

    def other_load(self) -> float:
        """The largest load by other processes while cells were timed, in cores."""
        return max((cell.other_load or 0.0 for cell in self.cells), default=0.0)

    def models(self) -> list[str]:
        """Model names in the order of measurement."""
        return list(dict.fromkeys(cell.model for cell in self.cells))

    def backends(self) -> list[str]:
        """Backend names in the order of measurement."""
        return list(dict.fromkeys(cell.backend for cell in self.cells))

    def sort(self, models: list[str], backends: list[str]) -> None:
        """Puts the cells in a stable order: known models first, each by mode and backend."""

        def rank(names: list[str], name: str) -> int:
            return names.index(name) if name in names else len(names)

        self.cells.sort(
            key=lambda cell: (
                rank(models, cell.model),
                rank(list(MODES), cell.mode),
                rank(backends, cell.backend),
            )
        )

    def geometric_means(self) -> list[GeometricMean]:
        """One mean for each mode and backend, over the models the backend finished."""
        means = []
        for mode in MODES:
            for backend in self.backends():
                speedups = [
                    cell.speedup
                    for cell in self.cells
                    if (cell.mode, cell.backend) == (mode, backend) and cell.speedup is not None
                ]
                if speedups and backend != REFERENCE:
                    mean = statistics.geometric_mean(speedups)
                    means.append(GeometricMean(mode, backend, mean, len(speedups)))
        return means

    def save(self, path: Path) -> None:
        """Writes the JSON file in one step, so that an interruption leaves the older one."""
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
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


# ------------------------------------------------------------------------------------- machine


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The processor, cores, thread counts, load and software versions of this process."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "load_average_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "commit": _commit(),
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


# -------------------------------------------------------------------------------------- tables


def _number(value: float | None, digits: int, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def _operators(cell: Cell) -> str:
    if cell.operators_on_device is None or cell.operators_in_fallback is None:
        return "-"
    return f"{cell.operators_on_device} / {cell.operators_in_fallback}"


def row(cell: Cell) -> list[str]:
    """One table row for a cell, in the order of ``HEADERS``."""
    worst = cell.max_error
    failed = cell.median_ms is None and cell.error is not None
    return [
        cell.model,
        cell.mode,
        cell.backend,
        _number(cell.first_call_s, 2),
        "failed" if failed else _number(cell.median_ms, 2),
        _number(cell.iqr_ms, 2),
        _number(cell.speedup, 2, "x"),
        "-" if worst is None else f"{worst:.1e}",
        _operators(cell),
    ]


def _markdown_row(entries: list[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def first_line(text: str) -> str:
    """The first line of an error text, at most 200 characters of it."""
    return text.strip().split("\n", 1)[0][:200]


def _describe_machine(results: Results) -> str:
    computer = results.machine
    versions = ", ".join(
        f"{name} {version}" for name, version in computer["versions"].items() if version
    )
    return (
        f"{computer['processor']} ({computer['cpu_capability']}), {computer['usable_cores']} cores"
        f", {computer['torch_threads']} PyTorch threads, {computer['memory_gib']} GiB; "
        f"Python {computer['python']}, {versions}; {computer['date']}."
    )


def markdown(results: Results) -> str:
    """The whole of ``results.md``."""
    size = "small" if results.settings.small else "full"
    lines = [
        "# Benchmark results",
        "",
        _describe_machine(results),
        "",
        f"{size.capitalize()}-size models, float32, {results.settings.samples} samples a cell, "
        "interleaved over backends. Speed-up is eager's median over the backend's median. Other "
        f"processes kept at most {results.other_load():.2f} cores busy meanwhile.",
        "",
        "## Geometric means of the speed-up over eager",
        "",
        _markdown_row(["mode", "backend", "speed-up", "models"]),
        "|---|---|---:|---:|",
    ]
    for mean in results.geometric_means():
        lines.append(
            _markdown_row([mean.mode, mean.backend, f"{mean.speedup:.2f}x", str(mean.models)])
        )
    lines += [
        "",
        "## All cells",
        "",
        _markdown_row(list(HEADERS)),
        "|---|---|---" + "|---:" * 6 + "|",
    ]
    lines += [_markdown_row(row(cell)) for cell in results.cells]
    failed = [cell for cell in results.cells if cell.error is not None]
    if failed:
        lines += ["", "## Failures", ""]
        lines += [
            f"- {cell.model}, {cell.mode}, {cell.backend}: `{first_line(cell.error or '')}`"
            for cell in failed
        ]
    return "\n".join(lines) + "\n"
