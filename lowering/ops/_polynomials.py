"""Polynomials with fixed coefficients, the highest power first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..lazy_jax import jnp


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """Horner's scheme."""
    result = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + jnp.asarray(coefficient, x.dtype)
    return result


def chebyshev(x: Any, coefficients: Sequence[float]) -> Any:
    """A sum of Chebyshev polynomials by Clenshaw's recurrence.

    The argument is twice that of the polynomials and the constant term counts half, as in
    Cephes' ``chbevl``.
    """
    before = last = jnp.zeros_like(x)
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, value
        value = x * last - before + jnp.asarray(coefficient, x.dtype)
    return 0.5 * (value - before)
