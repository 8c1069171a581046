"""``python -m benchmarks.report``: writes docs/performance.md from the JSON files of all parts.

A part that has not been measured is named as such; nothing here measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import depth, plot, plot_studies, warm_start
from benchmarks.machine import describe
from benchmarks.programs import EAGER, FREEZING, INDUCTOR, JAX, NEURON
from benchmarks.record import Cell, GeometricMean, Results, geometric_mean
from benchmarks.study import RESULTS, Row
from benchmarks.tables import failures, number, table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_BASES = (EAGER, INDUCTOR, FREEZING, JAX)
_TITLES = {
    "models": "Eight models",
    "dispatch": "Dispatch",
    "pointwise": "Pointwise operators",
    "reduction": "Reductions",
    "attention": "Attention over 2,048 positions",
    "autocast": "bfloat16 autocast",
}
_MODES = {
    "inference": "inference",
    "training": "training, SGD",
    "adamw": "training, AdamW compiled",
}
_MISSING = "Not measured yet."


class Page:
    """The folder of results, the page to be, and how the one links to the other."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.lines: list[str] = []

    def link(self, name: str) -> str:
        """A file of the results, as seen from the page."""
        return os.path.relpath(self.folder / name, self.path.parent)

    def figure(self, name: str, text: str) -> None:
        """A picture, where it was drawn."""
        if (self.folder / name).exists():
            self.add("", f"![{text}]({self.link(name)})")

    def add(self, *lines: str) -> None:
        """Lines of Markdown."""
        self.lines += lines


