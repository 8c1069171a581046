"""Matrix factorizations of one matrix in pure StableHLO, with LAPACK's conventions.

Each function takes matrices without batch dimensions (:func:`over_batch` adds them) and is made of
``lax`` loops over rows and columns alone: no custom call, so that any target compiles it. Signs,
pivots and unit diagonals are LAPACK's, wherever LAPACK's are determined. No array is captured
from NumPy, since ``jax.lax.composite`` would make it an operand. Formulas: G. Golub and
C. Van Loan, Matrix Computations, 4th edition (chapter and section are named below).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lazy_jax import jax, jnp, lax

#: Sweeps of Jacobi rotations after which a matrix is given up; they converge in about ten.
_MAX_SWEEPS = 40


def over_batch(function: Callable[..., Any], *arrays: Any, ranks: tuple[int, ...] = ()) -> Any:
    """``function`` over the trailing dimensions (two unless ``ranks`` says) of each array.

    The leading ones are broadcast, as ATen's linear algebra does.
    """
    ranks = ranks or (2,) * len(arrays)
    batches = [array.shape[: array.ndim - rank] for array, rank in zip(arrays, ranks, strict=True)]
    batch = jnp.broadcast_shapes(*batches)
    if not batch:
        return function(*arrays)
    flat = [
        jnp.broadcast_to(array, batch + core).reshape(int(np.prod(batch)), *core)
        for array, core in (
            (array, array.shape[array.ndim - rank :])
            for array, rank in zip(arrays, ranks, strict=True)
        )
    ]
    results = jax.vmap(function)(*flat)
    return jax.tree.map(lambda x: x.reshape(batch + x.shape[1:]), results)


def adjoint(a: Any) -> Any:
    """Conjugate transpose of the last two dimensions."""
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def _epsilon(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _row(a: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(a, index, 0, keepdims=False)


def _column(a: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(a, index, 1, keepdims=False)


def _set_row(a: Any, row: Any, index: Any) -> Any:
    return lax.dynamic_update_index_in_dim(a, row.astype(a.dtype), index, 0)


def _set_column(a: Any, column: Any, index: Any) -> Any:
    return lax.dynamic_update_index_in_dim(a, column.astype(a.dtype), index, 1)


def _scale(a: Any) -> Any:
    """The largest magnitude, or 1 where that is 0 or not finite: keeps squares in range."""
    largest = jnp.max(jnp.abs(a), initial=0)
    return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)


# --- triangular systems and Cholesky -----------------------------------------------------------


def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unit: bool = False) -> Any:
    """``X`` with ``A X = B`` or ``X A = B``; reads one triangle of ``A`` (3.1)."""
    if not left:
        return solve_triangular(a.T, b.T, upper=not upper, unit=unit).T
    if upper:
        return solve_triangular(a[::-1, ::-1], b[::-1], upper=False, unit=unit)[::-1]
    a = jnp.tril(a, -1 if unit else 0)

    def step(i: Any, x: Any) -> Any:
        row = _row(a, i)
        value = _row(b, i) - row @ x  # the rows of x from i on are zero
        return _set_row(x, value if unit else value / row[i], i)

    return lax.fori_loop(0, a.shape[0], step, jnp.zeros_like(b)) if b.size else b


def cholesky(a: Any) -> tuple[Any, Any]:
    """``L`` with ``L L^H = A``, from the lower triangle, and the first minor that failed (4.2)."""
    a, rows = jnp.tril(a), jnp.arange(a.shape[0])

    def step(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        factor, info = carry
        column = _column(a, j) - factor @ jnp.conj(_row(factor, j))
        pivot = jnp.real(column[j])
        info = jnp.where((info == 0) & ~(pivot > 0), j + 1, info)
        root = jnp.sqrt(pivot)
        column = jnp.where(rows > j, column / root, jnp.where(rows == j, root, 0))
        return _set_column(factor, column, j), info

    info = jnp.zeros((), jnp.int64)
    return lax.fori_loop(0, a.shape[0], step, (jnp.zeros_like(a), info)) if a.size else (a, info)


# --- LU ----------------------------------------------------------------------------------------


def _magnitude(x: Any) -> Any:
    """What LAPACK compares to find a pivot."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)


