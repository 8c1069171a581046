"""``segment_reduce`` and its backward: reductions over runs of rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten

#: The scatter that adds a row to its segment, and what an empty segment holds.
_REDUCTIONS = {
    "sum": ("add", 0.0),
    "mean": ("add", 0.0),
    "max": ("max", -math.inf),
    "min": ("min", math.inf),
    "prod": ("multiply", 1.0),
}


class _Segments:
    """Rows ``[batch, row, rest]`` of ``data`` and the segment of each.

    Lengths or offsets may differ along the dimensions before ``axis``.
    """

    def __init__(self, data: Any, lengths: Any, offsets: Any, axis: int) -> None:
        axis = axis % data.ndim
        if offsets is None:
            offsets = jnp.cumsum(lengths, axis=-1)
            offsets = jnp.pad(offsets, [(0, 0)] * (offsets.ndim - 1) + [(1, 0)])
        self.offsets = offsets.reshape(-1, offsets.shape[-1])
        self.count = offsets.shape[-1] - 1
        self.lengths = (self.offsets[:, 1:] - self.offsets[:, :-1])[..., None]
        rows = jnp.arange(data.shape[axis])
        # Rows before the first and after the last offset are in no segment.
        found = jnp.sum(rows[None, :, None] >= self.offsets[:, None, :], axis=-1) - 1
        self.place = jnp.arange(found.shape[0])[:, None], jnp.where(found < 0, self.count, found)
        self.inside = ((found >= 0) & (found < self.count))[..., None]
        self.shape = (found.shape[0], data.shape[axis], math.prod(data.shape[axis + 1 :]))

    def rows(self, data: Any) -> Any:
        return cast(data, opmath(data.dtype)).reshape(self.shape)

    def reduced(self, rows: Any, method: str, initial: float) -> Any:
        start = jnp.full((self.shape[0], self.count, self.shape[2]), initial, rows.dtype)
        return getattr(start.at[self.place], method)(rows, mode="drop")

    def spread(self, values: Any) -> Any:
        """A value of each segment for each of its rows."""
        values = values.reshape(self.shape[0], self.count, -1)
        return values.at[self.place].get(mode="clip")


@lowers(aten.segment_reduce.default)
def _segment_reduce(
    ctx: Context,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    method, start = _REDUCTIONS[reduce]
    segments = _Segments(data, lengths, offsets, axis)
    result = segments.reduced(segments.rows(data), method, start if initial is None else initial)
    if reduce == "mean":
        empty = jnp.nan if initial is None else result
        result = jnp.where(segments.lengths == 0, empty, result / segments.lengths)
    return result.reshape(ctx.shape)


@lowers(aten._segment_reduce_backward.default)
def _segment_reduce_backward(
    ctx: Context,
    grad: Any,
    output: Any,
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    offsets: Any = None,
    axis: int = 0,
    initial: Any = None,
) -> Any:
    segments = _Segments(data, lengths, offsets, axis)
    rows = segments.rows(data)
    upstream = segments.spread(cast(grad, rows.dtype))
    if reduce == "mean":
        upstream = upstream / segments.spread(segments.lengths)
    elif reduce in ("max", "min"):
        extreme = segments.spread(cast(output, rows.dtype))
        hit = (rows == extreme) | (jnp.isnan(rows) & jnp.isnan(extreme))
        ties = segments.reduced(hit.astype(rows.dtype), "add", 0)
        # ATen averages over ties only the gradients that are positive.
        ties = jnp.where(upstream > 0, jnp.maximum(segments.spread(ties), 1), 1)
        upstream = jnp.where(hit, upstream / ties, 0)
    elif reduce == "prod":
        upstream = upstream * _others(segments, rows, output, 1 if initial is None else initial)
    return jnp.where(segments.inside, upstream, 0).reshape(ctx.shape)


def _others(segments: _Segments, rows: Any, output: Any, initial: float) -> Any:
    """The product of all other rows of a segment, which a zero or NaN cannot be divided out of."""
    odd = (rows == 0) | jnp.isnan(rows)
    regular = segments.spread(segments.reduced(jnp.where(odd, 1, rows), "multiply", initial))
    zeros = segments.spread(segments.reduced((rows == 0).astype(rows.dtype), "add", 0))
    numbers = segments.spread(segments.reduced(jnp.isnan(rows).astype(rows.dtype), "add", 0))
    without = jnp.where(zeros - (rows == 0) > 0, 0 * regular, regular)
    without = jnp.where(numbers - jnp.isnan(rows) > 0, jnp.nan, without)
    return jnp.where(odd, without, segments.spread(cast(output, rows.dtype)) / rows)
