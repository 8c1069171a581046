"""Histograms over bins that are given, or lie evenly over a range (ATen's ``Histogram.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from ._shared import opmath

aten = torch.ops.aten


def _limits(ctx: Context, x: Any, low: Any, high: Any, half: float) -> tuple[Any, Any]:
    """A range of ``x.dtype``: that of the values if none is given, and never an empty one."""
    if low is None:
        low, high = (jnp.min(x), jnp.max(x)) if x.size else (0, 0 if half == 1 else 1)
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    infinite = ~(jnp.isfinite(low) & jnp.isfinite(high))
    ctx.check(infinite, RuntimeError, f"the range of the values is not finite ({x.size} values)")
    return jnp.where(low == high, low - half, low), jnp.where(low == high, high + half, high)


def _edges(low: Any, high: Any, bins: int) -> Any:
    """ATen's ``linspace``, from both ends to the middle."""
    step = (high - low) / bins
    index = jnp.arange(bins + 1).astype(low.dtype)
    return jnp.where(index < (bins + 1) // 2, low + step * index, high - step * (bins - index))


@lowers(aten.histc.default)
def _histc(ctx: Context, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    values = x.ravel()
    least, most = (None, None) if min == max and x.size else (min, max)
    low, high = _limits(ctx, values, least, most, half=1)
    inside = (values >= low) & (values <= high)
    # A position, not a search: at an edge its rounding decides, as in ATen.
    place = jnp.where(inside, (values - low) * bins / (high - low), 0).astype(jnp.int64)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    return jnp.zeros(bins, opmath(ctx.dtype)).at[place].add(1, mode="drop")


def _histogram(x: Any, edges: Sequence[Any], weight: Any, density: bool) -> Any:
    """Counts, or sums of weights, of points ``[..., D]`` in the cells between ``edges``."""
    points = x.reshape(-1, len(edges))
    shape = tuple(edge.shape[0] - 1 for edge in edges)
    inside, places = jnp.ones(points.shape[0], bool), []
    for axis, edge in enumerate(edges):
        value = points[:, axis]
        inside &= (value >= edge[0]) & (value <= edge[-1])
        place = jnp.searchsorted(edge, value, side="right") - 1
        places.append(jnp.clip(place, 0, shape[axis] - 1))  # the last bin has its right edge, too
    amounts: Any = 1 if weight is None else weight.ravel()
    amounts = jnp.where(inside, amounts, 0).astype(x.dtype)
    result = jnp.zeros(shape, x.dtype).at[tuple(places)].add(amounts)
    if density:
        result = result / jnp.sum(result)
        for axis, edge in enumerate(edges):
            width = edge[1:] - edge[:-1]
            result = result / width.reshape([-1 if i == axis else 1 for i in range(len(edges))])
    return result


def _even_edges(ctx: Context, x: Any, bins: Sequence[int], range: Any) -> list[Any]:
    points = x.reshape(-1, len(bins))
    edges = []
    for axis, count in enumerate(bins):
        least, most = (None, None) if range is None else range[2 * axis : 2 * axis + 2]
        low, high = _limits(ctx, points[:, axis], least, most, half=0.5)
        edges.append(_edges(low, high, count))
    return edges


@lowers(aten.histogram.bin_ct)
def _histogram_of_count(
    ctx: Context,
    x: Any,
    bins: int = 100,
    *,
    range: Any = None,
    weight: Any = None,
    density: bool = False,
) -> tuple[Any, Any]:
    edges = _even_edges(ctx, x, [bins], range)
    return _histogram(x, edges, weight, density), edges[0]


@lowers(aten.histogram.bins_tensor)
def _histogram_of_edges(
    ctx: Context, x: Any, bins: Any, *, weight: Any = None, density: bool = False
) -> tuple[Any, Any]:
    return _histogram(x, [bins], weight, density), bins


@lowers(aten._histogramdd_bin_edges.default)
def _histogramdd_bin_edges(
    ctx: Context, x: Any, bins: Sequence[int], *, range: Any = None, **_: Any
) -> list[Any]:
    return _even_edges(ctx, x, bins, range)


@lowers(aten._histogramdd_from_bin_cts.default)
def _histogramdd_from_bin_cts(
    ctx: Context,
    x: Any,
    bins: Sequence[int],
    *,
    range: Any = None,
    weight: Any = None,
    density: bool = False,
) -> Any:
    return _histogram(x, _even_edges(ctx, x, bins, range), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def _histogramdd_from_bin_tensors(
    ctx: Context, x: Any, bins: Sequence[Any], *, weight: Any = None, density: bool = False
) -> Any:
    return _histogram(x, bins, weight, density)
