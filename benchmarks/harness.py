"""Timing and checking of compilation backends on one model, interleaved in one process.

The machine's speed drifts, so the backends of one model and mode take turns in short visits
rather than one after the other. PyTorch's OpenMP threads and XLA's thread pool keep spinning for
a while after their last work, so each visit starts with a few settle calls that are not timed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.architecture import Architecture
from benchmarks.programs import (
    EAGER,
    FIRST_CALLS,
    NEURON,
    Observation,
    Program,
    fresh_caches,
    program,
)
from benchmarks.record import Cell

SETTLE_CALLS = 2
SAMPLES_PER_VISIT = 3
# A call of microseconds is timed by the loop: the clock and a thread that wakes up disturb less.
SHORTEST_SAMPLE_S = 2e-3
WEIGHT_SEED = 0
# A ReLU input that is zero but for rounding may pass in one correct backend and not in another,
# which can change a resnet18 gradient by several percent: for 40 % of the input seeds, eager's own
# float32 differs in that way from float64. Of the seeds below 60, this one keeps all ReLU inputs of
# the residual blocks farthest from zero: by 3.4 times their root mean square rounding error.
INPUT_SEED = 54

Notify = Callable[[str], None]


# --------------------------------------------------------------------------------- correctness


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((tensor.abs().max().item() for tensor in tensors.values()), default=0.0)


def max_relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest absolute difference of each tensor over that tensor's largest entry; the worst.

    Some gradients are zero in exact arithmetic (a key projection's bias under softmax, say) and
    consist of rounding noise, so no tensor's scale counts as less than a thousandth of the
    largest entry of all of them.
    """
    if actual.keys() != expected.keys():
        raise ValueError(f"tensors differ in name: {sorted(actual.keys() ^ expected.keys())}")
    floor = max(1e-3 * _largest(expected), torch.finfo(torch.float32).tiny)
    worst = 0.0
    for name, wanted in expected.items():
        got = actual[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise ValueError(
                f"{name} is {got.dtype} {tuple(got.shape)}, eager has "
                f"{wanted.dtype} {tuple(wanted.shape)}"
            )
        scale = max(wanted.abs().max().item(), floor)
        error = (got.double() - wanted.double()).abs().max().item() / scale
        if not math.isfinite(error):
            raise FloatingPointError(f"{name} is not finite")
        worst = max(worst, error)
    return worst


def relative_errors(actual: Observation, expected: Observation) -> dict[str, float]:
    """``max_relative_error`` for each kind of tensor that the mode yields."""
    return {
        kind: max_relative_error(actual.tensors[kind], wanted)
        for kind, wanted in expected.tensors.items()
    }


# ------------------------------------------------------------------------------------ counters


def _reported_operators() -> tuple[int, int] | None:
    """The neuron backend's process totals (on device, in fallback), if it can tell."""
    try:
        totals = importlib.import_module("neuron_compile").report()
        return int(totals.operators_on_device), int(totals.operators_in_fallback)
    except (ImportError, AttributeError, TypeError):
        return None


def _graphs_and_breaks() -> tuple[int, int]:
    """Process totals of the graphs Dynamo compiled and of its graph breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# --------------------------------------------------------------------------------- measurement


@dataclass
class Runner:
    """A backend's program on its own copy of a model, and the cell being filled."""

    program: Program
    cell: Cell
    observation: Observation = field(repr=False)


def _first_call(
    architecture: Architecture, mode: str, template: nn.Module, cell: Cell
) -> tuple[Program, Observation]:
    """Compiles and calls for the first time; records seconds and counts in the cell."""
    module, inputs = copy.deepcopy(template), architecture.inputs(INPUT_SEED)
    operators = _reported_operators() if cell.backend == NEURON else None
    graphs, breaks = _graphs_and_breaks()
    with fresh_caches(cell.backend):
        start = time.perf_counter()
        made = program(cell.backend, architecture, mode, module, inputs)
        output = made.run(FIRST_CALLS[mode])
        cell.first_call_s = time.perf_counter() - start
    graphs_after, breaks_after = _graphs_and_breaks()
    cell.graphs, cell.graph_breaks = graphs_after - graphs, breaks_after - breaks
    operators_after = _reported_operators()
    if operators is not None and operators_after is not None:
        cell.operators_on_device = operators_after[0] - operators[0]
        cell.operators_in_fallback = operators_after[1] - operators[1]
    return made, made.observe(output)


def _calls_per_sample(run: Callable[[int], object]) -> int:
    """How many calls a sample needs to last ``SHORTEST_SAMPLE_S``."""

    def timed(calls: int) -> float:
        start = time.perf_counter()
        run(calls)
        return time.perf_counter() - start

    calls = 1
    while True:
        # The fastest: a call that lost its core for a time slice says nothing.
        seconds = min(timed(calls) for _ in range(3))
        if seconds >= SHORTEST_SAMPLE_S:
            return calls
        # Not straight to the estimate: first calls are slow, and the clock is coarse for one call.
        calls = min(2 * calls, math.ceil(1.2 * calls * SHORTEST_SAMPLE_S / seconds))


def _visit(runner: Runner, samples: int) -> None:
    """Settles the thread pools and appends timed samples, in milliseconds a call."""
    cell, run = runner.cell, runner.program.run
    graphs, _ = _graphs_and_breaks()
    if not cell.calls_per_sample:
        run(SETTLE_CALLS)
        cell.calls_per_sample = _calls_per_sample(run)
    calls = cell.calls_per_sample
    run(SETTLE_CALLS * calls)
    for _ in range(min(SAMPLES_PER_VISIT, samples - len(cell.samples_ms))):
        start = time.perf_counter()
        run(calls)
        cell.samples_ms.append(round(1e3 * (time.perf_counter() - start) / calls, 6))
    cell.recompilations += _graphs_and_breaks()[0] - graphs


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps the garbage collector's pauses out of the timed calls."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _recording(cell: Cell) -> Iterator[None]:
    """Turns an exception into the cell's error text."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  a broken backend must not end the run
        text = "".join(traceback.format_exception_only(error)).strip()
        cell.error = text[:4000]


def _busy_seconds() -> tuple[float, float] | None:
    """Processor seconds so far of the whole machine and of this process (Linux only)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, interrupt, soft, steal = map(int, fields[:8])
    ticks = user + nice + system + interrupt + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


@contextlib.contextmanager
def _watching_load(cells: list[Cell]) -> Iterator[None]:
    """Records the load by other processes in the cells.

    It matters out of proportion: where PyTorch's OpenMP threads do not get all the cores, each
    small operator waits at its barrier for a whole time slice of the scheduler.
    """
    start, before = time.perf_counter(), _busy_seconds()
    yield
    seconds, after = time.perf_counter() - start, _busy_seconds()
    if before is not None and after is not None:
        others = (after[0] - before[0]) - (after[1] - before[1])
        for cell in cells:
            cell.other_load = round(max(others, 0.0) / seconds, 3)


def visits(samples: int) -> int:
    """How many visits each backend gets for the given number of samples."""
    return math.ceil(samples / SAMPLES_PER_VISIT)


def _start(
    architecture: Architecture, mode: str, cells: list[Cell], notify: Notify
) -> list[Runner]:
    """Makes every backend's first call and compares it with that of eager, the first."""
    template = architecture.build(WEIGHT_SEED)
    runners: list[Runner] = []
    for cell in cells:
        notify(f"{cell.model} · {mode} · {cell.backend} · first call")
        with _recording(cell):
            made, observation = _first_call(architecture, mode, template, cell)
            reference = runners[0].observation if runners else observation
            cell.errors = relative_errors(observation, reference)
            runners.append(Runner(made, cell, observation))
    return runners


def _take_turns(runners: list[Runner], samples: int, notify: Notify) -> None:
    """Visits the backends in rounds, each starting with the next backend."""
    for turn in range(visits(samples)):
        shift = turn % len(runners)
        for runner in runners[shift:] + runners[:shift]:
            cell = runner.cell
            notify(f"{cell.model} · {cell.mode} · {cell.backend} · {len(cell.samples_ms)} samples")
            if cell.error is None:
                with _without_collection(), _recording(cell):
                    _visit(runner, samples)


def measure(
    suite: str,
    architecture: Architecture,
    mode: str,
    backends: list[str],
    samples: int,
    notify: Notify,
) -> list[Cell]:
    """Measures all backends on one model in one mode; ``backends[0]`` must be eager."""
    if backends[0] != EAGER:
        raise ValueError(f"the first backend must be {EAGER}")
    torch._dynamo.reset()
    cells = [Cell(architecture.name, mode, backend, suite) for backend in backends]
    runners = _start(architecture, mode, cells, notify)
    if cells[0].error is not None:
        for cell in cells[1:]:
            cell.error = cell.error or "eager failed, so that there is nothing to compare with"
        return cells
    with _watching_load(cells):
        _take_turns(runners, samples, notify)
    for cell in cells:
        if cell.error is None:
            cell.summarise()
    eager = cells[0].median_ms
    for cell in cells:
        if eager is not None and cell.median_ms is not None:
            cell.speedup = eager / cell.median_ms
    return cells
