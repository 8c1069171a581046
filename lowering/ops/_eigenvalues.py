"""Eigenvalues and eigenvectors of a general matrix: complex Hessenberg form, then shifted QR.

G. Golub and C. Van Loan, Matrix Computations, 4th edition, 7.4 (Hessenberg), 7.5 (QR steps with
deflation), 7.6.4 (eigenvectors of a triangular matrix); the single shift is Wilkinson's.
"""

from __future__ import annotations

from typing import Any

from ..lazy_jax import jnp, lax
from ._factorizations import _column, _epsilon, _reflector, _row, _scale, _set_column, _set_row

#: QR steps for each eigenvalue, after which the iteration is given up; two or three are usual.
_STEPS = 30
#: Steps without deflation after which a shift is chosen at random, so to speak.
_STALLED = 10


def eig(a: Any) -> tuple[Any, Any]:
    """Eigenvalues, and eigenvectors of norm 1 whose largest element is real."""
    size = a.shape[0]
    if size == 0:
        return a.reshape(0), a
    scale = _scale(a).astype(a.dtype)
    triangle, basis = _schur(*_hessenberg(a / scale))
    vectors = basis @ _triangular_vectors(triangle)
    vectors = vectors / jnp.sqrt(jnp.sum(jnp.square(jnp.abs(vectors)), 0)).astype(a.dtype)
    largest = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), 0)[None], 0)
    vectors = vectors * (jnp.conj(largest) / jnp.abs(largest).astype(a.dtype))
    return jnp.diagonal(triangle) * scale, vectors


