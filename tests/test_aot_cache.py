"""Graphs through PyTorch's AOTAutogradCache: what comes out of it behaves as what went in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import neuron_compile
from neuron_compile import caching

from .support import equal, neuron


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both caches, in folders of this test."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE", "1")
    monkeypatch.setenv("NEURON_COMPILE_CACHE_DIR", str(tmp_path / "neff"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setattr(caching, "_recalled", set())
    caching._opened.cache_clear()
    counters.clear()
    yield
    caching._opened.cache_clear()


def aot() -> tuple[int, int, int]:
    """How often AOTAutogradCache had a graph, had it not, and does not take it."""
    found = counters["aot_autograd"]
    return tuple(found[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass"))  # type: ignore[return-value]


W = torch.randn(4, 4)


class Model(torch.nn.Module):
    """Parameters, a buffer that changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)).relu())


def changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1)
    return y.t()


def in_fallback(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_unpool2d(
        *torch.nn.functional.max_pool2d(x.view(1, 1, *x.shape), 2, return_indices=True), 2
    )


@torch.compiler.nested_compile_region
def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh()


PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "views": (lambda x: (x.t() * 2, x[1:], x @ W), {}),
    "changed": (changes, {}),
    "dynamic": (lambda x: (x @ W).softmax(-1), {"dynamic": True}),
    "data": (lambda x: x.detach()[x.detach() > 0].sum() + x, {}),
    "fallback": (in_fallback, {}),
    "checkpointed": (lambda x: checkpoint(lambda x: (x @ W).tanh(), x, use_reentrant=False), {}),
    "regions": (lambda x: layer(layer(x, W), W * 2), {}),
    "complex": (lambda x: torch.fft.fft(x).abs(), {}),
    "number": (lambda x: (x.sum(), 3, None), {}),
}


def gradient(results: Any, x: torch.Tensor) -> torch.Tensor:
    first = results[0] if isinstance(results, tuple) else results
    (found,) = torch.autograd.grad(first.square().sum(), x)
    return found


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_comes_out_as_it_went_in(name: str) -> None:
    function, options = PROGRAMS[name]
    x = torch.randn(4, 4, requires_grad=True)
    for turn in range(2):
        torch._dynamo.reset()
        counters.clear()
        neuron_compile.reset_report()
        run = neuron(function, **options)
        for _ in range(2):
            wanted, found = function(x), run(x)
            equal(found, wanted)
            equal(gradient(found, x), gradient(wanted, x))
        hit, miss, bypass = aot()
        assert bypass == 0
        assert (hit > 0, miss > 0) == (turn == 1, turn == 0)
    assert neuron_compile.report().compilations == 0
    assert neuron_compile.report().cache_hits > 0


def test_training_goes_on_as_in_eager() -> None:
    template, x = Model(), torch.randn(8, 4)
    for _ in range(2):
        torch._dynamo.reset()
        eager, compiled = copy.deepcopy(template), copy.deepcopy(template)
        run = neuron(compiled)
        for _ in range(3):
            for module, call in ((eager, eager), (compiled, run)):
                module.zero_grad()
                call(x).square().sum().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.sub_(0.01 * parameter.grad)
        for name, tensor in eager.state_dict().items():
            equal(compiled.state_dict()[name], tensor)
    assert aot()[0] == 1


def test_a_backward_may_run_twice() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        torch._dynamo.reset()
        loss = neuron(lambda x: (x @ W).sin().square().sum())(x)
        loss.backward(retain_graph=True)
        loss.backward()
        gradient, x.grad = x.grad, None
        (x @ W).sin().square().sum().backward()
        equal(gradient, 2 * x.grad)
        x.grad = None
    assert aot()[0] == 1


@pytest.mark.parametrize("recomputed", [False, True])
def test_dropout_has_one_mask_in_a_cached_graph(recomputed: bool) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5)

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, x, use_reentrant=False) if recomputed else inner(x)

    for _ in range(2):
        torch._dynamo.reset()
        run = neuron(function)
        x = torch.ones(64, requires_grad=True)
        first, second = run(x), run(x)
        assert not torch.equal(first, second)
        second.sum().backward()
        equal(x.grad, second.detach())
    assert aot()[0] == 1


def test_options_that_change_aot_autograds_graphs_are_in_its_key() -> None:
    x = torch.randn(8)
    for options in ({}, {"eager_rng": True}):
        torch._dynamo.reset()
        neuron(lambda x: torch.rand_like(x) + x, options=options)(x)
    assert aot()[:2] == (0, 2)
    torch._dynamo.reset()
    # Others settle how its graphs are compiled when they come out.
    neuron(lambda x: torch.rand_like(x) + x, options={"vendor_kernels": False})(x)
    assert aot()[:2] == (1, 2)


FACTOR = {"of": 2.0}


@torch.library.custom_op("test_aot_cache::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient * FACTOR["of"])


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("inner", [False, True])
def test_a_gradient_that_the_user_changes_is_not_kept(
    inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's key knows a custom operator by its name alone."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if inner:
            return checkpoint(lambda x: scaled(x).sin(), x, use_reentrant=False)
        return scaled(x).sin()

    x = torch.randn(3, requires_grad=True)
    for factor in (2.0, 3.0):
        torch._dynamo.reset()
        monkeypatch.setitem(FACTOR, "of", factor)
        equal(gradient(neuron(function)(x), x), gradient(function(x), x))
    assert aot() == (0, 0, 0)


def test_what_it_does_not_take_finds_its_executables() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.randn(3)
    for _ in range(2):
        torch._dynamo.reset()
        equal(neuron(function)(x), function(x))
    assert aot()[2] == 2
    assert neuron_compile.report().cache_hits == 1


def test_a_graph_is_let_go_once_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    build = neuron_compile.aot_cache.GraphCode.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(neuron_compile.aot_cache.GraphCode, "__init__", note)
    x = torch.randn(3, requires_grad=True)
    neuron(lambda x: x.sin())(x).sum().backward()
    assert len(made) == 2
    assert all(code._graph is None for code in made)
