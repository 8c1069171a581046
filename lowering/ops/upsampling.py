"""Upsampling in one to three dimensions, with and without antialiasing, and its backward.

Interpolation is separable: along each axis an output element is a weighted sum of a few input
elements, whose positions and weights are known when the operator is traced. They are computed as
in ATen (``ATen/native/UpSample.h`` and ``cpu/UpSampleKernel.cpp``), in its precision: a position
that rounds to another input element would be a visible error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath
from ._taps import Taps

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Axis:
    """An axis to interpolate along: sizes, and how far apart in the input two outputs are."""

    size: int
    output: int
    align_corners: bool
    factor: float | None
    real: type[np.floating[Any]]

    @property
    def scale(self) -> Any:
        if self.align_corners:
            return self.real(self.size - 1) / self.real(self.output - 1) if self.output > 1 else 0
        if self.factor is not None and self.factor > 0:
            return self.real(1.0 / self.factor)
        return self.real(self.size) / self.real(self.output)

    def steps(self) -> np.ndarray:
        return np.arange(self.output).astype(self.real)

    def source(self) -> np.ndarray:
        """Where in the input each output lies."""
        if self.align_corners:
            return self.real(self.scale) * self.steps()
        half = self.real(0.5)
        return self.real(self.scale) * (self.steps() + half) - half

    def split(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The input element at or before each place, and how far beyond it the place is."""
        index = np.minimum(np.floor(source).astype(np.int64), self.size - 1)
        return index, np.clip(source - index.astype(self.real), 0, 1)


def _floored(axis: _Axis, steps: np.ndarray) -> Taps:
    place = np.floor((steps * axis.scale).astype(np.float32))
    index = np.minimum(place.astype(np.int64), axis.size - 1)
    return Taps(index[:, None], np.ones((axis.output, 1)))


def _nearest(axis: _Axis) -> Taps:
    return _floored(axis, axis.steps())


def _nearest_exact(axis: _Axis) -> Taps:
    return _floored(axis, axis.steps() + axis.real(0.5))


def _nearest_or_copy(axis: _Axis) -> Taps:
    """For the same and the double size ATen has a short cut that ignores the scale factor.

    It takes it backward, in two dimensions, and in three with channels last, which is the one
    case that differs here: a lowering does not know strides.
    """
    if axis.output not in (axis.size, 2 * axis.size):
        return _nearest(axis)
    index = np.arange(axis.output) // (axis.output // max(axis.size, 1))
    return Taps(index[:, None], np.ones((axis.output, 1)))


def _linear(axis: _Axis) -> Taps:
    if axis.output == axis.size:
        index, beyond = np.arange(axis.output), np.zeros(axis.output, axis.real)
        return Taps(np.stack([index, index], 1), np.stack([1 - beyond, beyond], 1))
    index, beyond = axis.split(np.maximum(axis.source(), 0))
    after = np.minimum(index + 1, axis.size - 1)
    return Taps(np.stack([index, after], 1), np.stack([1 - beyond, beyond], 1))


