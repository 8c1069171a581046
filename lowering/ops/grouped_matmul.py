"""Products of groups of rows with a matrix each (mixtures of experts).

Where the groups end is data. They are cut into tiles of half the rows that a group has on average,
and a loop makes one dense product a tile: of ``rows + groups * tile`` rows in all, at most. XLA:CPU
expands ``ragged_dot`` to a product of all rows with all groups' matrices instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import opmath

aten = torch.ops.aten

_SMALLEST_TILE, _LARGEST_TILE = 16, 128


def _tile_rows(rows: int, groups: int) -> int:
    """The power of two that holds half an average group."""
    half = rows // (2 * groups)
    return min(max(1 << (half - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)


def _over_tiles(
    ends: Any, rows: int, tile: int, step: Callable[[Any, Any, Any, Any], Any], initial: Any
) -> Any:
    """Fold ``step(state, group, first row, rows that count)`` over the tiles of all groups."""
    ends = jnp.clip(ends, 0, rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    tiles = jnp.cumsum(jnp.maximum(-(-(ends - starts) // tile), 0), dtype=jnp.int32)

    def body(index: Any, state: Any) -> Any:
        group = jnp.sum(tiles <= index, dtype=jnp.int32)
        before = jnp.where(group > 0, tiles[group - 1], 0)
        start = starts[group] + (index - before) * tile
        return step(state, group, start, ends[group] - start)

    return jax.lax.fori_loop(jnp.int32(0), tiles[-1], body, initial)


def _padded(x: Any, tile: int) -> Any:
    """One tile more of rows, so that no tile leaves the array."""
    return jnp.pad(x, ((0, tile), (0, 0)))


def _dot(a: Any, b: Any) -> Any:
    """A product of two matrices, or two stacks of them, summed in float32."""
    batch = tuple(range(a.ndim - 2))
    dimensions = (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=opmath(a.dtype))


def _rows_by_groups(x: Any, weights: Any, ends: Any) -> Any:
    """Each group of rows of ``x`` times its matrix; zero for rows that belong to no group."""
    rows, columns = x.shape[0], weights.shape[2]
    tile = _tile_rows(rows, weights.shape[0])
    x = _padded(x, tile)

    def step(result: Any, group: Any, start: Any, _: Any) -> Any:
        part = jax.lax.dynamic_slice_in_dim(x, start, tile)
        matrix = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        # What a tile writes beyond its group, the next group's first tile overwrites.
        return jax.lax.dynamic_update_slice_in_dim(
            result, _dot(part, matrix).astype(result.dtype), start, 0
        )

    result = jnp.zeros((rows + tile, columns), x.dtype)
    result = _over_tiles(ends, rows, tile, step, result)[:rows]
    return jnp.where((jnp.arange(rows) < ends[-1])[:, None], result, 0)


def _groups_of_products(a: Any, b: Any, ends: Any) -> Any:
    """For each group of rows, ``a``'s transposed times ``b``'s."""
    rows, groups = a.shape[0], ends.shape[0]
    tile = _tile_rows(rows, groups)
    a, b = _padded(a, tile), _padded(b, tile)

    def step(result: Any, group: Any, start: Any, count: Any) -> Any:
        inside = (jnp.arange(tile) < count)[:, None]
        left, right = (
            jnp.where(inside, jax.lax.dynamic_slice_in_dim(x, start, tile), 0) for x in (a, b)
        )
        sum_ = jax.lax.dynamic_index_in_dim(result, group, keepdims=False) + _dot(left.T, right)
        return jax.lax.dynamic_update_index_in_dim(result, sum_, group, 0)

    zeros = jnp.zeros((groups, a.shape[1], b.shape[1]), opmath(a.dtype))
    return _over_tiles(ends, rows, tile, step, zeros)


def grouped(a: Any, b: Any, ends: Any) -> Any:
    """One of the four forms, by the ranks of the operands."""
    if a.ndim == 3 and b.ndim == 3:
        return _dot(a, b)
    if a.ndim == 2 and b.ndim == 3:
        return _rows_by_groups(a, b, ends)
    if a.ndim == 3:
        return _rows_by_groups(b.T, a.swapaxes(1, 2), ends).T
    return _groups_of_products(a.T, b, ends)


@lowers(aten._grouped_mm.default)
def _grouped_mm(
    ctx: Context,
    a: Any,
    b: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    return grouped(a, b, offs)
