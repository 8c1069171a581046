"""Training loops as they are written: eager's values, and nothing compiled once warm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import swa_utils

import neuron_compile

from .support import IGNORE_TORCH, equal, equal_modules, in_fresh_interpreter, neuron

pytestmark = IGNORE_TORCH

Compile = Callable[..., Any]
#: Makes a training step of a model; ``compile_`` compiles a function, or leaves it as it is.
MakeStep = Callable[[nn.Module, Compile], Callable[[torch.Tensor], Any]]
STEPS = 5


def compare(make: MakeStep, warm: int = 1, steps: int = STEPS) -> list[int]:
    """Run a loop in eager and compiled, and compare results and the model after every step.

    ``warm`` is the last step that may compile. Returns how much was compiled by the end of each.
    """
    counters.clear()
    eager = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    mine = copy.deepcopy(eager)
    run_mine, run_eager = make(mine, neuron), make(eager, lambda function, **_: function)
    compiled = []
    for _ in range(steps):
        x = torch.randn(6, 4)
        equal(run_mine(x), run_eager(x), 1e-4, 1e-5)
        equal_modules(mine, eager, 1e-4, 1e-5)
        compiled.append(neuron_compile.report().compilations)
    assert compiled[warm - 1 :] == compiled[warm - 1 : warm] * (steps - warm + 1)
    assert compiled[-1] > 0
    assert neuron_compile.report().operators_in_fallback == 0
    return compiled


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# ---------------------------------------------------------------------------- around the backward


def test_gradient_accumulation() -> None:
    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        call, update = compile_(model), compile_(optimizer.step)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            for part in x.chunk(3):
                (loss_of(call, part) / 3).backward()
            update()

        return step

    compare(make)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
@pytest.mark.parametrize("kind", ["norm", "infinite-norm", "value"])
def test_clipping(kind: str, foreach: bool) -> None:
    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def clip() -> Any:
            if kind == "value":
                return clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
            order = 2.0 if kind == "norm" else float("inf")
            return clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)

        compiled = compile_(clip, fullgraph=True)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            norm = compiled()
            optimizer.step()
            return norm

        return step

    assert compare(make)[-1] == 1


def test_clipping_and_updating_in_one_function() -> None:
    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def update() -> torch.Tensor:
            norm = clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return norm

        compiled = compile_(update)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            return compiled()

        return step

    compare(make)


# ------------------------------------------------------------------------------ moving averages


def averaged(average: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in average.parameters()]


@pytest.mark.parametrize("kind", ["ema", pytest.param("swa", marks=pytest.mark.slow)])
def test_an_averaged_model(kind: str) -> None:
    """PyTorch's own ends the graph at the number of averaged models; the first update copies."""
    functions = {
        "ema": swa_utils.get_ema_multi_avg_fn(0.9),
        "swa": swa_utils.get_swa_multi_avg_fn(),
    }

    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = swa_utils.AveragedModel(model, multi_avg_fn=functions[kind])
        update = compile_(average.update_parameters)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            update(model)
            return averaged(average), average.n_averaged

        return step

    compare(make, warm=3)


def test_a_moving_average_by_hand() -> None:
    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = copy.deepcopy(model)

        @torch.no_grad()
        def update() -> None:
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

        compiled = compile_(update, fullgraph=True)

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            compiled()
            return averaged(average)

        return step

    assert compare(make)[-1] == 1


def test_the_number_of_the_step() -> None:
    """Warm-up, Adam's correction and the decay of an average, all made of one Python integer."""

    def make(model: nn.Module, compile_: Compile) -> Any:
        parameters = list(model.parameters())
        first, second, average = (
            [torch.zeros_like(parameter) for parameter in parameters] for _ in range(3)
        )
        number = 0

        @torch.no_grad()
        def update(number: int) -> None:
            rate = 0.01 * min(1.0, number / 5)
            decay = min(0.99, (1 + number) / (10 + number))
            rows = zip(parameters, first, second, average, strict=True)
            for parameter, mean, square, smooth in rows:
                mean.lerp_(parameter.grad, 0.1)
                square.mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                root = (square / (1 - 0.99**number)).sqrt() + 1e-8
                parameter.addcdiv_(mean / (1 - 0.9**number), root, value=-rate)
                smooth.lerp_(parameter, 1 - decay)

        compiled = compile_(update, fullgraph=True)

        def step(x: torch.Tensor) -> Any:
            nonlocal number
            number += 1
            model.zero_grad()
            loss_of(model, x).backward()
            compiled(number)
            return average

        return step

    assert compare(make, warm=2)[-1] == 2
    assert neuron_compile.report().specializations == 0


