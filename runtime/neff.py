"""NEFF: a compiled graph, in memory and as a file.

A file holds the StableHLO in its portable form, which other versions of jaxlib can compile, the
executable that XLA made of it, the signature and what the executable depends on. The executable is
machine code, so :func:`load` uses it only where the caller trusts the file, and where versions and
machine are those it was made with; else XLA compiles the StableHLO again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import pjrt
from .checked import check_program
from .neff_file import NeffError, NeffFile, read, write
from .plain import (
    options_from_plain,
    options_to_plain,
    signature_from_plain,
    signature_to_plain,
    specs_from_plain,
    specs_to_plain,
)
from .targets import target
from .types import CompilerOptions, RuntimeCompileError, Signature

#: Packages whose versions decide what an executable is and does.
_PACKAGES = ("jax", "jaxlib", "neuron-compile", "torch", "torch-mlir")
STABLEHLO, EXECUTABLE, CONSTANTS = "stablehlo", "executable", "constants"


@dataclasses.dataclass(frozen=True)
class Neff:
    """StableHLO and what XLA made of it for one platform.

    ``program`` is the StableHLO as text or, from a file, in its portable form. ``vendor_kernels``
    the composites that the target replaced; ``seconds`` maps phases (``parse``, ``target``,
    ``xla``; ``load`` where an executable came from a file) to their time.
    """

    program: str | bytes
    options: CompilerOptions
    executable: Any
    vendor_kernels: int
    seconds: Mapping[str, float]

    @property
    def stablehlo(self) -> str:
        """The StableHLO, for people to read."""
        if isinstance(self.program, str):
            return self.program
        return pjrt.from_portable(self.program)

    @property
    def portable(self) -> bytes:
        """The StableHLO in a form that other versions of jaxlib read."""
        if isinstance(self.program, bytes):
            return self.program
        return pjrt.portable(self.program)

    def optimized_hlo(self) -> str:
        """The HLO after XLA's passes, for people to read."""
        return pjrt.optimized_hlo(self.executable)

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate of one run: see :func:`neuron_compile.runtime.pjrt.cost_analysis`."""
        return pjrt.cost_analysis(self.executable)

    def memory_analysis(self) -> dict[str, int]:
        """Bytes of one run: see :func:`neuron_compile.runtime.pjrt.memory_analysis`."""
        return pjrt.memory_analysis(self.executable)


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


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a file gave. ``rebuilt`` says why its executable was not used; ``None``: it was."""

    neff: Neff
    signature: Signature
    constants: tuple[torch.Tensor, ...]
    rebuilt: str | None


def save(
    path: str | os.PathLike[str],
    neff: Neff,
    signature: Signature,
    constants: Sequence[torch.Tensor] = (),
) -> None:
    """Write a NEFF file; ``constants`` are the tensors that follow the arguments of ``signature``.

    Raises:
        NeffError: where the signature holds a constant that a file cannot.
        OSError: where the file cannot be written.
    """
    write(path, to_file(neff, signature, constants))


def to_file(
    neff: Neff,
    signature: Signature,
    constants: Sequence[torch.Tensor] = (),
    more: Mapping[str, Any] | None = None,
) -> NeffFile:
    """What :func:`save` writes, with ``more`` metadata of the caller's.

    Raises:
        NeffError: where the signature holds a constant that a file cannot.
    """
    held = [tensor.detach().contiguous() for tensor in constants]
    program = neff.portable
    sections = {STABLEHLO: program}
    if held:
        sections[CONSTANTS] = b"".join(map(_bytes, held))
    if (machine_code := pjrt.serialize(neff.executable)) is not None:
        sections[EXECUTABLE] = machine_code
    metadata = {
        **(more or {}),
        "signature": signature_to_plain(signature),
        "constants": specs_to_plain(held),
        "options": options_to_plain(neff.options),
        "vendor_kernels": neff.vendor_kernels,
        "versions": dict(versions()),
        "machine": machine(),
        "source": hashlib.sha256(program).hexdigest(),
    }
    return NeffFile(metadata, sections)


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Loaded:
    """Read a NEFF file and load its executable, or what XLA makes of its StableHLO.

    Args:
        path: the file.
        trust: run the machine code in the file. Without it the file's author can do no more than
            have XLA compile and run a StableHLO program.

    Raises:
        NeffError: for a file that is none, or damaged, or whose metadata is wrong.
        RuntimeCompileError: where XLA refuses the program.
        PlatformError: where the file is for a platform that is not installed.
        OSError: where the file cannot be read.
    """
    return from_file(read(path), trust=trust)


