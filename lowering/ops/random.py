"""Random operators.

Each draws from XLA's Philox generator, whose key is the call's seed (taken from torch's default
generator, so ``torch.manual_seed`` governs it) and whose counter starts in a stream of its own.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _refuse_generator(node: fx.Node) -> str | None:
    return "a generator of the user's own" if node.kwargs.get("generator") is not None else None


def _bits(ctx: Context, shape: tuple[int, ...], salt: int = 0) -> Any:
    """Uniform 32-bit words: ``seed[0]`` is the key, ``seed[1]`` the operator's stream."""
    key = jax.lax.bitcast_convert_type(ctx.seed[0], jnp.uint64)
    stream = jax.lax.bitcast_convert_type(ctx.seed[1] * 4 + salt, jnp.uint64)
    # The high bits of the counter are the stream: 2**40 blocks of four words for each.
    state = jnp.stack([key, stream << jnp.uint64(40)])
    _, words = jax.lax.rng_bit_generator(
        state, (math.prod(shape),), dtype=jnp.uint32, algorithm=jax.lax.RandomAlgorithm.RNG_PHILOX
    )
    return words.reshape(shape)


def _uniform(ctx: Context, shape: tuple[int, ...], salt: int = 0) -> Any:
    """Uniform float32 in [0, 1) on a grid of 2**-24, as ATen draws them."""
    return (_bits(ctx, shape, salt) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _normal(ctx: Context, shape: tuple[int, ...]) -> Any:
    """Box-Muller over two uniform streams."""
    radius = jnp.sqrt(-2 * jnp.log1p(-_uniform(ctx, shape, 1)))
    return radius * jnp.cos(2 * math.pi * _uniform(ctx, shape, 2))


@lowers(aten.native_dropout.default, random=True)
def _native_dropout(ctx: Context, x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    if train is False:
        return x, jnp.ones(x.shape, bool)
    if p >= 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    keep = _uniform(ctx, x.shape) >= p
    scaled = cast(x, opmath(x.dtype)) * (1 / (1 - p))
    return jnp.where(keep, scaled, 0), keep


@lowers(aten.native_dropout_backward.default)
def _native_dropout_backward(ctx: Context, grad: Any, mask: Any, scale: float) -> Any:
    return cast(grad, opmath(grad.dtype)) * mask * scale


@lowers(aten.rand.default, aten.rand_like.default, random=True, refuse=_refuse_generator)
def _rand(ctx: Context, *_: Any, **__: Any) -> Any:
    return _uniform(ctx, ctx.shape)


@lowers(aten.randn.default, aten.randn_like.default, random=True, refuse=_refuse_generator)
def _randn(ctx: Context, *_: Any, **__: Any) -> Any:
    return _normal(ctx, ctx.shape)


@lowers(aten.bernoulli.p, random=True, refuse=_refuse_generator)
def _bernoulli_p(ctx: Context, x: Any, p: float = 0.5, **_: Any) -> Any:
    return _uniform(ctx, x.shape) < p


@lowers(aten.bernoulli.default, random=True, refuse=_refuse_generator)
def _bernoulli(ctx: Context, x: Any, **_: Any) -> Any:
    return _uniform(ctx, x.shape) < x
