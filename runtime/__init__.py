"""StableHLO to running code: XLA through PJRT, NEFF, executor."""

from . import strict
from .cache import CacheError, Entry, NeffCache, warn_once
from .executor import Executor, draw_seed, results_plan
from .handover import neff_from_bytes, neff_to_bytes
from .neff import (
    Loaded,
    Neff,
    compile_stablehlo,
    contents,
    load,
    loaded,
    machine,
    save,
    stablehlo_text,
    to_file,
    versions,
)
from .neff_file import NeffError, NeffFile, pack, read, unpack
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
    "compile_stablehlo",
    "contents",
    "devices",
    "draw_seed",
    "forked",
    "host_threads",
    "load",
    "loaded",
    "machine",
    "neff_from_bytes",
    "neff_to_bytes",
    "open_platform",
    "pack",
    "platform_errors",
    "platforms",
    "read",
    "results_plan",
    "save",
    "stablehlo_text",
    "strict",
    "to_file",
    "unpack",
    "versions",
    "warn_once",
]
