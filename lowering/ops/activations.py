"""Activation functions and their backward."""

from __future__ import annotations

from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(scaled)) / beta)


@lowers(aten.softplus.default)
def _softplus_op(ctx: Context, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    dtype = opmath(ctx.dtype)
    return _softplus(cast(x, dtype), cast(beta, dtype), cast(threshold, dtype))


_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654
_CUBIC = 0.044715


def _gelu(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return 0.5 * x * (1 + jax.lax.erf(x * _SQRT_HALF))


@lowers(aten.gelu.default)
def _gelu_op(ctx: Context, x: Any, approximate: str = "none") -> Any:
    return _gelu(cast(x, opmath(ctx.dtype)), approximate)


@lowers(aten.gelu_backward.default)
def _gelu_backward(ctx: Context, grad: Any, x: Any, approximate: str = "none") -> Any:
    dtype = opmath(ctx.dtype)
    grad, x = cast(grad, dtype), cast(x, dtype)
    if approximate == "tanh":
        cube = x * x
        inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * cube)
        tanh = jnp.tanh(inner)
        slope = _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * cube)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)
    cdf = 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF))
    pdf = jnp.exp(-0.5 * x * x) * 0.3989422804014327
    return grad * (cdf + x * pdf)


@lowers(aten.silu_backward.default)
def _silu_backward(ctx: Context, grad: Any, x: Any) -> Any:
    dtype = opmath(ctx.dtype)
    grad, x = cast(grad, dtype), cast(x, dtype)
    sigmoid = jax.lax.logistic(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@lowers(aten.elu.default)
def _elu(ctx: Context, x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    x = cast(x, opmath(ctx.dtype))
    return jnp.where(x <= 0, jnp.expm1(x * input_scale) * (alpha * scale), x * scale)


@lowers(aten.threshold_backward.default)
def _threshold_backward(ctx: Context, grad: Any, x: Any, threshold: Any) -> Any:
    grad = cast(grad, ctx.dtype)
    # ATen compares in the opmath dtype: the threshold is not rounded to a half type.
    dtype = opmath(ctx.dtype)
    return jnp.where(cast(x, dtype) <= cast(threshold, dtype), jnp.zeros_like(grad), grad)


@lowers(aten.tanh_backward.default)
def _tanh_backward(ctx: Context, grad: Any, output: Any) -> Any:
    dtype = opmath(ctx.dtype)
    output = cast(output, dtype)
    return cast(grad, dtype) * jnp.conj(1 - output * output)


@lowers(aten.sigmoid_backward.default)
def _sigmoid_backward(ctx: Context, grad: Any, output: Any) -> Any:
    dtype = opmath(ctx.dtype)
    output = cast(output, dtype)
    return cast(grad, dtype) * jnp.conj((1 - output) * output)


@lowers(aten.leaky_relu.default)
def _leaky_relu(ctx: Context, x: Any, negative_slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * cast(negative_slope, x.dtype))


@lowers(aten.mish.default)
def _mish(ctx: Context, x: Any) -> Any:
    x = cast(x, opmath(ctx.dtype))
    return x * jnp.tanh(_softplus(x))
