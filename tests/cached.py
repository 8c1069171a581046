"""What tests of the NEFF cache share: a process that knows nothing, and graphs with their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compile import caching, keys
from neuron_compile.lowering import registry
from neuron_compile.runtime import cache

from .support import neuron


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings that are given once a process are given in each test; nothing is recalled."""
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(caching, "_recalled", set())
    caching._opened.cache_clear()
    registry.forget_refusals()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    registry.forget_refusals()


def compiled(function: Callable[..., Any], folder: Path, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return neuron(function, options={"cache": True, "cache_dir": folder, **options})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[keys.Key]:
    """The keys made in a test."""
    found: list[keys.Key] = []

    def graph_key(*args: Any) -> keys.Key:
        found.append(keys.graph_key(*args))
        return found[-1]

    monkeypatch.setattr(caching, "graph_key", graph_key)
    return found


def base(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + torch.tensor([1.0, 2.0, 3.0])).sum(1)


X = torch.randn(4, 3)


def key_of(
    made: list[keys.Key], folder: Path, function: Any = base, x: torch.Tensor = X, **options: Any
) -> keys.Key:
    compiled(function, folder, **options)(x)
    return made[-1]
