"""Logging through ``torch._logging``, and the files of ``dump_dir``.

``TORCH_LOGS="+neuron_compile"`` works in a fresh process, since torch accepts the name of any
module there. The short name ``neuron`` and the artifacts (``neuron_fx``, ``neuron_torch``,
``neuron_stablehlo``, ``neuron_hlo``) exist once this package is imported: set them with
``torch._logging.set_logs`` or with the environment variable ``NEURON_COMPILE_LOGS``, which has
the syntax of ``TORCH_LOGS``.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import torch._logging
from torch._logging import _internal

from .caching import Compiled
from .classify import Boundary
from .runtime import Executor, NeffError, save
from .settings import Settings

ARTIFACTS = {
    "neuron_fx": "The FX graph of each partition.",
    "neuron_torch": "The Torch dialect of each partition, as Torch-MLIR imports it.",
    "neuron_stablehlo": "The StableHLO of each partition.",
    "neuron_hlo": "The HLO of each partition after XLA's passes.",
}
ENVIRONMENT = "NEURON_COMPILE_LOGS"

log = logging.getLogger("neuron_compile")
_artifacts: dict[str, logging.Logger] = {}
_numbers = itertools.count()


def many_specializations(kind: str, made: int, settings: Settings) -> None:
    """Warn that one graph is compiled again and again, and say what helps."""
    advice = (
        "options={'dynamic_shapes': 'bucket'} pads sizes to powers of two where that is right"
        if settings.dynamic_shapes == "specialize"
        else "neuron_compile.report() says which operator keeps it from being padded"
    )
    log.warning(
        "a graph with dynamic sizes (%s) was compiled for %d combinations of sizes; %d are kept"
        " (max_specializations). %s.",
        kind,
        made,
        settings.max_specializations,
        advice,
    )


def install() -> None:
    """Register the log and its artifacts; apply ``NEURON_COMPILE_LOGS``. Runs once, at import."""
    if _artifacts:
        return
    if not _internal.log_registry.is_log("neuron"):
        torch._logging._internal.register_log("neuron", "neuron_compile")
    for name, description in ARTIFACTS.items():
        torch._logging._internal.register_artifact(name, description, off_by_default=True)
        _artifacts[name] = _internal.getArtifactLogger("neuron_compile.artifacts", name)
    wanted = os.environ.get(ENVIRONMENT)
    if wanted:
        _apply(wanted)


def _apply(wanted: str) -> None:
    """Let torch parse our variable behind its own, so that both are in force."""
    before = os.environ.get(_internal.LOG_ENV_VAR)
    os.environ[_internal.LOG_ENV_VAR] = ",".join(filter(None, (before, wanted)))
    try:
        _internal._init_logs()
    finally:
        if before is None:
            del os.environ[_internal.LOG_ENV_VAR]
        else:
            os.environ[_internal.LOG_ENV_VAR] = before


def _enabled(name: str) -> bool:
    return _internal.log_state.is_artifact_enabled(name)


def wants_torch_dialect() -> bool:
    """Whether somebody reads the Torch dialect, whose text costs time."""
    return _enabled("neuron_torch")


def artifacts(boundary: Boundary, made: Compiled, executor: Executor, dump_dir: str | None) -> None:
    """Log and dump what a partition went through."""
    number, neff = next(_numbers), executor.neff
    makers = {
        "neuron_fx": lambda: boundary.module.print_readable(print_output=False),
        "neuron_torch": lambda: made.torch_dialect,
        "neuron_stablehlo": lambda: neff.stablehlo,
        "neuron_hlo": neff.optimized_hlo,
    }
    log.debug("partition %d: ready in %s", number, dict(made.seconds))
    suffixes = {"neuron_fx": "py", "neuron_hlo": "txt"}
    for name, make in makers.items():
        if _enabled(name):
            _artifacts[name].debug("partition %d:\n%s", number, make())
        if dump_dir is not None:
            folder = Path(dump_dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = f"{number:04d}_{name.removeprefix('neuron_')}.{suffixes.get(name, 'mlir')}"
            (folder / file).write_text(make())
    if dump_dir is not None:
        path = Path(dump_dir) / f"{number:04d}.neff"
        try:
            save(path, neff, executor.signature, boundary.constants)
        except NeffError as error:
            log.warning("partition %d has no NEFF file: %s", number, error)
