"""What the families of operators share: promotion, opmath, dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from .. import float8
from ..lazy_jax import jnp
from ..registry import node_tensors, result_tensors
from ..trace import Context, to_jax, to_torch


def is_half(dtype: Any) -> bool:
    """Whether a ``jax.numpy`` dtype is float16 or bfloat16."""
    return jnp.dtype(dtype).name in ("float16", "bfloat16")


def is_tensor(value: Any) -> bool:
    """Whether an argument of a lowering is a tensor (a JAX array) rather than a Python value."""
    return hasattr(value, "dtype") and hasattr(value, "shape")


def opmath(dtype: Any) -> Any:
    """The dtype ATen computes in: float32 for the half types and float8."""
    return jnp.float32 if is_half(dtype) or float8.is_float8(dtype) else dtype


@functools.lru_cache(maxsize=4096)
def _result_type(operands: tuple[Any, ...]) -> torch.dtype:
    values = [
        torch.empty((1,) * rank, dtype=dtype, device="meta") if rank is not None else dtype(1)
        for rank, dtype in operands
    ]
    result: Any = values[0]
    if len(values) == 1:
        return torch.result_type(result, result)
    # result_type takes two at a time; dimensioned, 0-d and wrapped numbers keep their rank.
    dtype = torch.result_type(result, values[1])
    for value in values[2:]:
        dtype = torch.promote_types(dtype, torch.result_type(value, value))
    return dtype


def promoted(*values: Any) -> Any:
    """The ``jax.numpy`` dtype that torch promotes the operands to (numbers are weak)."""
    described = tuple(
        (value.ndim if value.ndim == 0 else 1, to_torch(value.dtype))
        if is_tensor(value)
        else (None, type(value))
        for value in values
    )
    return to_jax(_result_type(described))


def cast(value: Any, dtype: Any) -> Any:
    """A tensor or a number as an array of ``dtype``.

    A number out of the range of an integer dtype wraps around, as ATen's wrapped numbers do.
    """
    if float8.is_float8(dtype) or (is_tensor(value) and float8.is_float8(value.dtype)):
        return float8.convert(jnp.asarray(value), dtype)
    if not is_tensor(value):
        with np.errstate(all="ignore"):
            return jnp.asarray(np.asarray(value).astype(dtype))
    if is_complex(value.dtype) and not is_complex(dtype):
        value = value != 0 if dtype == jnp.bool_ else jnp.real(value)
    return value.astype(dtype)


def is_complex(dtype: Any) -> bool:
    """Whether a ``jax.numpy`` dtype is complex."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def is_floating(dtype: Any) -> bool:
    """Whether a ``jax.numpy`` dtype is floating or complex."""
    return jnp.issubdtype(dtype, jnp.inexact)


def is_nan(x: Any) -> Any:
    """Which elements are NaN (no integer is)."""
    return jnp.isnan(x) if is_floating(x.dtype) else jnp.zeros_like(x, bool)


def nan_first(find: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """Make ``argmax`` or ``argmin`` take the first NaN before an extremum, as ATen does."""

    def lowered(x: Any, axis: int) -> Any:
        found = find(x, axis=axis)
        if not is_floating(x.dtype):
            return found
        nan = jnp.isnan(x)
        return jnp.where(jnp.any(nan, axis=axis), jnp.argmax(nan, axis=axis), found)

    return lowered


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function over arrays: operands go to the result's dtype and broadcast.

    An integer operand of a function with a floating result is converted first, and an operand
    of a half type is rounded to it before it is widened to the opmath dtype, as in ATen.
    """

    def lowered(ctx: Context, *args: Any) -> Any:
        operands = (cast(cast(arg, ctx.dtype), opmath(ctx.dtype)) for arg in args)
        return function(*jnp.broadcast_arrays(*operands))

    return lowered


def arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a function whose numbers and 0-d operands ATen never rounds to a half type."""

    def lowered(ctx: Context, *args: Any) -> Any:
        dtype = opmath(ctx.dtype)
        return function(*(cast(arg, dtype) for arg in args))

    return lowered


def predicate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift a comparison: operands go to their common promoted dtype."""

    def lowered(ctx: Context, *args: Any) -> Any:
        dtype = promoted(*args)
        return function(*(cast(arg, dtype) for arg in args))

    return lowered


def check_range(
    ctx: Context,
    index: Any,
    size: int,
    dim: int | None = None,
    *,
    error: type[Exception] = IndexError,
    wraps: bool = False,
) -> None:
    """Check that indices are in ``[0, size)``, or in ``[-size, size)`` where negative ones wrap."""
    low, limits = -size if wraps else 0, jnp.iinfo(index.dtype)
    failed = jnp.zeros(index.shape, bool)
    if low > limits.min:
        failed |= index < jnp.asarray(low, index.dtype)
    if size <= limits.max:
        failed |= index >= jnp.asarray(size, index.dtype)
    where = "" if dim is None else f" for dimension {dim}"
    ctx.check(failed, error, f"index out of range{where} with size {size}")


def canonical_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Non-negative dimensions; ``None`` and the empty list mean all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(sorted({dim % rank if rank else 0 for dim in dims})) if rank else ()


# Predicates over FX nodes: for which signatures Torch-MLIR's own lowering is trusted.

_FULL_FLOATS = (torch.float32, torch.float64)


def same_full_float(node: fx.Node) -> bool:
    """Every operand and result is float32, or every one is float64, and nothing is empty."""
    dtypes = {tensor.dtype for tensor in node_tensors(node)}
    return len(dtypes) == 1 and dtypes <= set(_FULL_FLOATS) and not has_empty(node)


def numeric_view(node: fx.Node) -> bool:
    """A single-result movement of data that keeps its dtype, over non-empty real tensors."""
    dtypes = {tensor.dtype for tensor in node_tensors(node)}
    return (
        len(dtypes) == 1
        and not next(iter(dtypes)).is_complex
        and dtypes.isdisjoint({torch.uint8, torch.bool})
        and not has_empty(node)
    )


def has_empty(node: fx.Node) -> bool:
    """Whether an operand or result has no elements."""
    return any(0 in tensor.shape for tensor in node_tensors(node))


def operand_dtype(node: fx.Node, position: int) -> torch.dtype:
    """The dtype of a node's tensor operand."""
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return result_tensors(operand)[0].dtype
