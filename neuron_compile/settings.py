"""Settings: one frozen dataclass from ``options=``, ``mode=`` and environment variables."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from .errors import SettingsError

if TYPE_CHECKING:
    from .runtime.types import CompilerOptions


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a graph is compiled. Each field is a key of ``torch.compile(..., options={...})``.

    Attributes:
        platform: PJRT platform that compiles and runs (``"cpu"``; others where a plugin is
            installed). Environment: ``NEURON_COMPILE_PLATFORM``.
        fullgraph_on_device: raise instead of running any operator in eager PyTorch.
            Environment: ``NEURON_COMPILE_FULLGRAPH_ON_DEVICE``.
        check_indices: raise, as eager does, where an index is out of range, an integer is divided
            by zero, or a probability is none. Off, indices are clamped (gathers) or dropped
            (scatters) and the result of such a division is undefined; no memory outside of a
            tensor is touched. Environment: ``NEURON_COMPILE_CHECK_INDICES``.
        eager_rng: let ATen draw all random numbers, so that they are eager's to the bit, and
            torch's generators advance as in eager. Off, one number a call is drawn, which seeds
            a generator on the device. Environment: ``NEURON_COMPILE_EAGER_RNG``.
        vendor_kernels: let the platform compute heavy operators (convolutions, matrix products,
            attention) with a vendor's kernels; off, XLA compiles their decompositions.
            Environment: ``NEURON_COMPILE_VENDOR_KERNELS``.
        pack_weights: let vendor kernels keep weights in a layout of their own between calls, made
            anew when a weight changes. Changes are seen by torch's count of them and, where torch
            does not count (``weight.data``, NumPy, another process), in a sample of 64 elements:
            turn it off if single elements are written in such a way.
            Environment: ``NEURON_COMPILE_PACK_WEIGHTS``.
        dump_dir: a folder for every graph's FX, Torch dialect, StableHLO and optimized HLO.
            Environment: ``NEURON_COMPILE_DUMP_DIR``.
        cache: keep compiled graphs on disk, and take them from there in other processes.
            ``torch.compiler.config.force_disable_caches`` turns it off as well.
            Environment: ``NEURON_COMPILE_CACHE``.
        cache_dir: the folder of that cache, which must be this user's alone; by default, the one
            where the system keeps a user's caches. Environment: ``NEURON_COMPILE_CACHE_DIR``, or
            ``TORCH_NEURONX_NEFF_CACHE_DIR``.
        cache_limit: bytes that this folder may take, with a unit if it is a string (``"512M"``);
            what was unused for longest goes first. Environment: ``NEURON_COMPILE_CACHE_LIMIT``.
        max_specializations: executables kept for one graph with dynamic shapes (1 or more);
            the one unused for longest is dropped first.
            Environment: ``NEURON_COMPILE_MAX_SPECIALIZATIONS``.
        dynamic_shapes: how a graph with symbolic sizes is served. ``"specialize"``: an executable
            for each combination of sizes. ``"bucket"``: sizes are padded to the next of
            ``buckets``, and what depends on the size is masked; a graph with an operator for which
            that is not known to be right is specialized. ``"auto"``: the first four combinations
            of sizes are specialized, and padded are those that come after them. Environment:
            ``NEURON_COMPILE_DYNAMIC_SHAPES``.
        buckets: the sizes to pad to, in any order; larger sizes are specialized. Empty: powers of
            two, from 16 on. Environment: ``NEURON_COMPILE_BUCKETS``, with commas.
        compile_in_background: run calls in eager PyTorch until a thread of a pool has compiled
            their graph, then switch to the compiled code. Random numbers of a run then depend on
            when that is, unless ``eager_rng`` is set. Environment:
            ``NEURON_COMPILE_COMPILE_IN_BACKGROUND``.
        compile_in_parallel: let the pool compile each graph while torch traces the next one; the
            first call waits. The backward graph of a training step is compiled beside the
            forward, even where no backward follows. Errors are raised by the first call.
            Environment: ``NEURON_COMPILE_COMPILE_IN_PARALLEL``.
        isolate_compiler: lower and compile in a worker process, which is started once and used
            again. An operator on which a compiler ends its process then runs in eager PyTorch,
            and is reported, like any that a compiler refuses. Environment:
            ``NEURON_COMPILE_ISOLATE_COMPILER``.
        xla_options: XLA flags by name, with a bool, int, float or string each, for example
            ``{"xla_cpu_enable_fast_math": True}``; they change values as XLA documents.
    """

    platform: str = "cpu"
    fullgraph_on_device: bool = False
    check_indices: bool = True
    eager_rng: bool = False
    vendor_kernels: bool = True
    pack_weights: bool = True
    dump_dir: str | None = None
    cache: bool = True
    cache_dir: str | None = None
    cache_limit: int = 4 << 30
    max_specializations: int = 64
    dynamic_shapes: str = "auto"
    buckets: tuple[int, ...] = ()
    compile_in_background: bool = False
    compile_in_parallel: bool = False
    isolate_compiler: bool = False
    xla_options: tuple[tuple[str, Any], ...] = ()

    @property
    def compiler_options(self) -> CompilerOptions:
        """What of them the runtime's compiler takes."""
        from .runtime.types import CompilerOptions  # with torch, which the doctor does not import

        return CompilerOptions(
            self.platform, self.xla_options, self.vendor_kernels, self.pack_weights
        )


