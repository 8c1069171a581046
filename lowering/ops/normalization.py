"""Normalizations and their backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Mean and biased variance with kept dimensions, in two passes over ``x`` as ATen computes."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


@lowers(aten.native_layer_norm.default)
def _native_layer_norm(
    ctx: Context, x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    wide = opmath(x.dtype)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    widened = cast(x, wide)
    mean, variance = _moments(widened, axes)
    rstd = jax.lax.rsqrt(variance + jnp.asarray(eps, wide))
    result = (widened - mean) * rstd
    if weight is not None:
        result = result * cast(weight, wide)
    if bias is not None:
        result = result + cast(bias, wide)
    return result, mean.reshape(ctx.outputs[1].shape), rstd.reshape(ctx.outputs[2].shape)


@lowers(aten.native_layer_norm_backward.default)
def _native_layer_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    wide = opmath(x.dtype)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    kept = (*x.shape[: len(outer)], *(1 for _ in axes))
    grad, mean, rstd = cast(grad, wide), cast(mean, wide), cast(rstd, wide)
    mean, rstd = mean.reshape(kept), rstd.reshape(kept)
    normal = (cast(x, wide) - mean) * rstd
    inner = grad if weight is None else grad * cast(weight, wide)
    dx = rstd * (
        inner
        - jnp.mean(inner, axis=axes, keepdims=True)
        - normal * jnp.mean(inner * normal, axis=axes, keepdims=True)
    )
    return dx, jnp.sum(grad * normal, axis=outer), jnp.sum(grad, axis=outer)


def _channels(value: Any, rank: int, wide: Any) -> Any:
    """A per-channel vector shaped to broadcast over ``[N, C, ...]``."""
    return cast(value, wide).reshape((1, -1, *(1,) * (rank - 2)))


def _normalize(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> Any:
    """``x`` times one factor a channel plus one term a channel, as ATen folds it."""
    wide = opmath(x.dtype)
    scale = rstd if weight is None else rstd * cast(weight, wide)
    shift = -mean * scale if bias is None else cast(bias, wide) - mean * scale
    return cast(x, wide) * _channels(scale, x.ndim, wide) + _channels(shift, x.ndim, wide)


def _batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any, Any, Any]:
    """Result, saved mean, saved reciprocal deviation, new running mean and variance."""
    wide = opmath(x.dtype)
    if not training:
        mean, variance = cast(running_mean, wide), cast(running_var, wide)
        rstd = 1 / jnp.sqrt(variance + jnp.asarray(eps, wide))
        result = _normalize(x, mean, rstd, weight, bias)
        return result, None, None, running_mean, running_var
    axes = (0, *range(2, x.ndim))
    count = math.prod(x.shape[axis] for axis in axes)
    mean, variance = (value.reshape(-1) for value in _moments(cast(x, wide), axes))
    rstd = 1 / jnp.sqrt(variance + jnp.asarray(eps, wide))
    result = _normalize(x, mean, rstd, weight, bias)
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = _move(running_mean, mean, momentum)
    new_var = _move(running_var, unbiased, momentum)
    return result, mean, rstd, new_mean, new_var


def _move(running: Any, value: Any, momentum: float) -> Any:
    if running is None:
        return None
    wide = opmath(running.dtype)
    moved = momentum * cast(value, wide) + (1 - momentum) * cast(running, wide)
    return cast(moved, running.dtype)


def _saved(ctx: Context, position: int, value: Any) -> Any:
    """A saved statistic; eager returns an empty tensor where there is none."""
    spec = ctx.outputs[position]
    return jnp.zeros(spec.shape, jnp.float32) if value is None else value.reshape(spec.shape)


def _results(ctx: Context, *arguments: Any) -> tuple[Any, ...]:
    """What every overload returns: result and saved statistics; the functional one goes on."""
    result, mean, rstd, *running = _batch_norm(*arguments)
    return result, _saved(ctx, 1, mean), _saved(ctx, 2, rstd), *running


# The overloads take tensors first, then what of (training, momentum, eps) they leave open.
lowers(aten._native_batch_norm_legit_functional.default)(_results)


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_inference(ctx: Context, *arguments: Any) -> tuple[Any, ...]:
    *tensors, momentum, eps = arguments
    return _results(ctx, *tensors, False, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(ctx: Context, *arguments: Any) -> tuple[Any, ...]:
    x, weight, bias, _, momentum, eps = arguments
    return _results(ctx, x, weight, bias, None, None, True, momentum, eps)[:3]


@lowers(aten._batch_norm_with_update_functional.default)
def _batch_norm_with_update(ctx: Context, *arguments: Any) -> tuple[Any, ...]:
    *tensors, momentum, eps = arguments
    result, mean, rstd, *running = _results(ctx, *tensors, True, momentum, eps)
    # Between them is what a vendor's kernel reserves for its backward: nothing here.
    return result, mean, rstd, jnp.zeros(ctx.outputs[3].shape, jnp.uint8), *running


@lowers(aten.batch_norm_backward.default)
def _batch_norm_backward(ctx: Context, *arguments: Any) -> tuple[Any, Any, Any]:
    return _native_batch_norm_backward(ctx, *arguments[:-1])  # the last is the reserve


@lowers(aten.native_batch_norm_backward.default)
def _native_batch_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    wide = opmath(x.dtype)
    axes = (0, *range(2, x.ndim))
    count = math.prod(x.shape[axis] for axis in axes)
    if train:
        mean, rstd = cast(save_mean, wide), cast(save_invstd, wide)
    else:
        mean = cast(running_mean, wide)
        rstd = 1 / jnp.sqrt(cast(running_var, wide) + jnp.asarray(eps, wide))
    grad = cast(grad, wide)
    centered = cast(x, wide) - _channels(mean, x.ndim, wide)
    grad_sum = jnp.sum(grad, axis=axes)
    dot = jnp.sum(grad * centered, axis=axes)
    scale = rstd if weight is None else rstd * cast(weight, wide)
    dx = grad
    if train:
        projection = _channels(dot * rstd * rstd / count, x.ndim, wide)
        dx = grad - centered * projection - _channels(grad_sum / count, x.ndim, wide)
    return dx * _channels(scale, x.ndim, wide), dot * rstd, grad_sum


@lowers(aten.native_group_norm.default)
def _native_group_norm(
    ctx: Context,
    x: Any,
    weight: Any,
    bias: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Any, Any, Any]:
    wide = opmath(x.dtype)
    grouped = cast(x, wide).reshape(N, group, C // group * HxW)
    mean, variance = _moments(grouped, (2,))
    rstd = jax.lax.rsqrt(variance + jnp.asarray(eps, wide))
    result = ((grouped - mean) * rstd).reshape(x.shape)
    if weight is not None:
        result = result * _channels(weight, x.ndim, wide)
    if bias is not None:
        result = result + _channels(bias, x.ndim, wide)
    return result, mean.reshape(N, group), rstd.reshape(N, group)


def _rms_scale(x: Any, normalized_shape: Sequence[int], eps: float | None) -> Any:
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    epsilon = jnp.finfo(x.dtype).eps if eps is None else eps
    return jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + jnp.asarray(epsilon, x.dtype))


@lowers(aten._fused_rms_norm.default)
def _fused_rms_norm(
    ctx: Context, x: Any, normalized_shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Any, Any]:
    widened = cast(x, opmath(x.dtype))
    rstd = _rms_scale(widened, normalized_shape, eps)
    result = widened * rstd
    if weight is not None:
        result = result * cast(weight, widened.dtype)
    return result, rstd.reshape(ctx.outputs[1].shape)


@lowers(aten._fused_rms_norm_backward.default)
def _fused_rms_norm_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    normalized_shape: Sequence[int],
    rstd: Any,
    weight: Any,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    wide = opmath(x.dtype)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    grad, rstd = cast(grad, wide), cast(rstd, wide)
    normal = cast(x, wide) * rstd
    inner = grad if weight is None else grad * cast(weight, wide)
    dx = rstd * (inner - normal * jnp.mean(inner * normal, axis=axes, keepdims=True))
    return dx, jnp.sum(grad * normal, axis=outer)