def _study(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    return data if data["rows"] else None


def _source(page: Page, data: dict[str, Any], command: str, name: str) -> None:
    computer = data["machine"]
    when = f"commit {computer['commit']}, {computer['date']}" if computer else "an earlier run"
    size = "; **small sizes, to try things out**" if data["settings"]["small"] else ""
    page.add("", f"`python -m {command}`, {when}{size}: [{name}]({page.link(name)}).")
    errors = [row for row in data["rows"] if "error" in row]
    for row in errors:
        page.add("", f"- failed: {row}")


# ------------------------------------------------------------------------------------- suite


def _mean(mean: GeometricMean | None) -> str:
    if mean is None:
        return "-"
    low, high = mean.interval
    return f"**{mean.speedup:.2f}** ({low:.2f}-{high:.2f})"


def _means(results: Results) -> list[str]:
    rows = []
    for suite in results.suites():
        for mode in results.modes():
            over = [
                geometric_mean(results.pairs(suite, mode, NEURON, base=base)) for base in _BASES
            ]
            if over[0] is None:
                continue
            counts = "/".join(str(mean.models) if mean else "0" for mean in over)
            worst = f"{over[0].worst} {over[0].worst_speedup:.2f}"
            if over[1] is not None:
                worst += f"; {over[1].worst} {over[1].worst_speedup:.2f}"
            rows.append([suite, _MODES[mode], *(_mean(mean) for mean in over), counts, worst])
    headers = ("suite", "mode", "over eager", "over Inductor", "over Inductor with freezing")
    return table(
        (*headers, "over jax.jit", "models", "worst model, over eager; over Inductor"), rows, left=2
    )


def _duration(milliseconds: float | None, microseconds: bool) -> str:
    if milliseconds is None:
        return "-"
    return f"{1e3 * milliseconds:.1f}" if microseconds else f"{milliseconds:.2f}"


def _cells(results: Results, suite: str) -> list[str]:
    """Medians and interquartile ranges by model and mode, backends side by side."""
    part = results.of_suites([suite])
    backends = part.backends()
    medians = [cell.median_ms for cell in part.cells if cell.median_ms is not None]
    microseconds = bool(medians) and statistics.median(medians) < 1
    rows = []
    for model in part.models():
        for mode in part.modes():
            cells = {cell.backend: cell for cell in part.group(suite, model, mode)}
            if not cells:
                continue
            rows.append(
                [model, _MODES[mode]]
                + [_median(cells.get(backend), microseconds) for backend in backends]
                + [
                    number(_ratio(cells.get(base), cells.get(NEURON)), 2)
                    for base in (EAGER, INDUCTOR)
                ]
            )
    unit = "µs" if microseconds else "ms"
    headers = ("model", "mode", *(f"{backend}, {unit}" for backend in backends))
    return table((*headers, "neuron over eager", "over Inductor"), rows, left=2)


def _median(cell: Cell | None, microseconds: bool) -> str:
    if cell is None:
        return "-"
    if cell.error is not None:
        return "failed"
    median = _duration(cell.median_ms, microseconds)
    return f"{median} ± {_duration((cell.iqr_ms or 0.0) / 2, microseconds)}"


def _ratio(base: Cell | None, cell: Cell | None) -> float | None:
    if base is None or cell is None or not base.median_ms or not cell.median_ms:
        return None
    return base.median_ms / cell.median_ms


def _noise(results: Results) -> str:
    spreads = sorted(
        (cell.iqr_ms or 0.0) / cell.median_ms for cell in results.cells if cell.median_ms
    )
    worst = max(
        (cell for cell in results.cells if cell.median_ms),
        key=lambda cell: (cell.iqr_ms or 0.0) / (cell.median_ms or 1.0),
    )
    return (
        f"{results.settings.samples} samples a cell, backends of one model and mode in turns, "
        "three samples a visit after two that are not counted; a sample is the mean of as many "
        "calls as fill 2 ms. Figures are medians ± half the interquartile range. That range is "
        f"{100 * statistics.median(spreads):.0f} % of the median in half of the cells, "
        f"{100 * spreads[int(0.9 * (len(spreads) - 1))]:.0f} % in nine of ten, and "
        f"{100 * spreads[-1]:.0f} % at most ({worst.model}, {worst.mode}, {worst.backend}). "
        "Intervals are 95 % bootstrap intervals over the samples: what the noise within this run "
        "leaves open, not what another day or machine would change. Other processes kept at most "
        f"{results.other_load():.2f} cores busy while cells were timed."
    )


def _correctness(results: Results) -> str:
    measured = [cell for cell in results.cells if cell.backend == NEURON and cell.max_error]
    if not measured:
        return ""
    parts = []
    for autocast, name in ((False, "float32"), (True, "bfloat16 autocast")):
        errors = [
            (cell.max_error or 0.0, f"{cell.model}, {cell.mode}")
            for cell in measured
            if (cell.suite == "autocast") == autocast
        ]
        if errors:
            parts.append(f"{max(errors)[0]:.1e} in {name} ({max(errors)[1]})")
    fallback = sum(cell.operators_in_fallback or 0 for cell in measured)
    again = sum(cell.recompilations for cell in measured)
    return (
        "Each backend's first call is compared with eager's: outputs, gradients, buffers, AdamW's "
        f"averages, over the tensor's largest value. neuron's largest difference is "
        f"{' and '.join(parts)}. {fallback} operators ran in eager fallback; {again} graphs were "
        "compiled after the first call."
    )


def _first_calls(results: Results) -> list[str]:
    rows = []
    for suite in results.suites():
        for mode in results.modes():
            pairs = results.pairs(suite, mode, NEURON, base=INDUCTOR)
            both = [
                (cell.first_call_s, base.first_call_s)
                for base, cell in pairs.values()
                if cell.first_call_s and base.first_call_s
            ]
            if both:
                ratios = [mine / other for mine, other in both]
                seconds = (
                    f"{sum(mine for mine, _ in both):.1f} / {sum(other for _, other in both):.1f}"
                )
                mean = f"{statistics.geometric_mean(ratios):.2f}"
                rows.append([suite, _MODES[mode], seconds, mean, f"{max(ratios):.2f}"])
    headers = ("suite", "mode", "sum, s (neuron / Inductor)", "ratio, geometric mean", "worst")
    return table(headers, rows, left=2)


def _suite(page: Page) -> None:
    path = page.folder / "results.json"
    if not path.exists():
        page.add("", _MISSING)
        return
    results = Results.load(path)
    plot.save(results, page.folder)
    page.add("", "## Machine and noise", "", describe(results.machine), "", _noise(results))
    if results.settings.small:
        page.add("", "**Small models, to try things out: no figure here means anything.**")
    page.add("", _correctness(results))
    page.add(
        "",
        "## Geometric means of neuron's speed-up",
        "",
        "A speed-up is the other backend's median over neuron's: above 1, neuron is faster. Counts "
        "are of the models in each of the four means; `jax.jit` runs what was written by hand "
        "([jax_models.py](../benchmarks/jax_models.py)), on JAX's own arrays, the limit of XLA "
        "itself.",
        "",
        *_means(results),
    )
    for suite in results.suites():
        page.add("", f"## {_TITLES.get(suite, suite)}", "", *_cells(results, suite))
        if suite == "models":
            page.figure("results.png", "Speed-up over eager and first calls of the eight models")
    page.figure("kernels.png", "Speed-up over eager and first calls of the other suites")
    failed = failures(results)
    if failed:
        page.add("", "Failures:", "", *failed)
    page.add(
        "",
        "## First calls in one process",
        "",
        "Seconds of the first call, compilation included, with empty caches, in a process that has "
        "compiled before (with a compiled optimizer, of the first two).",
        "",
        *_first_calls(results),
        "",
        f"All cells: [results.md]({page.link('results.md')}).",
    )


# ----------------------------------------------------------------------------------- studies


def _warm_start(page: Page, data: dict[str, Any]) -> None:
    rows: list[Row] = data["rows"]
    found = warm_start.summary(rows)
    backends = list(dict.fromkeys(row["backend"] for row in found))
    lines = []
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in found):
        of = {r["backend"]: r for r in found if (r["model"], r["mode"]) == (model, mode)}
        entries = [
            "-"
            if each not in of
            else f"{of[each]['cold_s']:.1f}"
            if each == EAGER
            else f"{of[each]['cold_s']:.1f} / {of[each]['warm_s']:.1f}"
            for each in backends
        ]
        mine = of.get(NEURON, {})
        figures = [mine.get(name) for name in ("call_s", "load_s", "steady_s")]
        lines.append([model, mode, *entries, *(number(value, 3) for value in figures)])
    names = ["Dynamo alone" if each == EAGER else f"{each}, cold / warm" for each in backends]
    inside = ("warm call, s", "of it loading", "steady call")
    page.add(
        "",
        "Seconds from the model's construction to the end of the first call, imports of the "
        "backend included, in processes of their own. Of neuron's warm process: the first call, "
        "the loading of executables in it, and a later call.",
        "",
        *table(("model", "mode", *names, *inside), lines, left=2),
        "",
    )
    for mode in dict.fromkeys(row["mode"] for row in found):
        for figure, name in (("cold_s", "cold"), ("warm_s", "warm")):
            ratios = warm_start.ratios(rows, mode, figure)
            if ratios:
                page.add(
                    f"- {mode}, {name}: {statistics.geometric_mean(ratios):.2f} of Inductor's "
                    f"seconds (geometric mean of {len(ratios)} models; {max(ratios):.2f} at most)"
                )
    compiled = sum(row["compilations"] or 0 for row in found if row["backend"] == NEURON)
    page.add("", f"Graphs that neuron compiled in warm processes: {compiled}.")
    plot_studies.draw_warm_start(rows, page.folder / "warm_start.png")
    page.figure("warm_start.png", "Cold and warm starts")


