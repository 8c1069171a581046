"""NEFF: a compiled graph. In memory for now: portable StableHLO, its options, the executable."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from . import pjrt
from .targets import target
from .types import CompilerOptions


@dataclasses.dataclass(frozen=True)
class Neff:
    """StableHLO and what XLA made of it for one platform.

    ``vendor_kernels`` counts the composites that the target replaced; ``seconds`` maps phases
    (``parse``, ``target``, ``xla``) to their time.
    """

    stablehlo: str
    options: CompilerOptions
    executable: Any
    vendor_kernels: int
    seconds: Mapping[str, float]

    def optimized_hlo(self) -> str:
        """The HLO after XLA's passes, for people to read."""
        return pjrt.optimized_hlo(self.executable)


def compile_stablehlo(stablehlo: str, options: CompilerOptions) -> Neff:
    """Compile one StableHLO module for ``options.platform`` and load it.

    Raises:
        RuntimeCompileError: where the platform is missing or XLA refuses the module.
    """
    marks = [time.perf_counter()]
    module = pjrt.parse_module(stablehlo)
    marks.append(time.perf_counter())
    chosen = target(options.platform)
    replaced = chosen.prepare(module, options)
    marks.append(time.perf_counter())
    flags = (*chosen.xla_options(), *options.xla_options)
    executable = pjrt.compile_module(module, options.platform, flags)
    marks.append(time.perf_counter())
    names = ("parse", "target", "xla")
    seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
    return Neff(stablehlo, options, executable, replaced, seconds)
