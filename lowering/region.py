"""Higher-order operators in a graph: calls that hold the graphs they run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

#: The class of ``torch.ops.higher_order``'s members, private to torch.
HigherOrderOperator = torch._ops.HigherOrderOperator

#: Key of ``node.meta``: the target of a node before Torch-MLIR's importer is to see it.
CALLED = "neuron_called"
_MARK = "graph:"


def mark(index: int) -> str:
    """What stands for the n-th graph of a region among the arguments of its node."""
    return f"{_MARK}{index}"


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """The target of a node that calls a higher-order operator with graphs of its own.

    The node has the operator's arguments, with ``mark(n)`` in the place of the n-th of
    ``graphs``, so that its inputs are tensors alone. Graphs are traced down to operators with
    static sizes; each of their nodes has ``meta["val"]``.
    """

    op: HigherOrderOperator
    graphs: tuple[fx.GraphModule, ...]

    @property
    def __name__(self) -> str:  # torch.fx prints a call by the name of its target
        return f"{self.op.name()}_{self.key[:8]}"

    def __str__(self) -> str:
        return f"higher_order.{self.op.name()}"

    @functools.cached_property
    def key(self) -> str:
        """A name that two regions share only if they compute the same."""
        text = [self.op.name(), *(str(line) for graph in self.graphs for line in lines(graph))]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def graph(self, marked: str) -> fx.GraphModule:
        """The graph that an argument stands for."""
        return self.graphs[int(marked.removeprefix(_MARK))]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in eager PyTorch."""
        args, kwargs = pytree.tree_map(self._unmarked, (args, kwargs))
        return self.op(*args, **kwargs)

    def _unmarked(self, leaf: Any) -> Any:
        marked = isinstance(leaf, str) and leaf.startswith(_MARK)
        return self.graph(leaf) if marked else leaf


def region(node: fx.Node) -> Region | None:
    """The region that a node calls, if any."""
    found = node.target if isinstance(node.target, Region) else node.meta.get(CALLED)
    return found if isinstance(found, Region) else None


def inner_nodes(found: Region) -> Iterator[fx.Node]:
    """Every operator that the graphs of a region call."""
    for graph in found.graphs:
        yield from (node for node in graph.graph.nodes if node.op == "call_function")


def held(module: torch.nn.Module, path: Any) -> Any:
    """The attribute of a module that a ``get_attr`` node names."""
    value: Any = module
    for name in str(path).split("."):
        value = getattr(value, name)
    return value


class _Reference:
    """Stands for a node in printed arguments, where no string can be taken for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def lines(graph: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """What a graph computes, node by node: the call, and the layouts of what comes out.

    Two graphs with the same lines compute the same from the same inputs, whatever the names of
    their nodes.
    """
    names: dict[fx.Node, _Reference] = {}
    for index, node in enumerate(graph.graph.nodes):
        names[node] = _Reference(f"%{index}")
        target: Any = _called(node.target) if node.op == "call_function" else ""
        if node.op == "get_attr":
            target = _constant(held(graph, node.target))
        arguments: Any = fx.map_arg((node.args, node.kwargs), names.__getitem__)  # type: ignore[arg-type]
        values = [_layout(leaf) for leaf in pytree.tree_leaves(node.meta.get("val"))]
        yield f"%{index} {node.op} {target} {arguments}", str(values)


def _called(target: Any) -> str:
    if isinstance(target, Region):
        return f"region {target.key}"
    # Stands for an operator as another call of it.
    if dataclasses.is_dataclass(target):
        return f"{type(target).__name__} {target!r}"
    return str(target)


def _constant(value: torch.Tensor) -> str:
    data = value.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return f"{value.dtype} {data.view(torch.uint8).tolist()}"


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        lazy = (leaf.is_conj(), leaf.is_neg())
        return (leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), *(lazy if any(lazy) else ()))
    return leaf


def results(graph: fx.GraphModule) -> Sequence[Any]:
    """What a graph returns, in a flat sequence."""
    return pytree.tree_leaves(graph.graph.output_node().args[0])
