"""Products of float8 matrices with scales that give their numbers the size they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jnp
from ..registry import lowers, takes_float8
from ..trace import Context
from ._shared import cast
from .grouped_matmul import grouped

aten = torch.ops.aten

# Where ATen's CPU kernel looks at ``scale_result``: not where the dtype is left to it, either.
_SCALED_RESULTS = (torch.float8_e4m3fn, torch.float8_e5m2)

# Recipes of ``torch.nn.functional.ScalingType``.
_TENSOR_WISE, _ROW_WISE = 0, 1


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.meta["val"]
    return found


def _refuse_scales(node: fx.Node) -> str | None:
    """One scale for each tensor, or one for each row of the left and column of the right."""
    a, b, scale_a, scale_b = (_tensor(arg) for arg in node.args[:4])
    return _why_not_scales(a, b, scale_a, scale_b)


def _why_not_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> str | None:
    if scale_a.dtype is not torch.float32 or scale_b.dtype is not torch.float32:
        return f"scales of {scale_a.dtype} and {scale_b.dtype}"
    if scale_a.numel() == scale_b.numel() == 1:
        return None
    rows, columns = (a.shape[0], 1), (1, b.shape[1])
    if (tuple(scale_a.shape), tuple(scale_b.shape)) == (rows, columns):
        return None
    return f"scales of shapes {tuple(scale_a.shape)} and {tuple(scale_b.shape)}"


@lowers(aten._scaled_mm.default, refuse=_refuse_scales)
def _scaled_mm(
    ctx: Context,
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    product = jnp.matmul(cast(a, jnp.float32), cast(b, jnp.float32))
    for scale in (scale_a, scale_b):
        product = product * (scale.reshape(()) if scale.size == 1 else scale)
    if bias is not None:
        product = product + cast(bias, jnp.float32)
    if scale_result is not None and out_dtype in _SCALED_RESULTS:
        product = product / scale_result.reshape(())
    return product


def _refuse_recipes(node: fx.Node) -> str | None:
    """The recipes of ``_scaled_mm``; blocks, levels and swizzled scales are refused, as by ATen."""
    a, b, scales_a, recipes_a, swizzles_a, scales_b, recipes_b, swizzles_b = node.args[:8]
    recipes: Any = (recipes_a, recipes_b)
    if recipes not in (([_TENSOR_WISE],) * 2, ([_ROW_WISE],) * 2):
        return f"scaling recipes {recipes_a} and {recipes_b}"
    if any([*swizzles_a, *swizzles_b]):  # type: ignore[misc]
        return "swizzled scales"
    return _why_not_scales(_tensor(a), _tensor(b), _tensor(scales_a[0]), _tensor(scales_b[0]))  # type: ignore[index]


@lowers(aten._scaled_mm_v2.default, refuse=_refuse_recipes)
def _scaled_mm_v2(
    ctx: Context,
    a: Any,
    b: Any,
    scale_a: Sequence[Any],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Any],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Any:
    return _scaled_mm(ctx, a, b, scale_a[0], scale_b[0], bias)


def _refuse_grouped_scales(node: fx.Node) -> str | None:
    scale = _tensor(node.args[2])
    return f"scales of {scale.dtype}" if scale.dtype is not torch.float32 else None


@lowers(aten._scaled_grouped_mm.default, refuse=_refuse_grouped_scales)
def _scaled_grouped_mm(
    ctx: Context,
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """A scale for each row of the left and each column of the right, of each of the groups."""
    a, b = cast(a, jnp.float32), cast(b, jnp.float32)
    if a.ndim == 2 and b.ndim == 2:
        # The groups lie along the contraction: their scales follow one another.
        product = grouped(a, b, offs)
        return product * scale_a.reshape(-1, a.shape[0], 1) * scale_b.reshape(-1, 1, b.shape[1])
    return grouped(a * scale_a[..., None], b * scale_b[..., None, :], offs)


takes_float8(aten._scaled_mm.default, aten._scaled_mm_v2.default, aten._scaled_grouped_mm.default)
