"""What a compiler refused is remembered for that very call, not for all calls of its operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from neuron_compile.lowering.registry import (
    forget_refusals,
    remember_refusal,
    takes_stock,
    why_unsupported,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    forget_refusals()
    yield
    forget_refusals()


def called(graph: fx.Graph, op: torch._ops.OpOverload, *args: object) -> fx.Node:
    node = graph.call_function(op, args)
    values = fx.map_arg(args, lambda operand: operand.meta["val"])
    node.meta["val"] = op(*values)
    return node


def test_other_numbers_are_not_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    refused, same, other = (called(graph, aten.tril.default, x, k) for k in (1, 1, 2))
    remember_refusal(refused, "for a reason")
    assert why_unsupported(refused) == why_unsupported(same) == "for a reason"
    assert why_unsupported(other) is None


def test_a_spliced_lowering_stands_in_for_torch_mlir() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    refused, other = (called(graph, aten.sum.dim_IntList, x, [dim]) for dim in (0, 1))
    assert takes_stock(refused) and takes_stock(other)
    remember_refusal(refused, "for a reason")
    assert not takes_stock(refused) and takes_stock(other)
    assert why_unsupported(refused) is None
