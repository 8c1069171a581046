"""Gamma, zeta and error functions, and orthogonal polynomials of variable degree.

Cephes is S. L. Moshier's library. Where ATen's approximation differs from JAX's by more than
rounding, ATen's is followed (``ATen/native/Math.h``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ..lazy_jax import jax, jnp, lax_functions
from ..registry import lowers
from ..trace import Context
from ._polynomials import polynomial
from ._shared import cast, opmath, pointwise

aten = torch.ops.aten

# Asymptotic series of digamma in 1/x**2: Bernoulli numbers over 2k (Cephes psi.c).
_PSI = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


def _digamma(x: Any) -> Any:
    reflected = jnp.where(x < 0, 1 - x, x)
    total, place = jnp.zeros_like(x), reflected
    for _ in range(10):  # up to 10 and beyond, where the series converges
        small = place < 10
        total = jnp.where(small, total - 1 / place, total)
        place = jnp.where(small, place + 1, place)
    inverse = 1 / (place * place)
    series = jnp.where(place < 1e17, inverse * polynomial(inverse, _PSI), 0)
    value = total + jnp.log(place) - 0.5 / place - series
    # The tangent of the fractional part, as ATen takes it, in float64 also for float32.
    fraction = cast(x, jnp.float64) - jnp.trunc(cast(x, jnp.float64))
    value = jnp.where(x < 0, value - cast(math.pi / jnp.tan(math.pi * fraction), x.dtype), value)
    value = jnp.where((x < 0) & (x == jnp.trunc(x)), jnp.nan, value)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), value)


def _trigamma(x: Any) -> Any:
    sine = jnp.sin(jnp.asarray(math.pi, x.dtype) * x)
    reflected = x < 0.5
    total = jnp.where(reflected, -(math.pi**2) / (sine * sine), 0)
    place = jnp.where(reflected, 1 - x, x)
    for _ in range(6):
        total = total + 1 / (place * place)
        place = place + 1
    inverse = 1 / (place * place)
    series = 1 + 1 / (2 * place) + inverse * polynomial(inverse, (1 / 42, -1 / 30, 1 / 6))
    total = total + series / place
    return jnp.where(reflected, -total, total)


# (2k)! / B(2k) for the tail of the Euler-Maclaurin sum of zeta (Cephes zeta.c).
_ZETA_TAIL = (
    *(12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1307674368000 / 691, 74724249600.0),
    *(-10670622842880000 / 3617, 5109094217170944000 / 43867, -802857662698291200000 / 174611),
    *(1.5511210043330985984e23 / 854513, -1.6938241367317436694528e27 / 236364091),
)


def _zeta_above(x: Any, q: Any) -> Any:
    """Hurwitz' zeta for positive ``q``: nine terms, and Euler-Maclaurin's formula for the rest."""
    epsilon = 2.0**-53
    term = total = jnp.power(q, -x)
    done = jnp.zeros_like(q, bool)
    for _ in range(9):
        q = q + 1
        term = jnp.where(done, term, jnp.power(q, -x))
        total = jnp.where(done, total, total + term)
        done = done | (term < epsilon * total)
    total = jnp.where(done, total, total + term * q / (x - 1) - 0.5 * term)
    factor = jnp.ones_like(x)
    for k, divisor in enumerate(_ZETA_TAIL):
        factor, term = factor * (x + 2 * k), term / q
        part = factor * term / divisor
        total = jnp.where(done, total, total + part)
        done = done | (jnp.abs(part / total) < epsilon)
        factor, term = factor * (x + (2 * k + 1)), term / q
    return total


def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz' zeta, in float64 for every dtype as in ATen.

    Below zero, where ``x`` must be whole, ATen adds term by term up to zero. Those terms are, but
    for the sign, the ones that two values above zero differ in.
    """
    dtype = x.dtype
    x, q = cast(x, jnp.float64), cast(q, jnp.float64)
    count = jnp.where(q < 0, jnp.ceil(-q), 0)
    first = q + count
    nearest = -(q + (count - 1))
    below = _zeta_above(x, nearest) - _zeta_above(x, nearest + count)
    value = _zeta_above(x, first)
    value = jnp.where(q < 0, value + jnp.where(jnp.remainder(x, 2) == 0, below, -below), value)
    pole = (x == 1) | (~(x < 1) & (q <= 0) & ((q == jnp.floor(q)) | jnp.isinf(x)))
    wrong = (x < 1) | jnp.isnan(x) | jnp.isnan(q) | ((q <= 0) & (x != jnp.floor(x)))
    return cast(jnp.where(pole, jnp.inf, jnp.where(wrong, jnp.nan, value)), dtype)


