"""``python -m tests.programs``: a long stream of random programs, in worker processes, resumable.

The stream is cut into parts of a hundred programs; what became of each program is a line in the
results file, and a part that is there already is not run again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..progress import progress_bar
from .check import DEVICE, FAILED, FALLBACK, REFUSED, UPSTREAM

RESULTS = Path(__file__).parent / "results"
STATUSES = (DEVICE, FALLBACK, FAILED, UPSTREAM, REFUSED)
#: Programs in a part, and seconds after which a worker that says nothing counts as hung.
PART, SILENCE = 100, 900


def judged(seed: int, count: int, flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the worker says of the programs of a part; a crash or a hang is a failure too."""
    command = [sys.executable, "-m", f"{__package__}.worker", f"--seed={seed}", f"--count={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    running: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        timer = threading.Timer(SILENCE, process.kill)
        try:
            timer.start()
            for line in process.stdout:
                timer.cancel()
                timer = threading.Timer(SILENCE, process.kill)
                timer.start()
                said = json.loads(line)
                if "running" in said:
                    running = said["running"]
                else:
                    yield said
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        if code:
            errors.seek(0)
            yield {
                "seed": seed,
                "number": -1,
                "status": FAILED,
                "mode": "",
                "operations": [],
                "fallback": {},
                "failure": f"the process ended with code {code}: {errors.read()[-800:]}",
                "source": "\n".join(running),
                "minimized": "",
            }


def read(path: Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(
    parts: Sequence[int], path: Path, jobs: int, flags: Sequence[str], console: Console
) -> None:
    """Judge the parts with these seeds; each is written to the file when all of it is done."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for part in parts:
        waiting.put(part)
    lock = threading.Lock()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, progress_bar(console) as progress:
        task = progress.add_task("programs", total=PART * len(parts))

        def work() -> None:
            while True:
                try:
                    part = waiting.get_nowait()
                except queue.Empty:
                    return
                lines = []
                for item in judged(part, PART, flags):
                    lines.append(json.dumps(item) + "\n")
                    progress.advance(task)
                    if item["status"] == FAILED:
                        show(item, console)
                with lock:
                    file.writelines(lines)
                    file.flush()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def show(item: dict[str, Any], console: Console) -> None:
    """Print a failing program, as small as it was made."""
    console.print(item["minimized"] or item["source"], markup=False, highlight=False)
    console.print(item["failure"], markup=False, highlight=False)


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """Programs by mode and status, and what ran in fallback."""
    table = Table("mode", "programs", *STATUSES)
    modes = collections.defaultdict(list)
    for item in results:
        modes[item["mode"]].append(item["status"])
    for mode, statuses in [*sorted(modes.items()), ("all", [x["status"] for x in results])]:
        counts = collections.Counter(statuses)
        table.add_row(mode, str(len(statuses)), *(str(counts[status]) for status in STATUSES))
    return table


def _print_padding(padding: Sequence[Any], console: Console) -> None:
    padded, made = (sum(item[position] for item in padding) for position in (0, 1))
    console.print(f"{padded} of {made} executables for dynamic sizes were padded; not, for:")
    for reason, count in collections.Counter(x for item in padding for x in item[2]).most_common(
        20
    ):
        console.print(f"{count:5} {reason[:90]}", markup=False, highlight=False)


def main() -> int:
    """Parse arguments, run what is missing, print the table; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="programs, rounded to hundreds")
    parser.add_argument("--seed", type=int, default=0, help="another stream")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, help="default: results/programs.jsonl or padded")
    parser.add_argument("--no-minimize", action="store_true", help="leave failures as they are")
    parser.add_argument("--padded", action="store_true", help="pad all sizes, where possible")
    options = parser.parse_args()
    console = Console()
    path = options.results or RESULTS / ("padded.jsonl" if options.padded else "programs.jsonl")
    flags = ["--padded"] * options.padded + ["--minimize"] * (not options.no_minimize)
    seeds = [options.seed * 1_000_000 + part for part in range(-(-options.count // PART))]
    done = {item["seed"] for item in read(path)}
    missing = [seed for seed in seeds if seed not in done]
    run(missing, path, options.jobs, flags, console)
    results = [item for item in read(path) if item["seed"] in seeds]
    console.print(summary(results))
    if options.padded:
        _print_padding([item["padding"] for item in results if "padding" in item], console)
    fallbacks = collections.Counter(name for item in results for name in item["fallback"])
    for name, count in fallbacks.most_common():
        console.print(f"{name} ran in eager in {count} programs", markup=False)
    failures = [item for item in results if item["status"] == FAILED]
    console.print(f"{len(failures)} failures", *(f"{x['seed']}:{x['number']}" for x in failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
