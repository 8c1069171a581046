"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .executor import Executor
from .neff import Neff, compile_stablehlo
from .pjrt import open_platform, platforms
from .types import (
    ArgumentSpec,
    CompilerOptions,
    PlatformError,
    ResultSpec,
    RuntimeCompileError,
    Signature,
)

__all__ = [
    "ArgumentSpec",
    "CompilerOptions",
    "Executor",
    "Neff",
    "PlatformError",
    "ResultSpec",
    "RuntimeCompileError",
    "Signature",
    "compile_stablehlo",
    "open_platform",
    "platforms",
]