def _depth(page: Page, data: dict[str, Any]) -> None:
    rows: list[Row] = data["rows"]
    layers = sorted({row["layers"] for row in rows})
    depths = [f"{each} layers" for each in layers]
    lines = []
    for (mode, backend), line in depth.lines(rows).items():
        seconds = {
            row["layers"]: row.get("first_call_s")
            for row in rows
            if (row["mode"], row["backend"]) == (mode, backend)
        }
        fitted = [f"{line.slope:.3f}", f"{line.intercept:+.2f}", f"{line.r_squared:.4f}"]
        entries = [number(seconds.get(each), 2) for each in layers]
        lines.append([mode, backend, *entries, *fitted, f"{100 * line.deviation:.0f} %"])
    page.add(
        "",
        "Seconds of the first call of a narrow GPT-2 in a fresh process with empty caches, after a "
        "trivial model; a least-squares line through them, and the largest distance from it.",
        "",
        *table(
            ("mode", "backend", *depths, "s a layer", "intercept", "R²", "off the line"),
            lines,
            left=2,
        ),
    )
    plot_studies.draw_depth(rows, page.folder / "depth.png")
    page.figure("depth.png", "Seconds of the first call by depth")


def _memory(page: Page, data: dict[str, Any]) -> None:
    rows: list[Row] = [row for row in data["rows"] if "peak_mib" in row]
    eager = {(row["model"], row["mode"]): row for row in rows if row["backend"] == EAGER}
    lines = []
    for row in rows:
        base = eager.get((row["model"], row["mode"]))
        below = base["above_steady_mib"] if base else 0.0
        ratio = row["above_steady_mib"] / below if below else None
        sizes = ("parameters_mib", "imported_mib", "steady_mib", "above_steady_mib", "peak_mib")
        entries = [number(row[name], 0) for name in sizes]
        lines.append([row["model"], row["mode"], row["backend"], *entries, number(ratio, 2)])
    headers = ("parameters", "after imports", "between steps", "peak above", "peak")
    page.add(
        "",
        "MiB resident in a process of its own: after torch's import; between steps, after a "
        "garbage collection and `malloc_trim`, what the compilers keep included; and the peak "
        "within three further steps, above that and in all. The last column compares the peak "
        "above with eager's.",
        "",
        *table(("model", "mode", "backend", *headers, "over eager's"), lines, left=3),
    )
    plot_studies.draw_memory(rows, page.folder / "peak_memory.png")
    page.figure("peak_memory.png", "Resident memory between steps and at the peak")


