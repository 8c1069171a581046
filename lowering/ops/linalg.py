"""Linear algebra: each operator is a composite whose decomposition is portable StableHLO.

The decompositions keep LAPACK's conventions where those are determined; where they are not (the
signs of eigenvectors and singular vectors, the order of general eigenvalues) a target that brings
ATen's kernel gives eager's very choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..lazy_jax import jnp
from ..registry import Validator, lowers
from ..trace import Context, to_jax
from . import _factorizations as factor
from ._eigenvalues import eig
from ._factorizations import adjoint, over_batch
from ._indefinite import ldl, ldl_solve
from ._shared import cast, is_tensor, opmath

aten = torch.ops.aten
LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]

#: Where eager raises, given the first operand and the results; the error and its message.
Failure = tuple[Callable[[Any, Any], Any], type[Exception], str]


def decomposes(
    op: Any, *, fails: Sequence[Failure] = (), refuse: Validator | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the decomposition of composite ``neuron.<operator>``.

    It is called with the operator's arguments by name and gives its results in order. Numbers,
    flags and strings become the composite's attributes; ``None`` is left out. With
    ``check_errors``, the last result (``info``) is checked once the call is over.
    """
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(ctx: Context, *args: Any, **kwargs: Any) -> Any:
            bound = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            tensors = {name: value for name, value in bound.items() if is_tensor(value)}
            settings = {name: bound[name] for name in names if name not in tensors}
            checked = settings.get("check_errors", False)
            if checked:
                settings["check_errors"] = False

            def plain(*arrays: Any) -> list[Any]:
                results = function(**dict(zip(tensors, arrays, strict=True)), **settings)
                return _promised(ctx, results if isinstance(results, tuple) else (results,))

            attributes = {
                name: int(value) if isinstance(value, bool) else value
                for name, value in settings.items()
                if value is not None
            }
            results = tuple(
                ctx.kernel(schema.name.split("::")[1], plain, list(tensors.values()), **attributes)
            )
            if checked:
                message = f"{op}: the factorization failed, or the matrix is singular"
                ctx.check(results[-1] != 0, LinAlgError, message, always=True)
            for failed, error, message in fails:
                ctx.check(failed(bound[names[0]], results), error, message, always=True)
            return results if len(results) > 1 else results[0]

        lowers(op, refuse=refuse)(lowered)
        return function

    return decorate


def _promised(ctx: Context, results: tuple[Any, ...]) -> list[Any]:
    """The results in their dtypes; one that is not computed (``None``) is an empty tensor."""
    return [
        jnp.zeros(spec.shape, to_jax(spec.dtype))
        if result is None
        else cast(result, to_jax(spec.dtype))
        for result, spec in zip(results, ctx.outputs, strict=True)
    ]


# --- triangular systems and Cholesky -----------------------------------------------------------


def _solve_triangular(a: Any, b: Any, **settings: Any) -> Any:
    return over_batch(functools.partial(factor.solve_triangular, **settings), a, b)


@decomposes(aten.linalg_solve_triangular.default)
def _linalg_solve_triangular(
    self: Any, B: Any, upper: bool, left: bool, unitriangular: bool
) -> Any:
    return _solve_triangular(self, B, upper=upper, left=left, unit=unitriangular)


@decomposes(aten.triangular_solve.default)
def _triangular_solve(
    self: Any, A: Any, upper: bool, transpose: bool, unitriangular: bool
) -> tuple[Any, Any]:
    matrix = jnp.swapaxes(A, -1, -2) if transpose else A
    solution = _solve_triangular(matrix, self, upper=upper != transpose, unit=unitriangular)
    batch = solution.shape[:-2]
    return solution, jnp.broadcast_to(A, batch + A.shape[-2:])


def _cholesky_factor(a: Any, upper: bool) -> tuple[Any, Any]:
    lower, info = over_batch(factor.cholesky, adjoint(a) if upper else a)
    return (adjoint(lower) if upper else lower), info


@decomposes(aten.linalg_cholesky_ex.default)
def _cholesky_ex(self: Any, upper: bool, check_errors: bool) -> tuple[Any, Any]:
    return _cholesky_factor(self, upper)


_NOT_DEFINITE = (
    "cholesky: The factorization could not be completed because the input is not positive-definite."
)


