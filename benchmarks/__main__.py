"""``python -m benchmarks``: measures the backends and writes JSON, Markdown and a figure."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import harness, plot, record
from benchmarks.models import Architecture, architectures
from benchmarks.record import MODES, REFERENCE, Results, Settings

_ERROR_LIMIT = 1e-3
_LOAD_LIMIT = 0.1
_CONDITIONS = ("processor", "usable_cores", "torch_threads", "versions", "environment")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    known = list(architectures())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", type=_names, default=known, help=f"of {','.join(known)}")
    parser.add_argument(
        "--backends",
        type=_names,
        default=[REFERENCE, "inductor", "neuron"],
        help="torch.compile backends; eager, which the others are compared with, is always added",
    )
    parser.add_argument("--modes", type=_names, default=list(MODES), help=f"of {','.join(MODES)}")
    parser.add_argument("--samples", type=int, default=30, help="timed calls a cell (default 30)")
    parser.add_argument("--small", action="store_true", help="tiny models, to try things out")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the finished cells of the output's results.json instead of starting over",
    )
    return parser


def _options() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    for chosen, known in ((options.models, list(architectures())), (options.modes, list(MODES))):
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            parser.error(f"{', '.join(unknown) or 'an empty list'} is not among {', '.join(known)}")
    if options.samples < 2:
        parser.error("--samples must be at least 2")
    options.backends = list(dict.fromkeys([REFERENCE, *options.backends]))
    return options


def _results(options: argparse.Namespace, path: Path) -> Results:
    """Empty results, or with --resume those of an earlier run under the same conditions."""
    fresh = Results(Settings(options.samples, options.small), record.machine())
    if not options.resume or not path.exists():
        return fresh
    earlier = Results.load(path)
    if earlier.settings != fresh.settings:
        sys.exit(f"{path} has {earlier.settings}, not {fresh.settings}: resume with the same")
    for condition in _CONDITIONS:
        if earlier.machine[condition] != fresh.machine[condition]:
            before, now = earlier.machine[condition], fresh.machine[condition]
            sys.exit(f"{path} was measured with {condition} {before}, not {now}: start over")
    fresh.cells = earlier.cells
    return fresh


def _is_finished(results: Results, model: str, mode: str, backends: list[str]) -> bool:
    """Whether a model and mode can be skipped.

    That holds for all the backends or for none, since a speed-up means something only between
    calls that took turns.
    """
    finished = {cell.backend for cell in results.group(model, mode) if cell.finished}
    return finished.issuperset(backends)


def _pending(options: argparse.Namespace, results: Results) -> list[tuple[Architecture, str]]:
    members = architectures(options.small)
    return [
        (members[model], mode)
        for model in options.models
        for mode in options.modes
        if not _is_finished(results, model, mode, options.backends)
    ]


def _measure(options: argparse.Namespace, results: Results, path: Path, console: Console) -> None:
    """Measures what is pending and saves after each model and mode."""
    pending = _pending(options, results)
    steps = len(options.backends) * (1 + harness.visits(options.samples))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("warming up", total=len(pending) * steps)
        if pending:
            for backend in options.backends:
                progress.update(task, description=f"warming up · {backend}")
                harness.warm_up(backend)

        def notify(description: str) -> None:
            progress.update(task, advance=1, description=description)

        for done, (architecture, mode) in enumerate(pending, start=1):
            cells = harness.measure(architecture, mode, options.backends, options.samples, notify)
            results.replace(architecture.name, mode, cells)
            results.sort(list(architectures()), options.backends)
            results.save(path)
            # A backend that failed took no turns.
            progress.update(task, completed=done * steps)


def _print(results: Results, console: Console) -> None:
    table = Table(title="Benchmark results")
    for index, header in enumerate(record.HEADERS):
        table.add_column(header, justify="left" if index < 3 else "right")
    previous = ""
    for cell in results.cells:
        if previous and cell.model != previous:
            table.add_section()
        previous = cell.model
        suspicious = cell.error is not None or (cell.max_error or 0.0) > _ERROR_LIMIT
        table.add_row(*record.row(cell), style="red" if suspicious else "")
    console.print(table)
    for mean in results.geometric_means():
        console.print(
            f"geometric mean, {mean.mode}, {mean.backend}: "
            f"[bold]{mean.speedup:.2f}x[/bold] over {mean.models} models"
        )
    if results.other_load() > _LOAD_LIMIT:
        console.print(
            f"[yellow]Other processes kept up to {results.other_load():.2f} cores busy while cells "
            "were timed: repeat on a quiet machine.[/yellow]"
        )
    for cell in results.cells:
        if cell.error is not None:
            where = f"{cell.model}, {cell.mode}, {cell.backend}"
            console.print(f"[red]{where}:[/red] {escape(record.first_line(cell.error))}")
        if cell.recompilations:
            where = f"{cell.model}, {cell.mode}, {cell.backend}"
            console.print(f"[yellow]{where}: compiled again after the first call[/yellow]")


def main() -> int:
    """Runs the command line; returns the exit status."""
    options = _options()
    # Dynamo tells on each first call that its profile is not used, as wanted.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    # Rich takes a pipe or a file for 80 columns wide, too few for the table.
    console = Console(width=None if sys.stdout.isatty() else 140)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "results.json"
    results = _results(options, path)
    status = 0
    try:
        _measure(options, results, path, console)
    except KeyboardInterrupt:
        console.print("Interrupted; --resume continues after the last model and mode saved.")
        status = 130
    if results.cells:
        path.with_suffix(".md").write_text(record.markdown(results))
        plot.save(results, path.with_suffix(".png"))
        _print(results, console)
        console.print(f"Written: {path.with_suffix('')}.{{json,md,png}}", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
