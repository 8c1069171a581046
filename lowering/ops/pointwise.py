"""Elementwise operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers prims.fma, into which Dynamo turns addcmul
from torch import fx

from ..lazy_jax import jax, jnp, lax_functions, numpy_functions, special_functions
from ..registry import lowers, torch_mlir_lowers
from ..trace import Context, to_jax
from . import _trigonometry
from ._shared import (
    arithmetic,
    cast,
    is_complex,
    is_floating,
    is_tensor,
    opmath,
    pointwise,
    predicate,
    same_full_float,
)

aten = torch.ops.aten
prims = torch.ops.prims


def _sign(x: Any) -> Any:
    if is_complex(x.dtype):
        return jnp.where(x == 0, x, x / jnp.where(x == 0, 1, jnp.abs(x)))
    if x.dtype in (jnp.bool_, jnp.uint8):
        return (x != 0).astype(x.dtype)
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _reciprocal_root(x: Any) -> Any:
    """As ATen makes it, rounded twice."""
    return 1 / jnp.sqrt(x)


_UNARY: dict[Any, Callable[[Any], Any]] = {
    aten.abs.default: numpy_functions.abs,
    aten.acos.default: numpy_functions.arccos,
    aten.acosh.default: numpy_functions.arccosh,
    aten.asin.default: numpy_functions.arcsin,
    aten.asinh.default: numpy_functions.arcsinh,
    aten.atan.default: numpy_functions.arctan,
    aten.atanh.default: numpy_functions.arctanh,
    aten.ceil.default: numpy_functions.ceil,
    aten.cos.default: _trigonometry.cos,
    aten.cosh.default: numpy_functions.cosh,
    aten.erf.default: lax_functions.erf,
    aten.erfc.default: lax_functions.erfc,
    aten.exp.default: numpy_functions.exp,
    aten.exp2.default: numpy_functions.exp2,
    aten.expm1.default: numpy_functions.expm1,
    aten.floor.default: numpy_functions.floor,
    aten.log.default: numpy_functions.log,
    aten.log10.default: numpy_functions.log10,
    aten.log1p.default: numpy_functions.log1p,
    aten.log2.default: numpy_functions.log2,
    aten.neg.default: numpy_functions.negative,
    aten.reciprocal.default: lambda x: 1 / x,
    aten.round.default: numpy_functions.round,
    aten.rsqrt.default: _reciprocal_root,
    aten.sigmoid.default: lax_functions.logistic,
    aten.sgn.default: _sign,
    aten.sign.default: _sign,
    aten.silu.default: lambda x: x * jax.lax.logistic(x),
    aten.sin.default: _trigonometry.sin,
    aten.sinh.default: numpy_functions.sinh,
    aten.sqrt.default: numpy_functions.sqrt,
    aten.square.default: numpy_functions.square,
    aten.tan.default: numpy_functions.tan,
    aten.tanh.default: numpy_functions.tanh,
    aten.trunc.default: numpy_functions.trunc,
    aten.relu.default: lambda x: jnp.maximum(x, jnp.zeros_like(x)),
    aten.bitwise_not.default: numpy_functions.bitwise_not,
    aten.angle.default: lambda x: jnp.where(jnp.isnan(x), x, jnp.angle(x)),
    aten.conj_physical.default: numpy_functions.conj,
    aten._conj_physical.default: numpy_functions.conj,
    aten.erfinv.default: lax_functions.erf_inv,
    aten.i0.default: special_functions.i0,
    aten.lgamma.default: lax_functions.lgamma,
    aten.special_i0e.default: special_functions.i0e,
    aten.special_i1.default: special_functions.i1,
    aten.special_i1e.default: special_functions.i1e,
    aten.special_ndtri.default: special_functions.ndtri,
}

_INTEGER_IDENTITY = (aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)


def _register_unary(op: Any, function: Callable[[Any], Any]) -> None:
    @lowers(op)
    def lowered(ctx: Context, x: Any) -> Any:
        if op in _INTEGER_IDENTITY and not is_floating(x.dtype):
            return x
        if is_complex(x.dtype):
            return function(x)
        return pointwise(function)(ctx, x)


for _op, _function in _UNARY.items():
    _register_unary(_op, _function)


_PREDICATES: dict[str, Callable[..., Any]] = {
    "eq": numpy_functions.equal,
    "ne": numpy_functions.not_equal,
    "lt": numpy_functions.less,
    "le": numpy_functions.less_equal,
    "gt": numpy_functions.greater,
    "ge": numpy_functions.greater_equal,
}
for _name, _function in _PREDICATES.items():
    lowers(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(predicate(_function))

_FLOATING_PREDICATES: dict[Any, Callable[[Any], Any]] = {
    aten.isinf.default: numpy_functions.isinf,
    aten.isnan.default: numpy_functions.isnan,
    aten.signbit.default: numpy_functions.signbit,
}


def _register_floating_predicate(op: Any, function: Callable[[Any], Any]) -> None:
    @lowers(op)
    def lowered(ctx: Context, x: Any) -> Any:
        if is_floating(x.dtype):
            return function(x)
        return x < 0 if op is aten.signbit.default else jnp.zeros_like(x, bool)


for _op, _function in _FLOATING_PREDICATES.items():
    _register_floating_predicate(_op, _function)

lowers(aten.logical_not.default)(lambda ctx, x: x == 0)
lowers(aten.logical_and.default)(lambda ctx, a, b: (a != 0) & (b != 0))
lowers(aten.logical_or.default)(lambda ctx, a, b: (a != 0) | (b != 0))
lowers(aten.logical_xor.default)(lambda ctx, a, b: (a != 0) ^ (b != 0))
lowers(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)(pointwise(numpy_functions.bitwise_and))
lowers(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)(pointwise(numpy_functions.bitwise_or))
lowers(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)(pointwise(numpy_functions.bitwise_xor))


def _factor(ctx: Context, alpha: Any) -> Any:
    """``alpha`` of a sum, which ATen rounds to a half type though it computes in float32."""
    return cast(cast(alpha, ctx.dtype), opmath(ctx.dtype))


@lowers(aten.add.Tensor, aten.add.Scalar)
def _add(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> Any:
    dtype = opmath(ctx.dtype)
    if dtype == jnp.bool_:
        return cast(a, dtype) | (cast(b, dtype) & bool(alpha))
    b = cast(b, dtype)
    return cast(a, dtype) + (b if alpha == 1 else b * _factor(ctx, alpha))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> Any:
    dtype = opmath(ctx.dtype)
    b = cast(b, dtype)
    return cast(a, dtype) - (b if alpha == 1 else b * _factor(ctx, alpha))


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(ctx: Context, a: Any, b: Any, alpha: Any = 1) -> Any:
    return _sub(ctx, b, a, alpha)


def _shifted(ctx: Context, a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Both operands in the result's dtype, and where the amount is out of range."""
    a, b = cast(a, ctx.dtype), cast(b, ctx.dtype)
    return a, b, (b < 0) | (b >= jnp.iinfo(ctx.dtype).bits)


