"""Losses that check their arguments: negative log-likelihood and binary cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..passes import cross_entropy
from ..registry import lowers
from ..trace import Context
from ._shared import cast, check_range, opmath

aten = torch.ops.aten


@lowers(aten.nll_loss_forward.default)
def _nll_loss_forward(
    ctx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    return _nll(ctx, x, lambda picked: picked, target, weight, reduction, ignore_index)


@lowers(cross_entropy)
def _cross_entropy(
    ctx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    """The loss of logits: their logarithmic softmax is made where the targets are, and not kept."""
    logits = x.reshape(-1, x.shape[-1])
    peak = jnp.max(logits, axis=1)
    total = jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=1))

    def log_softmax(picked: Any) -> Any:
        return (picked - peak) - total

    return _nll(ctx, x, log_softmax, target, weight, reduction, ignore_index)


def _nll(
    ctx: Context,
    x: Any,
    finish: Callable[[Any], Any],
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
) -> tuple[Any, Any]:
    """The loss where ``finish`` makes log-probabilities of what the targets pick of ``x``."""
    wide = opmath(x.dtype)
    x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    _check_target(ctx, x, target, ignore_index)
    weights = _nll_weights(x, target, weight, ignore_index, wide)
    safe = jnp.clip(target, 0, x.shape[1] - 1)
    losses = -finish(jnp.take_along_axis(x, safe[:, None], axis=1)[:, 0]).astype(wide)
    losses = jnp.where(target == ignore_index, 0, losses) * weights
    if reduction == 0:
        return losses.reshape(ctx.shape), jnp.zeros((), wide)
    total = jnp.sum(weights)
    return (jnp.sum(losses) / total if reduction == 1 else jnp.sum(losses)), total


def _check_target(ctx: Context, x: Any, target: Any, ignore_index: int) -> None:
    check_range(ctx, jnp.where(target == ignore_index, 0, target), x.shape[1])


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
    _check_target(ctx, rows, target, ignore_index)
    weights = _nll_weights(rows, target, weight, ignore_index, wide)
    scale = cast(grad, wide).reshape(-1) if reduction == 0 else cast(grad, wide)
    if reduction == 1:
        scale = scale / cast(total_weight, wide)
    hit = jax.nn.one_hot(target, rows.shape[1], dtype=wide) != 0
    return jnp.where(hit, -(weights * scale)[:, None], 0).reshape(x.shape)


@lowers(aten.nll_loss2d_forward.default)
def _nll_loss2d_forward(
    ctx: Context, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    return _nll_loss_forward(ctx, jnp.moveaxis(x, 1, -1), target, weight, reduction, ignore_index)


@lowers(aten.nll_loss2d_backward.default)
def _nll_loss2d_backward(ctx: Context, grad: Any, x: Any, *args: Any) -> Any:
    return jnp.moveaxis(_nll_loss_backward(ctx, grad, jnp.moveaxis(x, 1, -1), *args), -1, 1)


@lowers(aten.binary_cross_entropy.default)
def _binary_cross_entropy(
    ctx: Context, x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> Any:
    for name, value in (("input", x), ("target", target)):
        proper = (value >= 0) & (value <= 1)  # not so for NaN
        ctx.check(~proper, RuntimeError, f"all elements of {name} should be between 0 and 1")
    wide = opmath(x.dtype)
    x, target = cast(x, wide), cast(target, wide)
    one, zero = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    losses = (target - 1) * zero - target * one
    if weight is not None:
        losses = losses * cast(weight, wide)
    if reduction == 0:
        return losses
    return jnp.mean(losses) if reduction == 1 else jnp.sum(losses)
