"""Compilation in the background: eager until it is done, and never a mixture."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuron_compile
from neuron_compile import compile_pool, graph_compiler, records
from neuron_compile.compile_pool import CompilePool

from .support import equal, equal_modules, in_fresh_interpreter, neuron, sharing

BACKGROUND = {"compile_in_background": True}
PATIENCE = 60.0


class Gates:
    """A pool of one thread, with gates between its jobs, which run in their order."""

    def __init__(self, pool: CompilePool) -> None:
        self.pool = pool
        self._shut: list[tuple[threading.Event, threading.Event]] = []
        self.shut()

    def shut(self) -> None:
        """Let what is submitted from now on wait for one more call of ``open``."""
        reached, go = threading.Event(), threading.Event()

        def job() -> None:
            reached.set()
            assert go.wait(PATIENCE)

        self._shut.append((reached, go))
        self.pool.submit(job)

    def open(self) -> None:
        """Let the jobs up to the next gate run, and return when they are done."""
        self._shut.pop(0)[1].set()
        if self._shut:
            assert self._shut[0][0].wait(PATIENCE)
        else:
            assert neuron_compile.wait_for_compilations(PATIENCE)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    made = Gates(CompilePool(1))
    monkeypatch.setattr(compile_pool, "_pools", [made.pool])
    yield made
    while made._shut:
        made.open()


def counts() -> tuple[int, int, int]:
    """Compilations that are done, that wait or run (gates among them), and calls in eager."""
    report = neuron_compile.report()
    return report.compilations, report.in_background, report.eager_calls


def test_eager_until_it_is_compiled(gates: Gates) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(2)
        z = (x @ y.t()).relu()
        return z.t(), z[1:], x.view(-1), y.sum()

    compiled = neuron(function, options=BACKGROUND)

    def call(scale: float) -> None:
        wanted_args = [torch.randn(3, 4) * scale, torch.randn(5, 4)]
        args = copy.deepcopy(wanted_args)
        wanted, actual = function(*wanted_args), compiled(*args)
        equal((actual, args), (wanted, wanted_args))
        assert sharing((actual, args)) == sharing((wanted, wanted_args))

    call(1)
    call(2)
    assert counts() == (0, 2, 2)
    assert not neuron_compile.wait_for_compilations(0.01)
    gates.open()
    assert counts() == (1, 0, 2)
    call(3)
    assert counts() == (1, 0, 2)


class Trained(nn.Module):
    """Buffers that change, a saved mask, and what the backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x))).sigmoid())


def test_a_training_step_switches_half_by_half(gates: Gates) -> None:
    eager = Trained()
    model = copy.deepcopy(eager)
    compiled = neuron(model, options=BACKGROUND)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(5, 6)
        wanted, actual = eager(x), compiled(x)
        equal(actual, wanted)
        return wanted, actual

    def backward(results: tuple[torch.Tensor, torch.Tensor]) -> None:
        for result in results:
            result.square().sum().backward()
        equal_modules(model, eager, 1e-4, 1e-5)

    first, second = forward(), forward()
    gates.shut()
    backward(first)
    assert counts() == (0, 4, 3), "both halves in eager"
    gates.open()
    third = forward()
    backward(third)
    assert counts() == (1, 2, 4), "a compiled forward, a backward in eager"
    gates.open()
    backward(second)
    assert counts() == (2, 0, 4), "a forward in eager, a compiled backward"
    backward(forward())
    assert counts() == (2, 0, 4)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5) * 2, x, use_reentrant=False)


def masks_agree(x: torch.Tensor, result: torch.Tensor) -> None:
    """The gradient of ``dropped`` has the mask of its result."""
    (gradient,) = torch.autograd.grad(result.sum(), x)
    equal(gradient, x.detach().cos() * 4 * result.detach().ne(0))


@pytest.mark.parametrize("eager_rng", [False, True])
def test_numbers_that_are_drawn_again_follow_their_forward(gates: Gates, eager_rng: bool) -> None:
    compiled = neuron(dropped, options={**BACKGROUND, "eager_rng": eager_rng})
    x = (torch.rand(300) + 0.5).requires_grad_()
    early, later = compiled(x), compiled(x)
    gates.shut()
    masks_agree(x, early)  # both in eager
    assert counts()[0] == 0
    gates.open()
    assert counts()[0] == 1
    compiled_forward = compiled(x)
    gates.open()
    assert counts()[:2] == (2, 0)
    masks_agree(x, later)  # a forward in eager, and its backward after both were compiled
    masks_agree(x, compiled_forward)
    masks_agree(x, compiled(x))
    assert counts()[2] == (4 if not eager_rng else 3), "a seed keeps its backward in eager"


