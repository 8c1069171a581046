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
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import Architecture, Inputs
from benchmarks.record import REFERENCE, Cell

SETTLE_CALLS = 2
SAMPLES_PER_VISIT = 3
LEARNING_RATE = 1e-4
WEIGHT_SEED = 0
# A ReLU input that is zero but for rounding may pass in one correct backend and not in another,
# which can change a resnet18 gradient by several percent: for 40 % of the input seeds, eager's own
# float32 differs in that way from float64. Of the seeds below 60, this one keeps all ReLU inputs of
# the residual blocks farthest from zero: by 3.4 times their root mean square rounding error.
INPUT_SEED = 54

Notify = Callable[[str], None]


# --------------------------------------------------------------------------------- correctness


@dataclass(frozen=True)
class Observation:
    """What the first call left behind, in copies: output, gradients and float buffers."""

    output: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _observe(module: nn.Module, output: Tensor, mode: str) -> Observation:
    if mode == "inference":
        return Observation({"output": output.clone()}, {}, {})
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    buffers = {
        name: buffer.clone()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }
    return Observation({"output": output.clone()}, gradients, buffers)


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
        error = (got - wanted).abs().max().item() / scale
        if not math.isfinite(error):
            raise FloatingPointError(f"{name} is not finite")
        worst = max(worst, error)
    return worst


def relative_errors(actual: Observation, expected: Observation) -> dict[str, float]:
    """``max_relative_error`` for each kind of tensor that the mode yields."""
    errors = {"output": max_relative_error(actual.output, expected.output)}
    if expected.gradients:
        errors["gradients"] = max_relative_error(actual.gradients, expected.gradients)
    if expected.buffers:
        errors["buffers"] = max_relative_error(actual.buffers, expected.buffers)
    return errors


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


# ------------------------------------------------------------------------------------- backends

CACHE_DIR = "NEURON_COMPILE_CACHE_DIR"


@contextlib.contextmanager
def _fresh_caches(backend: str) -> Iterator[None]:
    """Keeps a first call from profiting from what an earlier compilation left behind.

    ``torch._dynamo.reset`` is not called here, since it would also drop the compiled code of the
    backends that are about to be timed; ``measure`` calls it between groups of backends.
    """
    FakeTensorMode.cache_clear()
    if backend not in ("inductor", "neuron"):
        yield
        return
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    if backend == "neuron":  # its caches are written, into empty folders
        with tempfile.TemporaryDirectory() as folder, fresh_cache():
            before = os.environ.get(CACHE_DIR)
            os.environ[CACHE_DIR] = folder
            try:
                yield
            finally:
                os.environ.pop(CACHE_DIR)
                if before is not None:
                    os.environ[CACHE_DIR] = before
        return
    # Disabling the caches leaves that of compiled C++ kernels, hence the fresh directory too.
    with config.patch(force_disable_caches=True), fresh_cache():
        yield


def warm_up(backend: str) -> None:
    """Compiles a trivial training step, so that first calls do not count one-time costs.

    Such costs are a backend's imports, its thread pools and Inductor's precompiled headers.
    A backend that fails here fails again, and is then recorded, when it meets a model.
    """
    if backend == REFERENCE:
        return
    model = nn.Linear(64, 64)
    with contextlib.suppress(Exception), _fresh_caches(backend):
        torch.compile(model, backend=backend)(torch.ones(64, 64)).relu().sum().backward()
    torch._dynamo.reset()


def _call(architecture: Architecture, mode: str, module: nn.Module, backend: str) -> Any:
    """A function without arguments that runs the model once and returns its output."""
    inputs: Inputs = architecture.inputs(INPUT_SEED)
    module.train(mode == "training")
    run: Callable[..., Tensor] = module
    if backend != REFERENCE:
        run = torch.compile(module, backend=backend)

    def inference() -> Tensor:
        with torch.no_grad():
            return run(**inputs)

    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def training() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        output = run(**inputs)
        architecture.loss(output, inputs).backward()
        optimizer.step()
        return output.detach()

    return inference if mode == "inference" else training


# --------------------------------------------------------------------------------- measurement


@dataclass
class Runner:
    """A backend's callable on its own copy of a model, and the cell being filled."""

    call: Callable[[], Tensor]
    cell: Cell
    observation: Observation = field(repr=False)


def _first_call(
    architecture: Architecture, mode: str, template: nn.Module, cell: Cell
) -> tuple[Callable[[], Tensor], Observation]:
    """Compiles and calls for the first time; records seconds and counts in the cell."""
    module = copy.deepcopy(template)
    operators = _reported_operators() if cell.backend == "neuron" else None
    graphs, breaks = _graphs_and_breaks()
    with _fresh_caches(cell.backend):
        start = time.perf_counter()
        call = _call(architecture, mode, module, cell.backend)
        output = call()
        cell.first_call_s = time.perf_counter() - start
    graphs_after, breaks_after = _graphs_and_breaks()
    cell.graphs, cell.graph_breaks = graphs_after - graphs, breaks_after - breaks
    operators_after = _reported_operators()
    if operators is not None and operators_after is not None:
        cell.operators_on_device = operators_after[0] - operators[0]
        cell.operators_in_fallback = operators_after[1] - operators[1]
    return call, _observe(module, output, mode)


def _visit(runner: Runner, samples: int) -> None:
    """Settles the thread pools and appends timed calls, in milliseconds."""
    graphs, _ = _graphs_and_breaks()
    for _ in range(SETTLE_CALLS):
        runner.call()
    for _ in range(min(SAMPLES_PER_VISIT, samples - len(runner.cell.samples_ms))):
        start = time.perf_counter()
        runner.call()
        runner.cell.samples_ms.append(1e3 * (time.perf_counter() - start))
    runner.cell.recompilations += _graphs_and_breaks()[0] - graphs


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
            call, observation = _first_call(architecture, mode, template, cell)
            reference = runners[0].observation if runners else observation
            cell.errors = relative_errors(observation, reference)
            runners.append(Runner(call, cell, observation))
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
    architecture: Architecture, mode: str, backends: list[str], samples: int, notify: Notify
) -> list[Cell]:
    """Measures all backends on one model in one mode; ``backends[0]`` must be eager."""
    if backends[0] != REFERENCE:
        raise ValueError(f"the first backend must be {REFERENCE}")
    torch._dynamo.reset()
    cells = [Cell(architecture.name, mode, backend) for backend in backends]
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