def default_directory() -> Path:
    """Where the cache is if no setting says otherwise."""
    return platformdirs.user_cache_path("neuron-compile", appauthor=False)


#: ``mode=`` of ``torch.compile``. Inductor's names are accepted so that scripts run unchanged;
#: none of them changes anything here. ``strict`` forbids every fallback.
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {},
    "strict": {"fullgraph_on_device": True},
}

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise SettingsError(f"{name} must be a bool, not {value!r}")


def _platform(name: str, value: Any) -> str:
    if isinstance(value, str) and value:
        return value.lower()
    raise SettingsError(f"{name} must be a PJRT platform's name such as 'cpu', not {value!r}")


def _folder(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str | os.PathLike) and os.fspath(value):
        return str(Path(value))
    raise SettingsError(f"{name} must be a path, not {value!r}")


def _count(name: str, value: Any) -> int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise SettingsError(f"{name} must be an int of at least 1, not {value!r}")


_UNITS = {unit: 1 << (10 * power) for power, unit in enumerate(("", "K", "M", "G", "T"))}


def size_in_bytes(name: str, value: Any) -> int:
    """A number of bytes, as an int or as a string with a unit of 1,024 to some power.

    Raises:
        SettingsError: naming ``name``, for what is none.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, str) and found:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    raise SettingsError(
        f"{name} must be a number of bytes such as 1000000 or '512M', not {value!r}"
    )


def _way(name: str, value: Any) -> str:
    if value in ("auto", "specialize", "bucket"):
        return str(value)
    raise SettingsError(f"{name} must be 'auto', 'specialize' or 'bucket', not {value!r}")


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or (isinstance(value, str) and not value):
        raise SettingsError(f"{name} must be a list of sizes, not {value!r}")
    return tuple(sorted({_count(name, part) for part in parts}))


def _flags(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name} must be a dict of XLA flags, not {value!r}")
    for flag, setting in value.items():
        if not isinstance(flag, str) or not flag.startswith("xla_"):
            raise SettingsError(f"{name}: {flag!r} is not an XLA flag's name ('xla_...')")
        if not isinstance(setting, bool | int | float | str):
            raise SettingsError(f"{name}[{flag!r}] must be bool, int, float or str: {setting!r}")
    return tuple(sorted(value.items()))


_VALIDATORS: Mapping[str, Callable[[str, Any], Any]] = {
    "platform": _platform,
    "fullgraph_on_device": _boolean,
    "check_indices": _boolean,
    "eager_rng": _boolean,
    "vendor_kernels": _boolean,
    "pack_weights": _boolean,
    "dump_dir": _folder,
    "cache": _boolean,
    "cache_dir": _folder,
    "cache_limit": size_in_bytes,
    "max_specializations": _count,
    "dynamic_shapes": _way,
    "buckets": _sizes,
    "compile_in_background": _boolean,
    "compile_in_parallel": _boolean,
    "isolate_compiler": _boolean,
    "xla_options": _flags,
}

#: Options with an environment variable, ``NEURON_COMPILE_<NAME>``.
ENVIRONMENT = tuple(name for name in _VALIDATORS if name != "xla_options")
#: TorchNeuron's name of a variable; ours goes before it.
OTHER_NAMES = {"cache_dir": "TORCH_NEURONX_NEFF_CACHE_DIR"}


def resolve(
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of one compilation: defaults, then environment, then mode, then options.

    Raises:
        SettingsError: for an unknown mode or option (listing the valid ones) or a wrong value.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for name in ENVIRONMENT:
        for variable in filter(None, (OTHER_NAMES.get(name), f"NEURON_COMPILE_{name.upper()}")):
            if variable in environment:
                values[name] = _VALIDATORS[name](variable, environment[variable])
    if mode is not None:
        if mode not in MODES:
            raise SettingsError(f"unknown mode {mode!r}; valid modes: {', '.join(MODES)}")
        values.update(MODES[mode])
    for name, value in (options or {}).items():
        if name not in _VALIDATORS:
            raise SettingsError(
                f"unknown option {name!r}; valid options: {', '.join(sorted(_VALIDATORS))}"
            )
        values[name] = _VALIDATORS[name](f"options[{name!r}]", value)
    return Settings(**values)
