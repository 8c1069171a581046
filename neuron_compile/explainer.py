"""``explain``: what the backend would do with a function, operator by operator."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .backend import compile_dynamo_graph
from .records import DEVICE, GraphRecord, as_data, collecting
from .settings import Settings, resolve


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph, and why."""

    reason: str
    user_line: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``str()`` of it is a page to read, :meth:`data` plain data.

    ``seconds`` maps phases (``dynamo`` holds AOT Autograd too) to their time over all graphs.
    """

    graphs: tuple[GraphRecord, ...]
    dynamo_graphs: int
    breaks: tuple[GraphBreak, ...]
    seconds: Mapping[str, float]

    @property
    def operators_on_device(self) -> int:
        """Operators lowered to StableHLO, over all graphs."""
        return sum(graph.on_device for graph in self.graphs)

    @property
    def operators_in_fallback(self) -> int:
        """Operators that run in eager PyTorch, over all graphs."""
        return sum(graph.in_fallback for graph in self.graphs)

    def data(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON."""
        return {
            **as_data(self),
            "operators_on_device": self.operators_on_device,
            "operators_in_fallback": self.operators_in_fallback,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.dynamo_graphs} Dynamo graphs, {len(self.breaks)} graph breaks; "
            f"{self.operators_on_device} operators on the device, "
            f"{self.operators_in_fallback} in eager fallback",
        ]
        for item in self.breaks:
            lines.append(f"  break: {item.reason}" + _at(item.user_line))
        for number, graph in enumerate(self.graphs):
            lines += ["", *_graph_lines(number, graph)]
        spent = "  ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        return "\n".join([*lines, "", f"seconds: {spent}"])


def _at(line: str) -> str:
    return f" (at {line})" if line else ""


def _graph_lines(number: int, graph: GraphRecord) -> list[str]:
    lines = [
        f"graph {number} ({graph.kind}): {graph.on_device} on device in {graph.partitions} "
        f"partitions, {graph.vendor_kernels} by vendor kernels, {graph.in_fallback} eager"
    ]
    on_device = collections.Counter(
        record.operator for record in graph.operators if record.where == DEVICE
    )
    for record in graph.operators:
        if record.where != DEVICE:
            lines.append(
                f"  {record.where:7} {record.signature}: {record.reason}{_at(record.user_line)}"
            )
    lines += [f"  device  {count:4d} x {name}" for name, count in on_device.most_common()]
    return lines


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Compile ``function`` (or module) for ``args`` and say what happened, without keeping it.

    The function runs once, so its side effects happen; where a result requires grad, its
    backward graph is compiled too (the sum of the floating results is differentiated with
    ``torch.autograd.grad``, which leaves every ``.grad`` alone).

    Returns:
        an :class:`Explanation`: graphs, breaks with the user's lines, each operator with where
        it runs and why, and the seconds of each phase.
    """
    # All is compiled when the call returns.
    settings = dataclasses.replace(
        resolve(),
        fullgraph_on_device=False,
        compile_in_background=False,
        compile_in_parallel=False,
    )
    backend, seen = watching(settings)
    started = time.perf_counter()
    # The entries of this backend must not use up Dynamo's limit for the function.
    compiled = torch.compile(  # type: ignore[call-overload]  # the stubs lack the last
        function, backend=backend, isolate_recompiles=True
    )
    with collecting() as collected:
        result = compiled(*args, **kwargs)
        _differentiate(function, result, args, kwargs)
    total = time.perf_counter() - started
    seconds: collections.Counter[str] = collections.Counter()
    for graph in collected:
        seconds.update(graph.seconds)
    spent = {**seconds, "dynamo": max(total - sum(seconds.values()), 0.0)}
    return Explanation(tuple(collected), seen.graphs, tuple(seen.breaks), spent)


@dataclasses.dataclass
class Seen:
    """What Dynamo brought so far: the number of graphs, and where one was ended early."""

    graphs: int = 0
    breaks: list[GraphBreak] = dataclasses.field(default_factory=list)


def watching(settings: Settings) -> tuple[Callable[..., Any], Seen]:
    """A Dynamo backend that compiles under ``settings``, and what it notes meanwhile."""
    seen = Seen()

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.graphs += 1
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            where = _frame(reason.user_stack)
            seen.breaks.append(GraphBreak(reason.reason.splitlines()[0], where))
        return compile_dynamo_graph(module, inputs, settings)

    return backend, seen


def _frame(stack: Sequence[Any]) -> str:
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _differentiate(
    function: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    outputs = [x for x in leaves if x.requires_grad]
    inputs = [
        x
        for x in torch.utils._pytree.tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf
    ]
    if isinstance(function, torch.nn.Module):
        inputs += [x for x in function.parameters() if x.requires_grad]
    if outputs and inputs:
        torch.autograd.grad(
            outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True
        )
