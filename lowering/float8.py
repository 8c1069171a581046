"""Conversions to and from the float8 formats, with ATen's bits.

ATen computes all of them by way of float32, and so do these. XLA's own conversions between float32
and the formats agree with ATen's on every code and every rounding, except for what is done here:
e4m3fn saturates, every NaN becomes one code a sign in e5m2, and e8m0fnu takes the magnitude.

XLA:CPU computes in a wider format whatever has float8 operands, a select or a concatenation too,
and NaNs come back with another code. So codes are put together and moved as bytes.
"""

from __future__ import annotations

from typing import Any

from .lazy_jax import jax, jnp

#: Names of the formats with infinities or two NaNs, and of those with one NaN and no other
#: special code.
_TWO_NANS = ("float8_e4m3fn", "float8_e5m2")
_ONE_NAN = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = (*_TWO_NANS, *_ONE_NAN)


def is_float8(dtype: Any) -> bool:
    """Whether a ``jax.numpy`` dtype is one of the formats."""
    return jnp.dtype(dtype).name in DTYPES


def convert(x: Any, dtype: Any) -> Any:
    """An array in another ``jax.numpy`` dtype, converted as ATen does."""
    if x.dtype == dtype:
        return x
    if is_float8(dtype):
        return jax.lax.bitcast_convert_type(_code(_widened(x), jnp.dtype(dtype)), dtype)
    if not is_float8(x.dtype):
        return x.astype(dtype)
    wide = _widened(x)
    if not jnp.issubdtype(dtype, jnp.integer):
        return wide.astype(dtype)
    # Undefined in C++: a NaN that ATen's compiler knows became zero.
    return truncated(
        jnp.where(jnp.isnan(wide), 0, wide) if x.dtype.name in _ONE_NAN else wide, dtype
    )


def _widened(x: Any) -> Any:
    """As float32."""
    real = jnp.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    return real.astype(jnp.float32)


def _code(x: Any, dtype: Any) -> Any:
    """The bytes of float32 numbers in one of the formats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if dtype == jnp.float8_e8m0fnu:
        # The nearest power of two, the larger of two; below 2**-127 there is none but that.
        exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
        least = jnp.where(exponent > 0, jnp.uint32(0x400000), jnp.uint32(0x400001))
        up = (fraction >= least) & (exponent < 0xFF)
        return (exponent + up).astype(jnp.uint8)
    if dtype == jnp.float8_e4m3fn:
        largest = jnp.float32(448)
        x = jnp.where(jnp.abs(x) > largest, jnp.copysign(largest, x), x)
    code = jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint8)
    if dtype == jnp.float8_e5m2:
        code = jnp.where(jnp.isnan(x), (bits >> 24 | 0x7F).astype(jnp.uint8), code)
    return code


def truncated(x: Any, dtype: Any) -> Any:
    """Floating numbers as integers of ``dtype``, the ones that do not fit as x86 makes them.

    Narrow integers are the low bits of a wider one; what does not fit the wide one, NaN included,
    gives its least number. That is undefined in C++, and what ATen gives.
    """
    info = jnp.iinfo(dtype)
    if info.bits == 64 and info.min == 0:
        half = jnp.asarray(2.0**63, x.dtype)
        upper = truncated(x - half, jnp.int64) ^ jnp.int64(-(2**63))
        return jnp.where(x >= half, upper, truncated(x, jnp.int64)).astype(dtype)
    wide = jnp.int64 if info.max > jnp.iinfo(jnp.int32).max else jnp.int32
    bound = jnp.asarray(-float(jnp.iinfo(wide).min), x.dtype)
    fits = (x < bound) & (x >= -bound)
    return jnp.where(fits, x.astype(wide), jnp.iinfo(wide).min).astype(dtype)
