"""``grid_sampler_2d`` and ``grid_sampler_3d``, and their backward.

A grid holds positions in ``[-1, 1]``, the last dimension in the order x, y, z. Formulas are those
of ``ATen/native/GridSampler.h``; like it, halves are computed in their own precision.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _unnormalized(grid: Any, size: int, align_corners: bool) -> tuple[Any, float]:
    """Positions in elements, and the slope of that."""
    if align_corners:
        return (grid + 1) * ((size - 1) / 2), (size - 1) / 2
    return ((grid + 1) * size - 1) * 0.5, size / 2


def _reflected(place: Any, size: int, align_corners: bool) -> tuple[Any, Any]:
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(place), jnp.zeros_like(place)
    sign = jnp.where(place < low, -1, 1).astype(place.dtype)
    # In a half type the quotient would round up to the next whole number of reflections.
    distance = cast(jnp.abs(place - low), opmath(place.dtype))
    rest = jax.lax.rem(distance, jnp.full_like(distance, span)).astype(place.dtype)
    even = jnp.floor(distance / span) % 2 == 0
    return jnp.where(even, rest, span - rest) + low, jnp.where(even, sign, -sign)


def _clipped(place: Any, size: int) -> tuple[Any, Any]:
    inside = (place > 0) & (place < size - 1)
    clipped = jnp.where(jnp.isnan(place), 0, jnp.clip(place, 0, size - 1))
    return clipped, inside.astype(place.dtype)


def _padded(place: Any, size: int, padding: int, align_corners: bool) -> tuple[Any, Any]:
    """Positions after padding, and the slope of that."""
    slope: Any = jnp.ones_like(place)
    if padding == _REFLECTION:
        place, slope = _reflected(place, size, align_corners)
    if padding != _ZEROS:
        place, inside = _clipped(place, size)
        slope = slope * inside
    return place, slope


def _read(x: Any, places: Sequence[Any]) -> Any:
    """``x`` ``[N, C, *size]`` at whole ``places`` ``[N, *output]``; zero outside."""
    size = x.shape[2:]
    inside = functools.reduce(
        jnp.logical_and,
        ((place >= 0) & (place <= n - 1) for place, n in zip(places, size, strict=True)),
    )
    flat: Any = 0
    for place, n in zip(places, size, strict=True):
        flat = flat * n + jnp.where(inside, place, 0).astype(jnp.int32)
    rows = x.reshape(*x.shape[:2], -1)
    index = flat.reshape(flat.shape[0], 1, -1)
    taken = jnp.take_along_axis(rows, index, axis=2, mode="promise_in_bounds")
    return jnp.where(inside[:, None], taken.reshape(*x.shape[:2], *flat.shape[1:]), 0)


def _linear(x: Any, places: Sequence[Any]) -> Any:
    """The corners around each position, weighted with their distance."""
    floors = [jnp.floor(place) for place in places]
    total: Any = 0
    for corner in itertools.product((0, 1), repeat=len(places)):
        weight: Any = 1
        # x comes first in a grid, and its corners and weights first in ATen.
        for place, floor, far in reversed(list(zip(places, floors, corner, strict=True))):
            weight = (place - floor if far else floor + 1 - place) * weight
        reads = [floor + far for floor, far in zip(floors, corner, strict=True)]
        total = total + _read(x, reads) * weight[:, None]
    return total


def _cubic_weights(t: Any) -> list[Any]:
    """Keys' cubic convolution for the elements at -1, 0, 1 and 2 from the one before."""
    a = -0.75

    def near(t: Any) -> Any:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Any) -> Any:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(x: Any, places: Sequence[Any], padding: int, align_corners: bool) -> Any:
    """Sixteen elements around each position; each of them is padded by itself."""
    y, x_ = places
    size_y, size_x = x.shape[2:]
    floors = jax.lax.stop_gradient(jnp.floor(y)), jax.lax.stop_gradient(jnp.floor(x_))
    weights_y, weights_x = _cubic_weights(y - floors[0]), _cubic_weights(x_ - floors[1])
    total: Any = 0
    for i, weight_y in enumerate(weights_y):
        row, _ = _padded(floors[0] + (i - 1), size_y, padding, align_corners)
        line: Any = 0
        for j, weight_x in enumerate(weights_x):
            column, _ = _padded(floors[1] + (j - 1), size_x, padding, align_corners)
            line = line + _read(x, (row, column)) * weight_x[:, None]
        total = total + line * weight_y[:, None]
    return total


def _positions(
    grid: Any, size: Sequence[int], mode: int, padding: int, align_corners: bool
) -> tuple[list[Any], list[Any]]:
    """A position along each axis, in the order of ``size``, and its slope in the grid."""
    places: list[Any] = []
    slopes: list[Any] = []
    for axis, n in enumerate(reversed(size)):
        place, scale = _unnormalized(grid[..., axis], n, align_corners)
        slope: Any = jnp.full_like(place, scale)
        if mode != _BICUBIC:
            place, inner = _padded(place, n, padding, align_corners)
            slope = slope * inner
        places.insert(0, place)
        slopes.insert(0, slope)
    return places, slopes


def _sample(x: Any, places: Sequence[Any], mode: int, padding: int, align_corners: bool) -> Any:
    if mode == _BICUBIC:
        return _cubic(x, places, padding, align_corners)
    if mode == _NEAREST:
        return _read(x, [jnp.round(place) for place in places])
    return _linear(x, places)


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(
    ctx: Context, x: Any, grid: Any, mode: int, padding: int, align_corners: bool
) -> Any:
    if 0 in x.shape or 0 in grid.shape:
        return jnp.zeros(ctx.shape, ctx.dtype)
    places, _ = _positions(grid, x.shape[2:], mode, padding, align_corners)
    return _sample(x, places, mode, padding, align_corners)


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_sampler_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    grid: Any,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    if 0 in x.shape or 0 in grid.shape:
        return jnp.zeros_like(x), jnp.zeros_like(grid)
    places, slopes = _positions(grid, x.shape[2:], mode, padding, align_corners)
    sample = functools.partial(_sample, mode=mode, padding=padding, align_corners=align_corners)
    # Positions are those of the forward; gradients are added up in float32.
    wide = opmath(x.dtype)
    operands = cast(x, wide), [cast(place, wide) for place in places]
    to_x, to_places = jax.vjp(sample, *operands)[1](cast(grad, wide))
    if mode == _NEAREST:
        return to_x, jnp.zeros_like(grid)
    along = [place * slope for place, slope in zip(to_places, slopes, strict=True)]
    return to_x, jnp.stack(along[::-1], axis=-1)
