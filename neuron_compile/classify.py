"""Arguments and results of a graph: what each is, and how it crosses into the executable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .lowering import seed_random_operators
from .runtime import ArgumentSpec, ResultSpec, Signature

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A graph whose placeholders and results are contiguous tensors, and its signature.

    ``constants`` are tensors that the graph held; they follow the arguments.
    """

    module: fx.GraphModule
    signature: Signature
    constants: tuple[torch.Tensor, ...]


def dense_permutation(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a dense tensor is contiguous, or ``None`` if it is not
    dense (it has gaps, overlaps or broadcast dimensions)."""
    order = sorted(
        range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), tensor.shape[dim] == 1)
    )
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes ``permutation``."""
    result = [0] * len(permutation)
    for position, dim in enumerate(permutation):
        result[dim] = position
    return tuple(result)


def bound(module: fx.GraphModule, static: frozenset[int]) -> Boundary:
    """Make every placeholder and result of ``module`` (changed in place) a contiguous tensor.

    Args:
        static: positions of arguments that are parameters or buffers.
    """
    # In this order the constants follow the arguments, and the seed is last.
    constants = hoist_constants(module)
    seeded = seed_random_operators(module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    arguments = placeholders[: len(placeholders) - len(constants) - int(seeded)]
    wanted = list(graph.output_node().args[0])  # type: ignore[arg-type]
    specs = tuple(
        _bind_argument(graph, node, index in static) for index, node in enumerate(arguments)
    )
    results = _bind_results(graph, wanted, arguments)
    return Boundary(module, Signature(specs, results, seeded), constants)


def hoist_constants(module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Turn tensors that the graph holds into placeholders: the IR holds no data."""
    constants = []
    placeholders = module.graph.find_nodes(op="placeholder")
    last = placeholders[-1] if placeholders else None
    for node in module.graph.find_nodes(op="get_attr"):
        value = _attribute(module, node.target)  # type: ignore[arg-type]
        where = (
            module.graph.inserting_after(last)
            if last is not None
            else module.graph.inserting_before(next(iter(module.graph.nodes)))
        )
        with where:
            placeholder = module.graph.placeholder(f"constant_{len(constants)}")
        placeholder.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        last = placeholder
        node.replace_all_uses_with(placeholder)
        module.graph.erase_node(node)
        constants.append(value)
    return tuple(constants)


def _attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the graph holds {path}, a {type(value).__name__}")
    return value


def _bind_argument(graph: fx.Graph, node: fx.Node, static: bool) -> ArgumentSpec:
    value = node.meta["val"]
    permutation = dense_permutation(value)
    spec = ArgumentSpec(
        name=node.name,
        shape=tuple(value.shape),
        dtype=value.dtype,
        permutation=None if value.is_contiguous() else permutation,
        static=static,
        dense=permutation is not None,
    )
    if spec.permutation is not None:
        back = inverse(spec.permutation)
        with graph.inserting_after(node):
            restored = graph.call_function(aten.permute.default, (node, list(back)))
        restored.meta["val"] = value
        node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
        node.meta["val"] = value.permute(spec.permutation)
    return spec


def _bind_results(
    graph: fx.Graph, wanted: Sequence[Any], arguments: Sequence[fx.Node]
) -> tuple[ResultSpec, ...]:
    positions = {node: index for index, node in enumerate(arguments)}
    output = graph.output_node()
    results: list[ResultSpec] = []
    produced: dict[fx.Node, ResultSpec] = {}
    tensors: list[fx.Node] = []
    for item in wanted:
        if not isinstance(item, fx.Node):
            results.append(
                ResultSpec("none") if item is None else ResultSpec("constant", value=item)
            )
        elif item.meta.get("val") is None:
            results.append(ResultSpec("none"))
        elif item in positions:
            results.append(ResultSpec("input", positions[item]))
        else:
            if item not in produced:
                with graph.inserting_before(output):
                    node, produced[item] = _bind_tensor(graph, item, len(tensors))
                tensors.append(node)
            results.append(produced[item])
    output.args = (tuple(tensors),)
    return tuple(results)


def _bind_tensor(graph: fx.Graph, node: fx.Node, index: int) -> tuple[fx.Node, ResultSpec]:
    value = node.meta["val"]
    if value.is_contiguous():
        return node, ResultSpec("tensor", index)
    permutation = dense_permutation(value)
    if permutation is not None:
        moved = graph.call_function(aten.permute.default, (node, list(permutation)))
        moved.meta["val"] = value.permute(permutation)
        return moved, ResultSpec("tensor", index, permutation=inverse(permutation))
    narrowed, base = value, node
    for dim in range(value.dim()):
        if value.stride(dim) == 0 and value.shape[dim] > 1:
            narrowed = narrowed.narrow(dim, 0, 1)
            base = graph.call_function(aten.slice.Tensor, (base, dim, 0, 1))
            base.meta["val"] = narrowed
    if base is not node and narrowed.is_contiguous():
        return base, ResultSpec("tensor", index, expand=tuple(value.shape))
    return node, ResultSpec("tensor", index, stride=tuple(value.stride()))
