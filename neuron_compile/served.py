"""A graph of AOT Autograd as a callable: compiled, or in eager PyTorch where that cannot be."""

from __future__ import annotations

from torch import fx

from .forked import Runner, unless_forked
from .graph_compiler import compile_graph
from .settings import Settings


def served(graph: fx.GraphModule, kind: str, static: frozenset[int], settings: Settings) -> Runner:
    """Compile ``graph`` into a boxed callable; the arguments are those of ``compile_graph``."""

    def compile_it() -> Runner:
        return compile_graph(graph, kind, static, settings)

    return compile_it() if settings.fullgraph_on_device else unless_forked(graph, compile_it)
