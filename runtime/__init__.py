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
from .neff_file import NeffError, NeffFile, pack, read, unpack
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
    "CacheError",
    "Check",
    "CompilerOptions",
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
    "draw_seed",
    "forked",
    "load",
    "loaded",
    "machine",
    "open_platform",
    "pack",
    "platforms",
    "read",
    "results_plan",
    "save",
    "stablehlo_text",
    "unpack",
    "versions",
    "warn_once",
]