def test_a_compiled_forward_waits_for_its_backward() -> None:
    compiled = neuron(dropped, options=BACKGROUND)
    x = (torch.rand(300) + 0.5).requires_grad_()
    compiled(x)
    assert neuron_compile.wait_for_compilations(PATIENCE)
    masks_agree(x, compiled(x))  # its backward was not begun before
    assert counts() == (2, 0, 1)


def test_eager_rng_draws_one_stream_across_the_switch(gates: Gates) -> None:
    """Also where ATen's order differs: a mask drawn in place for a transposed tensor."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.t(), 0.3) * torch.rand_like(x.t())

    compiled = neuron(function, options={**BACKGROUND, "eager_rng": True})
    x = torch.randn(33, 8)

    def stream(function: Any, steps: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [function(x) for _ in range(steps)] + [torch.get_rng_state()]

    equal(stream(compiled, 2), stream(function, 2))
    assert counts()[2] == 2
    gates.open()
    equal(stream(compiled, 2), stream(function, 2))
    assert counts() == (1, 0, 2)


def test_random_numbers_without_checkpointing(gates: Gates) -> None:
    compiled = neuron(lambda x: F.dropout(x, 0.5), options=BACKGROUND)
    x = torch.ones(200, requires_grad=True)
    results = [compiled(x)]
    gates.open()
    results.append(compiled(x))
    for result in results:
        (gradient,) = torch.autograd.grad(result.sum(), x)
        equal(gradient, result.detach())
    assert neuron_compile.wait_for_compilations(PATIENCE)


def test_errors_of_a_call_are_those_of_eager(gates: Gates) -> None:
    table, good, bad = torch.randn(3, 2), torch.tensor([0, 2]), torch.tensor([0, 3])
    compiled = neuron(F.embedding, options=BACKGROUND)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range"):
            compiled(bad, table)
        equal(compiled(good, table), F.embedding(good, table))
        if gates._shut:
            gates.open()
    assert counts() == (1, 0, 2)


def unsupported(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.tests_background.odd(x.sin()) + 1


@pytest.fixture(scope="module", autouse=True)
def odd() -> Iterator[None]:
    """An operator without a lowering."""
    with torch.library._scoped_library("tests_background", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x * 3, "CompositeExplicitAutograd")
        yield


def test_strict_mode_raises_at_the_next_call(gates: Gates) -> None:
    compiled = neuron(unsupported, options={**BACKGROUND, "fullgraph_on_device": True})
    x = torch.randn(3)
    equal(compiled(x), unsupported(x))
    gates.open()
    for _ in range(2):
        with pytest.raises(neuron_compile.UnsupportedError, match="odd"):
            compiled(x)


def test_a_fallback_is_told_where_the_code_is_called(gates: Gates) -> None:
    compiled = neuron(unsupported, options=BACKGROUND)
    x = torch.randn(3)
    equal(compiled(x), unsupported(x))
    gates.open()
    with pytest.warns(neuron_compile.FallbackWarning, match="odd"):
        equal(compiled(x), unsupported(x))
    equal(compiled(x), unsupported(x))  # once
    assert counts()[0] == 2


def test_what_a_thread_raises_is_raised_by_calls(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(graph_compiler, "lower", broken)
    compiled = neuron(lambda x: x * 2, options=BACKGROUND)
    equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    gates.open()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            compiled(torch.ones(2))


def test_sizes_are_compiled_once_each(gates: Gates) -> None:
    compiled = neuron(
        lambda x: x.cumsum(0) * 2, dynamic=True, options={**BACKGROUND, "max_specializations": 2}
    )
    for size in (3, 4, 3, 4, 3):
        x = torch.randn(size)
        equal(compiled(x), x.cumsum(0) * 2)
    assert counts() == (0, 3, 5), "a gate and two jobs"
    for size in (5, 6):  # the older ones are dropped
        equal(compiled(torch.ones(size)), torch.ones(size).cumsum(0) * 2)
    gc.collect()
    assert counts()[1] == 3, "what nobody waits for is cancelled"
    gates.open()
    assert counts() == (2, 0, 7)
    for size in (5, 6):
        equal(compiled(torch.ones(size)), torch.ones(size).cumsum(0) * 2)
    assert counts() == (2, 0, 7)


def test_padded_sizes(gates: Gates) -> None:
    options = {**BACKGROUND, "dynamic_shapes": "bucket"}
    compiled = neuron(lambda x: (x.softmax(0) * x).sum(), dynamic=True, options=options)
    for _ in range(2):
        for size in (17, 20, 31):
            x = torch.randn(size)
            equal(compiled(x), (x.softmax(0) * x).sum())
        if gates._shut:
            gates.open()
    report = neuron_compile.report()
    assert (report.padded, report.compilations, report.eager_calls) == (1, 1, 3)


def test_sizes_that_depend_on_data_are_compiled_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].exp() + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = neuron(function, options=BACKGROUND)
        x = torch.tensor([1.0, -1.0, 2.0])
        with (
            caplog.at_level(logging.INFO, "neuron_compile"),
            pytest.warns(neuron_compile.FallbackWarning),
        ):
            equal(compiled(x), function(x))
        assert "depend on data" in caplog.text
        assert neuron_compile.wait_for_compilations(PATIENCE)
        equal(compiled(x), function(x))


def test_graphs_with_regions(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compiled = neuron(function, options=BACKGROUND)
    for x in (torch.ones(3), -torch.ones(3)):
        equal(compiled(x), function(x))
    # torch's tracer must not run in the pool's threads: it is one for the process.
    with monkeypatch.context() as patched:
        patched.setattr("neuron_compile.higher_order.retraced", None)
        gates.open()
    for x in (torch.ones(3), -torch.ones(3)):
        equal(compiled(x), function(x))
    assert counts() == (1, 0, 2)
    assert neuron_compile.report().operators_in_fallback == 0


def test_graphs_wait_at_their_first_call(gates: Gates) -> None:
    """``compile_in_parallel``: the backward compiles beside the forward; nothing runs in eager."""
    eager = Trained()
    model = copy.deepcopy(eager)
    compiled = neuron(model, options={"compile_in_parallel": True})
    opener = threading.Thread(target=lambda: (waiting.wait(PATIENCE), gates.open()))
    waiting = threading.Event()
    opener.start()
    submit = gates.pool.submit

    def noted(job: Any) -> Any:
        future = submit(job)
        if gates.pool.pending() == 3:  # the gate and both graphs, before the forward has run
            waiting.set()
        return future

    gates.pool.submit = noted  # type: ignore[method-assign]
    x = torch.randn(5, 6)
    result, wanted = compiled(x), eager(x)
    opener.join()
    equal(result, wanted)
    assert counts() == (2, 0, 0)
    for each in (result, wanted):
        each.square().sum().backward(retain_graph=True)
        each.square().sum().backward()
    equal_modules(model, eager, 1e-4, 1e-5)
    assert counts() == (2, 0, 0)


def test_parallel_compilation_raises_and_warns_at_the_first_call() -> None:
    x = torch.randn(3)
    strict = neuron(unsupported, options={"compile_in_parallel": True, "fullgraph_on_device": True})
    with pytest.raises(neuron_compile.UnsupportedError, match="odd"):
        strict(x)
    compiled = neuron(unsupported, options={"compile_in_parallel": True})
    with pytest.warns(neuron_compile.FallbackWarning, match="odd"):
        equal(compiled(x), unsupported(x))


def test_explain_compiles_in_the_foreground(monkeypatch: pytest.MonkeyPatch, gates: Gates) -> None:
    monkeypatch.setenv("NEURON_COMPILE_COMPILE_IN_BACKGROUND", "1")
    neuron(lambda x: x.exp() * 2)(torch.ones(2))
    with records.collecting() as collected:
        explanation = neuron_compile.explain(lambda x: x.sin(), torch.ones(2))
        gates.open()
    assert explanation.operators_on_device == 1
    assert len(collected) == 1, "not what the thread compiled meanwhile"


def test_threads_switch_together() -> None:
    compiled = neuron(lambda x: (x.exp() + 1).log(), options=BACKGROUND)
    start = threading.Barrier(4)
    failed: list[Exception] = []

    def work(number: int) -> None:
        start.wait()
        x = torch.full((5,), float(number))
        wanted = (x.exp() + 1).log()
        try:
            while counts()[0] == 0 or counts()[1] > 0:
                equal(compiled(x), wanted)
            equal(compiled(x), wanted)
        except Exception as error:  # noqa: BLE001 - for the thread that asserts
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_many_graphs_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering, Torch-MLIR and XLA in several threads: values are eager's."""
    monkeypatch.setattr(compile_pool, "_pools", [CompilePool(4)])
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: (x @ x.t()).softmax(-1),
        lambda x: F.layer_norm(x, (6,)).cumsum(0),
        lambda x: torch.remainder(x, 0.7).sum(1),
        lambda x: F.gelu(x).flip(0).t(),
        lambda x: x.sort(dim=1)[0] * 2,
        lambda x: torch.linalg.inv(x @ x.t() + 6 * torch.eye(6)),
    ]
    x = torch.randn(6, 6)
    compiled = [neuron(function, options=BACKGROUND) for function in functions]
    for _ in range(2):
        for mine, function in zip(compiled, functions, strict=True):
            equal(mine(x), function(x), 1e-4, 1e-4)
        assert neuron_compile.wait_for_compilations(PATIENCE)
    assert neuron_compile.report().compilations == len(functions)


