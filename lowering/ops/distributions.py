"""Distributions beyond the uniform and the normal one, and ``rrelu``.

Samplers that reject draws are JAX's; their key comes from the operator's Philox stream.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, operand_dtype, opmath
from .random import _bits, _normal, _refuse_generator, _uniform

aten = torch.ops.aten


def _real(ctx: Context) -> Any:
    """The dtype to draw in: float64 for itself, float32 for all others."""
    return jnp.float64 if ctx.dtype == jnp.float64 else jnp.float32


def _positive(ctx: Context) -> Any:
    """Uniform in (0, 1): the least positive draw stands for zero."""
    dtype = _real(ctx)
    return jnp.maximum(_uniform(ctx, ctx.shape, dtype=dtype), jnp.finfo(dtype).eps / 2)


def _key(ctx: Context) -> Any:
    return jax.random.wrap_key_data(_bits(ctx, (2,)), impl="threefry2x32")


@lowers(aten.geometric.default, random=True, refuse=_refuse_generator)
def _geometric(ctx: Context, x: Any, p: float, **_: Any) -> Any:
    return (
        jnp.maximum(jnp.ceil(jnp.log(_positive(ctx)) / math.log1p(-p)), 1) if p < 1 else 1 + 0 * x
    )


@lowers(aten.cauchy.default, random=True, refuse=_refuse_generator)
def _cauchy(ctx: Context, x: Any, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Any:
    return median + sigma * jnp.tan(math.pi * (_positive(ctx) - 0.5))


@lowers(aten.log_normal.default, random=True, refuse=_refuse_generator)
def _log_normal(ctx: Context, x: Any, mean: float = 1.0, std: float = 2.0, **_: Any) -> Any:
    return jnp.exp(_normal(ctx, ctx.shape) * std + mean)


@lowers(
    *(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor),
    random=True,
    refuse=_refuse_generator,
)
def _normal_of_tensors(ctx: Context, mean: Any, std: Any = 1.0, **_: Any) -> Any:
    dtype = _real(ctx)
    std = cast(std, dtype)
    ctx.check(std < 0, RuntimeError, "normal expects all elements of std >= 0.0")
    return _normal(ctx, ctx.shape) * std + cast(mean, dtype)


@lowers(aten.bernoulli.Tensor, random=True, refuse=_refuse_generator)
def _bernoulli_of_tensor(ctx: Context, x: Any, p: Any, **_: Any) -> Any:
    ctx.check(~((p >= 0) & (p <= 1)), RuntimeError, "Expected p_in >= 0 && p_in <= 1 to be true")
    dtype = jnp.float64 if p.dtype == jnp.float64 else jnp.float32
    return _uniform(ctx, ctx.shape, dtype=dtype) < cast(p, dtype)


def _refuse_multinomial(node: fx.Node) -> str | None:
    """What is an error in eager that FakeTensor does not see."""
    proper = operand_dtype(node, 0).is_floating_point and node.args[1] > 0  # type: ignore[operator]
    return _refuse_generator(node) or (None if proper else "no samples, or weights not floating")


@lowers(aten.multinomial.default, random=True, refuse=_refuse_multinomial)
def _multinomial(
    ctx: Context, weights: Any, num_samples: int, replacement: bool = False, **_: Any
) -> Any:
    """With replacement by the cumulative distribution, without by an exponential race."""
    weights = cast(weights, jnp.float64)
    ctx.check(
        ~(jnp.isfinite(weights) & (weights >= 0)),
        RuntimeError,
        "probability tensor contains either `inf`, `nan` or element < 0",
    )
    total = jnp.sum(weights, axis=-1, keepdims=True)
    ctx.check(
        total <= 0, RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)"
    )
    if replacement:
        edges = jnp.cumsum(weights, axis=-1)
        draws = _uniform(ctx, ctx.shape, dtype=jnp.float64) * total
        find = jnp.vectorize(
            lambda edges, draws: jnp.searchsorted(edges, draws, side="right"),
            signature="(n),(m)->(m)",
        )
        return jnp.minimum(find(edges, draws), weights.shape[-1] - 1)
    draws = _uniform(ctx, weights.shape, dtype=jnp.float64)
    race = -jnp.log1p(-jnp.maximum(draws, 2.0**-54)) / weights
    return jnp.argsort(race, axis=-1)[..., :num_samples]


@lowers(aten.poisson.default, random=True, refuse=_refuse_generator)
def _poisson(ctx: Context, rate: Any, *_: Any) -> Any:
    rate = cast(rate, _real(ctx))
    ctx.check(rate < 0, RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    return jax.random.poisson(_key(ctx), rate, ctx.shape, jnp.int64)


@lowers(aten.binomial.default, random=True, refuse=_refuse_generator)
def _binomial(ctx: Context, count: Any, probability: Any, *_: Any) -> Any:
    dtype = _real(ctx)
    count, probability = cast(count, dtype), cast(probability, dtype)
    return jax.random.binomial(_key(ctx), count, probability, ctx.shape, dtype)


@lowers(aten._standard_gamma.default, random=True, refuse=_refuse_generator)
def _standard_gamma(ctx: Context, alpha: Any, *_: Any) -> Any:
    draws = jax.random.gamma(_key(ctx), cast(alpha, _real(ctx)), ctx.shape, _real(ctx))
    return jnp.maximum(draws, jnp.finfo(ctx.dtype).tiny)


@lowers(aten._standard_gamma_grad.default)
def _standard_gamma_grad(ctx: Context, alpha: Any, sample: Any) -> Any:
    """The derivative of a sample in ``alpha``; ATen approximates it to 5e-4."""
    dtype = opmath(ctx.dtype)
    return jax.lax.random_gamma_grad(cast(alpha, dtype), cast(sample, dtype))


@lowers(aten._sample_dirichlet.default, random=True, refuse=_refuse_generator)
def _sample_dirichlet(ctx: Context, alpha: Any, *_: Any) -> Any:
    dtype = _real(ctx)
    # Logarithms, lest all gammas of small parameters vanish together.
    logarithms = jax.random.loggamma(_key(ctx), cast(alpha, dtype), ctx.shape, dtype)
    return jax.nn.softmax(logarithms, axis=-1)


@lowers(aten.rrelu_with_noise_functional.default, random=True)
def _rrelu_with_noise(
    ctx: Context,
    x: Any,
    noise: Any,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Any, Any]:
    wide = cast(x, opmath(x.dtype))
    if not training:
        return jnp.where(wide <= 0, wide * ((lower + upper) / 2), wide), noise
    slopes = _uniform(ctx, ctx.shape, dtype=_real(ctx)) * (upper - lower) + lower
    # The noise that the backward multiplies with is the rounded one.
    slopes = cast(slopes, noise.dtype).astype(wide.dtype)
    return jnp.where(wide <= 0, wide * slopes, wide), jnp.where(wide <= 0, slopes, 1)


@lowers(aten.rrelu_with_noise_backward.default)
def _rrelu_with_noise_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    noise: Any,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Any:
    wide = opmath(ctx.dtype)
    grad = cast(grad, wide)
    if training and upper - lower > 1e-6:
        return grad * cast(noise, wide)
    return jnp.where(cast(x, wide) > 0, grad, grad * ((lower + upper) / 2))
