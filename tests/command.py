"""Runs a command of the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from neuron_compile.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command, in a pipe: its status, standard output and standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist has it from its terminal

    def run_it(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(item) for item in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_it