def _cubic_filter(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution, with its parameter ``a``."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _cubic(axis: _Axis) -> Taps:
    index, beyond = axis.split(axis.source())
    offsets = np.arange(-1, 3)
    reads = np.clip(index[:, None] + offsets, 0, axis.size - 1)
    return Taps(reads, _cubic_filter(beyond[:, None] - offsets.astype(axis.real), -0.75))


def _antialiased(filter: Callable[[np.ndarray], np.ndarray], width: int) -> Any:
    """The filter, ``width`` wide, stretched over all inputs that an output covers."""

    def taps(axis: _Axis) -> Taps:
        scale = axis.real(axis.scale)
        center = scale * (axis.steps() + axis.real(0.5))
        stretch = max(scale, axis.real(1))
        support = axis.real(width * 0.5) * stretch
        half = axis.real(0.5)
        start = np.maximum(np.trunc(center - support + half).astype(np.int64), 0)
        end = np.minimum(np.trunc(center + support + half).astype(np.int64), axis.size)
        count = np.clip(end - start, 0, int(np.ceil(support)) * 2 + 1)
        reach = np.arange(max(int(count.max(initial=0)), 1))
        index = start[:, None] + reach
        real = reach < count[:, None]
        place = (index.astype(axis.real) - center[:, None] + half) * (1 / stretch)
        weight = np.where(real, filter(place), 0).astype(axis.real)
        total = weight.sum(axis=1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
        return Taps(np.minimum(index, axis.size - 1), weight, None if real.all() else real)

    return taps


def _lanczos_filter(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _merged(taps: Taps) -> Taps:
    """Taps on one element as one, before their weights are rounded."""
    weight = taps.weight.copy()
    for later in range(1, weight.shape[1]):
        for earlier in range(later):
            same = taps.index[:, earlier] == taps.index[:, later]
            weight[:, earlier] += np.where(same, weight[:, later], 0)
            weight[:, later] = np.where(same, 0, weight[:, later])
    return dataclasses.replace(taps, weight=weight)


_LINEAR_AA = _antialiased(lambda x: np.maximum(1 - np.abs(x), 0), 2)
_CUBIC_AA = _antialiased(lambda x: _cubic_filter(x, -0.5), 4)
_LANCZOS_AA = _antialiased(_lanczos_filter, 6)


@dataclasses.dataclass(frozen=True)
class _Mode:
    """How one operator interpolates. ``corners``: it has the argument ``align_corners``."""

    taps: Callable[[_Axis], Taps]
    rank: int
    corners: bool = True
    backward: Callable[[_Axis], Taps] | None = None

    def axes(
        self, size: Sequence[int], output: Sequence[int], arguments: Sequence[Any], real: Any
    ) -> list[_Axis]:
        align_corners, factors = (
            (arguments[0], arguments[1:]) if self.corners else (False, arguments)
        )
        factors = (*factors, *(None,) * (self.rank - len(factors)))
        sizes = zip(size[-self.rank :], output[-self.rank :], factors, strict=True)
        return [_Axis(n, out, align_corners, factor, real) for n, out, factor in sizes]


def _register(name: str, mode: _Mode) -> None:
    @lowers(getattr(aten, name).default)
    def forward(ctx: Context, x: Any, output_size: Any, *arguments: Any) -> Any:
        fixed = x.dtype == jnp.uint8
        single = jnp.finfo(opmath(x.dtype)).dtype == jnp.float32 if not fixed else not mode.corners
        real = np.float32 if single else np.float64
        wide = x if fixed else cast(x, opmath(x.dtype))
        for back, axis in enumerate(reversed(mode.axes(x.shape, ctx.shape, arguments, real)), 1):
            taps = mode.taps(axis)
            if fixed and mode.corners:
                wide = _merged(taps).apply_uint8(wide, x.ndim - back)
            else:
                wide = taps.apply(wide, x.ndim - back)
        return wide

    @lowers(getattr(aten, f"{name}_backward").default)
    def backward(
        ctx: Context, grad: Any, output_size: Any, input_size: Any, *arguments: Any
    ) -> Any:
        if mode.taps is _cubic and grad.shape == ctx.shape:
            return grad  # whatever the scale factors were, as in ATen
        wide = cast(grad, opmath(grad.dtype))
        real = np.float64 if wide.dtype == jnp.float64 else np.float32
        for back, axis in enumerate(reversed(mode.axes(ctx.shape, grad.shape, arguments, real)), 1):
            wide = (
                (mode.backward or mode.taps)(axis)
                .transposed(axis.size)
                .apply(wide, grad.ndim - back)
            )
        return wide


_MODES: dict[str, _Mode] = {
    **{
        f"upsample_nearest{rank}d": _Mode(taps, rank, corners=False, backward=_nearest_or_copy)
        for rank, taps in ((1, _nearest), (2, _nearest_or_copy), (3, _nearest))
    },
    **{
        f"_upsample_nearest_exact{rank}d": _Mode(_nearest_exact, rank, corners=False)
        for rank in (1, 2, 3)
    },
    "upsample_linear1d": _Mode(_linear, 1),
    "upsample_bilinear2d": _Mode(_linear, 2),
    "upsample_trilinear3d": _Mode(_linear, 3),
    "upsample_bicubic2d": _Mode(_cubic, 2),
    "_upsample_bilinear2d_aa": _Mode(_LINEAR_AA, 2),
    "_upsample_bicubic2d_aa": _Mode(_CUBIC_AA, 2),
    "_upsample_lanczos2d_aa": _Mode(_LANCZOS_AA, 2),
}
for _name, _mode in _MODES.items():
    _register(_name, _mode)
