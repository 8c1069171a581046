"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .executor import Executor, draw_seed, results_plan
from .handover import neff_from_bytes, neff_to_bytes
from .neff import Loaded, Neff, compile_stablehlo, contents, load, save, stablehlo_text
from .neff_file import NeffError, NeffFile, read
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
    "Loaded",
    "Neff",
    "NeffError",
    "NeffFile",
    "PlatformError",
    "ResultSpec",
    "RuntimeCompileError",
    "Signature",
    "View",
    "compile_stablehlo",
    "contents",
    "draw_seed",
    "forked",
    "load",
    "neff_from_bytes",
    "neff_to_bytes",
    "open_platform",
    "platforms",
    "read",
    "results_plan",
    "save",
    "stablehlo_text",
]
