"""Splits a graph into partitions for the device and operators that stay with ATen."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils import _pytree as pytree

from .classify import dense_permutation
from .lowering import why_unsupported
from .lowering.registry import lookup
from .torch_internals import copied, free_symbols, memory, symbolic

aten = torch.ops.aten

#: What the names of partitions begin with whose sizes are known when they are called.
LATE = "late_"


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A graph whose partitions for the device are its submodules, or which is ``whole`` one."""

    module: fx.GraphModule
    whole: bool


class _Support(OperatorSupportBase):
    def __init__(self, supported: Container[fx.Node]) -> None:
        self._supported = supported

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node in self._supported


def partition(module: fx.GraphModule, eager: Mapping[fx.Node, str]) -> Partitioned:
    """Partition ``module``, which is left as it is where everything is supported.

    Inputs have static sizes. What has a size that depends on data, but comes from operators that
    ATen runs, goes into partitions of its own, which are graphs with dynamic sizes.

    Args:
        eager: what :func:`eager_nodes` gave for ``module``.
    """
    device = [node for node in module.graph.nodes if is_operator(node) and node not in eager]
    late = {node.name for node in device if _has_symbols(node)}
    numbers = any(
        node.op == "call_function" and not is_operator(node) for node in module.graph.nodes
    )
    if not eager and not late and not numbers:
        return Partitioned(module, True)
    module = copied(module)
    names = {node.name for node in device} - late
    for wanted, prefix in ((names, "fused_"), (late, LATE)):
        supported = {node for node in module.graph.nodes if node.name in wanted}
        if supported:
            partitioner = CapabilityBasedPartitioner(
                module, _Support(supported), allows_single_node_partition=True
            )
            module = partitioner.fuse_partitions(partitioner.propose_partitions(), prefix)
    return Partitioned(module, False)


def eager_nodes(
    module: fx.GraphModule, refused: Mapping[str, str], nested: bool = False
) -> dict[fx.Node, str]:
    """The operators that cannot run on the device, each with its reason.

    A getitem goes with its tuple; numbers are no operators.

    Args:
        refused: names of nodes that a compiler turned down, each with the reason.
        nested: whether ``module`` is a partition of what has sizes that depend on data. What still
            has such sizes then stays in eager: it would only be put off again.
    """
    eager: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if not is_operator(node):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        reason = eager.get(source) if isinstance(source, fx.Node) else None
        reason = reason or refused.get(node.name) or _why_not(node, nested)
        if reason is not None:
            eager[node] = reason
    for node in [node for node in eager if node.target in _OVER_GAPS]:
        _keep_gaps(node.args[0], eager)
    for node in _shared_gaps(module):
        eager.setdefault(node, "results share the memory of a tensor with gaps")
    return eager


def _shared_gaps(module: fx.GraphModule) -> list[fx.Node]:
    """What makes results that share memory with gaps: a result of the device has none to share."""
    made = [node for node in module.graph.nodes if _is_made(node)]
    given = {memory(node) for node in module.graph.find_nodes(op="placeholder")}
    first = {memory(node): node for node in reversed(made)}
    results = set(pytree.tree_leaves(module.graph.output_node().args)) & set(made)
    counts = collections.Counter(memory(node) for node in results)
    shared = {place for place, count in counts.items() if count > 1 and place not in given}
    wanted = {place for place in shared if _has_gaps(first[place])}
    return [node for node in made if memory(node) in wanted]


def _has_gaps(node: fx.Node) -> bool:
    return not _has_symbols(node) and dense_permutation(node.meta["val"]) is None


def _is_made(node: Any) -> bool:
    made = isinstance(node, fx.Node) and node.op == "call_function" and is_operator(node)
    return made and isinstance(node.meta.get("val"), torch.Tensor)


#: Where these stay in eager, they may look at what lies between the elements of their operand.
_OVER_GAPS = (aten.as_strided.default, torch.ops.prims.as_strided_scatter.default)


def _keep_gaps(node: Any, eager: dict[fx.Node, str]) -> None:
    """Leave to ATen what made a tensor with gaps: a scatter into one keeps what is in them."""
    while _is_made(node) and _has_gaps(node):
        eager.setdefault(node, "the memory between its elements is looked at")
        node = node.args[0]


def _why_not(node: fx.Node, nested: bool) -> str | None:
    values = pytree.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        return "a tensor on device meta has no data"
    if not _has_symbols(node):
        return why_unsupported(node)
    known = set().union(*(free_symbols(each.meta.get("val")) for each in node.all_input_nodes), ())
    if nested or not free_symbols(node.meta.get("val")) <= known:
        return "a number or a size in its result depends on the values of a tensor"
    # What else there may be against it is asked when the sizes are known.
    supported = node.target is operator.getitem or lookup(node.target) is not None
    return None if supported else why_unsupported(node)


def _has_symbols(node: fx.Node) -> bool:
    """Whether a number or a size at a node depends on data: those of inputs are known by now."""
    return symbolic([each.meta.get("val") for each in (node, *node.all_input_nodes)])


#: These take numbers, or the sizes of tensors alone.
_OF_NUMBERS = frozenset(
    {
        operator.getitem,
        aten._assert_scalar.default,
        aten.sym_numel.default,
        aten.sym_size.int,
        aten.sym_storage_offset.default,
        aten.sym_stride.int,
    }
)


def is_operator(node: fx.Node) -> bool:
    """Whether a node is one of PyTorch's operators; others compute numbers from numbers."""
    if node.op != "call_function":
        return False
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    if node.target is operator.getitem:
        return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(values))
    python = type(node.target).__module__ == "builtins"  # a function: symbolic numbers have these
    return not python and node.target not in _OF_NUMBERS
