"""The operators that take float8 tensors: those that ATen has on the CPU for them, nearly.

Everything else keeps eager's value, or its error, by staying with ATen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..passes import as_strided
from ..registry import takes_float8, wrap
from ..trace import Context
from ..types import FLOAT8, TensorSpec
from . import creation, indexing, pointwise, views  # noqa: F401 - whose lowerings are wrapped here
from ._shared import cast

aten = torch.ops.aten
prims = torch.ops.prims

#: What moves data, and the positions of the arguments that become the result's elements.
_MOVING: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.as_strided.default,
            as_strided,
            aten.cat.default,
            aten.clone.default,
            aten.detach.default,
            aten.diagonal.default,
            aten.embedding.default,
            aten.expand.default,
            aten.index.Tensor,
            aten.index_select.default,
            aten.lift_fresh_copy.default,
            aten.permute.default,
            aten.repeat.default,
            aten.reshape.default,
            aten.roll.default,
            aten.select.int,
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.stack.default,
            aten.t.default,
            aten.transpose.int,
            aten.unbind.int,
            aten.unfold.default,
            aten.unsqueeze.default,
            aten._unsafe_index.Tensor,
            aten._unsafe_view.default,
            aten.view.default,
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            aten.copy.default,
            aten.diagonal_scatter.default,
            prims.as_strided_scatter.default,
            aten.select_scatter.default,
            aten.slice_scatter.default,
        ),
        (0, 1),
    ),
    aten.constant_pad_nd.default: (0, 2),
    aten.index_put.default: (0, 2),
    aten.where.self: (1, 2),
}


def _by_code(positions: tuple[int, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering that moves float8 numbers as bytes, and all others as it did.

    XLA:CPU moves float8 numbers by way of a wider format, out of which NaNs come changed.
    """

    def lowered(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        if not all(spec.dtype in FLOAT8 for spec in ctx.outputs):
            return function(ctx, *args, **kwargs)

        def code(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [code(item) for item in value]
            return jax.lax.bitcast_convert_type(cast(value, ctx.dtype), jnp.uint8)

        outputs = tuple(TensorSpec(spec.shape, torch.uint8) for spec in ctx.outputs)
        codes = (code(arg) if at in positions else arg for at, arg in enumerate(args))
        results = function(dataclasses.replace(ctx, outputs=outputs), *codes, **kwargs)
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, ctx.dtype), results)

    return lowered


def _moves(node: fx.Node) -> bool:
    """Not a sum in place of a move."""
    return node.target is not aten.index_put.default or not (
        node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    )


for _op, _positions in _MOVING.items():
    wrap(_op, functools.partial(_by_code, _positions))
takes_float8(*_MOVING, when=_moves)

# Conversions and what makes tensors.
takes_float8(
    aten._to_copy.default,
    prims.convert_element_type.default,
    aten.view.dtype,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.eye.default,
    aten.eye.m,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.full.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.zeros_like.default,
)

takes_float8(aten.eq.Scalar, aten.eq.Tensor, aten.isnan.default, aten.ne.Scalar, aten.ne.Tensor)


def _of_tensors(node: fx.Node) -> bool:
    """ATen has no product with a number."""
    return len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args)


takes_float8(aten.mul.Tensor, when=_of_tensors)
