"""``embedding_bag``: rows of a table summed, averaged or maximized over bags of indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, check_range, opmath

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


def _bags(offsets: Any, count: int) -> Any:
    """The bag of each of ``count`` indices: the last whose offset is not beyond it."""
    return jnp.searchsorted(offsets, jnp.arange(count, dtype=offsets.dtype), side="right") - 1


def _rows(weight: Any, indices: Any) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip").astype(opmath(weight.dtype))


def _per_bag(values: Any, bags: Any, count: int) -> Any:
    """Sums of rows, or of numbers, over each of ``count`` bags."""
    return jnp.zeros((count, *values.shape[1:]), values.dtype).at[bags].add(values, mode="drop")


def _maximum(rows: Any, used: Any, bags: Any, count: int) -> tuple[Any, Any]:
    """Maxima over bags and the first position of each; a leading NaN stays, others are skipped."""
    length = rows.shape[0]
    position = jnp.arange(length)[:, None]
    first = (
        jnp.full((count, 1), length)
        .at[bags]
        .min(jnp.where(used[:, None], position, length), mode="drop")
    )
    # As ATen compares: NaN is not greater, and nothing is greater than NaN.
    leading = position == first[jnp.minimum(bags, count - 1)]
    counted = used[:, None] & ~(jnp.isnan(rows) & ~leading)
    candidates = jnp.where(counted, rows, -jnp.inf)
    best = (
        jnp.full((count, rows.shape[1]), -jnp.inf, rows.dtype).at[bags].max(candidates, mode="drop")
    )
    taken = best[jnp.minimum(bags, count - 1)]
    hit = counted & ((rows == taken) | (jnp.isnan(rows) & jnp.isnan(taken)))
    places = (
        jnp.full(best.shape, length).at[bags].min(jnp.where(hit, position, length), mode="drop")
    )
    return jnp.where(first < length, best, 0), places


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    ctx: Context,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """Result, bag of each index, indices a bag (without padding), and rows of the maxima.

    FakeTensor says which of the last three eager leaves empty.
    """
    check_range(ctx, indices, weight.shape[0], error=RuntimeError)
    count, length = ctx.shape[0], indices.shape[0]
    bags = _bags(offsets, length)
    used = indices != padding_idx
    sizes = _per_bag(used.astype(jnp.int64), bags, count)
    places = jnp.zeros(ctx.outputs[3].shape, jnp.int64)
    rows = _rows(weight, indices)
    if mode == _MAX:
        result, positions = _maximum(rows, used, bags, count)
        if length:
            places = jnp.where(positions < length, indices[jnp.minimum(positions, length - 1)], 0)
    else:
        if per_sample_weights is not None:
            rows = rows * cast(per_sample_weights, rows.dtype)[:, None]
        result = _per_bag(jnp.where(used[:, None], rows, 0), bags, count)
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None].astype(result.dtype)
    empty = ctx.outputs[1].shape == (0,)
    # It may also promise one size more than there are bags, which nobody reads.
    (promised,) = ctx.outputs[2].shape
    sizes = jnp.pad(sizes, (0, max(promised - count, 0)))[:promised]
    return result, bags[:0] if empty else bags, sizes, places


def _embedding_gradient(
    ctx: Context,
    grad: Any,
    indices: Any,
    bags: Any,
    sizes: Any,
    maxima: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int,
) -> Any:
    grad = cast(grad, opmath(ctx.dtype))
    table = jnp.zeros(ctx.shape, grad.dtype)
    if mode == _MAX:
        columns = jnp.arange(ctx.shape[1])
        return table.at[maxima, columns].add(jnp.where((sizes > 0)[:, None], grad, 0))
    rows = jnp.take(grad, bags, axis=0, mode="clip")
    if mode == _MEAN:
        rows = rows / jnp.maximum(sizes, 1)[bags][:, None].astype(grad.dtype)
    if per_sample_weights is not None:
        rows = rows * cast(per_sample_weights, grad.dtype)[:, None]
    if scale_grad_by_freq:
        # ATen divides the n-th distinct row not by its own count but by that of the n-th smallest
        # index, duplicates included.
        counts = jnp.zeros(num_weights, grad.dtype).at[indices].add(1)
        ordinal = jnp.cumsum(counts > 0) - 1
        rows = rows / counts[jnp.sort(indices)[ordinal[indices]]][:, None]
    return table.at[indices].add(jnp.where((indices != padding_idx)[:, None], rows, 0))


def _refuse_sparse(node: fx.Node) -> str | None:
    return "a sparse gradient" if node.args[9] else None


@lowers(aten._embedding_bag_backward.default, refuse=_refuse_sparse)
def _embedding_bag_backward(
    ctx: Context,
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    bags = _bags(offsets, indices.shape[0])
    settings = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return _embedding_gradient(ctx, grad, indices, bags, bag_size, maximum_indices, *settings)


@lowers(aten._embedding_bag_dense_backward.default)
def _embedding_bag_dense_backward(ctx: Context, *arguments: Any) -> Any:
    return _embedding_gradient(ctx, *arguments, *([-1] if len(arguments) == 9 else []))


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def _embedding_bag_per_sample_weights_backward(
    ctx: Context,
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    bags = _bags(offsets, indices.shape[0])
    upstream = jnp.take(cast(grad, opmath(grad.dtype)), bags, axis=0, mode="clip")
    products = jnp.sum(upstream * _rows(weight, indices), axis=1)
    return jnp.where(indices == padding_idx, 0, products)