@decomposes(
    aten.cholesky.default,
    fails=[(lambda a, results: jnp.isnan(results[0]), LinAlgError, _NOT_DEFINITE)],
)
def _cholesky(self: Any, upper: bool) -> Any:
    return _cholesky_factor(self, upper)[0]


@decomposes(aten.cholesky_solve.default)
def _cholesky_solve(self: Any, input2: Any, upper: bool) -> Any:
    lower = adjoint(input2) if upper else input2
    half = _solve_triangular(lower, self, upper=False)
    return _solve_triangular(adjoint(lower), half, upper=True)


@decomposes(aten.cholesky_inverse.default)
def _cholesky_inverse(self: Any, upper: bool) -> Any:
    return _cholesky_solve(jnp.eye(self.shape[-1], dtype=self.dtype), self, upper)


# --- LU ----------------------------------------------------------------------------------------


def _without_pivots(node: Any) -> str | None:
    """ATen has no such factorization on the CPU, and says so."""
    pivot = node.kwargs.get("pivot", True)
    return None if pivot else "LU without pivoting is not implemented on the CPU"


@decomposes(aten.linalg_lu_factor_ex.default, refuse=_without_pivots)
def _lu_factor_ex(A: Any, pivot: bool, check_errors: bool) -> tuple[Any, Any, Any]:
    return over_batch(factor.lu, A)


def _permutation_matrix(pivots: Any, size: int, dtype: Any) -> Any:
    def matrix(pivots: Any) -> Any:
        return jnp.eye(size, dtype=dtype)[:, factor.permutation(pivots, size)]

    return over_batch(matrix, pivots, ranks=(1,))


@decomposes(aten.lu_unpack.default)
def _lu_unpack(
    LU_data: Any, LU_pivots: Any, unpack_data: bool, unpack_pivots: bool
) -> tuple[Any, Any, Any]:
    matrix = lower = upper = None
    if unpack_pivots:
        matrix = _permutation_matrix(LU_pivots, LU_data.shape[-2], LU_data.dtype)
    if unpack_data:
        lower, upper = over_batch(factor.unpack, LU_data)
    return matrix, lower, upper


@decomposes(aten.linalg_lu.default, refuse=_without_pivots)
def _lu(A: Any, pivot: bool) -> tuple[Any, Any, Any]:
    factors, pivots, _ = over_batch(factor.lu, A)
    return _lu_unpack(factors, pivots, True, True)


def _lu_solve(factors: Any, pivots: Any, b: Any, left: bool, adjoint_: bool) -> Any:
    solve = functools.partial(factor.lu_solve, left=left, adjoint_=adjoint_)
    return over_batch(solve, factors, pivots, b, ranks=(2, 1, 2))


@decomposes(aten.linalg_lu_solve.default)
def _linalg_lu_solve(LU: Any, pivots: Any, B: Any, left: bool, adjoint: bool) -> Any:
    return _lu_solve(LU, pivots, B, left, adjoint)


@decomposes(aten._linalg_solve_ex.default)
def _solve_ex(A: Any, B: Any, left: bool, check_errors: bool) -> tuple[Any, Any, Any, Any]:
    factors, pivots, info = over_batch(factor.lu, A)
    # Eager reads B as a batch of vectors where its shape is that of A without its last dimension.
    vectors = B.ndim == 1 or (B.ndim + 1 == A.ndim and B.shape == A.shape[:-1])
    solution = _lu_solve(factors, pivots, B[..., None] if vectors else B, left or vectors, False)
    return (solution[..., 0] if vectors else solution), factors, pivots, info


@decomposes(aten.linalg_inv_ex.default)
def _inv_ex(A: Any, check_errors: bool) -> tuple[Any, Any]:
    factors, pivots, info = over_batch(factor.lu, A)
    identity = jnp.eye(A.shape[-1], dtype=A.dtype)
    return _lu_solve(factors, pivots, identity, True, False), info


# --- QR ----------------------------------------------------------------------------------------


@decomposes(aten.geqrf.default)
def _geqrf(self: Any) -> tuple[Any, Any]:
    return over_batch(factor.householder, self)


@decomposes(aten.linalg_householder_product.default)
def _householder_product(input: Any, tau: Any) -> Any:
    columns = input.shape[-1]

    def product(vectors: Any, taus: Any) -> Any:
        return factor.orthonormal(vectors, taus, columns)

    return over_batch(product, input, tau, ranks=(2, 1))


