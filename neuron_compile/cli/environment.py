"""What the installation and the environment say, found without importing torch.

``import torch`` itself fails where ``TORCH_LOGS`` names what torch does not know: what is to
diagnose that must not fail with it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "neuron-compile"
#: Shown by ``--version`` and ``doctor``.
PACKAGES = ("torch", "torch-mlir", "jax", "jaxlib", "numpy")
OK, NOTE, PROBLEM = "ok", "note", "problem"
_GROUP = "torch_dynamo_backends"
_OURS = "NEURON_COMPILE_"
_LOGS = "NEURON_COMPILE_LOGS"
_TORCH_BACKENDS = "neuron_compile.backend:neuron"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at: ``status`` is ``ok``, ``note`` (it changes what happens) or
    ``problem`` (it keeps something from working); ``advice`` says what to do."""

    check: str
    status: str
    detail: str
    advice: str = ""


def version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_line() -> str:
    """Versions in one line."""
    from .. import __version__

    others = ", ".join(f"{name} {version(name) or 'missing'}" for name in PACKAGES)
    return f"{DISTRIBUTION} {__version__} ({others}, Python {platform.python_version()})"


def requirements() -> dict[str, Requirement]:
    """What this package asks for, without its extras, by the name of the distribution."""
    from packaging.requirements import Requirement

    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [Requirement(line) for line in listed]
    return {x.name: x for x in found if x.marker is None or x.marker.evaluate({"extra": ""})}


def findings(environment: Mapping[str, str] | None = None) -> list[Finding]:
    """All that can be told without running anything."""
    environment = os.environ if environment is None else environment
    return [
        *_versions(),
        *_registration(),
        *_torch_variables(environment),
        *_our_variables(environment),
        *_xla_variables(environment),
        *_threads(environment),
        *_preloaded(environment),
    ]


def _versions() -> Iterator[Finding]:
    from .. import __version__

    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    installed = version(DISTRIBUTION)
    if installed is None:
        yield Finding(
            DISTRIBUTION,
            PROBLEM,
            f"{__version__} is imported from {Path(__file__).parents[1]}, but not installed",
            "pip install it: torch finds the backend by its entry point",
        )
    elif installed != __version__:
        yield Finding(
            DISTRIBUTION,
            PROBLEM,
            f"the installed metadata say {installed}, the code says {__version__}",
            "install it again",
        )
    else:
        yield Finding(DISTRIBUTION, OK, installed)
    wanted = requirements()
    for name in PACKAGES:
        yield _judged(name, version(name), wanted.get(name))
    jax, jaxlib = version("jax"), version("jaxlib")
    if jax and jaxlib and jax != jaxlib:
        yield Finding(
            "jax and jaxlib",
            NOTE,
            f"jax {jax} with jaxlib {jaxlib}; they are tested together in one version",
            f"pip install jax=={jax} jaxlib=={jax}",
        )


def _judged(name: str, found: str | None, wanted: Requirement | None) -> Finding:
    asked = f"{name}{wanted.specifier}" if wanted else name
    if found is None:
        return Finding(name, PROBLEM, "not installed", f"pip install '{asked}'")
    if wanted and not wanted.specifier.contains(found, prereleases=True):
        return Finding(
            name,
            PROBLEM,
            f"{found}; this package is made for {wanted.specifier}",
            f"pip install '{asked}'",
        )
    return Finding(name, OK, f"{found} (asked for: {wanted.specifier})" if wanted else found)


def _registration() -> Iterator[Finding]:
    found = importlib.metadata.entry_points(group=_GROUP, name="neuron")
    # An editable install may be listed twice, by one distribution.
    values = sorted({point.value for point in found})
    if values == [_TORCH_BACKENDS]:
        yield Finding("backend", OK, f"torch.compile(backend='neuron') is {_TORCH_BACKENDS}")
    elif not values:
        yield Finding(
            "backend",
            PROBLEM,
            f"no entry point 'neuron' in {_GROUP}: torch.compile(backend='neuron') fails",
            "install this package with pip, not by PYTHONPATH",
        )
    else:
        yield Finding(
            "backend",
            PROBLEM,
            f"the entry point 'neuron' of {_GROUP} is {', '.join(values)}",
            "another package took the name: uninstall one of them",
        )


def _torch_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if environment.get(name, "0") not in ("0", ""):
            yield Finding(
                name,
                PROBLEM,
                f"{name}={environment[name]}: torch.compile does nothing",
                f"unset {name}",
            )
    logs = environment.get("TORCH_LOGS", "")
    names = [part.strip().lstrip("+-").split(":")[0] for part in logs.split(",")]
    wrong = [name for name in names if name == "neuron" or name.startswith("neuron_")]
    wrong = [name for name in wrong if name.split(".")[0] != "neuron_compile"]
    if wrong:
        yield Finding(
            "TORCH_LOGS",
            PROBLEM,
            f"TORCH_LOGS={logs}: torch does not know {', '.join(wrong)} when it is imported, "
            "and raises",
            f"TORCH_LOGS=+neuron_compile, or {_LOGS}={','.join(wrong)}",
        )


def _our_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    from ..errors import SettingsError
    from ..settings import ENVIRONMENT, resolve

    for name in sorted(environment):
        if not name.startswith(_OURS) or name == _LOGS:
            continue
        known = {f"{_OURS}{option.upper()}" for option in ENVIRONMENT}
        text = f"{name}={environment[name]}"
        if name not in known:
            yield Finding(
                name, PROBLEM, f"{text}: there is no such option", f"known: {', '.join(known)}"
            )
            continue
        try:
            resolve(environment={name: environment[name]})
        except SettingsError as error:
            yield Finding(name, PROBLEM, f"{text}: {error}", f"correct or unset {name}")
        else:
            yield Finding(name, NOTE, f"{text}: the default of every compilation here")


def _xla_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("XLA_FLAGS"):
        yield Finding(
            "XLA_FLAGS",
            NOTE,
            f"XLA_FLAGS={environment['XLA_FLAGS']}: in force for every program; XLA aborts the "
            "process for a flag that it does not know",
            "options={'xla_options': {...}} sets flags of one model, and wrong ones raise",
        )
    if environment.get("JAX_PLATFORMS"):
        yield Finding(
            "JAX_PLATFORMS",
            NOTE,
            f"JAX_PLATFORMS={environment['JAX_PLATFORMS']}: other platforms are not opened",
        )


def _threads(environment: Mapping[str, str]) -> Iterator[Finding]:
    usable = usable_cores()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        given = environment.get(name, "")
        if not given:
            continue
        text = f"{name}={given}; this process may use {usable} cores"
        if given.isdigit() and int(given) > usable:
            yield Finding(name, NOTE, f"{text}: threads wait for each other", f"unset {name}")
        else:
            yield Finding(name, OK, text)
    if environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        yield Finding(
            "OMP_WAIT_POLICY",
            NOTE,
            f"OMP_WAIT_POLICY={environment['OMP_WAIT_POLICY']}: ATen's idle threads take the cores "
            "from XLA's",
            "OMP_WAIT_POLICY=PASSIVE",
        )


def _preloaded(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    missing = [path for path in given if "/" in path and not Path(path).exists()]
    if missing:
        yield Finding(
            "LD_PRELOAD",
            NOTE,
            f"there is no {', '.join(missing)}: the dynamic linker says so and goes on",
            "correct LD_PRELOAD",
        )
    elif given:
        yield Finding(
            "LD_PRELOAD",
            NOTE,
            f"{', '.join(given)} replaces functions of every library, of XLA and LLVM too",
            "unset it where a process crashes",
        )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
