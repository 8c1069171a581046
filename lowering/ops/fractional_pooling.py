"""Fractional max-pooling: windows at pseudo-random distances (Graham, arXiv:1412.6071)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from .pooling import _scatter_maxima

aten = torch.ops.aten


def _starts(sample: Any, size: int, output: int, window: int) -> Any:
    """``[..., output]``: where the windows along an axis start, for each plane's sample."""
    if output == 1:
        return jnp.full((*sample.shape, 1), size - window)
    step = jnp.asarray((size - window) / (output - 1), sample.dtype)
    position = jnp.arange(output - 1).astype(sample.dtype)
    places = ((position + sample[..., None]) * step).astype(jnp.int64)
    places = places - (sample * step).astype(jnp.int64)[..., None]
    last = jnp.full((*sample.shape, 1), size - window)
    return jnp.concatenate([places, last], axis=-1)


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def _fractional_max_pool(
    ctx: Context, x: Any, kernel_size: Sequence[int], output_size: Sequence[int], samples: Any
) -> tuple[Any, Any]:
    """Maxima, a later NaN before all, and their flat positions in the image."""
    rank = len(kernel_size)
    size, output = x.shape[-rank:], ctx.shape[-rank:]
    if 0 in ctx.shape:
        return jnp.zeros(ctx.shape, x.dtype), jnp.zeros(ctx.shape, jnp.int64)
    # One image may come with the samples of a batch: it takes the first.
    planes = samples.reshape(-1, rank)[: math.prod(x.shape[:-rank])]
    planes = planes.reshape(*x.shape[:-rank], rank)
    flat: Any = 0
    for axis in range(rank):
        # ATen takes the samples in the order x, y for images and t, y, x for volumes.
        sample = planes[..., 1 - axis if rank == 2 else axis]
        start = _starts(sample, size[axis], output[axis], kernel_size[axis])
        shape = [1] * rank
        shape[axis] = output[axis]
        flat = flat * size[axis] + start.reshape(*start.shape[:-1], *shape)
    flat = jnp.broadcast_to(flat, ctx.shape)
    rows = x.reshape(*x.shape[:-rank], -1)
    best, where = jnp.full(ctx.shape, -jnp.inf, x.dtype), flat
    for cell in itertools.product(*map(range, kernel_size)):
        offset = 0
        for axis, step in enumerate(cell):
            offset = offset * size[axis] + step
        index = flat + offset
        places = index.reshape(*rows.shape[:-1], -1)
        value = jnp.take_along_axis(rows, places, axis=-1, mode="clip").reshape(ctx.shape)
        better = (value > best) | jnp.isnan(value)
        best, where = jnp.where(better, value, best), jnp.where(better, index, where)
    return best, where


@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def _fractional_max_pool_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Any,
) -> Any:
    return _scatter_maxima(ctx, grad, indices, len(kernel_size))
