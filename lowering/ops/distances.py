"""Distances between all pairs of rows (cdist, pdist) and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context

aten = torch.ops.aten

#: Rows above which eager takes a matrix product for the Euclidean distance.
_PRODUCT_THRESHOLD = 25


def _norm(difference: Any, p: float) -> Any:
    """The p-norm over the last dimension; for p = 0 the number of elements that are not zero."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(jnp.minimum(jnp.ceil(size), 1), -1)
    if p == 1:
        return jnp.sum(size, -1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, -1))
    if math.isinf(p):
        return jnp.max(size, -1, initial=0)
    return jnp.power(jnp.sum(jnp.power(size, p), -1), 1 / p)


def _norm_gradient(grad: Any, difference: Any, norm: Any, p: float) -> Any:
    """The gradient of :func:`_norm` for each element; 0 where the distance is 0, as in ATen."""
    size, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(grad * difference)
    if p == 1:
        return grad * sign
    if math.isinf(p):
        return grad * sign * (size == norm)
    zero = (norm == 0) | ((difference == 0) & (p < 1))
    divisor = jnp.where(norm == 0, 1, norm)
    if p == 2:
        return jnp.where(zero, 0, grad * difference / divisor)
    if p < 2:
        slope = sign * jnp.power(jnp.where(zero, 1, size), p - 1)
    else:
        slope = difference * jnp.power(size, p - 2)
    return jnp.where(zero, 0, slope * grad / jnp.power(divisor, p - 1))


def _euclidean(x1: Any, x2: Any) -> Any:
    """``|x|^2 - 2 x y + |y|^2`` as one product, as ATen forms it."""
    squares1, squares2 = (jnp.sum(x * x, -1, keepdims=True) for x in (x1, x2))
    left = jnp.concatenate([-2 * x1, squares1, jnp.ones_like(squares1)], -1)
    right = jnp.concatenate([x2, jnp.ones_like(squares2), squares2], -1)
    batch = jnp.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (jnp.broadcast_to(x, batch + x.shape[-2:]) for x in (left, right))
    return jnp.sqrt(jnp.maximum(left @ jnp.swapaxes(right, -1, -2), 0))


@lowers(aten._cdist_forward.default)
def _cdist(ctx: Context, x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    large = max(x1.shape[-2], x2.shape[-2]) > _PRODUCT_THRESHOLD
    if x1.shape[-1] == 0:
        return jnp.zeros(ctx.shape, x1.dtype)
    if p == 2 and (compute_mode == 1 or (not compute_mode and large)):
        return _euclidean(x1, x2)
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


def _pairs_gradient(grad: Any, x1: Any, x2: Any, p: float, distance: Any) -> Any:
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return jnp.sum(_norm_gradient(grad[..., None], difference, distance[..., None], p), -2)


@lowers(aten._cdist_backward.default)
def _cdist_backward(ctx: Context, grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    if 0 in (*x1.shape, *x2.shape):
        return jnp.zeros(ctx.shape, x1.dtype)
    return jnp.broadcast_to(_pairs_gradient(grad, x1, x2, p, cdist), ctx.shape)


@lowers(aten._pdist_forward.default)
def _pdist(ctx: Context, x: Any, p: float = 2.0) -> Any:
    rows, columns = np.triu_indices(x.shape[0], 1)
    return _norm(x[rows] - x[columns], p)


@lowers(aten._pdist_backward.default)
def _pdist_backward(ctx: Context, grad: Any, x: Any, p: float, pdist: Any) -> Any:
    size = x.shape[0]
    pairs = np.triu_indices(size, 1)

    def symmetric(values: Any) -> Any:
        upper = jnp.zeros((size, size), values.dtype).at[pairs].set(values)
        return upper + upper.T

    if 0 in (x.size, grad.size):
        return jnp.zeros(ctx.shape, x.dtype)
    return _pairs_gradient(symmetric(grad), x, x, p, symmetric(pdist))
