"""Assertions about the values of tensors, which stay whatever ``check_indices`` says."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import lowers
from ..trace import Context

aten = torch.ops.aten


@lowers(aten._assert_async.default, aten._assert_async.msg)
def _assert_async(
    ctx: Context,
    x: Any,
    message: str = "Expected Tensor with single nonzero value, but got zero",
) -> None:
    ctx.check(x == 0, RuntimeError, message, always=True)


_LINALG = {
    "linalg.cholesky": "the input is not positive-definite",
    "linalg.eig": "the algorithm failed to converge",
    "linalg.eigh": "the algorithm failed to converge",
    "linalg.svd": "the algorithm failed to converge",
}


@lowers(aten._linalg_check_errors.default)
def _linalg_check_errors(ctx: Context, info: Any, api_name: str, *, is_matrix: bool) -> None:
    reason = _LINALG.get(api_name, "the input matrix is singular")
    error = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    ctx.check(info != 0, error, f"{api_name}: {reason}", always=True)


@lowers(aten._functional_assert_async.msg)
def _functional_assert_async(ctx: Context, x: Any, message: str, token: Any) -> Any:
    ctx.check(x == 0, RuntimeError, message, always=True)
    return token