lowers(aten.special_zeta.default, aten.special_zeta.other_scalar, aten.special_zeta.self_scalar)(
    pointwise(_zeta)
)


@lowers(aten.polygamma.default)
def _polygamma(ctx: Context, n: int, x: Any) -> Any:
    if n < 2:
        return pointwise(_trigamma if n else _digamma)(ctx, x)
    x = cast(x, opmath(ctx.dtype))
    factorial = jnp.exp(jnp.asarray(math.lgamma(n + 1), x.dtype))
    return (-1) ** (n + 1) * factorial * _zeta(jnp.full_like(x, n + 1), x)


# erfc(x) exp(x**2) from 1 to 8 (P, Q) and beyond (R, S) (Cephes ndtr.c).
_P = (
    *(2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687),
    *(4.86371970985681366614e1, 1.96520832956077098242e2, 5.26445194995477358631e2),
    *(9.34528527171957607540e2, 1.02755188689515710272e3, 5.57535335369399327526e2),
)
_Q = (
    *(1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2),
    *(9.75708501743205489753e2, 1.82390916687909736289e3, 2.24633760818710981792e3),
    *(1.65666309194161350182e3, 5.57535340817727675546e2),
)
_R = (
    *(5.64189583547755073984e-1, 1.27536670759978104416, 5.01905042251180477414),
    *(6.16021097993053585195, 7.40974269950448939160, 2.97886665372100240670),
)
_S = (
    *(1.0, 2.26052863220117276590, 9.39603524938001434673, 1.20489539808096656605e1),
    *(1.70814450747565897222e1, 9.60896809063285878198, 3.36907645100081516050),
)


def _erfcx(x: Any) -> Any:
    size = jnp.abs(x)
    middle = jnp.clip(size, 1, 8)
    # Beyond 8 in the inverse, which neither overflows nor meets infinity over infinity.
    inverse = 1 / jnp.maximum(size, 8)
    far = inverse * polynomial(inverse, _R[::-1]) / polynomial(inverse, _S[::-1])
    value = jnp.where(size < 8, polynomial(middle, _P) / polynomial(middle, _Q), far)
    near = jnp.exp(size * size) * jax.lax.erfc(size)
    value = jnp.where(size < 1, near, value)
    value = jnp.where(x < 0, 2 * jnp.exp(size * size) - value, value)
    return jnp.where(jnp.isnan(x), x, value)


def _incomplete(function: Callable[[Any, Any], Any], upper: bool) -> Callable[[Any, Any], Any]:
    """Regularized incomplete gamma: JAX's in float64, with ATen's values at the bounds."""

    def lowered(a: Any, x: Any) -> Any:
        value = cast(function(cast(a, jnp.float64), cast(x, jnp.float64)), x.dtype)
        at_end = 0 if upper else 1
        value = jnp.where(jnp.isinf(x), at_end, value)
        value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, 1 - at_end), value)
        value = jnp.where(x == 0, 1 - at_end, value)
        value = jnp.where(a == 0, jnp.where(x > 0, at_end, jnp.nan), value)
        return jnp.where((x < 0) | (a < 0), jnp.nan, value)

    return lowered


