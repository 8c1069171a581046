"""Targets: what a PJRT platform does to a portable module before XLA compiles it."""

from __future__ import annotations

from typing import Any, Protocol

from ..types import CompilerOptions
from . import cpu


class Target(Protocol):
    """A target prepares a module in place and names the XLA options that its results need."""

    def prepare(self, module: Any, options: CompilerOptions) -> int:
        """Replace composites with kernels; returns how many were replaced."""

    def register(self) -> None:
        """Register what executables of this target call, before one is loaded from a file."""

    def xla_options(self) -> tuple[tuple[str, Any], ...]:
        """The target's ``(flag, value)`` pairs; the user's come after and win."""


class _Plain:
    """A target with no kernels of its own: XLA compiles the decompositions."""

    def prepare(self, module: Any, options: CompilerOptions) -> int:
        return 0

    def register(self) -> None:
        pass

    def xla_options(self) -> tuple[tuple[str, Any], ...]:
        return ()


def target(platform: str) -> Target:
    """The target of a PJRT platform."""
    return cpu.CpuTarget() if platform == "cpu" else _Plain()
