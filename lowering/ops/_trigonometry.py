"""Sine and cosine of float32 in a form that vectorizes: XLA:CPU calls the C library for each.

The angle is reduced by a multiple of pi/2 in float64, pi/2 in two parts of which the first has so
few bits that its product is exact (Cody and Waite, "Software Manual for the Elementary
Functions", 1980), and the Taylor series of what is left, below pi/4, is summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..lazy_jax import jax, jnp, numpy_functions
from ._polynomials import polynomial

#: Elements below which two branches cost more than they save.
_FEW = 1 << 12
#: Largest angle that is reduced with so few bits.
_LARGEST = float(1 << 20)

# pi/2 as a number of 33 bits and the rest.
_HEAD, _TAIL = 1.5707963267341256, 6.077100506506192e-11

_SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in reversed(range(6))]
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in reversed(range(7))]


def _reduced(x: Any, quarter: int) -> Any:
    """``sin(x + quarter * pi/2)`` for angles that are not too large."""
    angle = x.astype(jnp.float64)
    turns = jnp.round(angle * (2 / math.pi))
    rest = (angle - turns * _HEAD) - turns * _TAIL
    rest = jnp.where(turns == 0, angle, rest)  # -0 stays what it is
    square = rest * rest
    sine = rest * polynomial(square, _SINE)
    cosine = polynomial(square, _COSINE)
    quadrant = turns.astype(jnp.int32) + quarter
    value = jnp.where(quadrant & 1 == 1, cosine, sine)
    return jnp.where(quadrant & 2 == 2, -value, value).astype(x.dtype)


def _vectorized(plain: Callable[[Any], Any], quarter: int) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if x.dtype != jnp.float32 or x.size < _FEW:
            return plain(x)
        usual = jnp.max(jnp.abs(x)) <= _LARGEST  # false for NaN
        return jax.lax.cond(usual, lambda x: _reduced(x, quarter), plain, x)

    return function


sin = _vectorized(numpy_functions.sin, 0)
cos = _vectorized(numpy_functions.cos, 1)