def lu(a: Any) -> tuple[Any, Any, Any]:
    """``L`` and ``U`` in one matrix, the interchanges from 1, the first zero pivot (3.4.1)."""
    rows, columns = jnp.arange(a.shape[0]), jnp.arange(a.shape[1])
    count = min(a.shape)

    def step(j: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        a, pivots, info = carry
        found = jnp.argmax(jnp.where(rows >= j, _magnitude(_column(a, j)), -1))
        row = _row(a, found)
        a = _set_row(_set_row(a, _row(a, j), found), row, j)
        pivot = row[j]
        info = jnp.where((info == 0) & (pivot == 0), j + 1, info)
        column = _column(a, j)
        factor = jnp.where(rows > j, column / jnp.where(pivot == 0, 1, pivot), 0)
        a = a - factor[:, None] * jnp.where(columns > j, row, 0)
        return _set_column(a, jnp.where(rows > j, factor, column), j), pivots.at[j].set(found), info

    carry = (a, jnp.zeros(count, jnp.int64), jnp.zeros((), jnp.int64))
    a, pivots, info = lax.fori_loop(0, count, step, carry) if count else carry
    return a, pivots + 1, info


def permutation(pivots: Any, size: int) -> Any:
    """The order of rows that a sequence of interchanges leads to."""

    def step(i: Any, order: Any) -> Any:
        other = pivots[i] - 1
        here, there = order[i], order[other]
        return order.at[i].set(there).at[other].set(here)

    order = jnp.arange(size)
    return lax.fori_loop(0, pivots.shape[0], step, order) if pivots.shape[0] and size else order


def unpack(factors: Any) -> tuple[Any, Any]:
    """``L`` and ``U`` of a packed factorization."""
    count = min(factors.shape)
    unit = jnp.eye(factors.shape[0], count, dtype=factors.dtype)
    return jnp.tril(factors[:, :count], -1) + unit, jnp.triu(factors[:count])


def lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool, adjoint_: bool) -> Any:
    """Solve with ``A`` or its adjoint, given :func:`lu` of ``A``."""
    if not left:
        return adjoint(lu_solve(factors, pivots, adjoint(b), left=True, adjoint_=not adjoint_))
    order = permutation(pivots, factors.shape[0])
    if not adjoint_:
        y = solve_triangular(factors, b[order], upper=False, unit=True)
        return solve_triangular(factors, y, upper=True)
    y = solve_triangular(adjoint(factors), b, upper=False)
    y = solve_triangular(adjoint(factors), y, upper=True, unit=True)
    return jnp.zeros_like(y).at[order].set(y)


# --- QR ----------------------------------------------------------------------------------------


def _reflector(column: Any, j: Any) -> tuple[Any, Any, Any]:
    """``beta, tau, v`` with ``(I - tau v v^H)^H x = beta e_j``, below row ``j`` (5.1, as LARFG)."""
    rows = jnp.arange(column.shape[0])
    alpha = column[j]
    tail = jnp.where(rows > j, column, 0)
    scale = _scale(jnp.where(rows >= j, column, 0))
    squares = jnp.square(jnp.abs(jnp.where(rows >= j, column, 0) / scale))
    beta = -jnp.copysign(scale * jnp.sqrt(jnp.sum(squares)), alpha.real).astype(column.dtype)
    trivial = jnp.all(tail == 0) & (alpha.imag == 0)
    beta = jnp.where(trivial, alpha, beta)
    tau = jnp.where(trivial, 0, (beta - alpha) / jnp.where(trivial, 1, beta))
    vector = tail / jnp.where(trivial, 1, alpha - beta)
    return beta, tau, jnp.where(rows == j, 1, vector)


