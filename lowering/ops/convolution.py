"""Convolutions in one to three dimensions, their transposes and their backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import is_half

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What ``aten.convolution`` takes besides tensors, a value for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        rank: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> _Settings:
        def spread(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) * (rank - 2) if len(values) == 1 else tuple(values)

        return cls(
            spread(stride),
            spread(padding),
            spread(dilation),
            bool(transposed),
            spread(output_padding),
            groups,
        )

    def attributes(self, channels_last: bool) -> dict[str, Any]:
        """Composite attributes: lists become text, which every MLIR version keeps as it is."""
        return {
            "stride": ",".join(map(str, self.stride)),
            "padding": ",".join(map(str, self.padding)),
            "dilation": ",".join(map(str, self.dilation)),
            "transposed": int(self.transposed),
            "output_padding": ",".join(map(str, self.output_padding)),
            "groups": self.groups,
            "channels_last": int(channels_last),
        }


def _convolve(x: Any, kernel: Any, settings: _Settings, **windows: Any) -> Any:
    rank = x.ndim
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        rhs_dilation=settings.dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(*(tuple(range(rank)) for _ in range(3))),
        feature_group_count=settings.groups,
        preferred_element_type=jnp.float32 if is_half(x.dtype) else None,
        **windows,
    )


def _plain(x: Any, weight: Any, settings: _Settings) -> Any:
    """The convolution as StableHLO has it; halves accumulate and come back in float32."""
    if settings.transposed:
        return _transposed(x, weight, settings)
    padding = [(amount, amount) for amount in settings.padding]
    return _convolve(x, weight, settings, window_strides=settings.stride, padding=padding)


def _transposed(x: Any, weight: Any, settings: _Settings) -> Any:
    """The gradient of a convolution with respect to its input, written as one convolution."""
    spatial, groups = weight.shape[2:], settings.groups
    inputs, per_group = weight.shape[0], weight.shape[1]
    flipped = jnp.flip(weight, tuple(range(2, weight.ndim)))
    grouped = flipped.reshape(groups, inputs // groups, per_group, *spatial)
    kernel = jnp.swapaxes(grouped, 1, 2).reshape(groups * per_group, inputs // groups, *spatial)
    pads = []
    for axis, size in enumerate(spatial):
        reach = settings.dilation[axis] * (size - 1) - settings.padding[axis]
        pads.append((reach, reach + settings.output_padding[axis]))
    return _convolve(
        x,
        kernel,
        settings,
        window_strides=(1,) * len(spatial),
        padding=pads,
        lhs_dilation=settings.stride,
    )


def _depthwise(x: Any, settings: _Settings) -> bool:
    """Whether the convolution wants channels last: vendors' depthwise kernels are 1.5 to 3 times
    faster there, and models that use them keep their channels last around them."""
    return x.ndim == 4 and 1 < settings.groups == x.shape[1]


def _channels_last(x: Any) -> Any:
    return jnp.moveaxis(x, 1, -1)


def _channels_first(x: Any) -> Any:
    return jnp.moveaxis(x, -1, 1)


def _same(x: Any) -> Any:
    return x


def _refuse(node: fx.Node) -> str | None:
    dtype = node.all_input_nodes[0].meta["val"].dtype
    plain = not dtype.is_complex and dtype is not torch.bool
    return None if plain else f"a convolution of {dtype}"


@lowers(aten.convolution.default, refuse=_refuse)
def _convolution(
    ctx: Context, x: Any, weight: Any, bias: Any, *options: Any, channels_last: bool = False
) -> Any:
    settings = _Settings.of(x.ndim, *options)
    last = channels_last or _depthwise(x, settings)
    outward, inward = (_channels_last, _channels_first) if last else (_same, _same)

    def plain(x: Any, weight: Any, *bias: Any) -> Any:
        result = _plain(inward(x), weight, settings)
        if bias:
            result = result + bias[0].reshape(1, -1, *(1,) * (x.ndim - 2))
        return outward(result.astype(ctx.dtype))

    operands = (outward(x), weight) if bias is None else (outward(x), weight, bias)
    return inward(ctx.kernel("convolution", plain, operands, **settings.attributes(last)))


@lowers(aten.convolution_backward.default, refuse=_refuse)
def _convolution_backward(
    ctx: Context, grad: Any, x: Any, weight: Any, bias_sizes: Any, *options: Any
) -> tuple[Any, ...]:
    settings = _Settings.of(x.ndim, *options[:-1])
    mask = tuple(bool(wanted) for wanted in options[-1])
    last = _depthwise(x, settings)
    outward, inward = (_channels_last, _channels_first) if last else (_same, _same)

    def plain(grad: Any, x: Any, weight: Any) -> Any:
        grad, x = inward(grad), inward(x)

        def forward(x: Any, weight: Any) -> Any:
            return _plain(x, weight, settings).astype(x.dtype)

        dx, dw = jax.vjp(forward, x, weight)[1](grad)
        db = jnp.sum(grad, axis=(0, *range(2, grad.ndim)))
        results = (outward(dx), dw, db)
        return tuple(value for value, wanted in zip(results, mask, strict=True) if wanted)

    results = iter(
        ctx.kernel(
            "convolution_backward",
            plain,
            (outward(grad), outward(x), weight),
            **settings.attributes(last),
            mask=",".join(str(int(wanted)) for wanted in mask),
        )
    )
    dx, dw, db = (next(results) if wanted else None for wanted in mask)
    return None if dx is None else inward(dx), dw, db
