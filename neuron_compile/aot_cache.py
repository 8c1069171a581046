"""Our part of PyTorch's own caches: AOTAutogradCache, and the artifacts of ``torch.compiler``.

AOTAutogradCache keeps what AOT Autograd made of a Dynamo graph: its functional graphs. A process
that finds them there skips AOT Autograd, and finds the executables in the NEFF cache, which goes by
the same graphs. ``torch.compiler.save_cache_artifacts`` takes both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from . import keys
from .decompositions import decompositions, lowered_whole
from .lowering.registry import registered
from .served import served
from .settings import Settings
from .torch_internals import (
    GraphPicklingError,
    OutputCode,
    boxed,
    fake_mode,
    graph_from_bytes,
    graph_to_bytes,
    not_cacheable,
)

#: The node metadata that a graph is compiled by; lines in the user's code are kept apart.
_KEPT = frozenset({"val", "desc"})
_TRACE = "stack_trace"
_state = threading.local()


def cache_tag(settings: Settings) -> str:
    """What AOTAutogradCache's key must hold besides what PyTorch puts in: all that decides what
    AOT Autograd's graphs are, and how they are compiled."""
    known = sorted(str(op) for op in (*lowered_whole(), *decompositions()))
    custom = sorted(str(entry.op) for entry in registered() if entry.foreign)
    parts = (keys.environment(), dataclasses.astuple(settings), known, custom)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def compiling(module: fx.GraphModule) -> Iterator[None]:
    """Take the user's lines from this Dynamo graph for all that AOT Autograd makes of it.

    A graph in the cache may come from a version of the user's file in which they had other numbers.
    """
    before = getattr(_state, "traces", ())
    _state.traces = tuple(node.meta.get(_TRACE) for node in module.graph.nodes)
    try:
        yield
    finally:
        _state.traces = before


class GraphCode(OutputCode):  # type: ignore[misc]
    """A graph of AOT Autograd with what runs it; pickled, it is the graph alone.

    ``lazy``: compile at the first call. AOT Autograd then makes a backward known to its cache at
    once, though nobody may ever call it.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        kind: str,
        static: frozenset[int],
        settings: Settings,
        *,
        lazy: bool,
    ) -> None:
        super().__init__()
        # torch._dynamo.disable copies what is in the dict of what it wraps.
        self._boxed_call = True
        self._graph: fx.GraphModule | None = graph
        self._packed = b""
        self._how = (kind, static, settings)
        self._lazy = lazy
        self._traces: tuple[str | None, ...] = getattr(_state, "traces", ())
        self._serve()

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run once; ``inputs`` is a list, which is emptied."""
        return self._run(list(inputs) if not isinstance(inputs, list) else inputs)

    def _serve(self) -> None:
        graph = self._graph
        assert graph is not None
        compile_it = lambda: served(graph, *self._how)  # noqa: E731
        self._run = _at_first_call(compile_it) if self._lazy else compile_it()

    def prepare_for_serialization(self) -> None:
        """Replace the graph by bytes. PyTorch calls this on a copy."""
        assert self._graph is not None
        places: dict[str, int] = {}
        for index, trace in enumerate(self._traces):
            places.setdefault(trace or "", index)
        lines = [places.get(node.meta.get(_TRACE) or "", -1) for node in self._graph.graph.nodes]
        try:
            self._packed = graph_to_bytes(self._graph, _KEPT)
        except GraphPicklingError as error:
            raise not_cacheable(f"neuron: {error}") from error
        self._lines = lines
        self._graph = None
        self._traces = ()
        del self._run

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Compile what came out of the cache: for the executables, it looks into ours."""
        if self._graph is not None:
            return
        self._graph = graph_from_bytes(self._packed, fake_mode())
        self._packed = b""
        self._traces = getattr(_state, "traces", ())
        for node, line in zip(self._graph.graph.nodes, self._lines, strict=True):
            if 0 <= line < len(self._traces) and self._traces[line]:
                node.meta[_TRACE] = self._traces[line]
        self._serve()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing here is of Triton's."""


def _at_first_call(compile_it: Callable[[], Callable[..., Any]]) -> Callable[[list[Any]], Any]:
    lock = threading.Lock()
    made: list[Callable[..., Any]] = []

    def run(args: list[Any]) -> Any:
        if not made:
            with lock:
                if not made:
                    made.append(compile_it())
        return made[0](args)

    return boxed(run)
