"""A NEFF from one process to another of this machine: the executable as bytes.

The executable is machine code; these bytes are for a process that this one started, or that
started this one, and for nobody else. Files that outlive a process are :mod:`neff`'s.
"""

from __future__ import annotations

import io
import time

from . import pjrt
from .neff import EXECUTABLE, Neff
from .neff_file import NeffFile, pack, unpack
from .targets import target
from .types import CompilerOptions


def neff_to_bytes(neff: Neff) -> bytes | None:
    """The executable of ``neff`` and what was noted of it; ``None`` where a platform cannot."""
    machine_code = pjrt.serialize(neff.executable)
    if machine_code is None:
        return None
    metadata = {"vendor_kernels": neff.vendor_kernels, "seconds": dict(neff.seconds)}
    return pack(NeffFile(metadata, {EXECUTABLE: machine_code}))


def neff_from_bytes(data: bytes, stablehlo: str, options: CompilerOptions) -> Neff:
    """The NEFF that another process compiled from ``stablehlo``, loaded on this one's platform.

    Raises:
        NeffError: for bytes that are not those of :func:`neff_to_bytes`, or are damaged.
        RuntimeCompileError: where XLA refuses the executable.
    """
    file = unpack(io.BytesIO(data), len(data))
    started = time.perf_counter()
    target(options.platform).register()
    executable = pjrt.deserialize(file.sections[EXECUTABLE], options.platform)
    seconds = {**file.metadata["seconds"], "load": time.perf_counter() - started}
    return Neff(stablehlo, options, executable, file.metadata["vendor_kernels"], seconds)
