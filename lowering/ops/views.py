"""Operators that move data without computing: reshapes, slices, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..functional import put_view, take_view
from ..lazy_jax import jax, jnp
from ..passes import as_strided
from ..registry import lowers, node_tensors, torch_mlir_lowers
from ..trace import Context
from ._shared import cast, numeric_view, opmath

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.contiguous.default,
)
def _identity(ctx: Context, x: Any, **_: Any) -> Any:
    return x


# The result's shape comes from the context, so one function serves every reshape.
@lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten._reshape_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
)
def _reshape(ctx: Context, x: Any, *_: Any) -> Any:
    return jnp.reshape(x, ctx.shape)


def _refuse_bits(node: fx.Node) -> str | None:
    if any(tensor.dtype.is_complex for tensor in node_tensors(node)):
        return "complex numbers seen as another dtype"
    return None


@lowers(aten.view.dtype, refuse=_refuse_bits)
def _view_dtype(ctx: Context, x: Any, dtype: torch.dtype) -> Any:
    # A boolean is a byte to torch and a bit to XLA.
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    target = jnp.dtype(jnp.uint8 if ctx.dtype == jnp.bool_ else ctx.dtype)
    if target.itemsize > x.dtype.itemsize:
        x = x.reshape(*x.shape[:-1], -1, target.itemsize // x.dtype.itemsize)
    bits = jax.lax.bitcast_convert_type(x, target).reshape(ctx.shape)
    return bits != 0 if ctx.dtype == jnp.bool_ else bits


@lowers(aten.expand.default)
def _expand(ctx: Context, x: Any, size: Any, implicit: bool = False) -> Any:
    return jnp.broadcast_to(x, ctx.shape)


@lowers(aten.repeat.default)
def _repeat(ctx: Context, x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


@lowers(aten.permute.default)
def _permute(ctx: Context, x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, [dim % x.ndim for dim in dims])


@lowers(aten.t.default)
def _t(ctx: Context, x: Any) -> Any:
    return x.T


@lowers(aten.transpose.int)
def _transpose(ctx: Context, x: Any, dim0: int, dim1: int) -> Any:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(ctx: Context, x: Any, dim: int = 0, start: int = 0, end: int = 0, step: int = 1) -> Any:
    return jax.lax.slice_in_dim(x, start, end, step, axis=dim % x.ndim)


@lowers(aten.select.int, aten.select_copy.int)
def _select(ctx: Context, x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, axis=dim % x.ndim, keepdims=False)


def _window(x: Any, dim: int, start: int, end: int, step: int) -> tuple[slice, ...]:
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return tuple(index)


@lowers(aten.slice_scatter.default)
def _slice_scatter(
    ctx: Context, x: Any, source: Any, dim: int = 0, start: int = 0, end: int = 0, step: int = 1
) -> Any:
    dim %= x.ndim
    if step == 1:
        # A concatenation fuses; a scatter does not.
        before = jax.lax.slice_in_dim(x, 0, start, axis=dim)
        after = jax.lax.slice_in_dim(x, end, x.shape[dim], axis=dim)
        window = (*x.shape[:dim], max(end - start, 0), *x.shape[dim + 1 :])
        return jnp.concatenate([before, jnp.broadcast_to(source, window), after], axis=dim)
    return x.at[_window(x, dim, start, end, step)].set(source.astype(x.dtype))


@lowers(aten.select_scatter.default)
def _select_scatter(ctx: Context, x: Any, source: Any, dim: int, index: int) -> Any:
    dim %= x.ndim
    index %= x.shape[dim]
    return _slice_scatter(ctx, x, jnp.expand_dims(source, dim), dim, index, index + 1)


@lowers(aten.cat.default)
def _cat(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Any:
    # A 1-d tensor without elements is skipped, whatever the others' rank (legacy of torch).
    kept = [x for x in tensors if not (x.ndim == 1 and x.shape[0] == 0)] or [tensors[0]]
    return jnp.concatenate([cast(x, ctx.dtype) for x in kept], axis=dim)


@lowers(aten.stack.default)
def _stack(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack([cast(x, ctx.dtype) for x in tensors], axis=dim)


def _pieces(x: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(jax.lax.slice_in_dim(x, start, start + size, axis=dim))
        start += size
    return pieces


@lowers(
    aten.split.Tensor, aten.split_copy.Tensor, aten.split_with_sizes.default, aten.chunk.default
)
def _split(ctx: Context, x: Any, _sizes: Any, dim: int = 0) -> list[Any]:
    dim %= x.ndim
    return _pieces(x, [output.shape[dim] for output in ctx.outputs], dim)


@lowers(aten.unbind.int, aten.unbind_copy.int)
def _unbind(ctx: Context, x: Any, dim: int = 0) -> list[Any]:
    dim %= x.ndim
    return [jax.lax.index_in_dim(x, i, axis=dim, keepdims=False) for i in range(x.shape[dim])]


@lowers(aten.constant_pad_nd.default)
def _constant_pad_nd(ctx: Context, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    config = [(0, 0, 0)] * x.ndim
    for position in range(len(pad) // 2):
        config[x.ndim - 1 - position] = (pad[2 * position], pad[2 * position + 1], 0)
    return jax.lax.pad(x, cast(value, x.dtype), config)


def _replicate(x: Any, pad: Sequence[int]) -> Any:
    for position in range(len(pad) // 2):
        axis = x.ndim - 1 - position
        size = x.shape[axis]
        reach = jnp.arange(-pad[2 * position], size + pad[2 * position + 1])
        x = jnp.take(x, jnp.clip(reach, 0, size - 1), axis=axis)
    return x


@lowers(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def _replication_pad_backward(ctx: Context, grad: Any, x: Any, pad: Sequence[int]) -> Any:
    wide = opmath(x.dtype)
    return jax.vjp(lambda x: _replicate(x, pad), cast(x, wide))[1](cast(grad, wide))[0]


@lowers(aten.flip.default)
def _flip(ctx: Context, x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dim % x.ndim for dim in dims)) if dims and x.ndim else x


@lowers(aten.roll.default)
def _roll(ctx: Context, x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims:
        return jnp.roll(x.ravel(), shifts).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lowers(aten.tril.default)
def _tril(ctx: Context, x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers(aten.triu.default)
def _triu(ctx: Context, x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowers(aten.diagonal.default)
def _diagonal(ctx: Context, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers(aten.diagonal_scatter.default)
def _diagonal_scatter(
    ctx: Context, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    steps = jnp.arange(source.shape[-1])
    place = (..., steps + max(-offset, 0), steps + max(offset, 0))
    return jnp.moveaxis(moved.at[place].set(cast(source, x.dtype)), (-2, -1), (dim1, dim2))


@lowers(aten.unfold.default)
def _unfold(ctx: Context, x: Any, dimension: int, size: int, step: int) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, ctx.shape)
    axis = dimension % x.ndim
    start = jnp.arange(ctx.shape[axis])[:, None] * step
    return jnp.moveaxis(jnp.take(x, start + jnp.arange(size), axis=axis), axis + 1, -1)


def _refuse_strided(node: fx.Node) -> str | None:
    """Only where the storage that strides walk over is the tensor itself."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    first = 2 if node.target is prims.as_strided_scatter.default else 1
    sizes, strides, *rest = node.args[first:]
    offset = rest[0] if rest else node.kwargs.get("storage_offset")
    steps = zip(sizes, strides, strict=True)  # type: ignore[arg-type]
    last = (offset or 0) + sum((size - 1) * stride for size, stride in steps)
    inside = x.is_contiguous() and (offset is None or x.storage_offset() == 0) and last < x.numel()
    return None if inside else "strides over memory outside of the tensor"