_POINTWISE: dict[Any, Callable[..., Any]] = {
    aten.digamma.default: _digamma,
    aten.igamma.default: _incomplete(lax_functions.igamma, upper=False),
    aten.igammac.default: _incomplete(lax_functions.igammac, upper=True),
    aten.special_erfcx.default: _erfcx,
}
for _op, _function in _POINTWISE.items():
    lowers(_op)(pointwise(_function))


@dataclasses.dataclass(frozen=True)
class _Family:
    """Orthogonal polynomials by their recurrence from degrees 0 and 1.

    ``following(x, k, p, q)`` is degree ``k + 1`` from degrees ``k - 1`` and ``k``. ``special(x,
    n, value)`` replaces the recurrence's value where there is a closed form, and ``closed(x, n)``
    says where the recurrence need not run. Degrees over ``limit`` are NaN.
    """

    first: Callable[[Any], Any]
    following: Callable[[Any, Any, Any, Any], Any]
    closed: Callable[[Any, Any], Any] = lambda x, n: jnp.zeros_like(x, bool)
    special: Callable[[Any, Any, Any], Any] = lambda x, n, value: value
    limited: bool = False
    shifted: bool = False


def _evaluate(family: _Family, x: Any, degree: Any) -> Any:
    if family.shifted:
        x = x + x - 1
    # A degree that int64 cannot hold becomes a negative one in C.
    fits = jnp.abs(degree) < 2.0**63
    n = jnp.where(fits, degree, -1).astype(jnp.int64)
    limit = 128 if x.dtype == jnp.float32 else 512
    steps = jnp.where(family.closed(x, n) | ((n > limit) & family.limited), 0, n)

    def goes_on(state: Any) -> Any:
        k, _, q = state
        return jnp.any((k < steps) & ~jnp.isnan(q))

    def step(state: Any) -> Any:
        k, p, q = state
        live = k < steps
        following = family.following(x, k.astype(x.dtype), p, q)
        return k + 1, jnp.where(live, q, p), jnp.where(live, following, q)

    start = (jnp.ones((), jnp.int64), jnp.ones_like(x), family.first(x))
    value = jax.lax.while_loop(goes_on, step, start)[2]
    value = jnp.where(n == 0, 1, value)
    if family.limited:
        value = jnp.where(n > limit, jnp.nan, value)
    return jnp.where(n < 0, 0, family.special(x, n, value))


def _alternating(n: Any, value: Any) -> Any:
    return jnp.where(n % 2 == 0, value, -value)


def _chebyshev(
    first: Callable[[Any], Any],
    above: int,
    at_one: Callable[[Any], Any],
    at_minus_one: Callable[[Any], Any],
    inside: Callable[[Any, Any, Any], Any],
    shifted: bool = False,
) -> _Family:
    """Degree n of a kind of Chebyshev polynomials.

    ``inside(x, n, angle)`` is taken for degrees ``above`` a bound and arguments below one, and
    ``at_one`` and ``at_minus_one`` (times ``(-1)**n``) at the ends.
    """

    def by_angle(x: Any, n: Any) -> Any:
        return (n > above) & (jnp.abs(x) < 1)

    def special(x: Any, n: Any, value: Any) -> Any:
        degree = n.astype(x.dtype)
        # An error of the angle grows with the degree: float32's is correctly rounded.
        angle = cast(jnp.arccos(cast(x, jnp.float64)), x.dtype)
        value = jnp.where(by_angle(x, n), inside(x, n, angle), value)
        value = jnp.where(x == -1, _alternating(n, at_minus_one(degree)), value)
        return jnp.where(x == 1, at_one(degree), value)

    return _Family(
        first,
        lambda x, k, p, q: (x + x) * q - p,
        lambda x, n: by_angle(x, n) | (jnp.abs(x) == 1),
        special,
        shifted=shifted,
    )


