"""What every test starts from: a fixed seed, no compiled code, an empty report."""

from __future__ import annotations

import pytest
import torch

import neuron_compile


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """Each test compiles anew and counts from zero."""
    torch._dynamo.reset()
    neuron_compile.reset_report()
    torch.manual_seed(0)
