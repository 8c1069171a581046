"""Gathers and scatters.

XLA clamps a gather's indices and drops a scatter's updates that are out of range; torch raises.
Indices of embeddings and gathers are wrapped and clamped here, never read out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _rows(weight: Any, indices: Any) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowers(aten.embedding.default)
def _embedding(
    ctx: Context,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return _rows(weight, indices)


@lowers(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    ctx: Context,
    grad: Any,
    indices: Any,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    width = grad.shape[-1]
    flat = indices.ravel()
    rows = cast(grad, opmath(ctx.dtype)).reshape(-1, width)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, rows.dtype).at[flat].add(1)
        rows = rows / counts[flat][:, None]
    if padding_idx >= 0:
        rows = jnp.where((flat == padding_idx)[:, None], 0, rows)
    return jnp.zeros((num_weights, width), rows.dtype).at[flat].add(rows)


@lowers(aten.index_select.default)
def _index_select(ctx: Context, x: Any, dim: int, index: Any) -> Any:
    if x.ndim == 0:
        return x
    return jnp.take(x, jnp.atleast_1d(index), axis=dim, mode="clip")


@lowers(aten.gather.default)
def _gather(ctx: Context, x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, ctx.shape)
    window = tuple(
        slice(None) if axis == dim % x.ndim else slice(0, size)
        for axis, size in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[window], index, axis=dim, mode="clip")


def _scatter_indices(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    grids = jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    grids[dim % x.ndim] = index
    return tuple(grids)


@lowers(aten.scatter.src, aten.scatter.value)
def _scatter(ctx: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(cast(source, x.dtype), x.shape)
    source = cast(source, x.dtype)
    if source.ndim:
        source = source[tuple(slice(0, size) for size in index.shape)]
    return x.at[_scatter_indices(x, dim, index)].set(source, mode="drop")


@lowers(aten.scatter_add.default)
def _scatter_add(ctx: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    if x.ndim == 0:
        return x + source.reshape(())
    source = source[tuple(slice(0, size) for size in index.shape)]
    wide = opmath(x.dtype)
    return cast(x, wide).at[_scatter_indices(x, dim, index)].add(cast(source, wide), mode="drop")


def _refuse_boolean_index(node: fx.Node) -> str | None:
    indices = node.args[1]
    for index in indices:  # type: ignore[union-attr]
        if isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8):
            return "a boolean index selects a number of elements that depends on data"
    return None


def _index_tuple(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@lowers(aten.index.Tensor, refuse=_refuse_boolean_index)
def _index(ctx: Context, x: Any, indices: Sequence[Any]) -> Any:
    return x.at[_index_tuple(indices)].get(mode="clip", wrap_negative_indices=True)


@lowers(
    aten.index_put.default, aten._unsafe_index_put.default, refuse=_refuse_boolean_index
)
def _index_put(
    ctx: Context, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    if not accumulate:
        return x.at[_index_tuple(indices)].set(cast(values, x.dtype), mode="drop")
    wide = opmath(x.dtype)
    return cast(x, wide).at[_index_tuple(indices)].add(cast(values, wide), mode="drop")


lowers(aten._unsafe_index.Tensor, refuse=_refuse_boolean_index)(_index)


@lowers(aten.index_add.default)
def _index_add(ctx: Context, x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    wide = opmath(x.dtype)
    source = cast(source, wide) * cast(alpha, wide)
    if x.ndim == 0:
        return cast(x, wide) + source.reshape(())
    place = (slice(None),) * (dim % x.ndim) + (jnp.atleast_1d(index),)
    return cast(x, wide).at[place].add(source, mode="drop")


@lowers(aten.nll_loss_forward.default)
def _nll_loss_forward(
    ctx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    wide = opmath(x.dtype)
    x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    weights = _nll_weights(x, target, weight, ignore_index, wide)
    safe = jnp.clip(target, 0, x.shape[1] - 1)
    losses = -jnp.take_along_axis(x, safe[:, None], axis=1)[:, 0].astype(wide)
    losses = jnp.where(target == ignore_index, 0, losses) * weights
    if reduction == 0:
        return losses.reshape(ctx.shape), jnp.zeros((), wide)
    total = jnp.sum(weights)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


def _nll_weights(x: Any, target: Any, weight: Any, ignore_index: int, wide: Any) -> Any:
    safe = jnp.clip(target, 0, x.shape[1] - 1)
    weights = jnp.ones(target.shape, wide) if weight is None else weight.astype(wide)[safe]
    return jnp.where(target == ignore_index, 0, weights)


@lowers(aten.nll_loss_backward.default)
def _nll_loss_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Any:
    wide = opmath(x.dtype)
    rows, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    weights = _nll_weights(rows, target, weight, ignore_index, wide)
    scale = cast(grad, wide).reshape(-1) if reduction == 0 else cast(grad, wide)
    if reduction == 1:
        scale = scale / cast(total_weight, wide)
    hit = jax.nn.one_hot(target, rows.shape[1], dtype=wide) != 0
    return jnp.where(hit, -(weights * scale)[:, None], 0).reshape(x.shape)