@lowers(aten.as_strided.default, as_strided, refuse=_refuse_strided)
def _as_strided(
    ctx: Context, x: Any, size: Any, stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    return jnp.take(x.ravel(), _positions(size, stride, storage_offset))


@lowers(prims.as_strided_scatter.default, refuse=_refuse_strided)
def _as_strided_scatter(
    ctx: Context, x: Any, source: Any, size: Any, stride: Sequence[int], storage_offset: int
) -> Any:
    positions = _positions(size, stride, storage_offset).ravel()
    return x.ravel().at[positions].set(cast(source, x.dtype).ravel()).reshape(x.shape)


@lowers(take_view)
def _take_view(
    ctx: Context, x: Any, base: Sequence[int], size: Any, stride: Sequence[int], offset: int
) -> Any:
    order = _memory_order(x.shape, base)
    return jnp.take(x.transpose(order).ravel(), _positions(size, stride, offset))


@lowers(put_view)
def _put_view(
    ctx: Context,
    x: Any,
    source: Any,
    base: Sequence[int],
    size: Any,
    stride: Sequence[int],
    offset: int,
) -> Any:
    order = _memory_order(x.shape, base)
    dense = x.transpose(order)
    positions = _positions(size, stride, offset).ravel()
    changed = dense.ravel().at[positions].set(cast(source, x.dtype).ravel())
    return changed.reshape(dense.shape).transpose(sorted(range(x.ndim), key=order.__getitem__))


def _memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The order of dimensions in which a dense tensor is contiguous."""
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], shape[dim] == 1))


def _positions(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    """Where in the storage the elements of a strided view are."""
    position = jnp.full(size, offset or 0, jnp.int64)
    for axis, step in enumerate(stride):
        position += step * jax.lax.broadcasted_iota(jnp.int64, size, axis)
    return position


@lowers(aten.copy.default)
def _copy(ctx: Context, x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(cast(source, ctx.dtype), ctx.shape)


@lowers(aten.view_as_real.default, aten.view_as_real_copy.default)
def _view_as_real(ctx: Context, x: Any) -> Any:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@lowers(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def _view_as_complex(ctx: Context, x: Any) -> Any:
    return jax.lax.complex(x[..., 0], x[..., 1])


torch_mlir_lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.cat.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    when=numeric_view,
)
