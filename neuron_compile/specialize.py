"""Turns a graph with symbolic sizes into one with the sizes of a call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .torch_internals import fake_inputs, fake_mode, symbolic


def call_key(args: Sequence[Any]) -> tuple[Any, ...]:
    """What a specialization depends on: numbers, and the layout of tensors."""
    return tuple(
        (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    )


def specialize(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """A copy of ``module`` in which every size is the number it has for ``args``.

    Numbers fold into the operators' arguments; every placeholder stays in its place.
    """
    mode = fake_mode()
    graph = fx.Graph()
    folded: dict[fx.Node, Any] = {}  # what a node's argument becomes: a node or a number
    values: dict[fx.Node, Any] = {}
    inputs = iter(fake_inputs(mode, args))
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], folded.__getitem__))
            continue
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(module)
            (values[node],) = fake_inputs(mode, [held])
        else:
            call_args, call_kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with mode:
                values[node] = node.target(*call_args, **call_kwargs)  # type: ignore[operator]
            if _is_plain(values[node], (call_args, call_kwargs)):
                folded[node] = values[node]
                continue
        copy = graph.node_copy(node, folded.__getitem__)
        copy.meta["val"] = values[node]
        folded[node] = values[node] if isinstance(values[node], int | float) else copy
    return fx.GraphModule(module, graph)


def _is_plain(value: Any, operands: Any) -> bool:
    """Whether an operator's value is all of it: a number, or a check of numbers that passed."""
    value = value if value is not None else operands
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
        return False
    return not symbolic(value)
