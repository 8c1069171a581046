"""Reductions, softmax and cumulative operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp, numpy_functions
from ..registry import lowers, result_tensors, torch_mlir_lowers
from ..trace import Context
from ._shared import (
    canonical_dims,
    cast,
    is_complex,
    is_nan,
    nan_first,
    opmath,
    same_full_float,
)

aten = torch.ops.aten


def _reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Serves the overloads over all elements, over some dimensions and over one."""

    def lowered(ctx: Context, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
        dims = canonical_dims(dim, x.ndim)
        return reduce(cast(x, opmath(ctx.dtype)), axis=dims, keepdims=keepdim)

    return lowered


lowers(aten.sum.default, aten.sum.dim_IntList)(_reduction(numpy_functions.sum))
lowers(aten.mean.default, aten.mean.dim)(_reduction(numpy_functions.mean))
lowers(aten.prod.default, aten.prod.dim_int)(_reduction(numpy_functions.prod))


def _extremum(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(ctx: Context, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
        return reduce(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)

    return lowered


lowers(aten.amax.default)(_extremum(numpy_functions.max))
lowers(aten.amin.default)(_extremum(numpy_functions.min))
lowers(aten.max.default)(lambda ctx, x: jnp.max(x))
lowers(aten.min.default)(lambda ctx, x: jnp.min(x))


@lowers(aten.hash_tensor.default)
def _hash_tensor(
    ctx: Context, x: Any, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> Any:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.float64 if floating else jnp.uint64)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint64)
    return jax.lax.reduce_xor(bits, canonical_dims(dim, x.ndim)).reshape(ctx.shape)


_argmax, _argmin = nan_first(numpy_functions.argmax), nan_first(numpy_functions.argmin)


def _with_indices(argument: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(ctx: Context, x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        index = jnp.expand_dims(argument(x, dim), dim)
        value = jnp.take_along_axis(x, index, axis=dim)
        if not keepdim:
            index, value = jnp.squeeze(index, dim), jnp.squeeze(value, dim)
        return value, index

    return lowered


lowers(aten.max.dim)(_with_indices(_argmax))
lowers(aten.min.dim)(_with_indices(_argmin))


def _index_of(argument: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(ctx: Context, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        index = argument(x.ravel(), 0) if dim is None or x.ndim == 0 else argument(x, dim)
        return index.reshape(ctx.shape)

    return lowered


lowers(aten.argmax.default)(_index_of(_argmax))
lowers(aten.argmin.default)(_index_of(_argmin))


def _variance(x: Any, dims: tuple[int, ...], correction: float, keepdim: bool) -> tuple[Any, Any]:
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    mean = jnp.mean(x, axis=dims, keepdims=True)
    centered = x - mean
    square = jnp.sum(jnp.square(jnp.abs(centered)), axis=dims, keepdims=keepdim)
    divisor = max(count - correction, 0)
    variance = square / jnp.asarray(divisor, square.dtype)
    return variance, mean if keepdim else jnp.squeeze(mean, dims)


@lowers(aten.var.correction)
def _var(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    correction = 1 if correction is None else correction
    x = cast(x, opmath(x.dtype))
    return _variance(x, canonical_dims(dim, x.ndim), correction, keepdim)[0]


@lowers(aten.std.correction)
def _std(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return jnp.sqrt(_var(ctx, x, dim, correction=correction, keepdim=keepdim))


@lowers(aten.var_mean.correction)
def _var_mean(
    ctx: Context, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Any, Any]:
    correction = 1 if correction is None else correction
    x = cast(x, opmath(x.dtype))
    return _variance(x, canonical_dims(dim, x.ndim), correction, keepdim)


@lowers(aten.any.default)
def _any(ctx: Context, x: Any) -> Any:
    return jnp.any(x != 0)


@lowers(aten.all.default)
def _all(ctx: Context, x: Any) -> Any:
    return jnp.all(x != 0)


def _logical(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(ctx: Context, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        # Unlike the other reductions these take an empty list of dimensions at its word.
        dims = () if dim == [] else canonical_dims(dim, x.ndim)
        return reduce(x != 0, axis=dims, keepdims=keepdim)

    return lowered


lowers(aten.any.dim, aten.any.dims)(_logical(numpy_functions.any))
lowers(aten.all.dim, aten.all.dims)(_logical(numpy_functions.all))


def _cumulative(scan: Callable[..., Any]) -> Callable[..., Any]:
    def lowered(ctx: Context, x: Any, dim: int, **_: Any) -> Any:
        x = cast(x, opmath(ctx.dtype))
        return scan(x, axis=dim % x.ndim) if x.ndim else x

    return lowered


lowers(aten.cumsum.default)(_cumulative(numpy_functions.cumsum))
lowers(aten.cumprod.default)(_cumulative(numpy_functions.cumprod))


def _add_of_logarithms(a: Any, b: Any) -> Any:
    """``log(exp(a) + exp(b))`` of complex numbers, off the principal branch as ATen's is."""
    smaller = (jnp.real(a) < jnp.real(b)) | jnp.isnan(b)
    low, high = jnp.where(smaller, a, b), jnp.where(smaller, b, a)
    nothing = jnp.isneginf(jnp.real(high))
    ratio = jnp.exp(jnp.where(nothing, 0, low - high))
    return jnp.where(nothing, low, jnp.log1p(ratio) + high)


def _logcumsumexp(x: Any, axis: int) -> Any:
    if not is_complex(x.dtype) or x.size == 0:
        return jax.lax.cumlogsumexp(x, axis=axis)

    def step(total: Any, row: Any) -> tuple[Any, Any]:
        total = _add_of_logarithms(row, total)
        return total, total

    # One after another: each sum's angle counts from that of the larger term.
    rows = jnp.moveaxis(x, axis, 0)
    later = jax.lax.scan(step, rows[0], rows[1:])[1]
    return jnp.moveaxis(jnp.concatenate([rows[:1], later]), 0, axis)


lowers(aten.logcumsumexp.default)(_cumulative(_logcumsumexp))


def _running_extremum(wins: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Extremum so far and its last index; NaN wins and stays."""

    def combine(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        (a, i), (b, j) = left, right
        later = wins(b, a) | is_nan(b)
        later &= ~is_nan(a) | is_nan(b)
        return jnp.where(later, b, a), jnp.where(later, j, i)

    def lowered(ctx: Context, x: Any, dim: int) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        index = jax.lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)
        return jax.lax.associative_scan(combine, (x, index), axis=dim % x.ndim)

    return lowered


lowers(aten.cummax.default)(_running_extremum(numpy_functions.greater_equal))
lowers(aten.cummin.default)(_running_extremum(numpy_functions.less_equal))


@lowers(aten.logsumexp.default)
def _logsumexp(ctx: Context, x: Any, dim: Any, keepdim: bool = False) -> Any:
    x = cast(x, opmath(ctx.dtype))
    return jax.nn.logsumexp(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers(aten._softmax.default)
def _softmax(ctx: Context, x: Any, dim: int, half_to_float: bool) -> Any:
    x = cast(x, opmath(ctx.dtype))
    if x.ndim == 0:
        return jnp.ones_like(x) * jnp.where(jnp.isfinite(x), 1, jnp.nan)
    if x.size == 0:
        return x

    def plain(x: Any) -> Any:
        exponential = jnp.exp(x - jnp.max(x, axis=dim, keepdims=True))
        return exponential / jnp.sum(exponential, axis=dim, keepdims=True)

    return ctx.kernel("softmax", plain, [x], dim=dim % x.ndim)


@lowers(aten._log_softmax.default)
def _log_softmax(ctx: Context, x: Any, dim: int, half_to_float: bool) -> Any:
    x = cast(x, opmath(ctx.dtype))
    if x.ndim == 0:
        return x - x
    if x.size == 0:
        return x

    def plain(x: Any) -> Any:
        shifted = x - jnp.max(x, axis=dim, keepdims=True)
        return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=dim, keepdims=True))

    return ctx.kernel("log_softmax", plain, [x], dim=dim % x.ndim)


@lowers(aten._softmax_backward_data.default)
def _softmax_backward(
    ctx: Context, grad: Any, output: Any, dim: int, input_dtype: torch.dtype
) -> Any:
    grad, output = cast(grad, opmath(grad.dtype)), cast(output, opmath(output.dtype))
    axis = dim if output.ndim else None
    product = grad * output
    return product - output * jnp.sum(product, axis=axis, keepdims=True)


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(
    ctx: Context, grad: Any, output: Any, dim: int, input_dtype: torch.dtype
) -> Any:
    grad, output = cast(grad, opmath(grad.dtype)), cast(output, opmath(output.dtype))
    axis = dim if output.ndim else None
    return grad - jnp.exp(output) * jnp.sum(grad, axis=axis, keepdims=True)


def _order(x: Any, dim: int, descending: bool) -> Any:
    """Indices that sort ``x`` stably; NaN counts as the largest, as in torch."""
    if descending:
        # A stable descending order is a stable ascending order of the reversed array, reversed.
        size = x.shape[dim]
        reversed_order = jnp.argsort(jnp.flip(x, dim), axis=dim, stable=True)
        return size - 1 - jnp.flip(reversed_order, dim)
    return jnp.argsort(x, axis=dim, stable=True)


@lowers(aten.sort.default, aten.sort.stable)
def _sort(
    ctx: Context, x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    order = _order(x, dim % x.ndim, descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@lowers(aten.topk.default)
def _topk(
    ctx: Context,
    x: Any,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = jax.lax.slice_in_dim(_order(x, dim, largest), 0, k, axis=dim)
    return jnp.take_along_axis(x, order, axis=dim), order


def _order_statistic(x: Any, dim: int, position: Any, keepdim: bool) -> tuple[Any, Any]:
    """The element at a position of the sorted dimension (an array where it varies), its index."""
    order = _order(x, dim, False)
    position = jnp.broadcast_to(position, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    index = jnp.take_along_axis(order, position, axis=dim)
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


@lowers(aten.kthvalue.default)
def _kthvalue(
    ctx: Context, x: Any, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    return _order_statistic(x, dim % x.ndim, k - 1, keepdim)


def _median(x: Any, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Any, Any]:
    """The lower median. A NaN, which sorts last, is itself the median unless it is skipped."""
    nan = jnp.sum(is_nan(x), axis=dim, keepdims=True)
    valid = x.shape[dim] - nan
    position = (valid - 1) // 2
    if not skip_nan:
        position = jnp.where(nan > 0, valid, position)
    return _order_statistic(x, dim, jnp.maximum(position, 0), keepdim)


def _register_median(op: Any, skip_nan: bool) -> None:
    @lowers(op.dim)
    def along(ctx: Context, x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        return _median(x, dim % x.ndim, keepdim, skip_nan)

    @lowers(op.default)
    def whole(ctx: Context, x: Any) -> Any:
        return _median(x.ravel(), 0, False, skip_nan)[0]


_register_median(aten.median, skip_nan=False)
_register_median(aten.nanmedian, skip_nan=True)


@lowers(aten.mode.default)
def _mode(ctx: Context, x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The end of the first longest run in sorted order; NaN equals nothing, as in ATen's loop."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    order = _order(x, dim, False)
    rows = jnp.take_along_axis(x, order, axis=dim)
    place = jax.lax.broadcasted_iota(jnp.int64, rows.shape, dim)
    starts = jnp.where((rows != jnp.roll(rows, 1, dim)) | (place == 0), place, 0)
    length = place - jax.lax.cummax(starts, axis=dim)
    longest = jnp.argmax(length, axis=dim, keepdims=True)
    found = (jnp.take_along_axis(values, longest, axis=dim) for values in (rows, order))
    return tuple(item if keepdim else jnp.squeeze(item, dim) for item in found)  # type: ignore[return-value]


def _plain_reduction(node: fx.Node) -> bool:
    dims: Sequence[int] | None = node.args[1] if len(node.args) > 1 else None  # type: ignore[assignment]
    # Torch-MLIR crashes on the reduction of a tensor without dimensions.
    ranked = bool(result_tensors(node.all_input_nodes[0])[0].dim())
    return ranked and same_full_float(node) and bool(dims) and not node.kwargs.get("dtype")


torch_mlir_lowers(aten.sum.dim_IntList, aten.mean.dim, when=_plain_reduction)