@decomposes(aten.ormqr.default)
def _ormqr(self: Any, input2: Any, input3: Any, left: bool, transpose: bool) -> Any:
    apply = functools.partial(factor.apply_reflectors, left=left, transpose=transpose)
    return over_batch(apply, self, input2, input3, ranks=(2, 1, 2))


@decomposes(aten.linalg_qr.default)
def _qr(A: Any, mode: str) -> tuple[Any, Any]:
    if mode == "r":
        return None, over_batch(lambda a: jnp.triu(factor.householder(a)[0][: min(a.shape)]), A)
    return over_batch(functools.partial(factor.qr, complete=mode == "complete"), A)


# --- spectra -----------------------------------------------------------------------------------

_NOT_CONVERGED = "The algorithm failed to converge because the input matrix "
_REPEATED = f"{_NOT_CONVERGED}is ill-conditioned or has too many repeated eigenvalues."


def _finite(a: Any) -> Any:
    return jnp.all(jnp.isfinite(a))


def _lost(position: int) -> Callable[[Any, Any], Any]:
    """Whether a result is NaN though the matrix is finite: the algorithm has failed."""
    return lambda a, results: jnp.any(jnp.isnan(results[position])) & _finite(a)


@decomposes(aten._linalg_eigh.default, fails=[(_lost(0), LinAlgError, f"linalg.eigh: {_REPEATED}")])
def _eigh(A: Any, UPLO: str, compute_v: bool) -> tuple[Any, Any]:
    lower = adjoint(A) if UPLO.upper() == "U" else A
    strict = jnp.tril(lower, -1)
    real_diagonal = jnp.where(jnp.eye(A.shape[-1], dtype=bool), jnp.real(lower), 0).astype(A.dtype)
    values, vectors = over_batch(factor.eigh, strict + adjoint(strict) + real_diagonal)
    return values, vectors if compute_v else None


_NOT_FINITE = f"linalg.svd: {_NOT_CONVERGED}contained non-finite values."


@decomposes(
    aten._linalg_svd.default,
    fails=[
        (lambda a, results: jnp.isnan(a), LinAlgError, _NOT_FINITE),
        (_lost(1), LinAlgError, f"linalg.svd: {_REPEATED}"),
    ],
)
def _svd(A: Any, full_matrices: bool, compute_uv: bool, driver: str | None) -> tuple[Any, ...]:
    compute = functools.partial(factor.svd, full=full_matrices, vectors=compute_uv)
    u, s, vh = over_batch(compute, A)
    return (u, s, vh) if compute_uv else (None, s, None)


@decomposes(
    aten.linalg_eig.default,
    fails=[
        (
            lambda a, results: ~_finite(a),
            RuntimeError,
            "torch.linalg.eig: input tensor should not contain infs or NaNs.",
        ),
        (_lost(0), LinAlgError, f"linalg.eig: {_REPEATED}"),
    ],
)
def _eig(self: Any) -> tuple[Any, Any]:
    return over_batch(eig, cast(self, jnp.result_type(self, jnp.complex64)))


@decomposes(
    aten._linalg_eigvals.default, fails=[(_lost(0), LinAlgError, f"linalg.eigvals: {_REPEATED}")]
)
def _eigvals(self: Any) -> Any:
    return _eig(self)[0]


# --- indefinite matrices -----------------------------------------------------------------------


@decomposes(aten.linalg_ldl_factor_ex.default)
def _ldl_factor_ex(self: Any, hermitian: bool, check_errors: bool) -> tuple[Any, Any, Any]:
    return over_batch(functools.partial(ldl, hermitian=hermitian), self)


@decomposes(aten.linalg_ldl_solve.default)
def _ldl_solve(LD: Any, pivots: Any, B: Any, hermitian: bool) -> Any:
    solve = functools.partial(ldl_solve, hermitian=hermitian)
    return over_batch(solve, LD, pivots, B, ranks=(2, 1, 2))


# --- functions of matrices -----------------------------------------------------------------------


@decomposes(aten.linalg_matrix_exp.default)
def _matrix_exp(self: Any) -> Any:
    return over_batch(factor.matrix_exp, cast(self, opmath(self.dtype)))
