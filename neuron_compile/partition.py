"""Splits a graph into partitions for the device and operators that stay with ATen."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils import _pytree as pytree

from .lowering import why_unsupported
from .torch_internals import symbolic


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """A graph whose partitions for the device are its submodules, or which is one itself.

    ``eager`` maps nodes that stay with ATen to the reason.
    """

    module: fx.GraphModule
    whole: bool
    eager: Mapping[fx.Node, str]


class _Support(OperatorSupportBase):
    def __init__(self, eager: Mapping[fx.Node, str]) -> None:
        self._eager = eager

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self._eager


def eager_nodes(module: fx.GraphModule, refused: Mapping[str, str]) -> dict[fx.Node, str]:
    """The nodes that cannot run on the device, each with its reason.

    ``refused`` names nodes that a compiler turned down. A getitem goes with its tuple.
    """
    eager: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        reason = eager.get(source) if isinstance(source, fx.Node) else None
        reason = (
            reason or refused.get(node.name) or _why_without_asking(node) or why_unsupported(node)
        )
        if reason is not None:
            eager[node] = reason
    return eager


def _why_without_asking(node: fx.Node) -> str | None:
    """Why no compiler needs to be asked: sizes of inputs are numbers by now, and tensors data."""
    values = pytree.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    if symbolic(values):
        return "a number or a size in it depends on the values of a tensor"
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        return "a tensor on device meta has no data"
    return None


def partition(module: fx.GraphModule, refused: Mapping[str, str]) -> Partitioned:
    """Partition ``module``, which is left as it is where everything is supported."""
    eager = eager_nodes(module, refused)
    if not eager:
        return Partitioned(module, True, eager)
    partitioner = CapabilityBasedPartitioner(
        module, _Support(eager), allows_single_node_partition=True
    )
    partitions = partitioner.propose_partitions()
    fused = partitioner.fuse_partitions(partitions)
    return Partitioned(fused, False, eager)
