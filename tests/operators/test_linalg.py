"""Linear algebra: the portable decompositions on their own, and ATen's kernels in their place.

What LAPACK leaves open (signs of vectors, order of eigenvalues) is compared through values that do
not depend on it; with ATen's kernels it must be eager's very choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .compare import PLAIN, check

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated"),
]

KERNELS: dict[str, Any] = {}
MODES = pytest.mark.parametrize("options", [KERNELS, PLAIN], ids=["kernels", "plain"])
REAL, COMPLEX = torch.float64, torch.complex128
FLAGS = (False, True)


def general(*shape: int, dtype: torch.dtype = REAL, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator)


def definite(*shape: int, dtype: torch.dtype = REAL) -> torch.Tensor:
    a = general(*shape, dtype=dtype)
    return a @ a.mH + shape[-1] * torch.eye(shape[-1], dtype=dtype)


def triangular(*shape: int, dtype: torch.dtype = REAL) -> torch.Tensor:
    """Well conditioned, whichever triangle and diagonal are read."""
    return general(*shape, dtype=dtype) / 4 + 2 * torch.eye(shape[-1], dtype=dtype)


def learned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [
        tensor.requires_grad_() if tensor.dtype.is_floating_point else tensor for tensor in tensors
    ]


def cholesky(a: torch.Tensor) -> Any:
    hermitian = (a + a.mH) / 2
    lower = torch.linalg.cholesky(hermitian)
    return lower, torch.linalg.cholesky_ex(hermitian, upper=True), torch.cholesky(hermitian, True)


def cholesky_solve(b: torch.Tensor, a: torch.Tensor) -> Any:
    solutions = [torch.cholesky_solve(b, a, upper=upper) for upper in FLAGS]
    return *solutions, *(torch.cholesky_inverse(a, upper=upper) for upper in FLAGS)


def solve_triangular(a: torch.Tensor, b: torch.Tensor) -> Any:
    results = []
    for upper, left, unit in itertools.product(FLAGS, repeat=3):
        operand = b if left else b.mT
        results.append(
            torch.linalg.solve_triangular(a, operand, upper=upper, left=left, unitriangular=unit)
        )
    return results


def old_triangular(a: torch.Tensor, b: torch.Tensor) -> Any:
    return [
        torch.triangular_solve(b, a, upper, transpose, unit)
        for upper, transpose, unit in itertools.product(FLAGS, repeat=3)
    ]


def lu(a: torch.Tensor) -> Any:
    factors, pivots, info = torch.linalg.lu_factor_ex(a)
    parts = torch.lu_unpack(factors, pivots), torch.lu_unpack(factors.detach(), pivots, False)
    return factors, pivots, info, *parts, torch.linalg.lu(a)


def lu_solve(a: torch.Tensor, b: torch.Tensor) -> Any:
    factors, pivots = torch.linalg.lu_factor(a)
    return [
        torch.linalg.lu_solve(factors, pivots, b if left else b.mT, left=left, adjoint=adjoint)
        for left, adjoint in itertools.product(FLAGS, repeat=2)
    ]


def solve(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (
        torch.linalg.solve(a, b),
        torch.linalg.solve(a, b.mT, left=False),
        torch.linalg.solve(a, b[..., 0]),
        torch.linalg.solve_ex(a.mT, b),
    )


def inverses(a: torch.Tensor) -> Any:
    return torch.linalg.inv(a), torch.linalg.inv_ex(a.mT), torch.linalg.matrix_power(a, -3)


def determinants(a: torch.Tensor) -> Any:
    """Of row-major and of column-major matrices, which ATen factors differently."""
    sign, logarithm = torch.linalg.slogdet(a)
    other = torch.linalg.slogdet(a.mT)
    return torch.linalg.det(a), torch.linalg.det(a.mT), sign, logarithm, *other


def qr(a: torch.Tensor) -> Any:
    return torch.linalg.qr(a)


def qr_modes(a: torch.Tensor) -> Any:
    return torch.linalg.qr(a, mode="complete"), torch.linalg.qr(a, mode="r"), torch.geqrf(a)


def householder(a: torch.Tensor, tau: torch.Tensor) -> Any:
    return torch.linalg.householder_product(a, tau)


def ormqr(a: torch.Tensor, tau: torch.Tensor, c: torch.Tensor) -> Any:
    return [
        torch.ormqr(a, tau, c if left else c.mT, left, transpose)
        for left, transpose in itertools.product(FLAGS, repeat=2)
    ]


def eigh(a: torch.Tensor) -> Any:
    results = []
    for triangle in "LU":
        values, vectors = torch.linalg.eigh(a, UPLO=triangle)
        cube = (vectors * values.pow(3).unsqueeze(-2)) @ vectors.mH
        results += [values, cube, vectors @ vectors.mH, torch.linalg.eigvalsh(a, UPLO=triangle)]
    return results


def svd(a: torch.Tensor) -> Any:
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    return s, (u * s.exp().unsqueeze(-2)) @ vh, torch.linalg.svdvals(a)


def full_svd(a: torch.Tensor) -> Any:
    u, s, vh = torch.linalg.svd(a)
    size = s.shape[-1]
    product = (u[..., :size] * s.unsqueeze(-2)) @ vh[..., :size, :]
    return product, u @ u.mH, vh @ vh.mH


def eig(a: torch.Tensor) -> Any:
    values, vectors = torch.linalg.eig(a)
    exponential = (vectors * values.exp().unsqueeze(-2)) @ torch.linalg.inv(vectors)
    return exponential, values.abs().sum(-1), torch.linalg.eigvals(a).pow(3).sum(-1)


def ranks(a: torch.Tensor) -> Any:
    return torch.linalg.matrix_rank(a), torch.linalg.cond(a), torch.linalg.cond(a, "nuc")


def pinv(a: torch.Tensor) -> Any:
    return (
        torch.linalg.pinv(a),
        torch.linalg.pinv(a, rtol=0.5),
        torch.linalg.pinv(a, atol=torch.full(a.shape[:-2], 0.7, dtype=torch.float64)),
        torch.linalg.pinv(a @ a.mH, hermitian=True),
    )


def ldl(a: torch.Tensor, b: torch.Tensor) -> Any:
    symmetric = torch.linalg.ldl_factor_ex(a + a.mT)
    hermitian = torch.linalg.ldl_factor_ex(a + a.mH, hermitian=True)
    solved = torch.linalg.ldl_solve(*hermitian[:2], b, hermitian=True)
    return symmetric, hermitian, torch.linalg.ldl_solve(*symmetric[:2], b), solved


def tensors(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (
        torch.linalg.tensorinv(a.reshape(2, 2, 4), ind=2),
        torch.linalg.tensorsolve(a.reshape(2, 2, 4), b[:, 0].reshape(2, 2)),
        torch.linalg.multi_dot([a, a, b]),
    )


Case = tuple[Callable[..., Any], Callable[[torch.dtype], tuple[torch.Tensor, ...]]]

#: Functions that are compared in both modes, gradients too.
CASES: dict[str, Case] = {
    "cholesky": (cholesky, lambda t: (definite(2, 4, 4, dtype=t),)),
    "cholesky_solve": (
        cholesky_solve,
        lambda t: (general(2, 4, 3, dtype=t), definite(2, 4, 4, dtype=t)),
    ),
    "solve_triangular": (
        solve_triangular,
        lambda t: (triangular(2, 4, 4, dtype=t), general(4, 3, dtype=t)),
    ),
    "triangular_solve": (
        old_triangular,
        lambda t: (triangular(4, 4, dtype=t), general(2, 4, 3, dtype=t)),
    ),
    "lu": (lu, lambda t: (general(2, 4, 4, dtype=t),)),
    "lu_tall": (lu, lambda t: (general(5, 3, dtype=t),)),
    "lu_wide": (lu, lambda t: (general(3, 5, dtype=t),)),
    "lu_solve": (lu_solve, lambda t: (general(2, 4, 4, dtype=t), general(2, 4, 3, dtype=t))),
    "solve": (solve, lambda t: (general(2, 4, 4, dtype=t), general(2, 4, 3, dtype=t))),
    # A batch whose shape is that of a matrix and one more: no right-hand side is a vector here.
    "inv": (inverses, lambda t: (general(3, 3, 3, dtype=t),)),
    "det": (determinants, lambda t: (general(2, 4, 4, dtype=t),)),
    "qr": (qr, lambda t: (general(2, 5, 3, dtype=t),)),
    "qr_wide": (qr, lambda t: (general(3, 5, dtype=t),)),
    "householder_product": (
        householder,
        lambda t: (general(2, 5, 3, dtype=t), general(2, 2, dtype=t)),
    ),
    "ormqr": (
        ormqr,
        lambda t: (general(5, 3, dtype=t), general(3, dtype=t), general(5, 2, dtype=t, seed=1)),
    ),
    "eigh": (eigh, lambda t: (definite(2, 5, 5, dtype=t),)),
    "svd": (svd, lambda t: (general(2, 5, 3, dtype=t),)),
    "svd_wide": (svd, lambda t: (general(3, 4, dtype=t),)),
    "pinv": (pinv, lambda t: (general(2, 3, 4, dtype=t),)),
    "matrix_exp": (
        torch.linalg.matrix_exp,
        lambda t: (general(3, 4, 4, dtype=t) * torch.tensor([0.1, 1, 9])[:, None, None].to(t),),
    ),
    "tensors": (tensors, lambda t: (general(4, 4, dtype=t), general(4, 2, dtype=t))),
    "eig": (eig, lambda t: (general(2, 4, 4, dtype=t),)),
}
#: Those that have no gradient, or none for these shapes.
WITHOUT_GRADIENT: dict[str, Case] = {
    "qr_modes": (qr_modes, lambda t: (general(2, 5, 3, dtype=t),)),
    "qr_modes_wide": (qr_modes, lambda t: (general(3, 5, dtype=t),)),
    "full_svd": (full_svd, lambda t: (general(2, 5, 3, dtype=t),)),
    "full_svd_wide": (full_svd, lambda t: (general(3, 5, dtype=t),)),
    "ranks": (ranks, lambda t: (general(2, 4, 4, dtype=t),)),
    "ldl": (ldl, lambda t: (general(2, 5, 5, dtype=t), general(2, 5, 3, dtype=t))),
}
#: The gradient of eager's complex SVD looks at values, which AOT Autograd cannot trace.
UNTRACEABLE = {"svd", "svd_wide"}


@pytest.mark.parametrize(
    "options",
    # The decompositions are differentiated in complex below, where all that is real is, too.
    [pytest.param(KERNELS, id="kernels"), pytest.param(PLAIN, id="plain", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, options: dict[str, Any]) -> None:
    function, make = CASES[name]
    check(function, *learned(*make(REAL)), grad=True, options=options, scale=100)


@MODES
@pytest.mark.parametrize("name", CASES)
def test_complex(name: str, options: dict[str, Any]) -> None:
    function, make = CASES[name]
    grad = name not in UNTRACEABLE
    args = [tensor.requires_grad_(grad) for tensor in make(COMPLEX)]
    check(function, *args, grad=grad, options=options, scale=100)


def test_saved_conjugates() -> None:
    """What a complex product saves is a lazy conjugate in the memory of its operand."""
    a, b = general(3, 4, dtype=COMPLEX), general(4, 2, dtype=COMPLEX)
    check(torch.mm, a.requires_grad_(), b.requires_grad_(), grad=True)


@MODES
@pytest.mark.parametrize("dtype", [REAL, COMPLEX], ids=str)
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_values(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    function, make = WITHOUT_GRADIENT[name]
    check(function, *make(dtype), options=options, scale=100)


@pytest.mark.parametrize("name", ["cholesky", "lu", "solve", "qr", "eigh", "svd", "pinv", "eig"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_single_precision(name: str, dtype: torch.dtype) -> None:
    function, make = CASES[name]
    check(function, *make(dtype), options=PLAIN, scale=30)


@pytest.mark.parametrize("dtype", [torch.float32, COMPLEX], ids=str)
def test_kernels_make_eagers_choices(dtype: torch.dtype) -> None:
    def factorize(a: torch.Tensor) -> Any:
        return (
            torch.linalg.svd(a),
            torch.linalg.svd(a[:, :3], full_matrices=False),
            torch.linalg.eigh(a),
            torch.linalg.eig(a),
            torch.linalg.eigvals(a),
        )

    check(factorize, general(5, 5, dtype=dtype))


@MODES
def test_without_elements(options: dict[str, Any]) -> None:
    def empty(a: torch.Tensor) -> Any:
        b = a.mT
        square = a.new_zeros((*a.shape[:-1], a.shape[-2]))
        return (
            torch.linalg.qr(a),
            torch.linalg.qr(b, mode="complete"),
            torch.linalg.qr(a, mode="r"),
            torch.linalg.svd(a),
            torch.linalg.svd(b, full_matrices=False),
            torch.linalg.svdvals(a),
            torch.linalg.pinv(a),
            torch.linalg.lu(a),
            torch.linalg.lu_factor_ex(b),
            torch.linalg.solve_ex(square + torch.eye(square.shape[-1]), a),
            torch.linalg.solve_triangular(torch.eye(square.shape[-1]), a, upper=True),
            torch.linalg.matrix_exp(square),
            torch.linalg.eigh(square),
            torch.linalg.ldl_factor_ex(square),
            torch.linalg.cholesky_ex(square + torch.eye(square.shape[-1])),
            torch.linalg.det(square),
            torch.linalg.slogdet(square),
            torch.linalg.householder_product(b.mT, a.new_zeros((*a.shape[:-2], 0))),
            torch.geqrf(a),
            torch.cdist(a, a),
        )

    for shape in ((0, 0), (3, 0), (0, 4, 3), (2, 0, 0)):
        check(empty, torch.zeros(shape), options=options)


@MODES
def test_eig_without_elements(options: dict[str, Any]) -> None:
    for shape in ((0, 0), (0, 3, 3)):
        check(torch.linalg.eig, torch.zeros(shape), options=options)


@MODES
def test_deficient_and_scaled(options: dict[str, Any]) -> None:
    def factorize(a: torch.Tensor) -> Any:
        u, s, vh = torch.linalg.svd(a)
        q, r = torch.linalg.qr(a)
        values, vectors = torch.linalg.eigh(a + a.mT)
        return (
            s,
            u @ u.mT,
            vh @ vh.mT,
            (u * s[..., None, :]) @ vh,
            q @ r,
            q.mT @ q,
            values,
            (vectors * values[..., None, :]) @ vectors.mT,
        )

    deficient = general(4, 5, 5)
    deficient[0] = 0
    deficient[1, :, 2] = deficient[1, :, 1]
    deficient[2] = torch.ones(5, 5)
    deficient[3] = torch.diag(torch.tensor([1.0, 2.0, 1.0, 0.0, 2.0]))
    check(factorize, deficient, options=options, scale=100)
    for exponent in (-140, 140):
        check(
            lambda a, e=exponent: factorize(a)[0] * 10.0**-e,
            deficient * 10.0**exponent,
            options=options,
            scale=100,
        )


def test_larger_matrices_in_plain() -> None:
    def factorize(a: torch.Tensor) -> Any:
        values, vectors = torch.linalg.eigh(a + a.mT)
        u, s, vh = torch.linalg.svd(a)
        return (
            values,
            (vectors * values) @ vectors.mT,
            s,
            (u * s) @ vh,
            torch.linalg.inv(a),
            torch.linalg.qr(a),
            torch.linalg.matrix_exp(a / 8),
        )

    check(factorize, general(33, 33), options=PLAIN, scale=1000)


@MODES
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf])
def test_distances(p: float, options: dict[str, Any]) -> None:
    def distances(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.cdist(x, y, p=p),
            torch.nn.functional.pdist(x[0], p=p) if p else x,
            torch.dist(x, x + 1, p) if p else x,  # no gradient in eager either
        )

    x, y = general(2, 5, 3), general(2, 4, 3, seed=1)
    y[0, 1] = x[0, 2]  # a distance of zero
    x[1, 0, 0] = y[1, 0, 0]
    check(distances, *learned(x, y), grad=True, options=options, scale=10)


def test_distance_by_product() -> None:
    x, y = general(2, 30, 3), general(28, 3, seed=1)
    check(torch.cdist, *learned(x, y), grad=True, scale=1000)
    mode = "use_mm_for_euclid_dist"
    check(lambda x, y: torch.cdist(x, y, compute_mode=mode), x[0, :5], y[:4], scale=1000)
    mode = "donot_use_mm_for_euclid_dist"
    check(lambda x, y: torch.cdist(x, y, compute_mode=mode), x, y)


def test_exponential_of_halves() -> None:
    """Eager's own is not finite; the decomposition's is that of the rounded matrix."""
    a = general(3, 3).to(torch.bfloat16)
    check(torch.linalg.matrix_exp, a)
    compiled = torch.compile(torch.linalg.matrix_exp, backend="neuron", options=PLAIN)
    torch.testing.assert_close(compiled(a), torch.linalg.matrix_exp(a.float()).bfloat16())


FAILURES: dict[str, tuple[Callable[..., Any], float]] = {
    "inv": (torch.linalg.inv, 0.0),
    "solve": (lambda a: torch.linalg.solve(a, a), 0.0),
    "cholesky": (torch.linalg.cholesky, -1.0),
    "old_cholesky": (torch.cholesky, -1.0),
    "cholesky_ex": (lambda a: torch.linalg.cholesky_ex(a, check_errors=True), -1.0),
    "inv_ex": (lambda a: torch.linalg.inv_ex(a, check_errors=True), 0.0),
    "svd": (torch.linalg.svd, math.nan),
    "eig": (torch.linalg.eig, math.nan),
    "eig_infinite": (torch.linalg.eig, math.inf),
}


@MODES
@pytest.mark.parametrize("name", FAILURES)
def test_failures_raise(name: str, options: dict[str, Any]) -> None:
    function, entry = FAILURES[name]
    bad = torch.eye(3).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(entry))
    with pytest.raises(RuntimeError) as expected:
        function(bad)
    compiled = torch.compile(function, backend="neuron", fullgraph=True, options=dict(options))
    with pytest.raises(type(expected.value)):
        compiled(bad)
    compiled(torch.eye(3))


@MODES
def test_not_definite_is_told_by_info(options: dict[str, Any]) -> None:
    def infos(a: torch.Tensor) -> Any:
        return (
            torch.linalg.cholesky_ex(a).info,
            torch.linalg.inv_ex(a).info,
            torch.linalg.lu_factor_ex(a).info,
            torch.linalg.ldl_factor_ex(a).info,
            torch.linalg.det(a),
            torch.linalg.slogdet(a),
        )

    a = torch.eye(4).repeat(3, 1, 1)
    a[1, 2, 2] = 0
    a[2, 1, 1] = -1
    check(infos, a, options=options)