@lowers(
    *(aten.__lshift__.Tensor, aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor),
    *(aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor),
)
def _shift_left(ctx: Context, a: Any, b: Any) -> Any:
    a, b, outside = _shifted(ctx, a, b)
    return jnp.where(outside, 0, jnp.left_shift(a, jnp.where(outside, 0, b)))


@lowers(
    *(aten.__rshift__.Tensor, aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor),
    *(aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor),
)
def _shift_right(ctx: Context, a: Any, b: Any) -> Any:
    a, b, outside = _shifted(ctx, a, b)
    beyond = jnp.where(a < 0, jnp.full_like(a, -1), 0) if b.dtype != jnp.uint8 else 0
    return jnp.where(outside, beyond, jnp.right_shift(a, jnp.where(outside, 0, b)))


lowers(aten.mul.Tensor, aten.mul.Scalar)(arithmetic(numpy_functions.multiply))

_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    aten.atan2.default: numpy_functions.arctan2,
    aten.copysign.Scalar: numpy_functions.copysign,
    aten.copysign.Tensor: numpy_functions.copysign,
    aten.fmax.default: numpy_functions.fmax,
    aten.fmin.default: numpy_functions.fmin,
    aten.gcd.default: numpy_functions.gcd,
    aten.hypot.default: numpy_functions.hypot,
    aten.lcm.default: numpy_functions.lcm,
    aten.ldexp.Tensor: lambda x, exponent: x * jnp.exp2(exponent),
    aten.maximum.default: numpy_functions.maximum,
    aten.minimum.default: numpy_functions.minimum,
    aten.nextafter.default: numpy_functions.nextafter,
}
for _op, _binary in _BINARY.items():
    lowers(_op)(pointwise(_binary))


