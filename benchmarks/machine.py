"""The machine that a benchmark ran on, and what else ran there."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "torch-mlir",
    "jax",
    "jaxlib",
    "numpy",
    "transformers",
    "neuron-compile",
    "torch-xla",
    "torchax",
)
_ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "XLA_FLAGS",
)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The processor, cores, thread counts, load and software versions of this process."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "load_average_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "commit": _commit(),
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def describe(computer: Mapping[str, Any]) -> str:
    """One sentence of what ``machine`` found."""
    versions = ", ".join(
        f"{name} {version}" for name, version in computer["versions"].items() if version
    )
    return (
        f"{computer['processor']} ({computer['cpu_capability']}), {computer['usable_cores']} cores"
        f", {computer['torch_threads']} PyTorch threads, {computer['memory_gib']} GiB; "
        f"Python {computer['python']}, {versions}; commit {computer['commit']}, {computer['date']}."
    )
