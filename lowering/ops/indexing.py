"""Gathers and scatters.

XLA clamps a gather's indices and drops a scatter's updates that are out of range; torch raises,
and so does a check beside each of them (``check_range``), with the type of error that ATen takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, check_range, is_floating, is_tensor, operand_dtype, opmath

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
    check_range(ctx, indices, weight.shape[0])
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
    # The forward checks the indices; ATen's backward drops those out of range, negative ones too.
    flat = jnp.where(indices < 0, num_weights, indices).ravel()
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
        check_range(ctx, index, 1)
        return x
    # ATen has an implementation of its own for dimension 1, with an error of its own.
    error = RuntimeError if dim % x.ndim == 1 else IndexError
    check_range(ctx, index, x.shape[dim], dim % x.ndim, error=error)
    return jnp.take(x, jnp.atleast_1d(index), axis=dim, mode="clip")


@lowers(aten.gather.default)
def _gather(ctx: Context, x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if index.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    _check_row(ctx, x, dim, index)
    if x.ndim == 0:
        return jnp.broadcast_to(x, ctx.shape)
    window = tuple(
        slice(None) if axis == dim % x.ndim else slice(0, size)
        for axis, size in enumerate(index.shape)
    )
    return jnp.take_along_axis(x[window], index, axis=dim, mode="clip")


def _check_row(ctx: Context, x: Any, dim: int, index: Any) -> None:
    """The check of gathers and scatters, whose negative indices do not wrap either."""
    row = jnp.atleast_1d(x)
    check_range(ctx, index, row.shape[dim], dim % row.ndim, error=RuntimeError)


def _scatter_indices(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    grids = list(
        jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    )
    grids[dim % x.ndim] = index
    return tuple(grids)


@lowers(aten.scatter.src, aten.scatter.value)
def _scatter(ctx: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    _check_row(ctx, x, dim, index)
    if x.ndim == 0:
        return jnp.broadcast_to(cast(source, x.dtype), x.shape)
    source = cast(source, x.dtype)
    if source.ndim:
        source = source[tuple(slice(0, size) for size in index.shape)]
    return x.at[_scatter_indices(x, dim, index)].set(source, mode="drop")


@lowers(aten.scatter_add.default)
def _scatter_add(ctx: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    if index.size == 0:
        return x
    _check_row(ctx, x, dim, index)
    if x.ndim == 0:
        return x + source.reshape(())
    source = source[tuple(slice(0, size) for size in index.shape)]
    wide = opmath(x.dtype)
    place = cast(x, wide).at[_scatter_indices(x, dim, index)]
    return _combine(place, "add", cast(source, wide))


_DYNAMIC = "a boolean index selects a number of elements that depends on data"


def _boolean_indices(node: fx.Node) -> list[fx.Node]:
    return [
        index
        for index in node.args[1]  # type: ignore[union-attr]
        if isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
    ]


def _refuse_boolean_index(node: fx.Node) -> str | None:
    return _DYNAMIC if _boolean_indices(node) else None


def _refuse_boolean_assignment(node: fx.Node) -> str | None:
    """A mask alone is a selection, if each value goes to all that the mask selects."""
    if not _boolean_indices(node):
        return None
    arguments: Any = node.args
    x, indices, values = arguments[:3]
    masks = [index for index in indices if index is not None]
    mask = masks[0].meta["val"]
    if len(masks) > 1 or mask.dtype is not torch.bool:
        return _DYNAMIC
    trailing = _trailing(x.meta["val"], mask, indices)
    shape = values.meta["val"].shape
    return None if len(shape) <= trailing or shape[-1 - trailing] == 1 else _DYNAMIC


def _trailing(x: Any, mask: Any, indices: Any) -> int:
    """How many dimensions of ``x`` follow those that a mask among ``indices`` covers."""
    leading = sum(index is None for index in indices[: _first(indices)])
    return int(x.ndim - leading - mask.ndim)


def _first(indices: Any) -> int:
    return next(i for i, index in enumerate(indices) if index is not None)


def _masked_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    leading = _first(indices)
    mask = indices[leading]
    trailing = _trailing(x, mask, indices)
    if values.ndim > trailing:
        before, after = values.shape[: -1 - trailing], values.shape[values.ndim - trailing :]
        values = values.reshape((*before, *(1,) * mask.ndim, *after))
    mask = mask.reshape((*mask.shape, *(1,) * trailing))
    return jnp.where(mask, x + values if accumulate else values, x)


def _index_tuple(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _check_tuple(ctx: Context, x: Any, indices: Sequence[Any]) -> None:
    for dim, index in enumerate(indices):
        if index is not None:
            check_range(ctx, index, x.shape[dim], dim, wraps=True)


@lowers(aten.index.Tensor, refuse=_refuse_boolean_index)
def _index(ctx: Context, x: Any, indices: Sequence[Any]) -> Any:
    _check_tuple(ctx, x, indices)
    return _unsafe_index(ctx, x, indices)


@lowers(aten._unsafe_index.Tensor, refuse=_refuse_boolean_index)
def _unsafe_index(ctx: Context, x: Any, indices: Sequence[Any]) -> Any:
    return x.at[_index_tuple(indices)].get(mode="clip", wrap_negative_indices=True)


@lowers(aten.index_put.default, refuse=_refuse_boolean_assignment)
def _index_put(
    ctx: Context, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    if indices[_first(indices)].dtype != jnp.bool_:
        _check_tuple(ctx, x, indices)
    return _unsafe_index_put(ctx, x, indices, values, accumulate)


@lowers(aten._unsafe_index_put.default, refuse=_refuse_boolean_assignment)
def _unsafe_index_put(
    ctx: Context, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    wide = opmath(x.dtype)
    x, values = cast(x, wide), cast(values, wide)
    if indices[_first(indices)].dtype == jnp.bool_:
        return _masked_put(x, indices, values, accumulate)
    place = x.at[_index_tuple(indices)]
    return _combine(place, "add", values) if accumulate else place.set(values, mode="drop")


def _combine(place: Any, method: str, values: Any) -> Any:
    """Scatter by ``add``, ``multiply``, ``max`` or ``min``; for bool the first two are or, and."""
    if values.dtype == jnp.bool_:
        method = {"add": "max", "multiply": "min"}.get(method, method)
    return getattr(place, method)(values, mode="drop")


@lowers(aten.take.default)
def _take(ctx: Context, x: Any, index: Any) -> Any:
    if index.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    check_range(ctx, index, x.size, wraps=True)
    return jnp.take(x.ravel(), jnp.where(index < 0, index + x.size, index), mode="clip")


@lowers(aten.put.default)
def _put(ctx: Context, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    check_range(ctx, index, x.size, wraps=True)
    flat = _unsafe_index_put(ctx, x.ravel(), [index.ravel()], source.ravel(), accumulate)
    return flat.reshape(x.shape)


def _refuse_other_mask(node: fx.Node) -> str | None:
    mask = operand_dtype(node, 1)
    return None if mask is torch.bool else f"a mask of {mask} is an error in eager"


@lowers(aten.masked_scatter.default, refuse=_refuse_other_mask)
def _masked_scatter(ctx: Context, x: Any, mask: Any, source: Any) -> Any:
    mask = jnp.broadcast_to(mask, ctx.shape)
    position = jnp.cumsum(mask.ravel()) - 1
    if position.size > source.size:
        short = position[-1] >= source.size
        ctx.check(short, RuntimeError, "fewer elements in source than ones in mask")
    if source.size == 0:
        return jnp.broadcast_to(x, ctx.shape)
    return jnp.where(mask, _rows(source.ravel(), position).reshape(ctx.shape), x)


@lowers(aten.masked_scatter_backward.default)
def _masked_scatter_backward(ctx: Context, grad: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """Where the mask holds, the n-th element of the gradient is that of the source's n-th."""
    mask = jnp.broadcast_to(mask, grad.shape).ravel()
    position = jnp.where(mask, jnp.cumsum(mask) - 1, math.prod(sizes))
    source = jnp.zeros(math.prod(sizes), grad.dtype)
    return source.at[position].set(grad.ravel(), mode="drop").reshape(ctx.shape)


