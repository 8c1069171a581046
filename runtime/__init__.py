"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from .cache import CacheError, Entry, NeffCache, warn_once
from .executor import Executor, draw_seed, results_plan
from .neff import (
    Loaded,
    Neff,
    as_file,
    compile_stablehlo,
    contents,
    load,
    loaded,
    machine,
    save,
    stablehlo_text,
    versions,
)
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
    "CacheError",
    "Check",
    "CompilerOptions",
    "Device",
    "Entry",
    "Executor",
    "Loaded",
    "Neff",
    "NeffCache",
    "NeffError",
    "NeffFile",
    "PlatformError",
    "ResultSpec",
    "RuntimeCompileError",
    "Signature",
    "View",
    "as_file",
    "compile_stablehlo",
    "contents",
    "devices",
    "draw_seed",
    "forked",
    "host_threads",
    "load",
    "loaded",
    "machine",
    "open_platform",
    "platform_errors",
    "platforms",
    "read",
    "results_plan",
    "save",
    "stablehlo_text",
    "versions",
    "warn_once",
]
