"""Pooling and resampling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _pair(values: Any) -> tuple[int, int]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return (values[0], values[0]) if len(values) == 1 else values  # type: ignore[return-value]


def _shifted_windows(
    x: Any,
    fill: Any,
    output: Sequence[int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> list[Any]:
    """The k*k strided views of the padded input, one a window position, each ``output`` large.

    Elementwise operators over them fuse and vectorize on a CPU; ``reduce_window`` does neither.
    """
    rank = x.ndim
    config = [(0, 0, 0)] * (rank - 2)
    for axis in range(2):
        reach = (output[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        high = max(reach - x.shape[rank - 2 + axis] - padding[axis], 0)
        config.append((padding[axis], high, 0))
    padded = jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)
    views = []
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        start = [0] * (rank - 2) + [i * dilation[0], j * dilation[1]]
        limit = list(x.shape[:-2]) + [
            start[-2] + (output[0] - 1) * stride[0] + 1,
            start[-1] + (output[1] - 1) * stride[1] + 1,
        ]
        views.append(jax.lax.slice(padded, start, limit, [1] * (rank - 2) + list(stride)))
    return views


def _positions(
    size: Sequence[int],
    output: Sequence[int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> list[Any]:
    """The flat input position that each window position reads, ``[oh, ow]`` each."""
    rows = jnp.arange(output[0], dtype=jnp.int64)[:, None] * stride[0] - padding[0]
    columns = jnp.arange(output[1], dtype=jnp.int64)[None, :] * stride[1] - padding[1]
    return [
        (rows + i * dilation[0]) * size[1] + columns + j * dilation[1]
        for i, j in itertools.product(range(kernel[0]), range(kernel[1]))
    ]


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool2d_with_indices(
    ctx: Context,
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    kernel = _pair(kernel_size)
    window = (kernel, _pair(stride) if stride else kernel, _pair(padding), _pair(dilation))
    output = ctx.shape[-2:]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    views = _shifted_windows(x, lowest, output, *window)
    positions = _positions(x.shape[-2:], output, *window)
    # The first position inside the image starts, so that a window of -inf has a valid index.
    best = jnp.full(ctx.shape, lowest, x.dtype)
    where = jnp.full(ctx.shape, -1, jnp.int64)
    inside = _shifted_windows(jnp.ones(x.shape[-2:], bool), False, output, *window)
    for view, position, valid in zip(views, positions, inside, strict=True):
        # Strictly greater keeps the first maximum; NaN wins and stays, as in ATen.
        better = ((view > best) | (view != view) | (where < 0)) & valid & ~(best != best)
        best = jnp.where(better, view, best)
        where = jnp.where(better, position, where)
    return best, where


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Each input element gathers the gradients of the windows whose maximum it was."""
    size = x.shape[-2] * x.shape[-1]
    planes = indices.reshape(-1, indices.shape[-2] * indices.shape[-1])
    rows = jnp.arange(planes.shape[0])[:, None]
    wide = opmath(ctx.dtype)
    flat = jnp.zeros((planes.shape[0], size), wide)
    flat = flat.at[rows, planes].add(cast(grad, wide).reshape(planes.shape), mode="drop")
    return flat.reshape(x.shape)


@lowers(aten.avg_pool2d.default)
def _avg_pool2d(
    ctx: Context,
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel = _pair(kernel_size)
    pad = _pair(padding)
    window = (kernel, _pair(stride) if stride else kernel, pad, (1, 1))
    output = ctx.shape[-2:]
    total = sum(_shifted_windows(cast(x, opmath(x.dtype)), 0, output, *window))
    if divisor_override:
        return total / divisor_override
    counted = jnp.ones(x.shape[-2:], total.dtype)
    if count_include_pad:
        # Padding counts, but what ceil_mode reaches beyond it does not.
        counted = jnp.pad(counted, [(pad[0], pad[0]), (pad[1], pad[1])], constant_values=1)
        window = (kernel, window[1], (0, 0), (1, 1))
    return total / sum(_shifted_windows(counted, 0, output, *window))


def _overlap(size: int, output: int) -> Any:
    """``[output, size]``: which inputs each adaptive window averages, divided by its length."""
    import numpy as np

    weights = np.zeros((output, size))
    for i in range(output):
        start, end = i * size // output, -(-(i + 1) * size // output)
        weights[i, start:end] = 1 / (end - start)
    return weights


@lowers(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(ctx: Context, x: Any, output_size: Sequence[int]) -> Any:
    wide = opmath(x.dtype)
    height, width = ctx.shape[-2:]
    x = cast(x, wide)
    if (height, width) == (1, 1):
        return jnp.mean(x, axis=(-2, -1), keepdims=True)
    rows = jnp.asarray(_overlap(x.shape[-2], height), wide)
    columns = jnp.asarray(_overlap(x.shape[-1], width), wide)
    return jnp.einsum("...hw,oh,pw->...op", x, rows, columns)


@lowers(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool2d_backward(ctx: Context, grad: Any, x: Any) -> Any:
    wide = opmath(x.dtype)
    rows = jnp.asarray(_overlap(x.shape[-2], grad.shape[-2]), wide)
    columns = jnp.asarray(_overlap(x.shape[-1], grad.shape[-1]), wide)
    return jnp.einsum("...op,oh,pw->...hw", cast(grad, wide), rows, columns)