# What an interpreter does with a compilation that takes long: each script has such a one.
SLOW = """
import os, signal, sys, threading, time
import torch
import neuron_compile
from neuron_compile import compile_pool, graph_compiler, records

# A shell's jobs in the background ignore it, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
began, go = threading.Event(), threading.Event()
compile_stablehlo = graph_compiler.compile_stablehlo

def slowly(*args):
    began.set()
    go.wait({seconds})
    return compile_stablehlo(*args)

graph_compiler.compile_stablehlo = slowly
compiled = torch.compile(
    lambda x: x.sin() + 1, backend="neuron", options={{"compile_in_background": True}}
)
x = torch.ones(3)
assert torch.equal(compiled(x), x.sin() + 1)
assert began.wait(60)
"""


def test_interrupt_while_waiting() -> None:
    script = SLOW.format(seconds=60) + (
        """
queued = compile_pool.pool().submit(lambda: 1)  # a second job, for another thread of the pool
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    neuron_compile.wait_for_compilations()
except KeyboardInterrupt:
    print("interrupted")
assert torch.equal(compiled(x), x.sin() + 1)
go.set()
assert neuron_compile.wait_for_compilations(60)
assert torch.allclose(compiled(x), x.sin() + 1)
assert neuron_compile.report().compilations == 1, neuron_compile.report()
print(neuron_compile.report().eager_calls)
"""
    )
    finished = in_fresh_interpreter(script)
    assert finished.stdout.split() == ["interrupted", "2"], finished.stderr
    assert finished.stderr == ""


@pytest.mark.slow
def test_an_exit_waits_for_what_runs_alone() -> None:
    script = SLOW.format(seconds=0.5) + (
        """
pool = compile_pool.pool()
for _ in range(pool.limit):
    pool.submit(go.wait)  # fill the other threads; these and what runs are waited for
late = pool.submit(lambda: print("ran"))
late.add_done_callback(lambda future: print("cancelled", future.cancelled()))
threading.Timer(1.0, go.set).start()
"""
    )
    finished = in_fresh_interpreter(script, {compile_pool.ENVIRONMENT: "1"})
    assert finished.stdout.split() == ["cancelled", "True"], finished.stdout
    assert finished.stderr == ""


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    script = SLOW.format(seconds=60) + (
        """
import warnings
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
child = os.fork()
if child == 0:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neuron_compile.FallbackWarning)
        assert torch.equal(compiled(x), x.sin() + 1)
    assert neuron_compile.wait_for_compilations(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
go.set()
"""
    )
    assert in_fresh_interpreter(script).stderr == ""


def test_a_wrong_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_pools", [])
    monkeypatch.setenv(compile_pool.ENVIRONMENT, "none")
    with pytest.raises(neuron_compile.SettingsError, match="at least 1"):
        compile_pool.pool()
