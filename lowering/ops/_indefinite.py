"""The Bunch-Kaufman factorization of a symmetric or Hermitian indefinite matrix.

J. Bunch and L. Kaufman, Some stable methods for calculating inertia and solving symmetric linear
systems, 1977, in LAPACK's layout (SYTRF, HETRF, lower triangle): the columns of ``L`` below the
blocks of ``D``, a pivot from 1 for a block of size one, twice its negative for one of size two.
"""

from __future__ import annotations

import math
from typing import Any

from ..lazy_jax import jnp, lax
from ._factorizations import _column, _magnitude, _row, _set_column, _set_row

#: Bounds the growth of elements, whichever size of block is taken.
_ALPHA = (1 + math.sqrt(17)) / 8


def _mirror(x: Any, hermitian: bool) -> Any:
    return jnp.conj(x) if hermitian else x


def _swap_rows(a: Any, i: Any, j: Any) -> Any:
    first, second = _row(a, i), _row(a, j)
    return _set_row(_set_row(a, second, i), first, j)


def _choose(a: Any, k: Any) -> tuple[Any, Any, Any]:
    """Whether the next block has size one, the row to bring there, and whether it is zero."""
    rows, column = jnp.arange(a.shape[0]), _column(a, k)
    below = jnp.where(rows > k, _magnitude(column), -1)
    found, largest = jnp.argmax(below), jnp.max(below, initial=0)
    pivot = _magnitude(column[k])
    row = _row(a, found)
    beside = jnp.max(jnp.where((rows >= k) & (rows != found), _magnitude(row), 0))
    # Not the other way round: NaN, and the last column, must end in a block of size one.
    stay = ~(pivot < _ALPHA * largest)
    stay |= pivot >= _ALPHA * largest * (largest / beside)
    bring = _magnitude(row[found]) >= _ALPHA * beside
    return stay | bring, jnp.where(stay, k, found), jnp.maximum(pivot, largest) == 0


def _inverse_block(first: Any, second: Any, k: Any, following: Any, hermitian: bool) -> Any:
    """The inverse of the block of size two at ``k``; its corner is its largest element."""
    corner = first[following]
    size = jnp.abs(corner).astype(corner.dtype)
    a, b, c = (x / size for x in (first[k], corner, second[following]))
    determinant = (a * c - b * _mirror(b, hermitian)) * size
    return jnp.array([[c, -_mirror(b, hermitian)], [-b, a]]) / determinant


def ldl(a: Any, *, hermitian: bool) -> tuple[Any, Any, Any]:
    """The packed factors, the pivots and the first block that is zero."""
    size = a.shape[0]
    rows = jnp.arange(size)
    strict = jnp.tril(a, -1)
    diagonal = jnp.where(jnp.eye(size, dtype=bool), jnp.real(a) if hermitian else a, 0)
    full = strict + _mirror(strict, hermitian).T + diagonal.astype(a.dtype)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        k, full, packed, pivots, info = carry
        single, target, zero = _choose(full, k)
        last = jnp.where(single, k, k + 1)
        full = _swap_rows(_swap_rows(full, last, target).T, last, target).T
        following = jnp.minimum(k + 1, size - 1)
        first, second = _column(full, k), _column(full, following)
        one = jnp.where(rows > k, first / jnp.where(zero, 1, first[k]), 0)
        rest = jnp.where((rows > following)[:, None], jnp.stack([first, second], 1), 0)
        two = rest @ _inverse_block(first, second, k, following, hermitian)
        product = jnp.where(
            single,
            one[:, None] * _mirror(one, hermitian) * first[k],
            two @ _mirror(rest, hermitian).T,
        )
        column = jnp.where(single, one, jnp.where(rows == following, first, two[:, 0]))
        packed = _set_column(packed, jnp.where(rows == k, first, column), k)
        column = jnp.where(rows == following, second, two[:, 1])
        column = jnp.where(single, _column(packed, following), column)
        packed = _set_column(packed, column, following)
        place = jnp.where(single, target + 1, -target - 1)
        pivots = pivots.at[following].set(jnp.where(single, pivots[following], place))
        info = jnp.where((info == 0) & zero, k + 1, info)
        return last + 1, full - product, packed, pivots.at[k].set(place), info

    start = (0, full, jnp.zeros_like(a), jnp.zeros(size, jnp.int64), jnp.zeros((), jnp.int64))
    if size == 0:
        return a, start[3], start[4]
    _, _, packed, pivots, info = lax.while_loop(lambda carry: carry[0] < size, step, start)
    return jnp.tril(packed), pivots, info


def ldl_solve(packed: Any, pivots: Any, b: Any, *, hermitian: bool) -> Any:
    """Solve with the matrix that :func:`ldl` factored."""
    size = packed.shape[0]
    rows = jnp.arange(size)
    if b.size == 0:
        return b

    def forward(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        k, b = carry
        single = pivots[k] > 0
        last = jnp.where(single, k, k + 1)
        b = _swap_rows(b, last, jnp.abs(pivots[k]) - 1)
        following = jnp.minimum(k + 1, size - 1)
        first, second = _column(packed, k), _column(packed, following)
        pair = jnp.stack([_row(b, k), _row(b, following)])
        beneath = jnp.where((rows > last)[:, None], jnp.stack([first, second], 1), 0)
        beneath = beneath * jnp.stack([jnp.ones_like(single), ~single])
        two = _inverse_block(first, second, k, following, hermitian) @ pair
        b = b - beneath @ pair
        b = _set_row(b, jnp.where(single, pair[0] / first[k], two[0]), k)
        return last + 1, _set_row(b, jnp.where(single, _row(b, following), two[1]), following)

    def backward(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        k, b = carry
        single = pivots[k] > 0
        before = jnp.maximum(k - 1, 0)
        for column, wanted in ((k, True), (before, ~single)):
            above = jnp.where((rows > k) & wanted, _column(packed, column), 0)
            b = _set_row(b, _row(b, column) - _mirror(above, hermitian) @ b, column)
        return jnp.where(single, k, before) - 1, _swap_rows(b, k, jnp.abs(pivots[k]) - 1)

    _, b = lax.while_loop(lambda carry: carry[0] < size, forward, (0, b))
    return lax.while_loop(lambda carry: carry[0] >= 0, backward, (size - 1, b))[1]
