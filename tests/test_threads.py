"""Several threads call one compiled function."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import neuron_compile

from .support import equal, neuron

THREADS = 8


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(0..7)``, each in a thread of its own, all starting together."""
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_threads_on_a_warm_function() -> None:
    compiled = neuron(lambda x, w: (x @ w).tanh().t())
    w = torch.randn(16, 16)
    compiled(torch.randn(4, 16), w)

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(25):
            x = torch.randn(4, 16, generator=generator)
            equal(compiled(x, w), (x @ w).tanh().t())

    at_once(work)
    assert neuron_compile.report().compilations == 1


def test_threads_race_for_the_first_call() -> None:
    compiled = neuron(lambda x: (x.exp() + 1).log())

    def work(number: int) -> None:
        for _ in range(3):
            x = torch.full((5,), float(number))
            equal(compiled(x), (x.exp() + 1).log())

    at_once(work)


def test_threads_race_for_new_sizes() -> None:
    options = {"dynamic_shapes": "specialize"}
    compiled = neuron(lambda x: x.cumsum(0) * 2, dynamic=True, options=options)
    compiled(torch.randn(3))

    def work(number: int) -> None:
        for size in (2 + number % 3, 5, 7 + number % 2):
            x = torch.randn(size)
            equal(compiled(x), x.cumsum(0) * 2)

    at_once(work)
    assert neuron_compile.report().specializations == len({3, 2, 4, 5, 7, 8})


def test_threads_train_copies_of_one_model() -> None:
    models = [nn.Linear(6, 3) for _ in range(THREADS)]
    twins = [copy.deepcopy(model) for model in models]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    compiled = neuron(loss)

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(3):
            x = torch.randn(4, 6, generator=generator)
            compiled(models[number], x).backward()
            loss(twins[number], x).backward()

    at_once(work)
    for model, twin in zip(models, twins, strict=True):
        equal(model.weight.grad, twin.weight.grad, rtol=1e-4, atol=1e-4)


def test_parameters_of_several_models_in_one_executable() -> None:
    compiled = neuron(lambda x, w: x @ w)
    weights = [torch.randn(8, 8) for _ in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(20):
            x = torch.randn(2, 8)
            equal(compiled(x, weights[number]), x @ weights[number])

    at_once(work)


def test_dropout_in_threads_gives_different_masks() -> None:
    compiled = neuron(lambda x: nn.functional.dropout(x, 0.5))
    compiled(torch.ones(500))
    masks = at_once(lambda number: compiled(torch.ones(500)) == 0)
    assert len({tuple(mask.tolist()) for mask in masks}) == THREADS