@lowers(aten.nonzero_static.default)
def _nonzero_static(ctx: Context, x: Any, *, size: int, fill_value: int = -1) -> Any:
    if x.ndim == 0 or x.size == 0:
        return jnp.full(ctx.shape, fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


def _refuse_unsized(node: fx.Node) -> str | None:
    sized = node.kwargs.get("output_size") is not None
    return None if sized else "the number of repetitions depends on data; pass output_size"


@lowers(aten.repeat_interleave.Tensor, refuse=_refuse_unsized)
def _repeat_interleave(ctx: Context, repeats: Any, *, output_size: int) -> Any:
    ctx.check(jnp.any(repeats < 0), RuntimeError, "repeats can not be negative")
    other = jnp.sum(repeats) != output_size
    ctx.check(other, RuntimeError, "allocated size does not match required size")
    positions = jnp.arange(repeats.shape[0], dtype=ctx.dtype)
    return jnp.repeat(positions, repeats, total_repeat_length=output_size)


@lowers(aten.embedding_renorm.default)
def _embedding_renorm(
    ctx: Context, weight: Any, indices: Any, max_norm: float, norm_type: float
) -> Any:
    """Scale the rows that are looked up and longer than ``max_norm`` down to it."""
    check_range(ctx, indices, weight.shape[0])
    flat = indices.ravel()
    rows = _rows(weight, flat)
    norm = jnp.linalg.norm(rows, ord=norm_type, axis=-1, keepdims=True)
    scale = jnp.where(norm > max_norm, max_norm / (norm + 1e-7), 1).astype(rows.dtype)
    return weight.at[flat].set(rows * scale, mode="drop")


def _refuse_mismatch(node: fx.Node) -> str | None:
    """Eager raises where the source's other dimensions differ; FakeTensor does not see it."""
    x, source = (node.args[position].meta["val"] for position in (0, 3))  # type: ignore[union-attr]
    dim = node.args[1] % max(x.ndim, 1)  # type: ignore[operator]
    others = [[*shape[:dim], *shape[dim + 1 :]] for shape in (x.shape, source.shape)]
    fits = x.ndim == 0 or source.ndim == 0 or others[0] == others[1]
    return None if fits else "the source has other dimensions than self, an error in eager"


@lowers(aten.index_add.default, refuse=_refuse_mismatch)
def _index_add(ctx: Context, x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    wide = opmath(x.dtype)
    source = cast(source, wide) * cast(alpha, wide)
    # ATen has two implementations, which raise different errors.
    error = RuntimeError if x.ndim > 1 else IndexError
    row = jnp.atleast_1d(x)
    check_range(ctx, index, row.shape[dim], dim % row.ndim, error=error)
    if x.ndim == 0:
        return cast(x, wide) + source.reshape(())
    place = (slice(None),) * (dim % x.ndim) + (jnp.atleast_1d(index),)
    return _combine(cast(x, wide).at[place], "add", source)


_REDUCTIONS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "multiply",
    "multiply": "multiply",
    "amax": "max",
    "amin": "min",
}


def _identity(method: str, dtype: Any) -> Any:
    """The element that a reduction leaves everything else as it is with."""
    if method in ("add", "multiply"):
        return int(method == "multiply")
    if dtype == jnp.bool_:
        return method == "min"
    sign = -1 if method == "max" else 1
    if is_floating(dtype):
        return sign * jnp.inf
    return jnp.iinfo(dtype).min if method == "max" else jnp.iinfo(dtype).max


def _reduce_at(x: Any, place: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    method = _REDUCTIONS[reduce]
    wide = opmath(x.dtype)
    result = cast(x, wide)
    if not include_self:
        result = result.at[place].set(_identity(method, wide), mode="drop")
    result = _combine(result.at[place], method, cast(source, wide))
    if reduce != "mean":
        return result
    count = jnp.full(x.shape, int(include_self), jnp.int64).at[place].add(1, mode="drop")
    count = cast(jnp.maximum(count, 1), wide)
    return result / count if is_floating(wide) else jnp.floor_divide(result, count)


@lowers(aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce)
def _scatter_reduce(
    ctx: Context, x: Any, dim: int, index: Any, source: Any, reduce: str, **settings: Any
) -> Any:
    _check_row(ctx, x, dim, index)
    row = jnp.atleast_1d(x)
    index = jnp.atleast_1d(index)
    if is_tensor(source):
        source = jnp.atleast_1d(source)[tuple(slice(0, size) for size in index.shape)]
    place = _scatter_indices(row, dim, index)
    return _reduce_at(row, place, source, reduce, **settings).reshape(x.shape)


@lowers(aten.index_copy.default)
def _index_copy(ctx: Context, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _set_rows(ctx, x, dim, index, jnp.atleast_1d(source), wraps=False)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(ctx: Context, x: Any, dim: int, index: Any, value: Any) -> Any:
    return _set_rows(ctx, x, dim, index, cast(value, x.dtype), wraps=True)


def _set_rows(ctx: Context, x: Any, dim: int, index: Any, value: Any, wraps: bool) -> Any:
    row = jnp.atleast_1d(x)
    check_range(ctx, index, row.shape[dim], dim % row.ndim, wraps=wraps)
    place = (slice(None),) * (dim % row.ndim) + (jnp.atleast_1d(index),)
    return row.at[place].set(value, mode="drop").reshape(x.shape)


@lowers(aten.index_reduce.default)
def _index_reduce(
    ctx: Context, x: Any, dim: int, index: Any, source: Any, reduce: str, **settings: Any
) -> Any:
    row = jnp.atleast_1d(x)
    check_range(ctx, index, row.shape[dim], dim % row.ndim)
    place = (slice(None),) * (dim % row.ndim) + (jnp.atleast_1d(index),)
    source = jnp.atleast_1d(source)
    return _reduce_at(row, place, source, reduce, **settings).reshape(x.shape)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _searchsorted(
    ctx: Context,
    borders: Any,
    values: Any,
    *,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
    **_: Any,
) -> Any:
    if sorter is not None:
        check_range(ctx, sorter, borders.shape[-1], error=RuntimeError)
        borders = jnp.take_along_axis(borders, sorter, axis=-1)
    values = jnp.asarray(values)
    if values.size == 0 or borders.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    side = side or ("right" if right else "left")
    search = functools.partial(jnp.searchsorted, side=side)
    if borders.ndim == 1:
        return search(borders, values)
    rows = borders.reshape(-1, borders.shape[-1]), values.reshape(-1, values.shape[-1])
    return jax.vmap(search)(*rows).reshape(values.shape)


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def _bucketize(ctx: Context, values: Any, borders: Any, *, right: bool = False, **_: Any) -> Any:
    return jnp.searchsorted(borders, jnp.asarray(values), side="right" if right else "left")
