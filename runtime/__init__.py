"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .executor import Executor, draw_seed, results_plan
from .neff import Loaded, Neff, compile_stablehlo, contents, load, save, stablehlo_text
from .neff_file import NeffError, NeffFile, read
from .pjrt import devices, forked, host_threads, open_platform, platform_errors, platforms
from .types import (
    ArgumentSpec,
    Check,
    CompilerOptions,
    Device,
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
    "Device",
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
    "devices",
    "draw_seed",
    "forked",
    "host_threads",
    "load",
    "open_platform",
    "platform_errors",
    "platforms",
    "read",
    "results_plan",
    "save",
    "stablehlo_text",
]
