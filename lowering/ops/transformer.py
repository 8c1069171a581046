"""The fused attention and encoder layer that ``torch.nn`` takes for inference."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath
from .activations import _gelu

aten = torch.ops.aten


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    """In the operands' dtype, rounded once."""
    wide = opmath(x.dtype)
    return (jnp.matmul(cast(x, wide), cast(weight, wide).T) + cast(bias, wide)).astype(x.dtype)


def _masked(scores: Any, mask: Any, mask_type: int | None) -> Any:
    """Softmax over ``[B, H, L, S]``; whatever is not zero in a mask is masked, as in ATen.

    Masks are ``[L, S]`` (type 0), of keys ``[B, S]`` (1), or ``[B, H, L, S]`` (2).
    """
    if mask is None:
        return jax.nn.softmax(scores, axis=-1)
    mask = mask != 0
    if mask_type == 1:
        mask = mask[:, None, None, :]
    mask = jnp.broadcast_to(mask, scores.shape)
    return jax.nn.softmax(jnp.where(mask, -jnp.inf, scores), axis=-1)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any,
    mask_type: int | None,
) -> tuple[Any, Any]:
    """Projected result ``[B, L, D]`` and weights ``[B, H, L, S]``."""
    wide = opmath(query.dtype)
    heads = []
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        projected = cast(_linear(x, weight, bias), wide)
        heads.append(projected.reshape(*projected.shape[:2], num_head, -1).transpose(0, 2, 1, 3))
    q, k, v = heads
    q = q / math.sqrt(q.shape[-1])
    attention = _masked(jnp.einsum("bhld,bhsd->bhls", q, k), mask, mask_type)
    result = jnp.einsum("bhls,bhsd->blhd", attention, v).astype(query.dtype)
    result = result.reshape(*result.shape[:2], -1)
    return _linear(result, proj_weight, proj_bias), attention


@lowers(aten._native_multi_head_attention.default)
def _native_multi_head_attention(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    settings = (num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type)
    result, weights = _attention(query, key, value, *settings)
    if not need_weights:
        return result, None
    return result, jnp.mean(weights, axis=1) if average_attn_weights else weights


def _layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    wide = cast(x, opmath(x.dtype))
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    normal = centered * jax.lax.rsqrt(variance + jnp.asarray(eps, wide.dtype))
    return (normal * cast(weight, wide.dtype) + cast(bias, wide.dtype)).astype(x.dtype)


@lowers(aten._transformer_encoder_layer_fwd.default)
def _transformer_encoder_layer_fwd(
    ctx: Context,
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    projections = (num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, mask_type)

    def attend(x: Any) -> Any:
        return _attention(x, x, x, *projections)[0]

    def feed_forward(x: Any) -> Any:
        hidden = _linear(x, ffn_weight_1, ffn_bias_1)
        wide = cast(hidden, opmath(x.dtype))
        activated = _gelu(wide, "none") if use_gelu else jnp.maximum(wide, 0)
        return _linear(activated.astype(x.dtype), ffn_weight_2, ffn_bias_2)

    def normalize_1(x: Any) -> Any:
        return _layer_norm(x, norm_weight_1, norm_bias_1, eps)

    def normalize_2(x: Any) -> Any:
        return _layer_norm(x, norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(normalize_1(src))
        return x + feed_forward(normalize_2(x))
    x = normalize_1(src + attend(src))
    return normalize_2(x + feed_forward(x))
