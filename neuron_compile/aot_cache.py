"""Our part of PyTorch's own caches: AOTAutogradCache, and the artifacts of ``torch.compiler``.

AOTAutogradCache keeps what AOT Autograd made of a Dynamo graph: its functional graphs. A process
that finds them there skips AOT Autograd, and finds the executables in the NEFF cache, which goes by
the same graphs. ``torch.compiler.save_cache_artifacts`` takes both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from . import keys
from .decompositions import decompositions, lowered_whole
from .forked import Runner
from .garbage import uncollected
from .lowering.registry import registered
from .lowering.seeded import SEED_ARGUMENT, Seeded, seeded
from .lowering.trace import trace_on
from .runtime import open_platform
from .served import served
from .settings import Settings, resolve
from .torch_aot import (
    GraphPicklingError,
    OutputCode,
    graph_from_bytes,
    graph_to_bytes,
    not_cacheable,
)
from .torch_internals import boxed, fake_mode, with_effects

#: The node metadata that a graph is compiled by; lines in the user's code are kept apart.
_KEPT = frozenset({"val", "desc", SEED_ARGUMENT})
_TRACE = "stack_trace"
_state = threading.local()


def cache_tag(settings: Settings) -> str:
    """What AOTAutogradCache's key must hold besides what PyTorch puts in: all that decides what
    AOT Autograd's graphs are. How they are compiled is settled when they come out."""
    known = sorted(str(op) for op in (*lowered_whole(), *decompositions()))
    custom = sorted(str(entry.op) for entry in registered() if entry.foreign)
    parts = (keys.environment(), settings.eager_rng, known, custom)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextlib.contextmanager
def compiling(module: fx.GraphModule, settings: Settings) -> Iterator[None]:
    """What AOT Autograd makes of this Dynamo graph gets these settings, and the graph's lines in
    the user's code: a graph in the cache may come from a version of the file with other numbers.
    """
    before: _Current | None = getattr(_state, "current", None)
    traces = tuple(node.meta.get(_TRACE) for node in module.graph.nodes)
    current = _state.current = _Current(settings, traces)
    try:
        yield
    finally:
        _state.current = before
        for code in current.made:
            code.release()


@dataclasses.dataclass(frozen=True)
class _Current:
    settings: Settings
    traces: tuple[str | None, ...]
    made: list[GraphCode] = dataclasses.field(default_factory=list)


def _current() -> _Current:
    current: _Current | None = getattr(_state, "current", None)
    if current is not None:
        return current
    # PyTorch took a graph out of a cache of its own without asking the backend.
    settings = resolve()
    trace_on(open_platform(settings.platform))
    return _Current(settings, ())


class GraphCode(OutputCode):  # type: ignore[misc]
    """A graph of AOT Autograd with what runs it; pickled, it is the graph alone.

    ``lazy``: compile at the first call. AOT Autograd then makes a backward known to its cache at
    once, though nobody may ever call it.
    """

    def __init__(
        self, graph: fx.GraphModule, kind: str, static: frozenset[int], *, lazy: bool
    ) -> None:
        super().__init__()
        # torch._dynamo.disable copies what is in the dict of what it wraps.
        self._boxed_call = True
        self._graph: fx.GraphModule | None = graph
        self._packed = b""
        self._lines: list[int] = []
        self._kind, self._static, self._lazy = kind, static, lazy
        self._serve(_current())

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run once; ``inputs`` is a list, which is emptied."""
        return self._run(list(inputs) if not isinstance(inputs, list) else inputs)

    def _serve(self, current: _Current) -> None:
        graph = self._graph
        assert graph is not None
        self._traces: tuple[str | None, ...] = current.traces
        current.made.append(self)
        compile_it = functools.partial(served, graph, self._kind, self._static, current.settings)
        lazy = self._lazy and not current.settings.compile_in_parallel
        self._run = _at_first_call(compile_it) if lazy else compile_it()

    def release(self) -> None:
        """Let the graph go, which was kept for the cache: it is large."""
        self._graph = None
        self._traces = ()

    def prepare_for_serialization(self) -> None:
        """Replace the graph by bytes. PyTorch calls this on a copy."""
        assert self._graph is not None
        if self._graph.graph.find_nodes(op="call_function", target=with_effects):
            # PyTorch takes such a graph out of its cache without what hands it the tokens.
            raise not_cacheable("neuron: it has effects, which are ordered by tokens")
        places: dict[str | None, int] = {}
        for index, trace in enumerate(self._traces):
            places.setdefault(trace, index)
        self._lines = [places.get(x.meta.get(_TRACE), -1) for x in self._graph.graph.nodes]
        try:
            with _plain_targets(self._graph.graph):
                self._packed = graph_to_bytes(self._graph, _KEPT)
        except GraphPicklingError as error:
            raise not_cacheable(f"neuron: {error}") from error
        self._graph = None
        self._traces = ()
        del self._run

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Compile what came out of the cache: for the executables, it looks into ours."""
        if self._graph is not None:
            return
        current = _current()
        self._graph = graph_from_bytes(self._packed, fake_mode())
        self._packed = b""
        for node, line in zip(self._graph.graph.nodes, self._lines, strict=True):
            trace = current.traces[line] if 0 <= line < len(current.traces) else None
            if trace:
                node.meta[_TRACE] = trace
            if node.meta.pop(SEED_ARGUMENT, False):
                node.target = seeded(node.target)
        self._serve(current)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing here is of Triton's."""


@contextlib.contextmanager
def _plain_targets(graph: fx.Graph) -> Iterator[None]:
    """Seeded operators as marked plain ones, since torch pickles no other targets."""
    changed = [node for node in graph.nodes if isinstance(node.target, Seeded)]
    for node in changed:
        node.meta[SEED_ARGUMENT], node.target = True, node.target.op
    try:
        yield
    finally:
        for node in changed:
            del node.meta[SEED_ARGUMENT]
            node.target = seeded(node.target)


def _at_first_call(compile_it: Callable[[], Runner]) -> Runner:
    lock = threading.Lock()
    todo, made = [compile_it], list[Runner]()

    def run(args: list[Any]) -> Any:
        if not made:
            with lock:
                if not made:
                    with uncollected():
                        made.append(todo[0]())
                    todo.clear()  # it holds the graph
        return made[0](args)

    return boxed(run)
