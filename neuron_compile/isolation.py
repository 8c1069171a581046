"""Compiles in worker processes, so that a compiler that ends its process ends no user's.

A worker is a plain interpreter, started when it is needed and used again; there are no more of
them than threads that compile. It gets a graph, and sends back the lowered module and the
executable. If it dies, that is a refusal like any other: the operator at fault is found by
compiling each alone, and runs in eager PyTorch.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any

from torch import fx

from . import logs
from .compile_pool import pool
from .compiler_worker import Began, Done, Failed, Refused, Request, Unknown
from .errors import NeuronError
from .graph_pickle import graph_to_bytes
from .lowering import LoweredModule, LoweringError
from .lowering.region import inner_nodes, region
from .lowering.registry import called, known_refusals, lookup
from .runtime import (
    CompilerOptions,
    Neff,
    RuntimeCompileError,
    compile_stablehlo,
    neff_from_bytes,
)

_OURS = "neuron_compile."
#: Bytes of what a worker wrote before it died that are worth showing.
_TAIL = 600
#: A module run by ``-m`` would define the classes of messages once more, under another name.
_MAIN = "from neuron_compile.compiler_worker import main; main({})"


class CompilerCrashed(LoweringError):
    """A worker process died while it lowered or compiled a graph."""


class _Local(Exception):
    """A graph that a worker cannot compile, for it lacks something of this process."""


def lower_and_compile_isolated(
    module: fx.GraphModule, options: CompilerOptions, *, capture_torch: bool, checked: bool
) -> tuple[LoweredModule, Neff] | None:
    """Lower and compile in a worker; ``None`` for a graph that only this process can lower.

    ``module`` is as for :func:`neuron_compile.lowering.lower`, and is not changed.

    Raises:
        CompilerCrashed: where the worker died of it.
        LoweringError: as by ``lower``.
        RuntimeCompileError: as by ``compile_stablehlo``.
        NeuronError: for anything else that was raised in the worker, with its traceback.
    """
    try:
        request = Request(
            _pickled(module),
            _modules(module),
            known_refusals(),
            options,
            capture_torch,
            checked,
        )
        answer = _workers().ask(pickle.dumps(request))
        if isinstance(answer, Unknown):
            raise _Local(answer.reason)
    except _Local as error:
        logs.log.warning("isolate_compiler: a graph is compiled in this process: %s", error)
        return None
    if isinstance(answer, Refused):
        if answer.by_xla:
            raise RuntimeCompileError(answer.message)
        raise LoweringError(answer.message, answer.node_name)
    if isinstance(answer, Failed):
        raise NeuronError(f"the compiler's worker process failed:\n{answer.text}")
    assert isinstance(answer, Done)
    lowered = answer.lowered
    if answer.executable is None:
        logs.log.warning(
            "isolate_compiler: platform %s hands no executables over: XLA compiles in this process",
            options.platform,
        )
        return lowered, compile_stablehlo(lowered.stablehlo, options)
    return lowered, neff_from_bytes(answer.executable, lowered.stablehlo, options)


def _pickled(module: fx.GraphModule) -> bytes:
    try:
        return graph_to_bytes(module)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise _Local(f"it holds what no other process has: {error}") from error


def _modules(module: fx.GraphModule) -> tuple[str, ...]:
    """The modules whose import registers the user's lowerings that a graph needs."""
    found: dict[str, None] = {}
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    nodes += [inner for node in nodes if (held := region(node)) for inner in inner_nodes(held)]
    for node in nodes:
        entry = lookup(called(node))
        function = None if entry is None else entry.function
        name = getattr(function, "__module__", _OURS)
        if name.startswith(_OURS):
            continue
        importable = getattr(sys.modules.get(name), "__spec__", None) is not None
        if name == "__main__" or not importable or "<locals>" in function.__qualname__:  # type: ignore[union-attr]
            raise _Local(
                f"the lowering of {node.target} is registered in {name}, which a worker cannot "
                "import: register it at the top of a module of its own"
            )
        found[name] = None
    return tuple(found)


class _Worker:
    """One worker process, and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # What it writes is shown if it dies.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        paths = [path or os.getcwd() for path in sys.path]
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN.format(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                # An interrupt at the terminal goes to a whole group of processes.
                process_group=0,
            )
        self._connection = Connection(ours.detach())

    def ask(self, request: bytes) -> Any:
        """The answer to a request.

        Raises:
            CompilerCrashed: if the process died of it.
            NeuronError: if it died before it began.
        """
        phase = ""
        try:
            self._connection.send_bytes(request)
            while isinstance(answer := self._connection.recv(), Began):
                phase = answer.phase
            return answer
        except (EOFError, OSError) as error:
            died = f"({self._death()}){self._tail()}"
            if not phase:
                raise NeuronError(
                    f"the compiler's worker process does not start {died}. Unset isolate_compiler "
                    "to compile in this process."
                ) from error
            raise CompilerCrashed(f"the compiler crashed in {phase} {died}") from error

    def _death(self) -> str:
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _tail(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size - _TAIL, 0))
        text = self._output.read().decode(errors="replace").strip()
        return f": {text}" if text else ""

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


class _Workers:
    """The workers of this process: idle ones, and as many at once as the pool has threads."""

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)
        self._idle: list[_Worker] = []
        self._of_parent: list[_Worker] = []
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: these are not its own to end."""
        self._of_parent, self._idle = self._idle, []

    def ask(self, request: bytes) -> Any:
        """Let a worker answer; one that died, or whose answer was not waited for, is replaced."""
        with self._free:
            worker = self._take()
            try:
                answer = worker.ask(request)
            except BaseException:
                worker.close()
                raise
            self._idle.append(worker)
            return answer

    def _take(self) -> _Worker:
        try:
            return self._idle.pop()
        except IndexError:
            logs.log.info("isolate_compiler: starting a worker process")
            return _Worker()

    def close(self) -> None:
        """End the idle workers."""
        while self._idle:
            self._idle.pop().close()


_made: list[_Workers] = []
_making = threading.Lock()


def _workers() -> _Workers:
    with _making:
        if not _made:
            _made.append(_Workers(pool().limit))
        return _made[0]
