"""What every test starts from: a fixed seed, no compiled code, an empty report."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import neuron_compile
from neuron_compile import graph_compiler
from neuron_compile.runtime import Executor

# Tests see what is compiled now, not what an earlier run left; those of the cache give folders.
os.environ.setdefault("NEURON_COMPILE_CACHE", "0")


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """Each test compiles anew and counts from zero."""
    torch._dynamo.reset()
    neuron_compile.reset_report()
    torch.manual_seed(0)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    """The executors made in a test, in the order of their compilation."""
    made: list[Executor] = []

    def make(*args: Any) -> Executor:
        made.append(Executor(*args))
        return made[-1]

    monkeypatch.setattr(graph_compiler, "Executor", make)
    return made
