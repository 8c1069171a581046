"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .executor import Executor, draw_seed, results_plan
from .neff import Neff, compile_stablehlo
from .pjrt import forked, open_platform, platforms
from .types import (
    ArgumentSpec,
    Check,
    CompilerOptions,
    PlatformError,
    ResultSpec,
    RuntimeCompileError,
    Signature,
    View,
)

__all__ = [
    "ArgumentSpec",
    "Check",
    "CompilerOptions",
    "Executor",
    "Neff",
    "PlatformError",
    "ResultSpec",
    "RuntimeCompileError",
    "Signature",
    "View",
    "compile_stablehlo",
    "draw_seed",
    "forked",
    "open_platform",
    "platforms",
    "results_plan",
]
