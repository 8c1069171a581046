"""Serves compiled code in a process that was forked after XLA had been started: in eager PyTorch.

XLA's threads stay in the parent, so a compiled program would wait for ever in the child. The graph
that AOT Autograd made is functional, and ATen runs it with eager's values.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .eager import eagerly
from .errors import FallbackWarning
from .records import note_fallback
from .runtime import forked
from .torch_internals import boxed

Runner = Callable[[list[Any]], Any]

_lock = threading.Lock()
_settled: set[bool] = set()


def unless_forked(graph: fx.GraphModule, compile_it: Callable[[], Runner]) -> Runner:
    """A boxed callable: what ``compile_it`` gives, or ``graph`` in eager PyTorch once forked."""
    code = eagerly(graph)

    def eager(args: list[Any]) -> Any:
        _settle()
        return code(args)

    if forked():
        return boxed(eager)
    compiled = compile_it()

    def run(args: list[Any]) -> Any:
        return eager(args) if forked() else compiled(args)

    return boxed(run)


def _settle() -> None:
    """Once a process: say so, and keep ATen to one thread.

    OpenMP's threads stayed in the parent, too, and ATen waits for them in its next large kernel,
    of the graph or around it (accumulating gradients, an optimizer).
    """
    with _lock:
        if _settled:
            return
        _settled.add(True)
    torch.set_num_threads(1)
    reason = "this process was forked after something had been compiled"
    note_fallback("every operator", reason)
    warnings.warn(
        f"{reason}, and XLA's threads stayed in the parent: compiled code runs in eager PyTorch "
        "here, on one thread. Start the process by the 'spawn' or 'forkserver' method to have it "
        "compiled. options={'fullgraph_on_device': True} makes this an error.",
        FallbackWarning,
        stacklevel=2,
    )
