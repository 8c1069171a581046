"""The tables of the suite's cells, and ``results.md``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.machine import describe
from benchmarks.programs import EAGER
from benchmarks.record import Cell, Results, geometric_mean

HEADERS = (
    "suite",
    "model",
    "mode",
    "backend",
    "first call (s)",
    "median (ms)",
    "IQR (ms)",
    "calls a sample",
    "speed-up",
    "max rel. error",
    "on device / fallback",
)


def number(value: float | None, digits: int, suffix: str = "") -> str:
    """A number with some digits behind the point, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def time_ms(value: float | None) -> str:
    """Milliseconds with digits down to tens of nanoseconds for short ones."""
    return number(value, 2 if value is None or value >= 1 else 5)


def _operators(cell: Cell) -> str:
    if cell.operators_on_device is None or cell.operators_in_fallback is None:
        return "-"
    return f"{cell.operators_on_device} / {cell.operators_in_fallback}"


def row(cell: Cell) -> list[str]:
    """One table row for a cell, in the order of ``HEADERS``."""
    worst = cell.max_error
    failed = cell.median_ms is None and cell.error is not None
    return [
        cell.suite,
        cell.model,
        cell.mode,
        cell.backend,
        number(cell.first_call_s, 2),
        "failed" if failed else time_ms(cell.median_ms),
        time_ms(cell.iqr_ms),
        str(cell.calls_per_sample or 1),
        number(cell.speedup, 2, "x"),
        "-" if worst is None else f"{worst:.1e}",
        _operators(cell),
    ]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a Markdown table whose first ``left`` columns are words."""
    ruler = "|" + "---|" * left + "---:|" * (len(headers) - left)
    return ["| " + " | ".join(headers) + " |", ruler] + [
        "| " + " | ".join(entries) + " |" for entries in rows
    ]


def first_line(text: str) -> str:
    """The first line of an error text, at most 200 characters of it."""
    return text.strip().split("\n", 1)[0][:200]


def means(results: Results, base: str = EAGER) -> list[list[str]]:
    """Rows of geometric means over eager, by suite, mode and backend."""
    rows = []
    for suite in results.suites():
        for mode in results.modes():
            for backend in results.backends():
                mean = geometric_mean(results.pairs(suite, mode, backend, base))
                if mean is not None and backend != base:
                    low, high = mean.interval
                    speed = (f"{mean.speedup:.2f}x", f"{low:.2f}-{high:.2f}")
                    worst = f"{mean.worst} {mean.worst_speedup:.2f}x"
                    rows.append([suite, mode, backend, *speed, str(mean.models), worst])
    return rows


def failures(results: Results) -> list[str]:
    """A list item for each cell with an error."""
    return [
        f"- {cell.model}, {cell.mode}, {cell.backend}: `{first_line(cell.error)}`"
        for cell in results.cells
        if cell.error is not None
    ]


def markdown(results: Results) -> str:
    """The whole of ``results.md``."""
    size = "small" if results.settings.small else "full"
    lines = [
        "# Benchmark results",
        "",
        describe(results.machine),
        "",
        f"{size.capitalize()}-size models, {results.settings.samples} samples a cell, interleaved "
        "over backends; a sample is the mean of as many calls as 2 ms need. Speed-up is eager's "
        "median over the backend's median; intervals are 95 % bootstrap intervals over the "
        f"samples. Other processes kept at most {results.other_load():.2f} cores busy meanwhile.",
        "",
        "## Geometric means of the speed-up over eager",
        "",
        *table(
            ("suite", "mode", "backend", "speed-up", "95 % interval", "models", "worst"),
            means(results),
            left=3,
        ),
        "",
        "## All cells",
        "",
        *table(HEADERS, [row(cell) for cell in results.cells], left=4),
    ]
    failed = failures(results)
    if failed:
        lines += ["", "## Failures", "", *failed]
    return "\n".join(lines) + "\n"
