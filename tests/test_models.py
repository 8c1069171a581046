"""The benchmarked architectures, small: inference and a training step against eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

import neuron_compile
from benchmarks.models import Architecture, architectures

from .support import IGNORE_TORCH, neuron

pytest.importorskip("transformers")

SMALL = architectures(small=True)


def close(actual: torch.Tensor, wanted: torch.Tensor, relative: float, scale: float) -> None:
    """Assert that no element is further off than ``relative`` of ``scale``."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    assert (actual - wanted).abs().max() <= relative * max(scale, 1e-12)


@pytest.fixture(params=SMALL)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    """Each of the architectures."""
    return SMALL[request.param]


def test_inference(architecture: Architecture) -> None:
    model = architecture.build(0).eval()
    compiled = neuron(model)
    with torch.no_grad():
        for seed in range(3):
            inputs = architecture.inputs(seed)
            wanted = model(**inputs)
            close(compiled(**inputs), wanted, 1e-4, wanted.abs().max().item())
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0, str(report)
    assert report.compilations == 1


@IGNORE_TORCH
def test_training(architecture: Architecture) -> None:
    model = architecture.build(0)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    for seed in range(2):
        inputs = architecture.inputs(seed)
        losses = []
        for module, call in ((model, compiled), (eager, eager)):
            module.zero_grad()
            output = call(**inputs)
            loss = architecture.loss(output, inputs)
            loss.backward()
            losses.append((output.detach(), loss.detach()))
        (output, loss), (wanted_output, wanted_loss) = losses
        close(output, wanted_output, 1e-4, wanted_output.abs().max().item())
        close(loss, wanted_loss, 1e-4, wanted_loss.abs().item())
        gradients(model, eager)
        for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0, str(report)
    assert report.compilations == 2


def gradients(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    """Compare all gradients on the scale of the model's largest."""
    wanted = dict(eager.named_parameters())
    largest = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            close(parameter.grad, wanted[name].grad, 1e-3, largest)


@pytest.mark.parametrize("name", ["mlp", "resnet18", "bert"])
def test_several_steps_of_training(name: str) -> None:
    architecture = SMALL[name]
    models = [architecture.build(0), architecture.build(0)]
    calls = [neuron(models[0]), models[1]]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in models]
    losses: list[list[float]] = [[], []]
    for step in range(5):
        inputs = architecture.inputs(step)
        for number, (call, optimizer) in enumerate(zip(calls, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = architecture.loss(call(**inputs), inputs)
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert neuron_compile.report().compilations == 2


def test_inference_in_half_precision() -> None:
    architecture = SMALL["bert"]
    model = architecture.build(0).eval().to(torch.bfloat16)
    compiled = neuron(model)
    inputs = architecture.inputs(0)
    with torch.inference_mode():
        wanted = model(**inputs)
        close(compiled(**inputs), wanted, 5e-2, wanted.abs().max().item())
    assert neuron_compile.report().operators_in_fallback == 0


def test_dynamic_batches() -> None:
    architecture = SMALL["bert"]
    model = architecture.build(0).eval()
    compiled = neuron(model, dynamic=True)
    inputs = architecture.inputs(0)
    with torch.no_grad():
        for batch, length in ((2, 16), (2, 9)):
            cut = {name: value[:batch, :length] for name, value in inputs.items()}
            wanted = model(**cut)
            close(compiled(**cut), wanted, 1e-4, wanted.abs().max().item())
    assert neuron_compile.report().operators_in_fallback == 0
