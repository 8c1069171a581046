"""Run the demonstration: `python -m examples.demo [--backend neuron] [--output demo-output]`.

A pretrained sentence encoder and the training of a small CNN on real data, each eager and
through `torch.compile(..., backend=...)`. Exits with 1 if the two disagree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples import digits, embeddings
from examples.common import JobResult, OperatorMeter

PIPED_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both jobs, print the final table, and return the exit code."""
    options = parse(arguments)
    console = make_console()
    if options.backend not in torch._dynamo.list_backends(exclude_tags=()):
        console.print(f"[red]No torch.compile backend is called {options.backend!r}.[/red]")
        return 2
    meter = OperatorMeter(options.backend)
    with make_progress(console) as progress:
        results = [
            embeddings.run(options.backend, progress, meter),
            digits.run(options.backend, options.output, progress, meter),
        ]
    console.print(summary(results, options.backend))
    console.print(f"Loss curves: {options.output / 'digits_loss.png'}")
    return report_checks(console, results)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="Compare eager PyTorch with a compiled run."
    )
    parser.add_argument("--backend", default="neuron", help="torch.compile backend (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for the picture"
    )
    return parser.parse_args(arguments)


def make_console() -> Console:
    """Return a console that is wide enough for the tables when the output is piped."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def make_progress(console: Console) -> Progress:
    """Return the progress display."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def summary(results: list[JobResult], backend: str) -> Table:
    """Return the table of first calls, medians, speed-ups and operator counts."""
    table = Table(title=f"Eager against torch.compile(backend={backend!r})")
    table.add_column("")
    for result in results:
        table.add_column(f"{result.name}\n[dim]{result.call}[/dim]", justify="right")
    for label, cell in SUMMARY_ROWS.items():
        table.add_row(label, *map(cell, results))
    return table


def operator_cell(result: JobResult, attribute: str) -> str:
    """Return one of the operator counts, if the backend keeps them."""
    return "n/a" if result.operators is None else str(getattr(result.operators, attribute))


SUMMARY_ROWS: dict[str, Callable[[JobResult], str]] = {
    "first call, eager": lambda job: f"{job.eager.first_call_seconds:.2f} s",
    "first call, compiled": lambda job: f"{job.compiled.first_call_seconds:.2f} s",
    "median call, eager": lambda job: f"{job.eager.median_milliseconds:.2f} ms",
    "median call, compiled": lambda job: f"{job.compiled.median_milliseconds:.2f} ms",
    "speed-up over eager": lambda job: f"{job.speed_up:.2f}x",
    "operators on device": lambda job: operator_cell(job, "on_device"),
    "operators in eager fallback": lambda job: operator_cell(job, "in_fallback"),
}


def report_checks(console: Console, results: list[JobResult]) -> int:
    """Print what was checked; return 1 if anything failed, else 0."""
    checks = [(result.name, check) for result in results for check in result.checks]
    for name, check in checks:
        mark = "[green]passed[/green]" if check.passed else "[bold red]FAILED[/bold red]"
        console.print(f"{mark}  {name}: {check.description}", highlight=False, soft_wrap=True)
    return 0 if all(check.passed for _, check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
