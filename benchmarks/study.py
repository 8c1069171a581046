"""Studies whose figures each come from a process of its own: run, keep, resume.

A module that uses this has a function that measures one case in the present process, behind
``--one``, and prints JSON as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def in_process(module: str, case: Sequence[str], folder: str) -> Row:
    """``python -m MODULE --one CASE`` with its caches of compiled code in ``folder``.

    Raises ``CalledProcessError`` where the process fails; its own words go to standard error.
    """
    caches = {
        "NEURON_COMPILE_CACHE": "1",  # on, whatever this environment says
        "NEURON_COMPILE_CACHE_DIR": f"{folder}/neff",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
    }
    done = subprocess.run(
        [sys.executable, "-m", module, "--one", *case],
        env={**os.environ, **caches},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def in_fresh_process(module: str, case: Sequence[str]) -> Row:
    """The same with empty caches, which are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return in_process(module, case, folder)


class Study:
    """Rows in a JSON file, with the machine and the settings that they were measured with."""

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.data: Row = {"settings": dict(settings), "machine": machine(), "rows": []}
        if resume and path.exists():
            earlier = json.loads(path.read_text())
            if earlier["settings"] != self.data["settings"]:
                sys.exit(f"{path} has {earlier['settings']}, not {dict(settings)}: start over")
            self.data["rows"] = earlier["rows"]

    @property
    def rows(self) -> list[Row]:
        """What has been measured, the earlier run's included."""
        rows: list[Row] = self.data["rows"]
        return rows

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether a row with these entries is there."""
        return any(all(row.get(name) == key[name] for name in key) for row in self.rows)

    def run(
        self, keys: Sequence[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], Row]
    ) -> None:
        """Measures what is missing, saving after each row, with a line of progress for each.

        A case whose process fails gets a row with ``error`` and no figures, and the rest goes on.
        """
        missing = [key for key in keys if not self.has(key)]
        for count, key in enumerate(missing, start=1):
            started = time.perf_counter()
            try:
                row = {**key, **measure(key)}
            except subprocess.CalledProcessError as error:
                row = {**key, "error": str(error)}
            self.rows.append(row)
            self.rows.sort(key=lambda row: _rank(keys, row))
            self._save()
            shown = ", ".join(f"{name} {_short(row[name])}" for name in row if _is_plain(row[name]))
            seconds = time.perf_counter() - started
            print(f"[{count}/{len(missing)}, {seconds:.0f} s] {shown}", flush=True)
        self._save()

    def _save(self) -> None:
        rows = ",\n  ".join(json.dumps(row) for row in self.rows)
        head = {name: self.data[name] for name in ("settings", "machine")}
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "rows": [\n  '
        partial = self.path.with_suffix(".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + rows + "\n ]\n}\n")
        partial.replace(self.path)


def _rank(keys: Sequence[Mapping[str, Any]], row: Row) -> int:
    found = (i for i, key in enumerate(keys) if all(row.get(name) == key[name] for name in key))
    return next(found, len(keys))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parser(module: str, description: str | None, default: str) -> argparse.ArgumentParser:
    """A parser with what the studies have in common."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    made.add_argument("--small", action="store_true", help="tiny models, to try things out")
    made.add_argument("--resume", action="store_true", help="keep the rows that are in the file")
    made.add_argument("--results", type=Path, default=RESULTS / default)
    return made


def names(text: str) -> list[str]:
    """A command line's list, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def size(small: bool) -> str:
    """How a case of ``--one`` says which size of the models it takes."""
    return "small" if small else "full"
