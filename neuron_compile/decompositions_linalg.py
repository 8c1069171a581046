"""Linear algebra that PyTorch has as one operator and that is made of others here.

They are decomposed while AOT Autograd traces, not lowered, because it is there that the layout
of an operand is known: of a row-major real matrix ATen's determinant factors the transpose, and
the gradient's formula, which is traced too, solves with that factorization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _factored(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed LU, pivots, the diagonal of U and the sign of the permutation."""
    transposed = matrix.is_contiguous() and not matrix.is_complex()
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix.mT if transposed else matrix)
    size = pivots.shape[-1]
    moved = pivots != torch.arange(1, size + 1, dtype=pivots.dtype)
    sign = 1 - 2 * (moved.sum(-1) % 2)
    return factors, pivots, factors.diagonal(0, -2, -1), sign.to(matrix.dtype)


def det(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``_linalg_det``: the product of U's diagonal, with the permutation's sign."""
    factors, pivots, diagonal, sign = _factored(matrix)
    return sign * diagonal.prod(-1), factors, pivots


def slogdet(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``_linalg_slogdet``: the same in logarithms."""
    factors, pivots, diagonal, sign = _factored(matrix)
    return sign * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), factors, pivots


def pinv(
    matrix: Tensor,
    *,
    atol: Tensor | None = None,
    rtol: Tensor | None = None,
    hermitian: bool = False,
) -> Tensor:
    """``linalg_pinv``: inverts the singular values above ``max(atol, rtol * largest)``."""
    rows, columns = matrix.shape[-2:]
    if matrix.numel() == 0:
        return matrix.new_zeros((*matrix.shape[:-2], columns, rows))
    real = matrix.real.dtype if matrix.is_complex() else matrix.dtype
    if rtol is None:
        rtol = torch.full((), torch.finfo(real).eps * max(rows, columns), dtype=torch.float64)
        if atol is not None:
            rtol = torch.where(atol > 0, torch.zeros((), dtype=torch.float64), rtol)
    if atol is None:
        atol = torch.zeros((), dtype=torch.float64)
    if hermitian:
        values, left = torch.linalg.eigh(matrix)
        right, sizes = left, values.abs()
        largest = sizes.amax(-1, keepdim=True)
    else:
        left, values, adjoint = torch.linalg.svd(matrix, full_matrices=False)
        right, sizes, largest = adjoint.mH, values, values[..., :1]
    tolerance = torch.maximum(atol.unsqueeze(-1), rtol.unsqueeze(-1) * largest)
    inverted = torch.where(sizes > tolerance, values.reciprocal(), torch.zeros_like(values))
    return (right * inverted.to(matrix.dtype).unsqueeze(-2)) @ left.mH


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
    aten.linalg_pinv.atol_rtol_tensor: pinv,
}
