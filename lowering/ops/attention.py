"""Scaled dot-product attention and its backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten


def _scores(query: Any, key: Any, mask: Any, is_causal: bool, scale: float) -> Any:
    """``[B, H, L, S]`` logits in opmath precision, masked."""
    wide = opmath(query.dtype)
    scores = jnp.einsum("bhld,bhsd->bhls", cast(query, wide), cast(key, wide)) * scale
    if is_causal:
        rows, columns = scores.shape[-2:]
        scores = jnp.where(jnp.tril(jnp.ones((rows, columns), bool)), scores, -jnp.inf)
    if mask is not None:
        if mask.dtype == jnp.bool_:
            return jnp.where(mask, scores, -jnp.inf)
        scores = scores + cast(mask, wide)
    return scores


def _scale(query: Any, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _repeat_heads(x: Any, heads: int) -> Any:
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _refuse_dropout(node: fx.Node) -> str | None:
    dropout = node.args[3] if len(node.args) > 3 else node.kwargs.get("dropout_p", 0.0)
    return "attention dropout inside the fused operator" if dropout else None


def _attributes(is_causal: bool, scale: float) -> dict[str, Any]:
    return {"is_causal": int(is_causal), "scale": float(scale)}


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default, refuse=_refuse_dropout)
def _flash_attention(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    factor = _scale(query, scale)

    def plain(query: Any, key: Any, value: Any, *mask: Any) -> tuple[Any, Any]:
        query, key, value = _swap(query), _swap(key), _swap(value)
        heads = query.shape[1]
        key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
        scores = _scores(query, key, mask[0] if mask else None, is_causal, factor)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        # A fully masked row has no finite logit: ATen gives zeros, not NaN.
        safe = jnp.where(jnp.isneginf(peak), 0, peak)
        weights = jnp.exp(scores - safe)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        nonzero = jnp.where(total == 0, 1, total)
        result = jnp.einsum("bhls,bhsd->bhld", weights / nonzero, cast(value, weights.dtype))
        logsumexp = (jnp.log(nonzero) + safe)[..., 0]
        return _swap(result).astype(ctx.dtype), logsumexp

    operands = [_swap(query), _swap(key), _swap(value)]
    operands += [] if attn_mask is None else [attn_mask]
    result, logsumexp = ctx.kernel(
        "flash_attention", plain, operands, **_attributes(is_causal, factor)
    )
    return _swap(result), logsumexp


def _swap(x: Any) -> Any:
    """Exchange heads and positions.

    The composites take and give ``[B, L, H, D]``, which is how projections lay heads out in
    memory: XLA then cancels the exchanges against the graph's own, and nothing is transposed.
    """
    return jnp.swapaxes(x, 1, 2)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _flash_attention_backward(
    ctx: Context,
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    factor = _scale(query, scale)

    def plain(
        grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, *mask: Any
    ) -> tuple[Any, ...]:
        wide = opmath(query.dtype)
        grad, query, key, value, out = map(_swap, (grad, query, key, value, out))
        heads, groups = query.shape[1], key.shape[1]
        k, v = _repeat_heads(key, heads), _repeat_heads(value, heads)
        scores = _scores(query, k, mask[0] if mask else None, is_causal, factor)
        statistic = cast(logsumexp, wide).reshape(*scores.shape[:-1], 1)
        weights = jnp.where(jnp.isneginf(scores), 0, jnp.exp(scores - statistic))
        g, o = cast(grad, wide), cast(out, wide)
        d_value = jnp.einsum("bhls,bhld->bhsd", weights, g)
        d_weights = jnp.einsum("bhld,bhsd->bhls", g, cast(v, wide))
        delta = jnp.sum(g * o, axis=-1, keepdims=True)
        d_scores = weights * (d_weights - delta) * factor
        d_query = jnp.einsum("bhls,bhsd->bhld", d_scores, cast(k, wide))
        d_key = jnp.einsum("bhls,bhld->bhsd", d_scores, cast(query, wide))
        d_key, d_value = _sum_heads(d_key, groups), _sum_heads(d_value, groups)
        return tuple(_swap(x).astype(query.dtype) for x in (d_query, d_key, d_value))

    operands = [*map(_swap, (grad, query, key, value, out)), logsumexp]
    operands += [] if attn_mask is None else [attn_mask]
    results = ctx.kernel(
        "flash_attention_backward", plain, operands, **_attributes(is_causal, factor)
    )
    return tuple(map(_swap, results))


def _sum_heads(x: Any, groups: int) -> Any:
    if x.shape[1] == groups:
        return x
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(axis=2)
