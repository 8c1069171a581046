"""Trains two models in eager and compiled, and asks whether their loss curves differ.

``python -m benchmarks.training`` writes ``training.json``, ``.md`` and ``.png``: loss curves with
dropout and activation checkpointing, in float32 and under autocast, over several seeds; the
difference step by step without anything random; resident memory over thousands of steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

from benchmarks.machine import machine
from benchmarks.memory import LOOPS
from benchmarks.training_tasks import TASKS, Task

BACKEND = "neuron"
SEEDS = 3
STEPS = 300
WINDOW = 25


@dataclass(frozen=True)
class Curves:
    """Losses by seed and step. Eager has twice as many seeds, to know its own noise."""

    task: str
    autocast: bool
    eager: list[list[float]]
    compiled: list[list[float]]


@dataclass(frozen=True)
class Verdict:
    """How far compiled training is from eager's, in windows of steps.

    ``difference`` is the largest difference, over the windows, of the mean of compiled seeds from
    the mean of eager's with the same seeds; ``deviation`` the largest such difference divided by
    its standard deviation, estimated from all of eager's seeds, and ``eager_deviation`` the same
    for the other half of eager's seeds in place of the compiled ones. ``spread`` is eager's range
    over the seeds in the window of the largest difference.
    """

    task: str
    autocast: bool
    last_eager: float
    last_compiled: float
    difference: float
    spread: float
    deviation: float
    eager_deviation: float


@dataclass(frozen=True)
class Exact:
    """The largest difference of a step's loss, relative to eager's, without dropout: in the first
    ten steps and in all, and in all those of eager from weights that are one rounding off."""

    task: str
    first_steps: float
    all_steps: float
    nudged_eager: float


def train(
    task: Task,
    seed: int,
    backend: str | None,
    autocast: bool = False,
    random: bool = False,
    steps: int = STEPS,
    nudge: bool = False,
) -> list[float]:
    """The losses of a training from new weights.

    Args:
        backend: compiles the model and the optimizer's step; ``None`` for eager.
        random: with dropout, and with activation checkpointing.
        nudge: start from weights that are off by about one rounding.
    """
    torch.manual_seed(seed)
    model = task.make(task.dropout if random else 0.0, random)
    if nudge:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    call: Callable[..., Any] = model
    update: Callable[[], Any] = optimizer.step
    if backend is not None:
        torch.compiler.reset()
        call, update = torch.compile(model, backend=backend), torch.compile(update, backend=backend)
    batches = task.batches(seed)
    losses = []
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        with _precision(autocast):
            loss = F.cross_entropy(call(inputs), targets)
        loss.backward()
        update()
        losses.append(loss.item())
    return losses


def _precision(autocast: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


def judge(curves: Curves, window: int = WINDOW) -> Verdict:
    """Compare windows of curves."""
    eager = [_windows(losses, window) for losses in curves.eager]
    compiled = [_windows(losses, window) for losses in curves.compiled]
    seeds = len(compiled)
    noise = [
        statistics.stdev(seed[index] for seed in eager) * math.sqrt(2 / seeds)
        for index in range(len(eager[0]))
    ]
    mine = _differences(compiled, eager[:seeds])
    other = _differences(eager[seeds:], eager[:seeds])
    worst = mine.index(max(mine))
    there = [seed[worst] for seed in eager]
    return Verdict(
        curves.task,
        curves.autocast,
        last_eager=statistics.mean(seed[-1] for seed in eager[:seeds]),
        last_compiled=statistics.mean(seed[-1] for seed in compiled),
        difference=mine[worst],
        spread=max(there) - min(there),
        deviation=max(a / b for a, b in zip(mine, noise, strict=True)),
        eager_deviation=max(a / b for a, b in zip(other, noise, strict=True)),
    )


def _windows(losses: Sequence[float], window: int) -> list[float]:
    return [
        statistics.mean(losses[start : start + window])
        for start in range(0, len(losses) - window + 1, window)
    ]


def _differences(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> list[float]:
    """Between the means over seeds, window by window."""
    return [
        abs(statistics.mean(a) - statistics.mean(b))
        for a, b in zip(zip(*some, strict=True), zip(*others, strict=True), strict=True)
    ]


def compare_exactly(task: Task, steps: int, seeds: int, notify: Callable[[], None]) -> Exact:
    """Eager and compiled from the same weights, on the same batches, with nothing random."""
    differences, nudged = [], []
    for seed in range(seeds):
        eager = train(task, seed, None, steps=steps)
        differences.append(_relative(train(task, seed, BACKEND, steps=steps), eager))
        nudged.append(_relative(train(task, seed, None, steps=steps, nudge=True), eager))
        notify()
    return Exact(
        task.name,
        first_steps=max(max(row[:10]) for row in differences),
        all_steps=max(map(max, differences)),
        nudged_eager=max(map(max, nudged)),
    )


def _relative(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(some, others, strict=True)]


def measure_memory(loop: str, steps: int, backend: str = BACKEND) -> dict[str, Any]:
    """Resident memory of a loop in a process of its own (see ``benchmarks.memory``)."""
    command = [sys.executable, "-m", "benchmarks.memory", loop, str(steps), backend]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def markdown(results: dict[str, Any]) -> str:
    """The tables of ``training.md``."""
    settings = results["settings"]
    lines = [
        "# Training study",
        "",
        f"{settings['steps']} steps of AdamW (its step compiled, too), {settings['seeds']} seeds,"
        " dropout and activation checkpointing. Losses are means over windows of"
        f" {settings['window']} steps; a deviation is the largest difference of the seeds' means"
        " over the windows, in standard deviations of such a difference, estimated from twice as"
        " many seeds of eager. `eager` in its last column are eager's other seeds.",
        "",
        "| Model | precision | last loss, eager | neuron | largest difference | eager's range there"
        " | deviation, neuron | eager |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {v['task']} | {'bfloat16 autocast' if v['autocast'] else 'float32'}"
        f" | {v['last_eager']:.4f} | {v['last_compiled']:.4f} | {v['difference']:.4f}"
        f" | {v['spread']:.4f} | {v['deviation']:.2f} | {v['eager_deviation']:.2f} |"
        for v in results["verdicts"]
    ]
    lines += [
        "",
        "Float32 without dropout, the same weights and batches: the largest relative difference of"
        " a step's loss; and that of eager from weights that are one rounding off.",
        "",
        "| Model | first 10 steps | all | eager, one rounding off |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {e['task']} | {e['first_steps']:.1e} | {e['all_steps']:.1e} | {e['nudged_eager']:.1e} |"
        for e in results["exact"]
    ]
    lines += [
        "",
        "Resident memory, each loop in a process of its own.",
        "",
        "| Loop | steps | at step 200, MiB | at the end | largest change after step 200 |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {m['loop']} | {m['steps']} | {m['settled']:.0f} | {m['last']:.0f} | {m['change']:.2%} |"
        for m in results["memory"]
    ]
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the windows' means of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = results["settings"]["window"]
    figure, axes = plt.subplots(1, len(results["curves"]), figsize=(14, 3.4))
    for axis, curves in zip(axes, results["curves"], strict=True):
        for name, colour in (("eager", "#8A8F98"), ("compiled", "#2F6DB5")):
            for index, losses in enumerate(curves[name]):
                means = _windows(losses, window)
                steps = [window * (place + 0.5) for place in range(len(means))]
                label = {"eager": "eager", "compiled": "neuron"}[name] if index == 0 else None
                axis.plot(steps, means, color=colour, linewidth=1, label=label)
        precision = "bfloat16 autocast" if curves["autocast"] else "float32"
        axis.set_title(f"{curves['task']}, {precision}", fontsize=9)
        axis.set_xlabel("step")
        axis.set_yscale("log")
    axes[0].set_ylabel("loss")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def study(steps: int, seeds: int, memory_steps: int, console: Console) -> dict[str, Any]:
    """Everything; ten minutes of one core or more."""
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    conditions = machine()
    curves: list[Curves] = []
    with Progress(console=console) as progress:
        total = len(TASKS) * (2 * 3 * seeds + seeds) + len(LOOPS)
        bar = progress.add_task("training", total=total)

        def notify() -> None:
            progress.advance(bar)

        def runs(task: Task, backend: str | None, autocast: bool, count: int) -> list[list[float]]:
            found = []
            for seed in range(count):
                found.append(train(task, seed, backend, autocast, random=True, steps=steps))
                notify()
            return found

        for task in TASKS:
            for autocast in (False, True):
                eager = runs(task, None, autocast, 2 * seeds)
                curves.append(
                    Curves(task.name, autocast, eager, runs(task, BACKEND, autocast, seeds))
                )
        exact = [compare_exactly(task, steps, seeds, notify) for task in TASKS]
        memory = []
        for loop in LOOPS:
            memory.append(measure_memory(loop, memory_steps))
            notify()
    return {
        "settings": {"steps": steps, "seeds": seeds, "window": WINDOW},
        "machine": conditions,
        "verdicts": [asdict(judge(each)) for each in curves],
        "exact": [asdict(each) for each in exact],
        "memory": memory,
        "curves": [asdict(each) for each in curves],
    }


def _rounded(value: Any) -> Any:
    """Six digits of every number: the file is kept in the repository."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--memory-steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = study(options.steps, options.seeds, options.memory_steps, console)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "training.json"
    path.write_text(json.dumps(_rounded(results)) + "\n")
    path.with_suffix(".md").write_text(markdown(results))
    plot(results, path.with_suffix(".png"))
    console.print(markdown(results), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
