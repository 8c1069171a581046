"""Compilers in worker processes: what they give is the same, and their deaths are refusals."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import neuron_compile
from neuron_compile import isolation
from neuron_compile.graph_pickle import graph_from_bytes, graph_to_bytes
from neuron_compile.lowering.region import Region
from neuron_compile.lowering.registry import forget_refusals, lasting_refusals

from . import crashing
from .support import check, equal, neuron

ISOLATED = {"isolate_compiler": True}
STRICT = {"fullgraph_on_device": True}


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Workers for this module, which start in an environment without a trap."""
    made = isolation._Workers(2)
    kept, isolation._made[:] = list(isolation._made), [made]
    yield
    made.close()
    isolation._made[:] = kept


@pytest.fixture(autouse=True)
def none_refused() -> Iterator[None]:
    yield
    forget_refusals()


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it a failure to lower or compile in this process."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("lowered in this process")

    monkeypatch.setattr("neuron_compile.graph_compiler.lower", refuse)
    monkeypatch.setattr("neuron_compile.graph_compiler.compile_stablehlo", refuse)


def test_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU(), torch.nn.Flatten()
    )
    check(model, torch.randn(3, 2, 6, 6), backward=True, atol=1e-4, options=ISOLATED)
    report = neuron_compile.report()
    assert (report.compilations, report.operators_in_fallback) == (2, 0)
    seconds = report.graphs[0].seconds
    assert {"torch_mlir", "xla", "load"} <= seconds.keys()


def test_checks_regions_seeds_and_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    table = torch.randn(3, 2)
    look_up = neuron(F.embedding, options=ISOLATED)
    with pytest.raises(IndexError, match=r"out of range.*aten\.embedding"):
        look_up(torch.tensor([3]), table)
    table_of_bytes = torch.arange(3).to(torch.uint16)

    def function(x: torch.Tensor) -> Any:
        branch = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return branch.t(), x.flip(0)[1:], table_of_bytes.view(torch.int16) + 1

    check(function, torch.randn(3, 4), options=ISOLATED)
    dropped = neuron(lambda x: F.dropout(x, 0.5), options=ISOLATED)(torch.ones(200))
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_a_death_in_lowering_is_a_refusal() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return crashing.plain(crashing.abort(x.sin()) + 1).exp()

    compiled = neuron(function, options=ISOLATED)
    x = torch.randn(4)
    with pytest.warns(
        neuron_compile.FallbackWarning, match=r"abort.*compiler crashed in lowering \(SIGABRT\)"
    ):
        equal(compiled(x), function(x))
    report = neuron_compile.report()
    assert (report.operators_in_fallback, report.refusals) == (1, 1)
    assert list(report.fallback_reasons) == ["tests_crashing.abort.default"]
    # It is remembered: another graph does not kill a worker again.
    again = neuron(lambda x: crashing.abort(x) * 5, options=ISOLATED)
    equal(again(x), x * 10)
    assert neuron_compile.report().refusals == 1
    strict = neuron(lambda x: crashing.abort(x) - 5, options={**ISOLATED, **STRICT})
    with pytest.raises(Exception, match=r"fullgraph_on_device.*\n.*abort.*compiler crashed"):
        strict(x)


@pytest.mark.slow
def test_a_death_in_xla_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(crashing.XLA_DIES_OF, "stablehlo.cosine")
    made = isolation._Workers(1)
    monkeypatch.setattr(isolation, "_made", [made])

    def function(x: torch.Tensor) -> torch.Tensor:
        return crashing.plain(x.sin()).cos() + 1

    # A worker falls into the trap once it has imported ``crashing``, for ``plain``.
    compiled = neuron(function, options=ISOLATED)
    x = torch.randn(4)
    with pytest.warns(neuron_compile.FallbackWarning, match=r"compiler crashed in XLA \(SIGABRT\)"):
        equal(compiled(x), function(x))
    made.close()
    assert lasting_refusals() == {}, "other processes may have more luck"


def test_a_lowering_that_a_worker_cannot_import(caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("tests_isolation::local", mutates_args=())
    def local(x: torch.Tensor) -> torch.Tensor:
        return x * 7

    local.register_fake(torch.empty_like)
    neuron_compile.register_lowering(local)(lambda ctx, x: x * 7)
    compiled = neuron(lambda x: local(x) + 1, options=ISOLATED)
    with caplog.at_level(logging.WARNING, "neuron_compile"):
        equal(compiled(torch.ones(2)), torch.full((2,), 8.0))
    assert "compiled in this process" in caplog.text and "local" in caplog.text
    assert neuron_compile.report().operators_in_fallback == 0


def test_a_worker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_made", [isolation._Workers(1)])
    monkeypatch.setattr(isolation, "_MAIN", "raise SystemExit('no such thing {}')")
    with pytest.raises(Exception, match=r"does not start.*no such thing"):
        neuron(lambda x: x + 1, options=ISOLATED)(torch.ones(2))


# Of JAX's, where another test has used it in this process, and of Python's.
@pytest.mark.filterwarnings("ignore:.*os.fork.. was called", "ignore:.*multi-threaded, use of fork")
def test_a_forked_child_leaves_workers_alone() -> None:
    workers = isolation._Workers(1)
    workers._idle.append(object())  # type: ignore[arg-type]  # it cannot be closed
    child = os.fork()
    if child == 0:
        workers.close()
        os._exit(len(workers._idle))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(workers._idle) == 1
    workers._idle.clear()


def test_a_worker_whose_answer_was_not_waited_for_is_not_asked_again() -> None:
    class Interrupted:
        closed = False

        def ask(self, request: bytes) -> Any:
            raise KeyboardInterrupt

        def close(self) -> None:
            self.closed = True

    workers, worker = isolation._Workers(1), Interrupted()
    workers._idle.append(worker)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        workers.ask(b"")
    assert worker.closed and not workers._idle


def test_a_graph_as_bytes() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> Any:
        parts = x.t()[1:].split([1, 2])
        return parts[1].to(torch.float64), torch.full((2,), float("-inf"), dtype=torch.float16)

    module = make_fx(function, tracing_mode="fake")(torch.randn(3, 4))
    copy = graph_from_bytes(graph_to_bytes(module))
    for mine, theirs in zip(copy.graph.nodes, module.graph.nodes, strict=True):
        assert (mine.op, mine.name) == (theirs.op, theirs.name)
        assert str((mine.target, mine.args, mine.kwargs)) == str(
            (theirs.target, theirs.args, theirs.kwargs)
        )
        if theirs.op != "output":
            assert _described(mine.meta["val"]) == _described(theirs.meta["val"])
    x = torch.randn(3, 4)
    equal(copy(x), function(x))


def _described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)


def test_a_region_as_bytes() -> None:
    inner = fx.symbolic_trace(lambda x: x + torch.ones(2))
    for node in inner.graph.nodes:
        node.meta["val"] = torch.empty(2, device="meta")
    found = Region(torch.ops.higher_order.cond, (inner, inner))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    graph.output((graph.call_function(found, (x, "graph:0")),))
    copy = graph_from_bytes(graph_to_bytes(fx.GraphModule(torch.nn.Module(), graph)))
    (node,) = (node for node in copy.graph.nodes if node.op == "call_function")
    assert node.target.op is found.op
    assert node.target.key == found.key