def from_file(file: NeffFile, *, trust: bool = False) -> Loaded:
    """The same, of a file that was read.

    Raises:
        NeffError, RuntimeCompileError, PlatformError: as :func:`load`.
    """
    signature, options, constants = contents(file)
    program = stablehlo_text(file)
    if not trust:
        check_program(program, signature, constants)
    reason = why_rebuild(file, trust)
    if reason is None:
        try:
            return Loaded(loaded(file, options), signature, constants, None)
        except RuntimeCompileError as error:
            reason = str(error)
    return Loaded(compile_stablehlo(program, options), signature, constants, reason)


def loaded(file: NeffFile, options: CompilerOptions) -> Neff:
    """The executable in a file of this machine's and these versions', which is trusted.

    Raises:
        RuntimeCompileError: where the platform cannot load it.
        NeffError: where the file has none.
    """
    for name in (STABLEHLO, EXECUTABLE):
        if name not in file.sections:
            raise NeffError(f"the file has no section {name!r}")
    started = time.perf_counter()
    target(options.platform).register()
    executable = pjrt.deserialize(file.sections[EXECUTABLE], options.platform)
    seconds = {"load": time.perf_counter() - started}
    count = file.metadata.get("vendor_kernels")
    return Neff(
        file.sections[STABLEHLO],
        options,
        executable,
        count if isinstance(count, int) else 0,
        seconds,
    )


def contents(file: NeffFile) -> tuple[Signature, CompilerOptions, tuple[torch.Tensor, ...]]:
    """The signature, the options and the constants of a file.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    metadata = file.metadata
    return (
        signature_from_plain(metadata.get("signature")),
        options_from_plain(metadata.get("options")),
        _constants(metadata.get("constants"), file.sections.get(CONSTANTS, b"")),
    )


def stablehlo_text(file: NeffFile) -> str:
    """The program of a file, for people and for XLA.

    Raises:
        NeffError: where there is none, or not one that this version of jaxlib reads.
    """
    if STABLEHLO not in file.sections:
        raise NeffError("the file has no StableHLO")
    try:
        return pjrt.from_portable(file.sections[STABLEHLO])
    except RuntimeCompileError as error:
        raise NeffError(str(error)) from error


def why_rebuild(file: NeffFile, trust: bool) -> str | None:
    """Why the executable of a file is not run here, but made again; ``None``: it is run."""
    if EXECUTABLE not in file.sections:
        return "the file has no executable"
    if not trust:
        return "the file is not trusted"
    made, here = file.metadata.get("versions"), dict(versions())
    if not isinstance(made, dict) or _running(made) != _running(here):
        return f"it was made with other versions: {made}, here {here}"
    if file.metadata.get("machine") != machine():
        return f"it was made on another machine: {file.metadata.get('machine')}, here {machine()}"
    return None


def _running(found: Mapping[str, Any]) -> dict[str, Any]:
    """The versions that an executable depends on when it runs: of what lowered it, no more."""
    return {name: version for name, version in found.items() if name != "torch-mlir"}


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Names and versions of the packages that decide what an executable is."""
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, ""))
    return tuple(found)


@functools.cache
def machine() -> str:
    """What identifies the processor: its architecture and a digest of its features."""
    features = ""
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(errors="replace").splitlines()
        kept = ("vendor_id", "model name", "flags", "Features", "CPU part")
        features = "\n".join(sorted({line for line in lines if line.startswith(kept)}))
    text = f"{platform.machine()} {platform.system()} {features or platform.processor()}"
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _constants(listed: Any, data: bytes) -> tuple[torch.Tensor, ...]:
    specs = specs_from_plain(listed)
    lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
    if sum(lengths) != len(data):
        raise NeffError(f"the constants are {len(data)} bytes, not {sum(lengths)}")
    found, begin = [], 0
    for (shape, dtype), length in zip(specs, lengths, strict=True):
        part = torch.frombuffer(bytearray(data[begin : begin + length] or b"\0"), dtype=torch.uint8)
        found.append(part[:length].view(dtype).reshape(shape))
        begin += length
    return tuple(found)
