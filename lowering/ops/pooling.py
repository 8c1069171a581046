"""Pooling in one to three dimensions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, check_range, is_floating, is_nan, nan_first, opmath
from ._taps import Taps

aten = torch.ops.aten


def _spread(values: Any, rank: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


@dataclasses.dataclass(frozen=True)
class _Window:
    """A window that moves over the last dimensions; ``output`` is how often it fits in each."""

    output: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, output: Sequence[int], kernel: Any, stride: Any, padding: Any = 0, dilation: Any = 1
    ) -> _Window:
        rank = len(output)
        kernel = _spread(kernel, rank)
        stride = _spread(stride, rank) if stride else kernel
        return cls(tuple(output), kernel, stride, _spread(padding, rank), _spread(dilation, rank))

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def cells(self) -> list[tuple[int, ...]]:
        """Where each element of the window lies, relative to its first."""
        return [
            tuple(i * step for i, step in zip(cell, self.dilation, strict=True))
            for cell in itertools.product(*map(range, self.kernel))
        ]

    def reads(self, x: Any, fill: Any) -> list[Any]:
        """A strided view of the padded ``x`` for each cell, each ``output`` large.

        Elementwise operators over them fuse and vectorize on a CPU; ``reduce_window`` does
        neither.
        """
        leading = x.ndim - self.rank
        config = [(0, 0, 0)] * leading
        for axis in range(self.rank):
            reach = (self.output[axis] - 1) * self.stride[axis]
            reach += self.dilation[axis] * (self.kernel[axis] - 1) + 1
            high = max(reach - x.shape[leading + axis] - self.padding[axis], 0)
            config.append((self.padding[axis], high, 0))
        padded = jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)
        strides = [1] * leading + list(self.stride)
        views = []
        for cell in self.cells():
            last = zip(cell, self.output, self.stride, strict=True)
            limit = [start + (size - 1) * step + 1 for start, size, step in last]
            start = [0] * leading + list(cell)
            views.append(jax.lax.slice(padded, start, [*x.shape[:leading], *limit], strides))
        return views

    def positions(self, size: Sequence[int]) -> list[Any]:
        """The flat position in an image of ``size`` that each cell reads, ``output`` large."""
        starts = [
            jax.lax.broadcasted_iota(jnp.int64, self.output, axis) * self.stride[axis]
            - self.padding[axis]
            for axis in range(self.rank)
        ]
        return [
            functools.reduce(
                lambda flat, axis: flat * size[axis] + starts[axis] + cell[axis],
                range(1, self.rank),
                starts[0] + cell[0],
            )
            for cell in self.cells()
        ]


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool_with_indices(
    ctx: Context,
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    rank = len(kernel_size)
    window = _Window.of(ctx.shape[-rank:], kernel_size, stride, padding, dilation)
    size = x.shape[-rank:]
    lowest = -jnp.inf if is_floating(x.dtype) else jnp.iinfo(x.dtype).min
    inside = window.reads(jnp.ones(size, bool), False)
    # The first position inside the image starts, so that a window of -inf has a valid index.
    best = jnp.full(ctx.shape, lowest, x.dtype)
    where = jnp.full(ctx.shape, -1, jnp.int64)
    cells = zip(window.reads(x, lowest), window.positions(size), inside, strict=True)
    for view, position, valid in cells:
        # Strictly greater keeps the first maximum; NaN wins and stays, as in ATen.
        better = ((view > best) | is_nan(view) | (where < 0)) & valid & ~is_nan(best)
        best = jnp.where(better, view, best)
        where = jnp.where(better, position, where)
    return best, where


def _scatter_maxima(ctx: Context, grad: Any, indices: Any, rank: int) -> Any:
    """Each input element gathers the gradients of the windows whose maximum it was."""
    shape = ctx.shape
    planes = indices.reshape(-1, math.prod(indices.shape[-rank:]))
    rows = jnp.arange(planes.shape[0])[:, None]
    wide = opmath(ctx.dtype)
    flat = jnp.zeros((planes.shape[0], math.prod(shape[-rank:])), wide)
    flat = flat.at[rows, planes].add(cast(grad, wide).reshape(planes.shape), mode="drop")
    return flat.reshape(shape)


@lowers(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default
)
def _max_pool_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    return _scatter_maxima(ctx, grad, indices, len(kernel_size))


def _average(x: Any, window: _Window, count_include_pad: bool, divisor_override: int | None) -> Any:
    total = sum(window.reads(x, 0))
    if divisor_override:
        return total / divisor_override
    counted = jnp.ones(x.shape[-window.rank :], total.dtype)
    if count_include_pad:
        # Padding counts, but what ceil_mode reaches beyond it does not.
        counted = jnp.pad(counted, [(pad, pad) for pad in window.padding], constant_values=1)
        window = dataclasses.replace(window, padding=(0,) * window.rank)
    return total / sum(window.reads(counted, 0))


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(
    ctx: Context,
    x: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    window = _Window.of(ctx.shape[-len(kernel_size) :], kernel_size, stride, padding)
    return _average(cast(x, opmath(x.dtype)), window, count_include_pad, divisor_override)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(
    ctx: Context,
    grad: Any,
    x: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    window = _Window.of(grad.shape[-len(kernel_size) :], kernel_size, stride, padding)
    wide = opmath(x.dtype)

    def forward(x: Any) -> Any:
        return _average(x, window, count_include_pad, divisor_override)

    return jax.vjp(forward, cast(x, wide))[1](cast(grad, wide))[0]


def _adaptive_bounds(size: int, output: int) -> list[tuple[int, int]]:
    """Where each adaptive window starts and ends."""
    return [(i * size // output, -(-(i + 1) * size // output)) for i in range(output)]


def _adaptive_taps(size: int, output: int) -> Taps:
    """What each adaptive window along an axis averages, padded to the longest of them."""
    start, end = np.array(_adaptive_bounds(size, output)).T
    length = (end - start)[:, None]
    step = np.arange(length.max())
    index = np.minimum(start[:, None] + step, size - 1)
    return Taps(index, np.broadcast_to(1 / length, index.shape), step < length)


def _register_adaptive_average(forward: Any, backward: Any, rank: int) -> None:
    @lowers(forward)
    def pool(ctx: Context, x: Any, output_size: Sequence[int]) -> Any:
        x = cast(x, opmath(x.dtype))
        if 0 in ctx.shape:
            return jnp.zeros(ctx.shape, x.dtype)
        if set(ctx.shape[-rank:]) == {1}:
            return jnp.mean(x, axis=tuple(range(-rank, 0)), keepdims=True)
        for axis in range(x.ndim - rank, x.ndim):
            x = _adaptive_taps(x.shape[axis], ctx.shape[axis]).apply(x, axis)
        return x

    @lowers(backward)
    def pool_backward(ctx: Context, grad: Any, x: Any) -> Any:
        grad = cast(grad, opmath(x.dtype))
        if 0 in ctx.shape or 0 in grad.shape:
            return jnp.zeros(ctx.shape, grad.dtype)
        for axis in range(x.ndim - rank, x.ndim):
            size = x.shape[axis]
            grad = _adaptive_taps(size, grad.shape[axis]).transposed(size).apply(grad, axis)
        return grad


_register_adaptive_average(
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default, 2
)
_register_adaptive_average(
    aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default, 3
)


def _adaptive_max(ctx: Context, x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    rank = len(output_size)
    size, output = x.shape[-rank:], ctx.shape[-rank:]
    leading = x.ndim - rank
    position: Any = jnp.zeros((), jnp.int64)
    inside: Any = jnp.ones((), bool)
    # Windows of one axis are padded to the longest: x becomes [..., output, window] for each.
    for axis in range(rank):
        bounds = _adaptive_bounds(size[axis], output[axis])
        longest = max((end - start for start, end in bounds), default=1)
        reach = np.array([start for start, _ in bounds]).reshape(-1, 1) + np.arange(longest)
        valid = reach < np.array([end for _, end in bounds]).reshape(-1, 1)
        reach = np.minimum(reach, size[axis] - 1)
        x = jnp.take(x, jnp.asarray(reach), axis=leading + 2 * axis)
        later = (1,) * (2 * (rank - 1 - axis))
        position = position * size[axis] + reach.reshape(*reach.shape, *later)
        inside = inside & valid.reshape(*valid.shape, *later)
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]

    def flat(value: Any) -> Any:
        before = value.ndim - 2 * rank
        axes = [*range(before), *(before + axis for axis in order)]
        return value.transpose(axes).reshape(*value.shape[:before], *output, -1)

    position, inside, windows = flat(position), flat(inside), flat(x)
    lowest = -jnp.inf if is_floating(x.dtype) else jnp.iinfo(x.dtype).min
    best = nan_first(jnp.argmax)(jnp.where(inside, windows, lowest), -1)[..., None]
    position = jnp.broadcast_to(position, windows.shape)

    def taken(value: Any) -> Any:
        return jnp.take_along_axis(value, best, axis=-1)[..., 0]

    return taken(windows), taken(position)


lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)(_adaptive_max)


@lowers(aten.adaptive_max_pool2d_backward.default)
def _adaptive_max_pool2d_backward(ctx: Context, grad: Any, x: Any, indices: Any) -> Any:
    return _scatter_maxima(ctx, grad, indices, 2)


@lowers(aten.adaptive_max_pool3d_backward.default)
def _adaptive_max_pool3d_backward(ctx: Context, grad: Any, x: Any, indices: Any) -> Any:
    return _scatter_maxima(ctx, grad, indices, 3)


@lowers(aten.max_unpool2d.default, aten.max_unpool3d.default)
def _max_unpool(ctx: Context, x: Any, indices: Any, output_size: Sequence[int], *_: Any) -> Any:
    size = math.prod(output_size)
    check_range(ctx, indices, size, error=RuntimeError)
    planes = math.prod(x.shape[: -len(output_size)])
    values, place = x.reshape(planes, -1), indices.reshape(planes, -1)
    rows = jnp.arange(planes)[:, None]
    result = jnp.zeros((planes, size), x.dtype).at[rows, place].set(values, mode="drop")
    return result.reshape(ctx.shape)