@lowers(aten.polar.default)
def _polar(ctx: Context, radius: Any, angle: Any) -> Any:
    return _complex(ctx, radius * jnp.cos(angle), radius * jnp.sin(angle))


@lowers(aten.complex.default)
def _complex(ctx: Context, real: Any, imaginary: Any) -> Any:
    return jax.lax.complex(*jnp.broadcast_arrays(real, imaginary))


@lowers(aten.frexp.Tensor)
def _frexp(ctx: Context, x: Any) -> tuple[Any, Any]:
    return jnp.frexp(x)


@lowers(aten.round.decimals)
def _round_decimals(ctx: Context, x: Any, decimals: int = 0) -> Any:
    x = cast(x, opmath(ctx.dtype))
    if decimals == 0:
        return jnp.round(x)
    power = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    return jnp.round(x * power) / power if decimals > 0 else jnp.round(x / power) * power


@lowers(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    aten.true_divide.Tensor,
    aten.true_divide.Scalar,
)
def _div(ctx: Context, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    dtype = opmath(ctx.dtype)
    if rounding_mode is not None:
        _check_divisor(ctx, b)
    a, b = cast(a, dtype), cast(b, dtype)
    if rounding_mode is None:
        return a / b
    a, b = jnp.broadcast_arrays(a, b)
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    return jnp.trunc(a / b) if is_floating(dtype) else jax.lax.div(a, b)


def _check_divisor(ctx: Context, divisor: Any) -> None:
    """ATen raises where it divides integers by zero, in text a ZeroDivisionError."""
    known = not is_tensor(divisor) and divisor != 0
    if not (known or is_floating(ctx.dtype) or 0 in ctx.shape):
        ctx.check(cast(divisor, ctx.dtype) == 0, RuntimeError, "ZeroDivisionError")


def _floor_divide(a: Any, b: Any) -> Any:
    """``c10::div_floor_floating``: exact where ``floor(a / b)`` would round up."""
    if not is_floating(a.dtype):
        return jnp.floor_divide(a, b)
    remainder = jax.lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    zero = jnp.where(jnp.signbit(a / b), -jnp.zeros_like(a), jnp.zeros_like(a))
    result = jnp.where(quotient == 0, zero, floored)
    return jnp.where(b == 0, a / b, result)


lowers(aten.floor_divide.default)(functools.partial(_div, rounding_mode="floor"))


def _remainder(a: Any, b: Any) -> Any:
    remainder = jax.lax.rem(a, b)
    return jnp.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _checked_remainder(ctx: Context, a: Any, b: Any) -> Any:
    _check_divisor(ctx, b)
    return pointwise(_remainder)(ctx, a, b)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(ctx: Context, a: Any, b: Any) -> Any:
    _check_divisor(ctx, b)
    return pointwise(jax.lax.rem)(ctx, a, b)


def _power(base: Any, exponent: Any) -> Any:
    """Powers; one integer to the power of a negative one is an integer, too."""
    if is_floating(base.dtype):
        return jnp.power(base, exponent)
    whole = jnp.power(base, jnp.maximum(exponent, 0))
    sign = jnp.where(exponent & 1 == 1, base, 1)
    return jnp.where(exponent >= 0, whole, jnp.where(abs(base) == 1, sign, 0))


@lowers(aten.pow.Tensor_Scalar)
def _pow_scalar(ctx: Context, x: Any, exponent: Any) -> Any:
    """ATen special-cases the small exponents as products and roots; so does XLA's fast road."""
    dtype = opmath(ctx.dtype)
    x = cast(x, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return pointwise(_power)(ctx, x, exponent)
    products: dict[float, Callable[[], Any]] = {
        0.5: lambda: jnp.sqrt(x),
        1: lambda: x,
        2: lambda: x * x,
        3: lambda: x * x * x,
        -0.5: lambda: _reciprocal_root(x),
        -1: lambda: 1 / x,
        -2: lambda: 1 / (x * x),
    }
    found = products.get(exponent)
    return found() if found else jnp.power(x, cast(exponent, dtype))


lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)(pointwise(_power))


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(ctx: Context, condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition != 0, cast(a, ctx.dtype), cast(b, ctx.dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(ctx: Context, x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, cast(value, ctx.dtype), x)


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def _clamp(ctx: Context, x: Any, min: Any = None, max: Any = None) -> Any:
    x = cast(x, ctx.dtype)
    # maximum and minimum propagate NaN from either operand, as clamp does.
    if min is not None:
        x = jnp.maximum(x, cast(min, ctx.dtype))
    if max is not None:
        x = jnp.minimum(x, cast(max, ctx.dtype))
    return x


lowers(aten.clamp_min.default, aten.clamp_min.Tensor)(pointwise(numpy_functions.maximum))
lowers(aten.clamp_max.default, aten.clamp_max.Tensor)(pointwise(numpy_functions.minimum))


def _refuse_to_copy(node: fx.Node) -> str | None:
    layout, device = node.kwargs.get("layout"), node.kwargs.get("device")
    if layout not in (None, torch.strided):
        return f"a conversion to layout {layout}"
    if device is not None and torch.device(device).type != "cpu":  # type: ignore[arg-type]
        return f"a copy to device {device}"
    return None


@lowers(aten._to_copy.default, refuse=_refuse_to_copy)
def _to_copy(ctx: Context, x: Any, **_: Any) -> Any:
    return cast(x, ctx.dtype)


lowers(aten._conj.default, aten._conj_copy.default)(lambda ctx, x: jnp.conj(x))
lowers(aten._neg_view.default, aten._neg_view_copy.default)(lambda ctx, x: -x)
# A lazy conjugate or negative is resolved when it enters a graph; inside there is none.
lowers(aten.resolve_conj.default, aten.resolve_neg.default)(lambda ctx, x: x)


@lowers(prims.convert_element_type.default)
def _convert_element_type(ctx: Context, x: Any, dtype: torch.dtype) -> Any:
    return cast(x, to_jax(dtype))


@lowers(aten.addcmul.default)
def _addcmul(ctx: Context, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    dtype = opmath(ctx.dtype)
    return cast(x, dtype) + cast(value, dtype) * cast(a, dtype) * cast(b, dtype)


lowers(prims.fma.default)(pointwise(lambda a, b, c: a * b + c))


@lowers(aten.addcdiv.default)
def _addcdiv(ctx: Context, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    dtype = opmath(ctx.dtype)
    return cast(x, dtype) + cast(value, dtype) * (cast(a, dtype) / cast(b, dtype))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(ctx: Context, start: Any, end: Any, weight: Any) -> Any:
    dtype = opmath(ctx.dtype)
    start, end, weight = cast(start, dtype), cast(end, dtype), cast(weight, dtype)
    difference = end - start
    return jnp.where(
        jnp.abs(weight) < 0.5, start + weight * difference, end - difference * (1 - weight)
    )


def _plain_alpha(node: fx.Node) -> bool:
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return bool(alpha == 1) and same_full_float(node) and not _has_complex_number(node)


def _has_complex_number(node: fx.Node) -> bool:
    return any(isinstance(arg, complex) for arg in node.args)


torch_mlir_lowers(aten.add.Tensor, aten.sub.Tensor, when=_plain_alpha)
torch_mlir_lowers(
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.abs.default,
    aten.exp.default,
    aten.log.default,
    aten.sqrt.default,
    aten.tanh.default,
    aten.sigmoid.default,
    when=lambda node: same_full_float(node) and not _has_complex_number(node),
)


def _same_values(node: fx.Node) -> bool:
    """``where`` with a boolean condition and two non-empty tensors of one full float dtype.

    One has the result's shape: Torch-MLIR takes ``where(c, x, x)`` for ``x``, though it be smaller.
    """
    condition, *values = node.all_input_nodes
    if len(values) != 2 or len(node.all_input_nodes) != 3:
        return False
    dtypes = {value.meta["val"].dtype for value in values} | {node.meta["val"].dtype}
    return (
        condition.meta["val"].dtype is torch.bool
        and len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float64}
        and all(0 not in item.meta["val"].shape for item in (condition, *values, node))
        and any(value.meta["val"].shape == node.meta["val"].shape for value in values)
    )


torch_mlir_lowers(aten.where.self, when=_same_values)
