"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .executor import Executor
from .neff import Neff, compile_stablehlo
from .pjrt import platforms
from .types import ArgumentSpec, CompilerOptions, ResultSpec, RuntimeCompileError, Signature

__all__ = [
    "ArgumentSpec",
    "CompilerOptions",
    "Executor",
    "Neff",
    "ResultSpec",
    "RuntimeCompileError",
    "Signature",
    "compile_stablehlo",
    "platforms",
]