def _hessenberg(a: Any) -> tuple[Any, Any]:
    """``H`` and the unitary ``Q`` with ``A = Q H Q^H``."""

    def step(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        a, basis = carry
        rows = jnp.arange(a.shape[0])
        column = jnp.where(rows > j, _column(a, j), 0)
        _, tau, vector = _reflector(column, j + 1)
        a = a - jnp.conj(tau) * vector[:, None] * (jnp.conj(vector) @ a)
        a = a - tau * (a @ vector)[:, None] * jnp.conj(vector)
        basis = basis - tau * (basis @ vector)[:, None] * jnp.conj(vector)
        return _set_column(a, jnp.where(rows > j + 1, 0, _column(a, j)), j), basis

    start = (a, jnp.eye(a.shape[0], dtype=a.dtype))
    return lax.fori_loop(0, a.shape[0] - 2, step, start) if a.shape[0] > 2 else start


def _shift(h: Any, high: Any, stalled: Any) -> Any:
    """The eigenvalue of the last block of size two that is nearer to its last entry."""
    low = high - 1
    a, b, c, d = h[low, low], h[low, high], h[high, low], h[high, high]
    half = (a - d) / 2
    root = jnp.sqrt(half * half + b * c)
    root = jnp.where(jnp.real(jnp.conj(half) * root) < 0, -root, root)
    denominator = half + root
    nearer = d - jnp.where(denominator == 0, 0, b * c / jnp.where(denominator == 0, 1, denominator))
    odd = (stalled > 0) & (stalled % _STALLED == 0)
    return jnp.where(odd, d + jnp.abs(c) * (0.75 + 0.4j), nearer).astype(h.dtype)


def _qr_step(h: Any, basis: Any, low: Any, high: Any, shift: Any) -> tuple[Any, Any]:
    """Chase a bulge from row ``low`` to row ``high`` with rotations."""
    size = h.shape[0]

    def rotate(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        h, basis = carry
        before = jnp.maximum(k - 1, 0)
        start = k == low
        x = jnp.where(start, h[k, k] - shift, h[k, before])
        y = jnp.where(start, h[k + 1, k], h[k + 1, before])
        norm = jnp.sqrt(jnp.square(jnp.abs(x)) + jnp.square(jnp.abs(y))).astype(h.dtype)
        c = jnp.where(norm == 0, 1, x / jnp.where(norm == 0, 1, norm))
        s = jnp.where(norm == 0, 0, y / jnp.where(norm == 0, 1, norm))
        rotation = jnp.stack([jnp.stack([jnp.conj(c), jnp.conj(s)]), jnp.stack([-s, c])])
        rows = lax.dynamic_slice(h, (k, 0), (2, size))
        h = lax.dynamic_update_slice(h, rotation @ rows, (k, 0))
        back = jnp.conj(rotation).T
        columns = lax.dynamic_slice(h, (0, k), (size, 2))
        h = lax.dynamic_update_slice(h, columns @ back, (0, k))
        # Where the bulge was there is nothing left.
        h = h.at[k + 1, before].set(jnp.where(start, h[k + 1, before], 0))
        columns = lax.dynamic_slice(basis, (0, k), (size, 2))
        return h, lax.dynamic_update_slice(basis, columns @ back, (0, k))

    return lax.fori_loop(low, high, rotate, (h, basis))


def _schur(h: Any, basis: Any) -> tuple[Any, Any]:
    """The triangular ``T`` and the unitary ``Q`` of ``A = Q T Q^H``."""
    size = h.shape[0]
    index = jnp.arange(size)
    epsilon = _epsilon(h.dtype)

    def negligible(h: Any) -> Any:
        """For each row, whether its element before the diagonal counts as zero."""
        sizes = jnp.abs(jnp.diagonal(h))
        sums = sizes + jnp.roll(sizes, 1)
        below = jnp.pad(jnp.abs(jnp.diagonal(h, -1)), (1, 0))
        floor = epsilon * jnp.finfo(h.dtype).tiny ** 0.5
        return (below <= jnp.maximum(epsilon * sums, floor)) | (index == 0)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        h, basis, high, stalled, count = carry
        zero = negligible(h)
        h = jnp.where((index[:, None] == index + 1) & zero[:, None], 0, h)
        low = jnp.max(jnp.where(zero & (index <= high), index, 0))
        done = low == high
        # A range without rows does nothing.
        h, basis = _qr_step(h, basis, low, high, _shift(h, jnp.maximum(high, 1), stalled))
        return h, basis, high - done, jnp.where(done, 0, stalled + 1), count + 1

    def unfinished(carry: tuple[Any, ...]) -> Any:
        return (carry[2] > 0) & (carry[4] < _STEPS * size)

    start = (h, basis, jnp.asarray(size - 1), jnp.asarray(0), jnp.asarray(0))
    h, basis, high, _, _ = lax.while_loop(unfinished, step, start) if size > 1 else start
    failed = (high > 0) | ~jnp.all(jnp.isfinite(h))
    return jnp.where(failed, jnp.nan, jnp.triu(h)), basis


def _triangular_vectors(triangle: Any) -> Any:
    """The eigenvectors of an upper triangular matrix, as columns, by back substitution."""
    size = triangle.shape[0]
    index, values = jnp.arange(size), jnp.diagonal(triangle)
    smallest = (_epsilon(triangle.dtype) * _scale(triangle)).astype(triangle.dtype)
    strict = jnp.triu(triangle, 1)
    large = 1 / jnp.finfo(triangle.dtype).tiny ** 0.25

    def step(i: Any, vectors: Any) -> Any:
        j = size - 1 - i
        gap = values[j] - values
        # Equal eigenvalues: as if they were not quite so, as LAPACK does (TREVC).
        gap = jnp.where(jnp.abs(gap) < jnp.abs(smallest), smallest, gap)
        row = -(_row(strict, j) @ vectors) / gap
        vectors = _set_row(vectors, jnp.where(index > j, row, _row(vectors, j)), j)
        largest = jnp.max(jnp.abs(vectors), 0)
        return vectors / jnp.where(largest > large, largest, 1).astype(vectors.dtype)

    return lax.fori_loop(0, size, step, jnp.eye(size, dtype=triangle.dtype))
