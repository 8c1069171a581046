"""Gives the calls of higher-order operators graphs that the registry's lowerings can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .decompositions import decompositions
from .lowering.passes import clamp_slices
from .lowering.region import HigherOrderOperator, Region, held, mark
from .lowering.registry import UNTRACED, lookup
from .mutating import functional_calls
from .torch_internals import copied, retraced

higher_order = torch.ops.higher_order
_assert_scalar = torch.ops.aten._assert_scalar.default


def adopt(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` (static sizes), or a copy in which regions take the place of such calls.

    A call whose graphs cannot be traced stays as it is, with the reason in its ``meta``. torch
    traces in one thread at a time: this is for the one that holds Dynamo's lock, or calls.
    """
    module = functional_calls(module)
    if not any(_is_call(node) for node in module.graph.nodes):
        return module
    module = copied(module)
    for node in list(filter(_is_call, module.graph.nodes)):
        graphs = [arg for arg in node.all_input_nodes if _is_graph(module, arg)]
        try:
            node.target = _region(module, node, graphs)
        except Exception as error:  # noqa: BLE001 - whatever torch says: the call runs in eager
            node.meta[UNTRACED] = f"its graphs could not be traced: {type(error).__name__}: {error}"
            continue
        marks: dict[fx.Node, Any] = {graph: mark(index) for index, graph in enumerate(graphs)}
        node.args = fx.map_arg(node.args, lambda arg: marks.get(arg, arg))  # noqa: B023 - used now
        for graph in graphs:
            if not graph.users:
                module.graph.erase_node(graph)
    return module


def _is_call(node: fx.Node) -> bool:
    target = node.target
    known = isinstance(target, HigherOrderOperator) and lookup(target) is not None
    return known and UNTRACED not in node.meta


def _is_graph(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(held(module, node.target), fx.GraphModule)


def _region(module: fx.GraphModule, node: fx.Node, graphs: Sequence[fx.Node]) -> Region:
    values = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    args, kwargs = values
    assert isinstance(node.target, HigherOrderOperator)
    examples = _EXAMPLES[node.target](*args, **kwargs)
    traced = (
        _traced(held(module, graph.target), inputs)
        for graph, inputs in zip(graphs, examples, strict=True)
    )
    return Region(node.target, tuple(traced))


def _traced(graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """``graph`` for these inputs, in operators that have lowerings; numbers are burned in."""
    made = retraced(graph, inputs, decompositions())
    placeholders = made.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        if not isinstance(value, torch.Tensor) and node.users:
            raise ValueError(f"{value!r} is an argument of it")
    for node in made.graph.find_nodes(op="call_function", target=_assert_scalar):
        if not node.all_input_nodes and node.args[0]:  # of sizes, which are numbers by now
            made.graph.erase_node(node)
    clamp_slices(made.graph)
    return adopt(made)


# What each operator's graphs are called with, in the order of the graphs.
_Examples = Iterator[Sequence[Any]]


def _of_cond(chosen: Any, yes: Any, no: Any, operands: Sequence[Any] = ()) -> _Examples:
    yield operands
    yield operands


def _of_while_loop(
    condition: Any, body: Any, carried: Sequence[Any], additional: Sequence[Any]
) -> _Examples:
    yield [*carried, *additional]
    yield [*carried, *additional]


def _of_scan(
    body: Any, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]
) -> _Examples:
    yield [*init, *(x.select(0, 0) for x in xs), *additional]


def _of_map(body: Any, xs: Sequence[Any], operands: Sequence[Any]) -> _Examples:
    yield [*(x.select(0, 0) for x in xs), *operands]


def _of_invoke_subgraph(body: Any, name: str, *operands: Any) -> _Examples:
    yield operands


def _of_flex_attention(
    query: torch.Tensor,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Sequence[Any],
    scale: float,
    options: Any,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> _Examples:
    """A score and its place: batch, head, query, key, as eager takes them."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    place = [torch.empty((), dtype=torch.int64, device="meta")] * 4
    yield [torch.empty((), dtype=wide, device="meta"), *place, *score_buffers]
    yield [*place, *mask_buffers]


_EXAMPLES: dict[Any, Callable[..., _Examples]] = {
    higher_order.cond: _of_cond,
    higher_order.while_loop: _of_while_loop,
    higher_order.scan: _of_scan,
    higher_order.map_impl: _of_map,
    higher_order.invoke_subgraph: _of_invoke_subgraph,
    higher_order.flex_attention: _of_flex_attention,
}
