"""``python -m benchmarks``: measures the backends and writes JSON, Markdown and a figure."""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import harness, machine, plot, tables
from benchmarks.architecture import ALL_MODES, Architecture
from benchmarks.programs import BACKENDS, EAGER, supports, warm_up
from benchmarks.record import Results, Settings, geometric_mean
from benchmarks.suites import SUITES, suites

_LOAD_LIMIT = 0.1
_CONDITIONS = ("processor", "usable_cores", "torch_threads", "versions", "environment")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _known_models() -> list[str]:
    return [name for members in suites().values() for name in members]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--suites", type=_names, default=list(SUITES), help=f"of {','.join(SUITES)}"
    )
    parser.add_argument(
        "--models", type=_names, help=f"all of the suites, or of {','.join(_known_models())}"
    )
    parser.add_argument(
        "--backends",
        type=_names,
        default=list(BACKENDS),
        help=f"default {','.join(BACKENDS)}; other names are torch.compile's; eager, which the "
        "others are compared with, is always added",
    )
    parser.add_argument(
        "--modes", type=_names, default=list(ALL_MODES), help=f"of {','.join(ALL_MODES)}"
    )
    parser.add_argument("--samples", type=int, default=30, help="timed samples a cell (default 30)")
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
    options.models = options.models or _known_models()
    for chosen, known in (
        (options.suites, list(SUITES)),
        (options.models, _known_models()),
        (options.modes, list(ALL_MODES)),
    ):
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            parser.error(f"{', '.join(unknown) or 'an empty list'} is not among {', '.join(known)}")
    if options.samples < 2:
        parser.error("--samples must be at least 2")
    options.backends = list(dict.fromkeys([EAGER, *options.backends]))
    return options


def _results(options: argparse.Namespace, path: Path) -> Results:
    """Empty results, or with --resume those of an earlier run under the same conditions."""
    fresh = Results(Settings(options.samples, options.small), machine.machine())
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


@dataclass(frozen=True)
class Group:
    """A model and mode, and the backends that take turns on it."""

    suite: str
    architecture: Architecture
    mode: str
    backends: list[str]

    def is_finished(self, results: Results) -> bool:
        """Whether it can be skipped.

        That holds for all the backends or for none, since a speed-up means something only
        between calls that took turns.
        """
        cells = results.group(self.suite, self.architecture.name, self.mode)
        return {cell.backend for cell in cells if cell.finished}.issuperset(self.backends)


def _groups(options: argparse.Namespace) -> list[Group]:
    groups = []
    for suite, members in suites(options.small).items():
        for name, architecture in members.items():
            for mode in options.modes:
                backends = [each for each in options.backends if supports(each, architecture, mode)]
                if suite in options.suites and name in options.models and EAGER in backends:
                    groups.append(Group(suite, architecture, mode, backends))
    return groups


def _measure(options: argparse.Namespace, results: Results, path: Path, console: Console) -> None:
    """Measures what is pending and saves after each model and mode."""
    pending = [group for group in _groups(options) if not group.is_finished(results)]
    turns = 1 + harness.visits(options.samples)
    order = [(suite, name) for suite, members in suites().items() for name in members]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = sum(turns * len(group.backends) for group in pending)
        task = progress.add_task("warming up", total=total)
        for backend in options.backends if pending else ():
            progress.update(task, description=f"warming up · {backend}")
            warm_up(backend)

        def notify(description: str) -> None:
            progress.update(task, advance=1, description=description)

        done = 0
        for group in pending:
            cells = harness.measure(
                group.suite,
                group.architecture,
                group.mode,
                group.backends,
                options.samples,
                notify,
            )
            results.replace(cells)
            results.sort(order, options.backends)
            results.save(path)
            # A backend that failed took no turns.
            done += turns * len(group.backends)
            progress.update(task, completed=done)


def _print(results: Results, console: Console) -> None:
    table = Table(title="Benchmark results")
    for index, header in enumerate(tables.HEADERS):
        table.add_column(header, justify="left" if index < 4 else "right")
    previous = ""
    for cell in results.cells:
        if previous and cell.model != previous:
            table.add_section()
        previous = cell.model
        table.add_row(*tables.row(cell), style="red" if cell.suspicious else "")
    console.print(table)
    for suite in results.suites():
        for mode in results.modes():
            for backend in results.backends():
                mean = geometric_mean(results.pairs(suite, mode, backend))
                if mean is not None and backend != EAGER:
                    console.print(
                        f"geometric mean, {suite}, {mode}, {backend}: "
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
            console.print(f"[red]{where}:[/red] {escape(tables.first_line(cell.error))}")
        if cell.recompilations:
            where = f"{cell.model}, {cell.mode}, {cell.backend}"
            console.print(f"[yellow]{where}: compiled again after the first call[/yellow]")


def main() -> int:
    """Runs the command line; returns the exit status."""
    options = _options()
    # Dynamo tells on each first call that its profile is not used, as wanted.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    # Rich takes a pipe or a file for 80 columns wide, too few for the table.
    console = Console(width=None if sys.stdout.isatty() else 170)
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
        path.with_suffix(".md").write_text(tables.markdown(results))
        plot.save(results, options.output)
        _print(results, console)
        console.print(f"Written: {path.with_suffix('')}.{{json,md}} and figures", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