def _t_inside(x: Any, n: Any, angle: Any) -> Any:
    return jnp.cos(n.astype(x.dtype) * angle)


def _u_inside(x: Any, n: Any, angle: Any) -> Any:
    after, sine = (n + 1).astype(x.dtype), jnp.sin(angle)
    return jnp.where(sine != 0, jnp.sin(after * angle) / sine, after * jnp.cos(after * angle) / x)


def _v_inside(x: Any, n: Any, angle: Any) -> Any:
    half = angle / 2
    value = jnp.cos((n.astype(x.dtype) + 0.5) * angle) / jnp.cos(half)
    return jnp.where(jnp.sin(half) != 1, value, _alternating(n, (2 * n + 1).astype(x.dtype)))


def _w_inside(x: Any, n: Any, angle: Any) -> Any:
    half = angle / 2
    value = jnp.sin((n.astype(x.dtype) + 0.5) * angle) / jnp.sin(half)
    return jnp.where(jnp.cos(half) != 1, value, (2 * n + 1).astype(x.dtype))


def _w_inside_shifted(x: Any, n: Any, angle: Any) -> Any:
    """ATen's value where the angle vanishes is that of the other end."""
    wrong = _alternating(n, jnp.ones_like(x))
    return jnp.where(jnp.cos(angle / 2) != 1, _w_inside(x, n, angle), wrong)


def _one(n: Any) -> Any:
    return jnp.ones_like(n)


def _chebyshevs(shifted: bool) -> dict[str, _Family]:
    """The four kinds, with ATen's bounds between recurrence and closed form."""
    t, u, v, w = (6, 6, 6, 4) if shifted else (6, 8, 8, 8)
    w_inside = _w_inside_shifted if shifted else _w_inside
    kinds = {
        "t": (lambda x: x, t, _one, _one, _t_inside),
        "u": (lambda x: x + x, u, lambda n: n + 1, lambda n: n + 1, _u_inside),
        "v": (lambda x: x + x - 1, v, _one, lambda n: n + n + 1, _v_inside),
        "w": (lambda x: x + x + 1, w, lambda n: n + n + 1, _one, w_inside),
    }
    prefix = "special_shifted_" if shifted else "special_"
    return {
        f"{prefix}chebyshev_polynomial_{kind}": _chebyshev(*rest, shifted=shifted)
        for kind, rest in kinds.items()
    }


_FAMILIES: dict[str, _Family] = {
    **_chebyshevs(shifted=False),
    **_chebyshevs(shifted=True),
    "special_hermite_polynomial_h": _Family(
        lambda x: x + x, lambda x, k, p, q: (x + x) * q - 2 * k * p, limited=True
    ),
    "special_hermite_polynomial_he": _Family(
        lambda x: x, lambda x, k, p, q: x * q - k * p, limited=True
    ),
    "special_laguerre_polynomial_l": _Family(
        lambda x: 1 - x,
        lambda x, k, p, q: ((k + k + (1 - x)) * q - k * p) / (k + 1),
        lambda x, n: x == 0,
        lambda x, n, value: jnp.where(x == 0, 1, value),
    ),
    "special_legendre_polynomial_p": _Family(
        lambda x: x,
        lambda x, k, p, q: ((k + k + 1) * x * q - k * p) / (k + 1),
        lambda x, n: jnp.abs(x) == 1,
        lambda x, n, value: jnp.where(
            jnp.abs(x) == 1, jnp.where(x > 0, _one(x), _alternating(n, _one(x))), value
        ),
    ),
}


def _register_family(name: str, family: _Family) -> None:
    packet = getattr(aten, name)

    @lowers(packet.default, packet.x_scalar, packet.n_scalar)
    def lowered(ctx: Context, x: Any, n: Any) -> Any:
        return pointwise(lambda x, n: _evaluate(family, x, n))(ctx, x, n)


for _name, _family in _FAMILIES.items():
    _register_family(_name, _family)
