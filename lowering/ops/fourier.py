"""Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context

aten = torch.ops.aten


def _scaled(x: Any, sizes: Sequence[int], normalization: int) -> Any:
    """Divide by nothing, by the root of the transform's size, or by the size itself."""
    size = math.prod(sizes)
    return x / (1, math.sqrt(size), size)[normalization] if normalization else x


def _transform(x: Any, dims: Sequence[int], forward: bool) -> Any:
    if not dims:
        return x
    # ``norm`` is the side that divides: the plain transform is the one of the other side.
    if forward:
        return jnp.fft.fftn(x, axes=tuple(dims), norm="backward")
    return jnp.fft.ifftn(x, axes=tuple(dims), norm="forward")


@lowers(aten._fft_c2c.default)
def _fft_c2c(ctx: Context, x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    return _scaled(_transform(x, dim, forward), [x.shape[i] for i in dim], normalization)


@lowers(aten._fft_r2c.default)
def _fft_r2c(ctx: Context, x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    sizes = [x.shape[i] for i in dim]
    if onesided:
        halved = jnp.fft.rfft(x, axis=dim[-1])
        return _scaled(_transform(halved, dim[:-1], True), sizes, normalization)
    return _scaled(_transform(x, dim, True), sizes, normalization)


@lowers(aten._fft_c2r.default)
def _fft_c2r(
    ctx: Context, x: Any, dim: Sequence[int], normalization: int, last_dim_size: int
) -> Any:
    partial = _transform(x, dim[:-1], False)
    result = jnp.fft.irfft(partial, n=last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(result, [ctx.shape[i] for i in dim], normalization)