def _peers(page: Page) -> None:
    page.add(
        "",
        "`torch_xla`'s `openxla` backend and `torchax` need another torch. In an environment of "
        "theirs, `python -m benchmarks.peers openxla --output "
        "benchmarks/results/peers-openxla.json` prints the same rows for the models that can be "
        "built there.",
    )
    for path in sorted(page.folder.glob("peers-*.json")):
        results = Results.load(path)
        page.add("", f"### {path.stem}", "", describe(results.machine))
        for suite in results.suites():
            page.add("", *_cells(results, suite))


_STUDIES: tuple[tuple[str, str, str, Callable[[Page, dict[str, Any]], None]], ...] = (
    ("Cold and warm start", "benchmarks.warm_start", "warm_start.json", _warm_start),
    ("Depth", "benchmarks.depth", "depth.json", _depth),
    ("Peak memory", "benchmarks.peak_memory", "peak_memory.json", _memory),
)


def write(folder: Path, path: Path) -> None:
    """The page at ``path``, and its figures beside the results in ``folder``."""
    page = Page(folder, path)
    page.add(
        "# Performance",
        "",
        "Written by `python -m benchmarks.report` from the files of `make bench`; not edited.",
    )
    _suite(page)
    for title, module, name, section in _STUDIES:
        page.add("", f"## {title}")
        data = _study(folder, name)
        if data is None:
            page.add("", f"{_MISSING} `python -m {module}`")
            continue
        section(page, data)
        _source(page, data, module, name)
    page.add("", "## Peers in other environments")
    _peers(page)
    page.add(
        "",
        "## Measuring again",
        "",
        "`make bench` runs all of it, about 40 minutes on two idle cores; `make bench "
        "ARGS=--resume` continues an interrupted run. Parts: `make bench-suite`, "
        "`bench-warm-start`, `bench-depth`, `bench-memory`, and `bench-report` for this page.",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(page.lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    write(options.results, options.page)
    print(f"Written: {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
