"""``linear_cross_entropy`` in chunks: cross-entropy of a linear layer without its logits.

torch cuts the batch so that the logits of one chunk exist at a time, and makes the gradients in
the forward. Here a chunk is a step of ``lax.map``, or all of a batch that is one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.modules.linear_cross_entropy  # defines the operators
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, check_range, opmath

torch_nn = torch.ops.torch_nn


def _weights(target: Any, weight: Any, ignore_index: int, wide: Any) -> Any:
    """The weight of each sample's class; zero for those that are ignored."""
    weights = 1 if weight is None else cast(weight, wide).at[target].get(mode="clip")
    return jnp.where(target == ignore_index, 0, jnp.asarray(weights, wide))


def _losses(x: Any, linear_weight: Any, bias: Any, target: Any, weights: Any) -> Any:
    logits = x @ linear_weight.T if bias is None else x @ linear_weight.T + bias
    picked = jnp.take_along_axis(logits, target[:, None], axis=1, mode="clip")[:, 0]
    return (jax.nn.logsumexp(logits, axis=1) - picked) * weights


def _chunked(size: int, x: Any, linear_weight: Any, bias: Any, target: Any, weights: Any) -> Any:
    """Losses of all samples; only the logits of ``size`` of them exist at a time."""
    count = x.shape[0]
    if count <= size or not count:
        return _losses(x, linear_weight, bias, target, weights)
    short = -count % size

    def cut(value: Any) -> Any:
        padded = jnp.pad(value, [(0, short), *([(0, 0)] * (value.ndim - 1))])
        return padded.reshape(-1, size, *value.shape[1:])

    # The backward makes the logits of a chunk again.
    chunk = jax.checkpoint(lambda part: _losses(part[0], linear_weight, bias, *part[1:]))
    return jax.lax.map(chunk, (cut(x), cut(target), cut(weights))).reshape(-1)[:count]


def _operands(
    ctx: Context, x: Any, linear_weight: Any, target: Any, bias: Any, weight: Any, ignored: int
) -> tuple[Any, Any, Any, Any]:
    wide = opmath(x.dtype)
    checked = jnp.where(target == ignored, 0, target)
    check_range(ctx, checked, linear_weight.shape[0])
    widened = None if bias is None else cast(bias, wide)
    weights = _weights(target, weight, ignored, wide)
    return cast(x, wide), cast(linear_weight, wide), widened, weights


def _refuse_smoothing(node: fx.Node) -> str | None:
    return "label smoothing" if node.args[7] else None


@lowers(torch_nn._linear_cross_entropy_batch_chunked.default, refuse=_refuse_smoothing)
def _linear_cross_entropy(
    ctx: Context,
    x: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    *_: Any,
) -> tuple[Any, Any, Any, Any]:
    """Loss, and what is asked for of its gradients in the input, the weight and the bias."""
    *operands, weights = _operands(ctx, x, linear_weight, target, linear_bias, weight, ignore_index)
    total = jnp.sum(weights)
    scale = jnp.where(total == 0, jnp.nan, 1 / total) if reduction == "mean" else 1

    def loss(x: Any, linear_weight: Any, bias: Any) -> Any:
        parts = _chunked(batch_chunk_size, x, linear_weight, bias, target, weights * scale)
        return jnp.sum(parts)

    value, pull = jax.vjp(loss, *operands)
    if reduction == "mean" and x.shape[0] == 0:
        value = jnp.full_like(value, jnp.nan)
    grads = pull(jnp.ones_like(value))
    asked = (spec.shape for spec in ctx.outputs[1:])
    return value, *(
        jnp.zeros(shape, x.dtype) if grad is None or grad.shape != shape else grad
        for grad, shape in zip(grads, asked, strict=True)
    )


@lowers(torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default)
def _linear_cross_entropy_of_samples(
    ctx: Context,
    x: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any,
    weight: Any,
    ignore_index: int,
    batch_chunk_size: int,
    *_: Any,
) -> Any:
    inputs = _operands(ctx, x, linear_weight, target, linear_bias, weight, ignore_index)
    wide, matrix, bias, weights = inputs
    return _chunked(batch_chunk_size, wide, matrix, bias, target, weights)
