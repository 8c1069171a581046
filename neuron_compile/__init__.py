"""neuron-compile: ``torch.compile(model, backend="neuron")`` through Torch-MLIR, StableHLO, XLA.

The backend registers itself by entry point; nothing needs to be imported to use it. This package
offers what explains it: :func:`explain`, :func:`report`, :func:`reset_report`, and
:func:`support`, which says where an operator would run; and :func:`register_lowering`, which
brings an operator of yours to the device. :func:`export` compiles a model ahead of time into a
file, which :func:`load` runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .compile_pool import wait_for_compilations
    from .errors import (
        FallbackWarning,
        InputError,
        NeuronError,
        PackageError,
        SettingsError,
        UnsupportedError,
    )
    from .explainer import Explanation, explain
    from .exporter import export
    from .operators import Support, register_lowering, support
    from .package import Package, load
    from .records import Report, report, reset_report
    from .settings import Settings

_HOME = {
    "Explanation": "explainer",
    "FallbackWarning": "errors",
    "InputError": "errors",
    "NeuronError": "errors",
    "Package": "package",
    "PackageError": "errors",
    "Report": "records",
    "Settings": "settings",
    "Support": "operators",
    "SettingsError": "errors",
    "UnsupportedError": "errors",
    "explain": "explainer",
    "export": "exporter",
    "load": "package",
    "register_lowering": "operators",
    "report": "records",
    "reset_report": "records",
    "support": "operators",
    "wait_for_compilations": "compile_pool",
}

__all__ = [
    "Explanation",
    "FallbackWarning",
    "InputError",
    "NeuronError",
    "Package",
    "PackageError",
    "Report",
    "Settings",
    "SettingsError",
    "Support",
    "UnsupportedError",
    "explain",
    "export",
    "load",
    "register_lowering",
    "report",
    "reset_report",
    "support",
    "wait_for_compilations",
]


def __getattr__(name: str) -> Any:
    # Importing torch's compiler takes a second; do it when something is asked for.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
