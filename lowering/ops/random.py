"""Random operators.

Each draws from XLA's Philox generator, whose key is the call's seed (taken from torch's default
generator, so ``torch.manual_seed`` governs it) and whose counter starts in a stream of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..seeded import new_seed
from ..trace import Context
from ._shared import cast, is_complex, opmath

aten = torch.ops.aten


def _refuse_generator(node: fx.Node) -> str | None:
    return "a generator of the user's own" if node.kwargs.get("generator") is not None else None


def _argument(node: fx.Node, position: int, name: str, default: float) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


# Arguments that are numbers are checked here: a call that ATen would not take is left to it.


def _refuse_bounds(node: fx.Node) -> str | None:
    low, high = _argument(node, 1, "from", 0.0), _argument(node, 2, "to", 1.0)
    return _refuse_generator(node) or ("an empty range" if low > high else None)


def _refuse_probability(node: fx.Node) -> str | None:
    proper = 0 <= _argument(node, 1, "p", 0.5) <= 1
    return _refuse_generator(node) or (None if proper else "a probability not between 0 and 1")


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


def _wide_bits(ctx: Context, shape: tuple[int, ...], salt: int = 0) -> Any:
    """Uniform 64-bit words."""
    words = _bits(ctx, (2, *shape), salt).astype(jnp.uint64)
    return (words[0] << jnp.uint64(32)) | words[1]


#: Bits of a uniform number, so that it is exact in its dtype and never rounds up to 1.
_UNIFORM_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}


def _uniform(ctx: Context, shape: tuple[int, ...], salt: int = 0, dtype: Any = "float32") -> Any:
    """Uniform in [0, 1) on the grid that ATen draws from: 2**-24 for float32.

    Both parts of a complex number are.
    """
    if is_complex(dtype):
        return jax.lax.complex(*_uniform(ctx, (2, *shape), salt, jnp.finfo(dtype).dtype))
    if dtype == jnp.float64:
        return (_wide_bits(ctx, shape, salt) >> jnp.uint64(11)).astype(dtype) * 2.0**-53
    digits = _UNIFORM_BITS[jnp.dtype(dtype).name]
    words = _bits(ctx, shape, salt) >> (32 - digits)
    return words.astype(jnp.float32) * jnp.float32(2.0**-digits)


def _normal(ctx: Context, shape: tuple[int, ...]) -> Any:
    """Box-Muller over two uniform streams; both parts of a complex number have variance 1/2."""
    wide = ctx.dtype in (jnp.float64, jnp.complex128)
    dtype = jnp.float64 if wide else jnp.float32
    angle = 2 * math.pi * _uniform(ctx, shape, 2, dtype)
    squared = -2 * jnp.log1p(-_uniform(ctx, shape, 1, dtype))
    if is_complex(ctx.dtype):
        radius = jnp.sqrt(squared / 2)
        return jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
    return jnp.sqrt(squared) * jnp.cos(angle)


@lowers(new_seed, random=True)
def _new_seed(ctx: Context) -> Any:
    return ctx.seed


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
    return _uniform(ctx, ctx.shape, dtype=ctx.dtype)


@lowers(aten.uniform.default, random=True, refuse=_refuse_bounds)
def _uniform_between(ctx: Context, x: Any, low: Any = 0.0, high: Any = 1.0, **_: Any) -> Any:
    lowest = complex(low, low) if is_complex(ctx.dtype) else low
    return _uniform(ctx, ctx.shape, dtype=ctx.dtype) * (high - low) + lowest


@lowers(aten.exponential.default, random=True, refuse=_refuse_generator)
def _exponential(ctx: Context, x: Any, lambd: Any = 1.0, **_: Any) -> Any:
    dtype = jnp.float64 if ctx.dtype == jnp.float64 else jnp.float32
    # The smallest positive draw stands for zero, which the distribution does not contain.
    draws = jnp.maximum(_uniform(ctx, ctx.shape, dtype=dtype), jnp.finfo(dtype).eps / 2)
    return -jnp.log1p(-draws) / lambd


def _refuse_random_integer(node: fx.Node) -> str | None:
    dtype = node.meta["val"].dtype
    return _refuse_generator(node) or (f"random integers as {dtype}" if dtype.is_complex else None)


def _random_integers(ctx: Context, low: int, high: int) -> Any:
    """As ATen: a random word modulo the range, 64 bits wide where the range needs it."""
    span = high - low
    if span >= 1 << 32:
        draws = (_wide_bits(ctx, ctx.shape) % jnp.uint64(span)).astype(jnp.int64)
    else:
        draws = (_bits(ctx, ctx.shape) % jnp.uint32(span)).astype(jnp.int64)
    return draws + low


@lowers(
    aten.randint.default,
    aten.randint_like.default,
    random=True,
    refuse=_refuse_random_integer,
)
def _randint(ctx: Context, *args: Any, **__: Any) -> Any:
    high = next(arg for arg in args if isinstance(arg, int))
    return _random_integers(ctx, 0, high)


@lowers(aten.randint.low, aten.randint_like.low_dtype, random=True, refuse=_refuse_random_integer)
def _randint_low(ctx: Context, *args: Any, **__: Any) -> Any:
    low, high = [arg for arg in args if isinstance(arg, int)][:2]
    return _random_integers(ctx, low, high)


@lowers(aten.randperm.default, random=True, refuse=_refuse_generator)
def _randperm(ctx: Context, n: int, **_: Any) -> Any:
    return jnp.argsort(_wide_bits(ctx, (n,)))


@lowers(aten.normal_functional.default, random=True, refuse=_refuse_generator)
def _normal_functional(ctx: Context, x: Any, mean: Any = 0.0, std: Any = 1.0, **_: Any) -> Any:
    return _normal(ctx, ctx.shape) * std + mean


@lowers(aten.normal.float_float, random=True, refuse=_refuse_generator)
def _normal_floats(ctx: Context, mean: Any, std: Any, *_: Any, **__: Any) -> Any:
    return _normal(ctx, ctx.shape) * std + mean


@lowers(aten.randn.default, aten.randn_like.default, random=True, refuse=_refuse_generator)
def _randn(ctx: Context, *_: Any, **__: Any) -> Any:
    return _normal(ctx, ctx.shape)


@lowers(aten.bernoulli.p, random=True, refuse=_refuse_probability)
def _bernoulli_p(ctx: Context, x: Any, p: float = 0.5, **_: Any) -> Any:
    return _uniform(ctx, x.shape) < p


@lowers(aten.bernoulli.default, random=True, refuse=_refuse_generator)
def _bernoulli(ctx: Context, x: Any, **_: Any) -> Any:
    # NaN is no probability either.
    ctx.check(~((x >= 0) & (x <= 1)), RuntimeError, "a probability is not between 0 and 1")
    return _uniform(ctx, x.shape) < x
