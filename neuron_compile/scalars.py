"""Numbers that change from call to call and are no sizes: arguments of a program, not its key.

A step's number or a decay made of it reaches a graph as a symbolic integer. Python computes what
the graph makes of such numbers, and where they are operands of tensors they become tensors of no
dimensions, so one executable serves all of their values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .torch_internals import copied, fake_mode, free_symbols, symbolic

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

# Operators in which a number is an operand like a tensor, with the overload for two tensors.
_OPERANDS = {
    **{op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
}
_POWERS = (aten.pow.Scalar, aten.pow.Tensor_Scalar)
_COMPARISONS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
# Beside half types ATen computes with a number in full, though not with a tensor's element; beside
# narrow integers it refuses a number out of their range.
_DTYPES = (torch.float32, torch.float64, torch.int64)


@dataclasses.dataclass(frozen=True)
class Scalars:
    """A graph without such numbers, and how to call it with the original's arguments."""

    module: fx.GraphModule
    static: frozenset[int]
    _kept: tuple[int, ...]
    _compute: Callable[..., tuple[list[Any], list[Any]]]
    _returned: tuple[int, ...]

    def serve(self, runner: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The original graph, by the compiled ``module``."""

        def run(args: list[Any]) -> Any:
            operands, returned = self._compute(*args)
            tensors = [args[index] for index in self._kept]
            args.clear()
            results = list(runner([*tensors, *map(_as_tensor, operands)]))
            for position, number in zip(self._returned, returned, strict=True):
                results[position] = number
            return results

        return run


def take_scalars(module: fx.GraphModule, static: frozenset[int]) -> Scalars | None:
    """``module`` with tensors for its changing numbers; ``None`` if there are none, or if one of
    them is used in a way that only a number of its own can serve.

    Args:
        static: positions of the inputs that are parameters or buffers.
    """
    numbers = _numbers(module)
    output = module.graph.output_node()
    results = output.args[0]
    users = {node: [user for user in node.users if user not in numbers] for node in numbers}
    operands = [node for node in numbers if any(user is not output for user in users[node])]
    fit = all(
        _takes_tensor(user, node) for node in operands for user in users[node] if user is not output
    )
    if not operands or not fit or not isinstance(results, tuple | list):
        return None
    returned = {index: node for index, node in enumerate(results) if node in numbers}
    placeholders = module.graph.find_nodes(op="placeholder")
    kept = tuple(index for index, node in enumerate(placeholders) if node not in numbers)
    return Scalars(
        _with_tensors(module, numbers, operands),
        frozenset(kept.index(index) for index in static if index in kept),
        kept,
        _host_function(module, numbers, operands, list(returned.values())),
        tuple(returned),
    )


def _numbers(module: fx.GraphModule) -> dict[fx.Node, None]:
    """The nodes whose values are numbers that no size depends on, in their order."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    sizes = free_symbols([value for value in values if isinstance(value, torch.Tensor)])
    numbers: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            continue
        given = node.op == "placeholder" and symbolic(value)
        made = node.op == "call_function" and set(node.all_input_nodes) <= numbers.keys()
        if (given or made) and not free_symbols([value]) & sizes:
            numbers[node] = None
    return numbers


def _takes_tensor(user: fx.Node, number: fx.Node) -> bool:
    """Whether ``user`` computes the same with a tensor of no dimensions for ``number``."""
    value = user.meta.get("val")
    if not isinstance(value, torch.Tensor) or isinstance(number.meta["val"], torch.SymBool):
        return False
    if user.target is aten.scalar_tensor.default:
        return True
    alone = not user.kwargs and sum(arg is number for arg in user.args) == 1
    tensors = [node for node in user.all_input_nodes if node is not number]
    dtypes = {node.meta["val"].dtype for node in tensors if _is_tensor(node)}
    if not alone or len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        return False
    floating = torch.int64 not in dtypes
    if user.target in _COMPARISONS:
        return floating or isinstance(number.meta["val"], torch.SymInt)
    # A negative power of integers is an error as a number.
    served = user.target in _OPERANDS and (floating or user.target not in _POWERS)
    return served and dtypes == {value.dtype}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _host_function(
    module: fx.GraphModule,
    numbers: dict[fx.Node, None],
    operands: list[fx.Node],
    returned: list[fx.Node],
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A function from the arguments of ``module`` to the values of ``operands``, ``returned``."""
    graph = fx.Graph()
    copies = {
        node: graph.placeholder(node.name) for node in module.graph.find_nodes(op="placeholder")
    }
    for node in numbers:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([copies[node] for node in nodes] for nodes in (operands, returned)))
    function: Callable[..., Any] = fx.GraphModule(module, graph).forward
    return function


def _as_tensor(number: Any) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def _with_tensors(
    module: fx.GraphModule, numbers: dict[fx.Node, None], operands: list[fx.Node]
) -> fx.GraphModule:
    """A copy of ``module`` with one more argument for each of ``operands``, and no numbers."""
    work = copied(module)
    twins = dict(zip(module.graph.nodes, work.graph.nodes, strict=True))
    graph = work.graph
    last = graph.find_nodes(op="placeholder")[-1]
    for node in operands:
        is_float = isinstance(node.meta["val"], torch.SymFloat)
        with graph.inserting_after(last):
            last = graph.placeholder(f"number_{node.name}")
        last.meta["val"] = _description(torch.float64 if is_float else torch.int64)
        for user in node.users:
            if user not in numbers and user.op != "output":
                _use(graph, twins[user], twins[node], last)
    output = graph.output_node()
    gone = {twins[node] for node in numbers}
    output.args = (tuple(None if x in gone else x for x in output.args[0]),)  # type: ignore[union-attr]
    for node in reversed(numbers):
        graph.erase_node(twins[node])
    work.recompile()
    return work


def _use(graph: fx.Graph, user: fx.Node, number: fx.Node, tensor: fx.Node) -> None:
    """Let ``user`` take ``tensor`` where it took ``number``."""
    target: Any = user.target
    compared = target in _COMPARISONS
    dtype = user.args[0].meta["val"].dtype if compared else user.meta["val"].dtype  # type: ignore[union-attr]
    with graph.inserting_before(user):
        converted = graph.call_function(convert, (tensor, dtype))
        converted.meta["val"] = _description(dtype)
    if target is aten.scalar_tensor.default:
        user.replace_all_uses_with(converted)
        graph.erase_node(user)
        return
    user.target = _COMPARISONS[target] if compared else _OPERANDS[target]
    user.args = tuple(converted if arg is number else arg for arg in user.args)


def _description(dtype: torch.dtype) -> torch.Tensor:
    with fake_mode():
        return torch.empty((), dtype=dtype)
