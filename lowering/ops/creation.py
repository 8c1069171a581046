"""Operators that make tensors from sizes and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, is_floating, opmath

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(aten.full.default, aten.full_like.default)
def _full(ctx: Context, _like: Any, fill_value: Any, **_: Any) -> Any:
    return jnp.full(ctx.shape, cast(fill_value, ctx.dtype))


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.empty.memory_format,
    aten._efficientzerotensor.default,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_zeros.default,
    aten._new_zeros_with_same_feature_meta.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def _zeros(ctx: Context, *_: Any, **__: Any) -> Any:
    # Not ``jnp.zeros``: the format without a zero, e8m0fnu, has its least number in that place.
    return jnp.full(ctx.shape, cast(0, ctx.dtype))


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(ctx: Context, *_: Any, **__: Any) -> Any:
    return jnp.ones(ctx.shape, ctx.dtype)


@lowers(aten.new_full.default)
def _new_full(ctx: Context, _like: Any, _size: Any, fill_value: Any, **_: Any) -> Any:
    return jnp.full(ctx.shape, cast(fill_value, ctx.dtype))


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def _fill(ctx: Context, _like: Any, value: Any) -> Any:
    return jnp.full(ctx.shape, cast(value, ctx.dtype))


@lowers(aten.scalar_tensor.default)
def _scalar_tensor(ctx: Context, value: Any, **_: Any) -> Any:
    return cast(value, ctx.dtype)


@lowers(aten.arange.start_step)
def _arange_step(ctx: Context, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    return _progression(ctx, start, step)


@lowers(aten.arange.start)
def _arange_start(ctx: Context, start: Any, end: Any, **_: Any) -> Any:
    return _progression(ctx, start, 1)


@lowers(aten.arange.default)
def _arange(ctx: Context, end: Any, **_: Any) -> Any:
    return _progression(ctx, 0, 1)


@lowers(prims.iota.default)
def _iota(ctx: Context, length: int, *, start: int, step: int, **_: Any) -> Any:
    return _progression(ctx, start, step)


def _progression(ctx: Context, start: Any, step: Any) -> Any:
    """``start + step * i``, computed in double precision for floating results as ATen does."""
    (length,) = ctx.shape
    wide = jnp.float64 if jnp.issubdtype(ctx.dtype, jnp.floating) else jnp.int64
    return jnp.asarray(start, wide) + jnp.asarray(step, wide) * jnp.arange(length, dtype=wide)


@lowers(aten.eye.default, aten.eye.m)
def _eye(ctx: Context, *_: Any, **__: Any) -> Any:
    rows, columns = ctx.shape
    return cast(jnp.eye(rows, columns, dtype=bool), ctx.dtype)


@lowers(
    aten.linspace.default,
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
)
def _linspace(ctx: Context, start: Any, end: Any, steps: int, **_: Any) -> Any:
    """From both ends to the middle, in the result's precision, as ATen counts.

    For an integer dtype the ends are cut to it first and the steps counted in float64.
    """
    wide = opmath(ctx.dtype) if is_floating(ctx.dtype) else jnp.float64
    start, end = (cast(cast(value, ctx.dtype), wide) for value in (start, end))
    # XLA multiplies by the rounded reciprocal of a constant; integers show that.
    step = (end - start) / jax.lax.optimization_barrier(jnp.asarray(max(steps - 1, 1), wide))
    position = jnp.arange(steps)
    from_start = start + step * position.astype(wide)
    from_end = end - step * (steps - 1 - position).astype(wide)
    return jnp.where(position < max(steps // 2, 1), from_start, from_end)


def _register_indices(op: Any, positions: Any) -> None:
    @lowers(op)
    def lowered(ctx: Context, rows: int, columns: int, offset: int = 0, **_: Any) -> Any:
        return jnp.asarray(np.stack(positions(rows, offset, columns)))


_register_indices(aten.tril_indices.default, np.tril_indices)
_register_indices(aten.triu_indices.default, np.triu_indices)
