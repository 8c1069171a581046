"""Lowers one functional FX graph with static shapes to one StableHLO module."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import fx

from . import passes
from .registry import origin, remember_refusal, require, signature, takes_stock
from .trace import Splice, splice
from .types import LoweredModule, LoweringError


def lower(
    module: fx.GraphModule, *, capture_torch: bool = False, checked: bool = True
) -> LoweredModule:
    """Lower ``module``, which is changed in place (hand in a copy to keep it).

    Every placeholder and result must be a tensor with static sizes whose ``meta["val"]`` is
    contiguous. Random operators must have been seeded (``passes.seed_random_operators``).
    ``checked`` is whether the values of tensors (indices, divisors) are checked at run time.

    Raises:
        LoweringError: where an operator has no lowering, or Torch-MLIR refuses the graph twice:
            the first refusal of a node that also has a spliced lowering is mended here.
    """
    # A process that finds its executables in a cache lowers nothing.
    from .torch_mlir import input_specs, lower_to_stablehlo, output_specs

    passes.prepare(module)
    graph = module.graph
    traced = 0.0

    def splicer(node: fx.Node) -> tuple[Splice, list[fx.Node]] | None:
        nonlocal traced
        entry = require(node)
        if takes_stock(node):
            return None
        if entry.function is None:
            raise LoweringError(f"{signature(node)} has no spliced lowering", node.name)
        started = time.perf_counter()
        try:
            return splice(entry, node, checked)
        except LoweringError:
            raise
        except Exception as error:
            raise LoweringError(
                f"{signature(node)}: its lowering failed: {type(error).__name__}: {error}",
                node.name,
            ) from error
        finally:
            traced += time.perf_counter() - started

    while True:
        try:
            result = lower_to_stablehlo(graph, splicer, capture_torch)
            break
        except LoweringError as error:
            again = [
                node
                for node in _nodes_named(graph, error.node_name)
                if takes_stock(node) and _has_function(node)
            ]
            if not again:
                raise
            for node in again:
                remember_refusal(node, str(error))
    phases = dict(result.phases)
    phases["trace"] = traced
    phases["import"] -= traced
    return LoweredModule(
        stablehlo=result.text,
        inputs=input_specs(graph),
        outputs=output_specs(graph),
        torch_dialect=result.torch_dialect,
        phases=phases,
        spliced=result.spliced,
        checks=result.checks,
    )


def _nodes_named(graph: fx.Graph, name: str | None) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and origin(node) == name)


def _has_function(node: fx.Node) -> bool:
    return require(node).function is not None
