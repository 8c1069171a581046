"""Runs the graphs of a higher-order operator over ``jax.numpy``, by the registry's lowerings."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .lazy_jax import jnp
from .region import held, region, results
from .registry import require, result_tensors, signature
from .trace import Context, code, conform, output_mask
from .types import Check, TensorSpec

# Of a linear congruential generator (Knuth's MMIX): Philox takes any key.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Body:
    """A graph of the region that a lowering lowers, as a function of arrays.

    It returns the graph's results and an int32: the position from 1 of the first check in it
    that failed, or 0. ``report`` makes checks of the lowering of them, after the loop or branch.
    """

    def __init__(self, ctx: Context, marked: str) -> None:
        assert ctx.region is not None
        self._ctx = ctx
        self._graph = ctx.region.graph(marked)
        self._checks: list[Check] = []

    def __call__(
        self, *arrays: Any, seed: Any = None, checked: bool = True
    ) -> tuple[tuple[Any, ...], Any]:
        """Run once. Random operators draw from ``seed``, that of the context if none is given."""
        flags: list[tuple[Check, Any]] = []
        checked = checked and self._ctx.checked
        seed = self._ctx.seed if seed is None else seed
        found = _run(self._graph, arrays, seed, checked, flags)
        self._checks[:] = [check for check, _ in flags]
        failed = code([flag for _, flag in flags])
        return found, failed[0] if failed else jnp.int32(0)

    def report(self, failed: Any) -> None:
        """Raise after the call what the first failed check says, if ``failed`` is not 0."""
        for position, check in enumerate(self._checks, 1):
            self._ctx.flags.append((check, failed == position))


def fold(seed: Any, number: Any) -> Any:
    """The seed of the n-th run of a body; ``None`` where nothing is random."""
    if seed is None:
        return None
    key = seed[0] * jnp.int64(_MULTIPLIER) + (seed[1] + 1) * jnp.int64(_INCREMENT)
    return jnp.stack([key + jnp.asarray(number, jnp.int64) * jnp.int64(_MULTIPLIER), key * 0])


def _run(
    graph: fx.GraphModule,
    arrays: Sequence[Any],
    seed: Any,
    checked: bool,
    flags: list[tuple[Check, Any]],
) -> tuple[Any, ...]:
    values: dict[fx.Node, Any] = {}
    inputs = iter(arrays)
    for position, node in enumerate(graph.graph.nodes):
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = _constant(held(graph, node.target))
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            values[node] = _call(node, values, fold(seed, position), checked, flags)
    return tuple(values[item] if isinstance(item, fx.Node) else item for item in results(graph))


def _call(
    node: fx.Node,
    values: dict[fx.Node, Any],
    seed: Any,
    checked: bool,
    flags: list[tuple[Check, Any]],
) -> Any:
    entry = require(node)
    assert entry.function is not None
    outputs = tuple(TensorSpec.of(tensor) for tensor in result_tensors(node))
    ctx = Context(outputs, seed if entry.random else None, checked, region=region(node))
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    mask = output_mask(node)
    made = iter(list(conform(entry.function(ctx, *args, **kwargs), mask, outputs, node)))
    flags += [
        (dataclasses.replace(check, message=f"{check.message} in {signature(node)}"), flag)
        for check, flag in ctx.flags
    ]
    found = tuple(next(made) if wanted else None for wanted in mask)
    return found if isinstance(node.meta["val"], tuple | list) else found[0]


def _constant(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)
    return jnp.asarray(tensor.detach().resolve_conj().resolve_neg().numpy())
