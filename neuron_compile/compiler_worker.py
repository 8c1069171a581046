"""The worker of ``isolate_compiler``, and what is said between it and the process that waits.

The worker serves one request after the other from the process that started it, and ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import pickle
import signal
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from .graph_pickle import graph_from_bytes
from .lowering import LoweredModule, LoweringError, lower
from .lowering.registry import adopt_refusals, called, lookup
from .lowering.trace import trace_on
from .runtime import (
    CompilerOptions,
    RuntimeCompileError,
    compile_stablehlo,
    neff_to_bytes,
    open_platform,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile. ``modules`` register lowerings of the user's when they are imported."""

    graph: bytes
    modules: tuple[str, ...]
    refusals: Mapping[str, str]
    options: CompilerOptions
    capture_torch: bool
    checked: bool


@dataclasses.dataclass(frozen=True)
class Began:
    """The worker begins a phase: ``lowering`` or ``XLA``."""

    phase: str


@dataclasses.dataclass(frozen=True)
class Done:
    """The result; ``executable`` is ``None`` where the platform cannot hand one over."""

    lowered: LoweredModule
    executable: bytes | None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A compiler refused the graph; ``by_xla`` or in lowering, at ``node_name`` if it is known."""

    message: str
    by_xla: bool
    node_name: str | None


@dataclasses.dataclass(frozen=True)
class Unknown:
    """The worker cannot have what the graph needs: why."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """Something else was raised: the traceback."""

    text: str


def serve(connection: Connection, request: Request) -> Any:
    """The answer to a request; phases are sent as they begin."""
    connection.send(Began("lowering"))
    try:
        for name in request.modules:
            importlib.import_module(name)
        module = graph_from_bytes(request.graph)
    except Exception as error:  # noqa: BLE001 - user code: the starting process says so
        return Unknown(f"{type(error).__name__}: {error}")
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if lookup(called(node)) is None:
            return Unknown(f"importing {', '.join(request.modules)} registers no {node.target}")
    adopt_refusals(dict(request.refusals))
    trace_on(open_platform(request.options.platform))
    try:
        lowered = lower(module, capture_torch=request.capture_torch, checked=request.checked)
        connection.send(Began("XLA"))
        neff = compile_stablehlo(lowered.stablehlo, request.options)
    except LoweringError as error:
        return Refused(str(error), False, error.node_name)
    except RuntimeCompileError as error:
        return Refused(str(error), True, None)
    return Done(lowered, neff_to_bytes(neff))


def main(descriptor: int) -> None:
    """Serve at a socket until its other end is closed."""
    # An interrupt is for the process that waits; it ends this one if it must.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request = pickle.loads(connection.recv_bytes())
            try:
                answer = serve(connection, request)
            except Exception:  # noqa: BLE001 - raised again in the process that waits
                answer = Failed(traceback.format_exc())
            connection.send(answer)