def householder(a: Any) -> tuple[Any, Any]:
    """Reflectors below the diagonal and ``R`` above, and the factors ``tau`` (5.2.1)."""
    rows, columns = jnp.arange(a.shape[0]), jnp.arange(a.shape[1])
    count = min(a.shape)

    def step(j: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        a, taus = carry
        beta, tau, vector = _reflector(_column(a, j), j)
        product = jnp.conj(vector) @ a
        a = a - vector[:, None] * jnp.where(columns > j, jnp.conj(tau) * product, 0)
        below = jnp.where(rows == j, beta, vector)
        return _set_column(a, jnp.where(rows >= j, below, _column(a, j)), j), taus.at[j].set(tau)

    carry = (a, jnp.zeros(count, a.dtype))
    return lax.fori_loop(0, count, step, carry) if count else carry


def apply_reflectors(
    vectors: Any, taus: Any, c: Any, *, left: bool = True, transpose: bool = False
) -> Any:
    """``Q C``, ``Q^H C``, ``C Q`` or ``C Q^H``, given the reflectors of ``Q`` (5.1.6)."""
    if not left:
        return adjoint(apply_reflectors(vectors, taus, adjoint(c), transpose=not transpose))
    rows, count = jnp.arange(c.shape[0]), taus.shape[0]

    def step(i: Any, c: Any) -> Any:
        j = i if transpose else count - 1 - i
        vector = jnp.where(rows == j, 1, jnp.where(rows > j, _column(vectors, j), 0))
        tau = jnp.conj(taus[j]) if transpose else taus[j]
        return c - tau * vector[:, None] * (jnp.conj(vector) @ c)

    return lax.fori_loop(0, count, step, c) if count and c.size else c


def orthonormal(vectors: Any, taus: Any, columns: int) -> Any:
    """The first ``columns`` columns of ``Q``."""
    identity = jnp.eye(vectors.shape[0], columns, dtype=vectors.dtype)
    return apply_reflectors(vectors, taus, identity)


def qr(a: Any, *, complete: bool = False) -> tuple[Any, Any]:
    """``Q`` and ``R``, reduced or complete."""
    vectors, taus = householder(a)
    columns = a.shape[0] if complete else min(a.shape)
    return orthonormal(vectors, taus, columns), jnp.triu(vectors[:columns])


# --- Jacobi rotations --------------------------------------------------------------------------


def _next_round(a: Any) -> Any:
    """The columns in the order in which ``i`` meets ``i + size / 2`` in the next round.

    After ``size - 1`` rounds every pair has met once and the order is the first again (8.5.5).
    """
    half = a.shape[1] // 2
    top, bottom = a[:, :half], a[:, half:]
    if half == 1:
        return a
    return jnp.concatenate([top[:, :1], bottom[:, :1], top[:, 1:-1], bottom[:, 1:], top[:, -1:]], 1)


def _rotation(alpha: Any, beta: Any, gamma: Any, rotate: Any) -> tuple[Any, Any, Any]:
    """``c``, ``s`` and the phase of gamma: they diagonalize ``[[alpha, gamma], [gamma*, beta]]``.

    The columns ``p, q`` become ``c phase p - s q`` and ``s phase p + c q`` (8.5.2).
    """
    size = jnp.abs(gamma)
    rotate &= size > 0
    safe = jnp.where(rotate, size, 1)
    ratio = (beta - alpha) / (2 * safe)
    # A square that overflows belongs to a tangent that is 0.
    tangent = jnp.where(ratio < 0, -1, 1) / (jnp.abs(ratio) + jnp.sqrt(1 + ratio * ratio))
    tangent = jnp.where(rotate, tangent, 0)
    cosine = 1 / jnp.sqrt(1 + tangent * tangent)
    phase = jnp.where(rotate, gamma / safe.astype(gamma.dtype), 1)
    return cosine, tangent * cosine, phase


def _rotate(a: Any, cosine: Any, sine: Any, phase: Any) -> Any:
    """Rotate the columns ``i`` and ``i + half`` of ``a``."""
    half = a.shape[1] // 2
    p, q = a[:, :half] * phase, a[:, half:]
    return jnp.concatenate([cosine * p - sine * q, sine * p + cosine * q], 1)


def _even(a: Any) -> Any:
    """A square matrix of even size: with a row and a column of zeros that no rotation touches."""
    odd = a.shape[0] % 2
    return jnp.pad(a, ((0, odd), (0, odd)))


def eigh(a: Any) -> tuple[Any, Any]:
    """Ascending eigenvalues and eigenvectors of a Hermitian matrix, by Jacobi's method (8.5)."""
    size, scale = a.shape[0], _scale(a)
    if size == 0:
        return a.real.reshape(0), a
    finite = jnp.all(jnp.isfinite(a))
    a = _even(a / scale.astype(a.dtype))
    half = a.shape[0] // 2
    diagonal = jnp.eye(a.shape[0], dtype=bool)
    meeting = jnp.roll(diagonal, half, 0)

    def round_(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        a, vectors = carry
        entries = jnp.diagonal(a).real
        rotation = _rotation(entries[:half], entries[half:], jnp.diagonal(a, half), True)
        a = adjoint(_rotate(adjoint(_rotate(a, *rotation)), *rotation))
        a = jnp.where(meeting, 0, a)
        return _next_round(_next_round(a).T).T, _next_round(_rotate(vectors, *rotation))

    def sweep(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        a, vectors, count = carry
        a, vectors = lax.fori_loop(0, a.shape[0] - 1, round_, (a, vectors))
        return (a + adjoint(a)) / 2, vectors, count + 1

    def unfinished(carry: tuple[Any, Any, Any]) -> Any:
        a, _, count = carry
        squares = jnp.square(jnp.abs(a))
        rest, whole = jnp.sum(jnp.where(diagonal, 0, squares)), jnp.sum(squares)
        return (rest > whole * _epsilon(a.dtype) ** 2) & (count < _MAX_SWEEPS)

    a, vectors, _ = lax.while_loop(unfinished, sweep, (a, jnp.eye(a.shape[0], dtype=a.dtype), 0))
    values = jnp.diagonal(a).real[:size]
    ascending = jnp.argsort(values)
    values, vectors = values[ascending] * scale, vectors[:size, :size][:, ascending]
    return jnp.where(finite, values, jnp.nan), jnp.where(finite, vectors, jnp.nan)


def _orthogonalize(w: Any) -> tuple[Any, Any]:
    """``W J`` with orthogonal columns and the unitary ``J``: one-sided Jacobi (8.6.4)."""
    half = w.shape[0] // 2
    tolerance = _epsilon(w.dtype) * max(w.shape[0], 4)

    def round_(_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        w, basis, rotated = carry
        p, q = w[:, :half], w[:, half:]
        alpha, beta = (jnp.sum(jnp.square(jnp.abs(x)), 0) for x in (p, q))
        gamma = jnp.sum(jnp.conj(p) * q, 0)
        rotate = jnp.abs(gamma) > tolerance * jnp.sqrt(alpha) * jnp.sqrt(beta)
        rotation = _rotation(alpha, beta, gamma, rotate)
        w, basis = (_next_round(_rotate(x, *rotation)) for x in (w, basis))
        return w, basis, rotated | jnp.any(rotate)

    def sweep(carry: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        w, basis, _, count = carry
        start = (w, basis, jnp.zeros((), bool))
        return *lax.fori_loop(0, w.shape[0] - 1, round_, start), count + 1

    start = (w, jnp.eye(w.shape[0], dtype=w.dtype), jnp.ones((), bool), 0)
    return lax.while_loop(lambda c: c[2] & (c[3] < _MAX_SWEEPS), sweep, start)[:2]


def svd(a: Any, *, full: bool, vectors: bool = True) -> tuple[Any, ...]:
    """``U, S, V^H``, or ``S`` alone: QR, then one-sided Jacobi on the adjoint of ``R``.

    Z. Drmač and K. Veselić, New fast and accurate Jacobi SVD algorithm, 2008, without pivoting.
    """
    if a.shape[0] < a.shape[1]:
        u, s, vh = svd(adjoint(a), full=full, vectors=vectors)
        return adjoint(vh), s, adjoint(u)
    size = a.shape[1]
    if size == 0:
        basis = jnp.eye(a.shape[0], a.shape[0] if full else 0, dtype=a.dtype)
        return basis, jnp.zeros(0, a.real.dtype), jnp.zeros((0, 0), a.dtype)
    finite, scale = jnp.all(jnp.isfinite(a)), _scale(a)
    q, r = qr(a / scale.astype(a.dtype), complete=full and vectors)
    w, basis = _orthogonalize(_even(adjoint(r[:size])))
    w, basis = w[:size, :size], basis[:size, :size]
    values = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(w)), 0))
    order = jnp.argsort(-values)
    s = jnp.where(finite, values[order] * scale, jnp.nan)
    if not vectors:
        return q, s, r
    # R's diagonal holds the norms up to a phase; where one is 0, Q completes an orthonormal basis.
    v, triangle = qr(w[:, order])
    v = v * _phase(jnp.diagonal(triangle))
    u = jnp.concatenate([q[:, :size] @ basis[:, order], q[:, size:]], 1)
    return jnp.where(finite, u, jnp.nan), s, jnp.where(finite, adjoint(v), jnp.nan)


def _phase(x: Any) -> Any:
    size = jnp.abs(x)
    return jnp.where(size > 0, x / jnp.where(size > 0, size, 1).astype(x.dtype), 1)


# --- the exponential ---------------------------------------------------------------------------

_TAYLOR_DEGREE = 18


def matrix_exp(a: Any) -> Any:
    """Scaling and squaring of a Taylor polynomial of degree 18 (9.3.1).

    With a norm of at most 1, its first missing term is below 1e-17.
    """
    identity = jnp.eye(a.shape[0], dtype=a.dtype)
    if a.size == 0:
        return a
    norm = jnp.max(jnp.sum(jnp.abs(a), 0))
    squarings = jnp.ceil(jnp.log2(jnp.where((norm > 1) & jnp.isfinite(norm), norm, 1)))
    squarings = squarings.astype(jnp.int32)
    a = a * jnp.ldexp(jnp.ones((), norm.dtype), -squarings).astype(a.dtype)
    square = a @ a
    powers = (identity, a, square)
    coefficients = 1 / np.cumprod([1.0, *range(1, _TAYLOR_DEGREE + 1)])
    cube, result = square @ a, jnp.zeros_like(a)
    for start in range(_TAYLOR_DEGREE, -1, -3):
        terms = zip(coefficients[start : start + 3], powers, strict=False)
        result = result @ cube + sum(float(c) * power for c, power in terms)
    return lax.fori_loop(0, squarings, lambda _, x: x @ x, result)
