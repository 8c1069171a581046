"""Serves compiled code in a process that was forked after XLA had been started: in eager PyTorch.

XLA's threads stay in the parent, so a compiled program would wait for ever in the child. The graph
that AOT Autograd made is functional, and ATen runs it with eager's values.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .effects import plain_checks
from .errors import FallbackWarning
from .mutating import functional_calls
from .records import note_fallback
from .runtime import forked
from .torch_internals import boxed, has_symbols

Runner = Callable[[list[Any]], Any]

_lock = threading.Lock()
_settled: set[bool] = set()


def unless_forked(graph: fx.GraphModule, compile_it: Callable[[], Runner]) -> Runner:
    """A boxed callable: what ``compile_it`` gives, or ``graph`` in eager PyTorch once forked."""
    if forked():
        return boxed(_eagerly(graph))
    compiled = compile_it()
    eager = _eagerly(graph)

    def run(args: list[Any]) -> Any:
        return eager(args) if forked() else compiled(args)

    return boxed(run)


def _eagerly(graph: fx.GraphModule) -> Runner:
    module = plain_checks(graph)
    if not has_symbols(module):
        module = functional_calls(module)
    # The code and what it reads: a graph with its descriptions of tensors would be larger.
    code = module.graph.python_code("self")
    names = {str(node.target).split(".")[0] for node in module.graph.find_nodes(op="get_attr")}
    held = types.SimpleNamespace(**{name: getattr(module, name) for name in names})

    @functools.cache
    def function() -> Callable[..., Any]:
        found: dict[str, Any] = dict(code.globals)
        exec(code.src, found)
        return found["forward"]  # type: ignore[no-any-return]

    def run(args: list[Any]) -> Any:
        _settle()
        taken = tuple(args)
        args.clear()
        return function()(held, *taken)

    return run


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
