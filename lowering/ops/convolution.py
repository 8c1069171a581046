"""Convolutions in one to three dimensions, their transposes and their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from ..registry import lowers
from ..trace import Context
from ._shared import HALVES

aten = torch.ops.aten




def _spread(values: Sequence[int], rank: int) -> tuple[int, ...]:
    values = tuple(values)
    return values * (rank - 2) if len(values) == 1 else values


def _forward(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=[(amount, amount) for amount in padding],
        rhs_dilation=dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            *(tuple(range(x.ndim)) for _ in range(3))
        ),
        feature_group_count=groups,
        preferred_element_type=jnp.float32 if x.dtype in HALVES else None,
    )


def _transposed(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """The gradient of a convolution with respect to its input, written as one convolution."""
    spatial = weight.shape[2:]
    inputs, per_group = weight.shape[0], weight.shape[1]
    flipped = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = flipped.reshape(groups, inputs // groups, per_group, *spatial)
    kernel = jnp.swapaxes(grouped, 1, 2).reshape(groups * per_group, inputs // groups, *spatial)
    pads = []
    for size, pad, dil, extra in zip(spatial, padding, dilation, output_padding, strict=True):
        reach = dil * (size - 1)
        pads.append((reach - pad, reach - pad + extra))
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,) * len(spatial),
        padding=pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            *(tuple(range(x.ndim)) for _ in range(3))
        ),
        feature_group_count=groups,
        preferred_element_type=jnp.float32 if x.dtype in HALVES else None,
    )


def _plain(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if transposed:
        return _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    return _forward(x, weight, stride, padding, dilation, groups)


def _attributes(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> dict[str, Any]:
    """Composite attributes: lists become text, which every MLIR version keeps as it is."""
    return {
        "stride": ",".join(map(str, stride)),
        "padding": ",".join(map(str, padding)),
        "dilation": ",".join(map(str, dilation)),
        "transposed": int(transposed),
        "output_padding": ",".join(map(str, output_padding)),
        "groups": groups,
    }


def _refuse(node: fx.Node) -> str | None:
    dtype = node.all_input_nodes[0].meta["val"].dtype
    return None if dtype.is_floating_point else f"a convolution of {dtype}"


@lowers(aten.convolution.default, refuse=_refuse)
def _convolution(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    stride, padding, dilation, output_padding = (
        _spread(values, x.ndim) for values in (stride, padding, dilation, output_padding)
    )
    settings = (stride, padding, dilation, transposed, output_padding, groups)

    def plain(x: Any, weight: Any, *bias: Any) -> Any:
        result = _plain(x, weight, *settings)
        if bias:
            result = result + bias[0].reshape(1, -1, *(1,) * (x.ndim - 2))
        return result.astype(ctx.dtype)

    operands = (x, weight) if bias is None else (x, weight, bias)
    return ctx.kernel("convolution", plain, operands, **_attributes(*settings))


@lowers(aten.convolution_backward.default, refuse=_refuse)
def _convolution_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    stride, padding, dilation, output_padding = (
        _spread(values, x.ndim) for values in (stride, padding, dilation, output_padding)
    )
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    mask = tuple(bool(wanted) for wanted in output_mask)

    def plain(grad: Any, x: Any, weight: Any) -> Any:
        def forward(x: Any, weight: Any) -> Any:
            return _plain(x, weight, *settings).astype(x.dtype)

        dx, dw = jax.vjp(forward, x, weight)[1](grad)
        db = jnp.sum(grad, axis=(0, *range(2, grad.ndim)))
        return tuple(value for value, wanted in zip((dx, dw, db), mask, strict=True) if wanted)

    results = iter(
        ctx.kernel(
            "convolution_backward",
            plain,
            (grad, x, weight),
            **_attributes(*settings),
            mask=",".join(str(int(wanted)) for wanted in mask),
        )
    )
    return tuple(next(results) if wanted else None for wanted in mask)
