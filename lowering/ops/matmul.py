"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..passes import gemm, gemm_bias
from ..registry import lowers
from ..trace import Context
from ._shared import cast, is_half, opmath

aten = torch.ops.aten


def _product(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
    batch = tuple(range(a.ndim - 2))
    contract_a = a.ndim - (2 if transpose_a else 1)
    contract_b = b.ndim - (1 if transpose_b else 2)
    accumulate = jnp.float32 if is_half(a.dtype) else a.dtype
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), (batch, batch)),
        preferred_element_type=accumulate,
    )


@lowers(gemm)
def _gemm(ctx: Context, a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
    def plain(a: Any, b: Any) -> Any:
        return _product(a, b, transpose_a, transpose_b).astype(ctx.dtype)

    return ctx.kernel(
        "gemm", plain, (a, b), transpose_a=int(transpose_a), transpose_b=int(transpose_b)
    )


@lowers(gemm_bias)
def _gemm_bias(
    ctx: Context, a: Any, b: Any, bias: Any, transpose_a: bool, transpose_b: bool
) -> Any:
    def plain(a: Any, b: Any, bias: Any) -> Any:
        product = _product(a, b, transpose_a, transpose_b)
        return (product + cast(bias, product.dtype)).astype(ctx.dtype)

    return ctx.kernel(
        "gemm_bias", plain, (a, b, bias), transpose_a=int(transpose_a), transpose_b=int(transpose_b)
    )


@lowers(aten.mm.default, aten.bmm.default)
def _mm(ctx: Context, a: Any, b: Any) -> Any:
    return _product(a, b, False, False)


@lowers(aten.addmm.default, aten.baddbmm.default)
def _addmm(ctx: Context, bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    dtype = opmath(ctx.dtype)
    product = cast(_product(a, b, False, False), dtype)
    if alpha != 1:
        product = product * cast(alpha, dtype)
    # beta == 0 ignores the bias altogether, NaN included.
    return product if beta == 0 else product + cast(bias, dtype) * cast(beta, dtype)


@lowers(aten.addbmm.default)
def _addbmm(ctx: Context, bias: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    rows = jnp.moveaxis(a, 0, 1).reshape(a.shape[1], a.shape[0] * a.shape[2])
    return _addmm(ctx, bias, rows, b.reshape(b.shape[0] * b.shape[1], b.shape[2]), beta, alpha)


@lowers(aten._trilinear.default)
def _trilinear(
    ctx: Context,
    a: Any,
    b: Any,
    c: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """The product of three operands, each with dimensions of size one put in, summed."""
    wide = opmath(ctx.dtype)
    operands = [
        jnp.expand_dims(cast(x, wide), tuple(dims))
        for x, dims in ((a, expand1), (b, expand2), (c, expand3))
    ]
    rank = operands[0].ndim
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    # einsum contracts without materializing the product; a dimension of size one is left out.
    named = [
        "".join(n for n, size in zip(letters, x.shape, strict=True) if size != 1) for x in operands
    ]
    kept = "".join(
        n for dim, n in enumerate(letters) if dim not in sumdim and any(n in x for x in named)
    )
    squeezed = [x.reshape([size for size in x.shape if size != 1]) for x in operands]
    return jnp.einsum(f"{','.join(named)}->{kept}", *squeezed).reshape(ctx.shape)


@lowers(aten.mv.default)
def _mv(ctx: Context, a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


@lowers(aten.dot.default)
def _dot(ctx: Context, a: Any, b: Any) -> Any:
    return jnp.dot(a, b)