# ---------------------------------------------------------------------------- compiled autograd


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_compiled_autograd(optimizer: str) -> None:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    }

    def make(model: nn.Module, compile_: Compile) -> Any:
        chosen = makers[optimizer](model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            chosen.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            chosen.step()
            return loss.detach()

        return compile_(step)

    with torch._dynamo.config.patch(compiled_autograd=True):
        compare(make, warm=2)
    assert counters["compiled_autograd"]["captures"] == 1


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_autograd_of_a_region(dynamic: bool) -> None:
    """A backward of several compiled calls and eager operators between them becomes one graph."""

    def make(model: nn.Module, compile_: Compile) -> Any:
        first, last = compile_(model[0]), compile_(model[2])

        def step(x: torch.Tensor) -> None:
            model.zero_grad()
            last(first(x).tanh()).square().mean().backward()

        if compile_ is not neuron:
            return step

        def compiled_step(x: torch.Tensor) -> None:
            backend = torch.compile(backend="neuron")
            with torch._dynamo.compiled_autograd._enable(backend, dynamic=dynamic):
                step(x)

        return compiled_step

    compare(make, warm=2)
    assert counters["compiled_autograd"]["captures"] == 1


# ------------------------------------------------------------- forward, backward and update at once


def test_a_step_of_functions() -> None:
    """``torch.func``: gradients and update are one graph."""

    def make(model: nn.Module, compile_: Compile) -> Any:
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        def update(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
            gradients, value = torch.func.grad_and_value(loss)(parameters, x)
            return {n: p - 0.1 * gradients[n] for n, p in parameters.items()}, value

        compiled = compile_(update, fullgraph=True)

        def step(x: torch.Tensor) -> Any:
            nonlocal parameters
            parameters, value = compiled(parameters, x)
            return parameters, value

        return step

    assert compare(make)[-1] == 1


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_a_whole_step_in_one_graph(how: str) -> None:
    """Dynamo follows autograd where it is told to; the update is written out.

    Around ``torch.optim``'s own step PyTorch ends the graph.
    """

    def make(model: nn.Module, compile_: Compile) -> Any:
        parameters = list(model.parameters())
        momenta = [torch.zeros_like(parameter) for parameter in parameters]

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, x)
            if how == "grad":
                gradients = torch.autograd.grad(loss, parameters)
            else:
                loss.backward()
                gradients = tuple(parameter.grad for parameter in parameters)
            with torch.no_grad():
                for parameter, momentum, gradient in zip(
                    parameters, momenta, gradients, strict=True
                ):
                    momentum.mul_(0.9).add_(gradient)
                    parameter.add_(momentum, alpha=-0.1)
                    parameter.grad = None
            return loss.detach()

        return compile_(step, fullgraph=True)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert compare(make)[-1] == 1
    assert neuron_compile.report().graphs[0].kind == "inference"


@pytest.mark.parametrize("follow", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_whole_step_with_an_optimizer(follow: bool) -> None:
    def make(model: nn.Module, compile_: Compile) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return compile_(step)

    with torch._dynamo.config.patch(trace_autograd_ops=follow):
        assert compare(make, warm=2)[-1] <= 4


# ------------------------------------------------------------------------------------ long loops


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("index", [0, 1], ids=["digits", "gpt"])
def test_loss_curves(index: int, autocast: bool) -> None:
    """The benchmark's study in short: dropout, checkpointing, a compiled AdamW."""
    training = pytest.importorskip("benchmarks.training", reason="needs the demo's packages")
    task = training.TASKS[index]
    settings = {"autocast": autocast, "random": True, "steps": 100}
    eager = [training.train(task, seed, None, **settings) for seed in range(4)]
    mine = [training.train(task, seed, "neuron", **settings) for seed in range(2)]
    verdict = training.judge(training.Curves(task.name, autocast, eager, mine))
    # Of a few windows, the worst of 3 deviations by chance is rare; a wrong gradient is far off.
    assert verdict.deviation < 4, verdict
    assert verdict.last_compiled < 0.8 * mine[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1], ids=["digits", "gpt"])
def test_losses_step_by_step(index: int) -> None:
    training = pytest.importorskip("benchmarks.training", reason="needs the demo's packages")
    task = training.TASKS[index]
    mine, eager = (training.train(task, 0, backend, steps=30) for backend in ("neuron", None))
    torch.testing.assert_close(mine[:10], eager[:10], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, eager, rtol=5e-2, atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["training", "inference"])
def test_memory_is_flat(loop: str) -> None:
    """Resident memory, in a process of its own, within 2 % after the 200th step."""
    root = Path(__file__).parents[1]
    result = in_fresh_interpreter(
        f"""
        import sys
        import warnings
        warnings.filterwarnings("ignore", message=".*script_method. is deprecated")
        sys.path.insert(0, {str(root)!r})
        from benchmarks import memory
        print(memory.measure({loop!r}, 500, "neuron")["change"])
        """
    )
    assert float(result.stdout.splitlines()[-1]) < 0.02
