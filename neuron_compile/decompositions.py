"""Which operators AOT Autograd decomposes: those that have a decomposition and no lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import decompositions_foreach, decompositions_linalg, decompositions_numbers
from .lowering.registry import lookup, registered, version
from .torch_internals import core_decompositions, decomposed_above_autograd

aten = torch.ops.aten

# Decompositions that core ATen leaves out, for operators without a lowering of their own.
_MORE = (
    aten.addmv,
    aten.as_strided_copy,
    aten.as_strided_scatter,
    aten.baddbmm,
    aten.cudnn_batch_norm,
    aten.dist,
    aten.linalg_vector_norm,
    aten.narrow_copy,
    aten.native_dropout_backward,
    aten.permute_copy,
    aten.view_copy,
)

# Operators that equal a composite one, which is traced through.
_COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for AOT Autograd."""
    return dict(_table(version()))


def lowered_whole() -> frozenset[Any]:
    """Overloads that torch would decompose above autograd, though there is a lowering.

    An overload without one, such as ``vec``, leads to the default one, which has it.
    """
    return _whole(version())


@functools.lru_cache(maxsize=2)
def _whole(registry_version: int) -> frozenset[Any]:
    packets = {
        entry.op.overloadpacket.default
        for entry in registered()
        if isinstance(entry.op, torch._ops.OpOverload) and entry.op._overloadname == "default"
    }
    return frozenset(found for op in packets for found in decomposed_above_autograd(op))


@functools.lru_cache(maxsize=2)
def _table(registry_version: int) -> dict[Any, Callable[..., Any]]:
    table = {
        **core_decompositions(_MORE),
        **_COMPOSITES,
        **decompositions_foreach.DECOMPOSITIONS,
        **decompositions_linalg.DECOMPOSITIONS,
    }
    wanted = {op: function for op, function in table.items() if lookup(op) is None}
    return wanted | {
        op: _first(function, wanted.get(op))
        for op, function in decompositions_numbers.DECOMPOSITIONS.items()
    }


def _first(special: Callable[..., Any], usual: Callable[..., Any] | None) -> Callable[..., Any]:
    """``special``, or ``usual`` where that does not apply."""
    if usual is None:
        return special

    def run(*args: Any, **kwargs: Any) -> Any:
        result = special(*args, **kwargs)
        return usual(*args, **kwargs) if result is NotImplemented else result

    return run
