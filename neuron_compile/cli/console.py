"""What every command prints with: tables for people, JSON for programs, progress bars.

On a terminal a table is as wide as that; in a pipe it is as wide as it needs to be, one line a row,
without colours and lines, for ``grep`` and ``awk``. Nothing is ever cut: what is too wide wraps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Wider than any line, and yet a width that rich can lay out.
_UNLIMITED = 10_000
_STYLES = {
    "ok": "green",
    "note": "cyan",
    "problem": "bold red",
    "device": "green",
    "decomposed": "cyan",
    "eager": "yellow",
    "damaged": "bold red",
}

#: One more step of long work is done.
Step = Callable[[], None]


class UsageError(Exception):
    """An argument or a file is wrong; the message says which, and what would be right."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: numbers are ``right``; one that is ``whole`` does not wrap."""

    name: str
    right: bool = False
    whole: bool = False


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = ""
) -> argparse.ArgumentParser:
    """A subcommand with ``--json``; ``more`` follows the description in its help."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[:1].upper() + text[1:] + ".",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)
    return parser


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    print(json.dumps(data, indent=1))


def table(title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table under its title; without rows, nothing."""
    if not rows:
        return
    from rich import box
    from rich.table import Table

    out = _console()
    made = Table(
        box=box.SIMPLE_HEAD if out.is_terminal else None,
        show_edge=False,
        pad_edge=False,
        header_style="bold",
        padding=(0, 1 if out.is_terminal else 2, 0, 0),
    )
    for item in columns:
        column = item if isinstance(item, Column) else Column(item)
        made.add_column(
            column.name,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=column.right or column.whole,
        )
    for row in rows:
        made.add_row(*map(_cell, row))
    heading(title)
    _emit(out, made)


def facts(values: Mapping[str, Any]) -> None:
    """Print names with their values, one a line; values that are ``None`` are left out."""
    from rich.table import Table

    out = _console()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in values.items():
        if value is not None:
            grid.add_row(name, _cell(value))
    _emit(out, grid)


def heading(text: str) -> None:
    """Print the title of what follows, set off by an empty line."""
    if text:
        from rich.text import Text

        print()
        _emit(_console(), Text(text, style="bold underline"))


def say(text: str) -> None:
    """Print a line of prose."""
    _emit(_console(), text)


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, still: bool = False) -> Iterator[Step]:
    """A bar on standard error while work goes on, on a terminal only.

    Args:
        what: names the work.
        total: the number of steps; ``None``: not known.
        still: draw at each step alone, and not all the time: the work is being timed.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    count = [] if total is None else [BarColumn(), MofNCompleteColumn()]
    layout = (SpinnerColumn(), TextColumn("{task.description}"), *count, TimeElapsedColumn())
    out = Console(stderr=True)
    with Progress(*layout, console=out, transient=True, auto_refresh=not still) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def step() -> None:
            bar.advance(task)
            bar.refresh()

        yield step


def counted(count: int, one: str, many: str) -> str:
    """``1 entry``, ``3 entries``."""
    return f"{count} {one if count == 1 else many}"


def size_text(count: float | None) -> str:
    """A number of bytes for people: ``13.2 KiB``; ``-`` where it is not known."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """A duration for people: ``1.62 s``, ``12.1 ms``, ``85.0 µs``; ``-`` where it is not known."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _console() -> Console:
    from rich.console import Console

    # Brackets are shapes here, not markup.
    made = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(markup=False, highlight=False, emoji=False, width=_UNLIMITED)
    return made


def _emit(out: Console, what: RenderableType) -> None:
    """Print; in a pipe without the blanks that fill up columns."""
    if out.is_terminal:
        out.print(what)
        return
    with out.capture() as captured:
        out.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _cell(value: Any) -> Any:
    from rich.text import Text

    text = str(value)
    return Text(text, style=_STYLES.get(text, ""))
