"""``python -m tests.conformance``: run the whole suite, in worker processes, resumable.

Each case's result is a line in the results file, written when it is done; a case that is there
already is not run again. A worker that crashes or hangs is a failure of its case alone.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from ..progress import progress_bar
from . import page
from .catalog import DTYPES, Case, cases

RESULTS = Path(__file__).parent / "results"
#: Seconds that eight samples may take, and cases after which a worker makes room for a fresh one.
TIMEOUT, CASES_PER_WORKER = 600, 150


class Worker:
    """A child process that judges one case at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._done = 0
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - kept as long as the worker

    def judge(self, key: str, limit: int) -> dict[str, Any]:
        """The result of a case; a crash or a hang is one too."""
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.write(f"{key} {limit}\n")
        process.stdin.flush()
        line: str | None = "\n"
        while line == "\n":  # it is alive
            line = self._next()
        answered = line is not None
        self._done += 1
        if line:
            if self._done >= CASES_PER_WORKER:
                self.stop()
            return dict(json.loads(line))
        what = "crashed" if answered else "hung"
        if answered:
            process.wait()
        self.stop()
        return {
            "key": key,
            "samples": 0,
            "outcomes": {"failed": 1},
            "status": what,
            "fallback": {},
            "backward": [0, 0],
            "failures": [f"the process {what} (exit code {process.returncode}): {self._said()}"],
        }

    def _next(self) -> str | None:
        """The process's next line; empty where it has ended, ``None`` where it says nothing."""
        try:
            return self._lines.get(timeout=TIMEOUT)
        except queue.Empty:
            return None

    def _said(self) -> str:
        """The end of what the process wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read()[-800:]

    def stop(self) -> None:
        """End the process, by force if it does not listen."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._done = None, 0

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._errors.truncate(0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        ).start()


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The results in a file, by key; the last of a key counts."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {item["key"]: item for item in map(json.loads, lines)}


def run(keys: Sequence[str], path: Path, limit: int, jobs: int, console: Console) -> None:
    """Judge the cases and append each result to the file."""
    waiting = collections.deque(keys)
    lock = threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, progress_bar(console) as progress:
        task = progress.add_task("conformance", total=len(waiting))

        def work() -> None:
            worker = Worker()
            try:
                while True:
                    with lock:
                        if not waiting:
                            return
                        key = waiting.popleft()
                        progress.update(task, description=key[:60].ljust(60))
                    result = worker.judge(key, limit)
                    with lock:
                        file.write(json.dumps(result) + "\n")
                        file.flush()
                        progress.advance(task)
            finally:
                worker.stop()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _wanted(options: argparse.Namespace) -> Iterator[Case]:
    index, count = (int(part) for part in options.shard.split("/"))
    names = options.entries or ["*"]
    chosen = (
        case
        for case in cases(options.dtypes.split(","))
        if case.mode in options.modes.split(",")
        and case.kind in options.kinds.split(",")
        and any(fnmatch.fnmatchcase(case.entry, name) for name in names)
    )
    yield from (case for position, case in enumerate(chosen) if position % count == index - 1)


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """Cases by dtype, mode and status."""
    table = Table("dtype", "mode", "cases", "samples", *page.STATUSES)
    rows = collections.defaultdict(list)
    for item in results:
        case = Case.of(item["key"])
        rows[case.dtype, case.mode].append(item)
    for (dtype, mode), items in sorted(rows.items()):
        counts = collections.Counter(item["status"] for item in items)
        total = sum(item["samples"] for item in items)
        numbers = (len(items), total, *(counts[status] for status in page.STATUSES))
        table.add_row(dtype, mode, *map(str, numbers))
    return table


def main() -> int:
    """Parse arguments, run what is missing, print the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("entries", nargs="*", help="entry names, * as a wildcard (default: all)")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--modes", default="inference,training,errors")
    parser.add_argument("--kinds", default="operator,module")
    parser.add_argument("--samples", type=int, default=0, help="a case at most (0: all)")
    parser.add_argument("--shard", default="1/1", help="the n-th of m parts, as n/m")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=RESULTS / "full.jsonl")
    parser.add_argument("--again", action="store_true", help="run cases that failed again")
    parser.add_argument("--page", action="store_true", help="save the data and docs/operators.md")
    options = parser.parse_args()
    console = Console()
    done = read(options.results)
    if options.again:
        done = {key: item for key, item in done.items() if item["status"] in ("device", "upstream")}
    wanted = [case.key for case in _wanted(options)]
    missing = [key for key in wanted if key not in done]
    run(missing, options.results, options.samples, options.jobs, console)
    found = read(options.results)
    results = [found[key] for key in wanted]
    console.print(summary(results))
    failures = [item for item in results if page.status(item) == "failed"]
    for item in failures:
        console.print(item["key"], item["status"], *item["failures"][:1], markup=False)
    if options.page:
        page.save(results, options.samples)
        page.write()
    wrong = page.disagreements(results) if not options.entries and options.shard == "1/1" else []
    for line in wrong:
        console.print(line, markup=False)
    return int(bool(failures or wrong))


if __name__ == "__main__":
    sys.exit(main())
