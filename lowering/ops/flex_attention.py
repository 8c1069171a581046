"""``flex_attention``: attention whose scores and mask are functions of the positions.

A block of queries meets only the blocks of keys that the block mask lists for it, by the online
softmax of "FlashAttention" (Dao et al., 2022, algorithm 1): no more than a block of scores exists
at a time. Blocks that the block mask does not list are left out, whatever ``mask_mod`` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..interpret import Body
from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast

#: Queries at a time where the block mask asks for no blocks.
_QUERIES = 128


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """For each block of queries, how many blocks of keys it meets, and which."""

    count: Any  # int32[batch or 1, heads or 1, query blocks]
    index: Any  # int32[batch or 1, heads or 1, query blocks, key blocks]
    masked: bool


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Keys and values in blocks, ``[batch, heads, blocks, keys, width]``, and what to apply."""

    keys: Any
    values: Any
    groups: int
    length: int
    scale: float
    score: Callable[..., Any]
    mask: Callable[..., Any]


@lowers(torch.ops.higher_order.flex_attention)
def _flex_attention(
    ctx: Context,
    query: Any,
    key: Any,
    value: Any,
    score_mod: str,
    block_mask: Sequence[Any],
    scale: float,
    _options: Any,
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> tuple[Any, Any, Any]:
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    batch, heads, queries, _ = query.shape
    length = key.shape[2]
    _, _, count, index, full_count, full_index, *_, query_block, key_block, mask_mod = block_mask
    whole = index.shape[2] == index.shape[3] == 1
    rows = min(_QUERIES if whole else query_block, queries)
    columns = min(key_block, length)
    lists = [_Blocks(count, index, masked=True)]
    if full_count is not None:
        lists.append(_Blocks(full_count, full_index, masked=False))
    problem = _Problem(
        _in_blocks(cast(key, wide), columns, batch),
        _in_blocks(cast(value, wide), columns, batch),
        heads // key.shape[1],
        length,
        scale,
        _over_positions(Body(ctx, score_mod), score_buffers, scores=True),
        _over_positions(Body(ctx, mask_mod), mask_buffers, scores=False),
    )
    padded = _in_blocks(cast(query, wide), rows, batch)

    def attend(number: Any) -> Any:
        return _attend(problem, padded[:, :, number], number, lists, whole)

    parts = jax.lax.map(attend, jnp.arange(padded.shape[2]))
    result, total, most = (
        jnp.moveaxis(part, 0, 2).reshape(batch, heads, -1, *part.shape[4:])[:, :, :queries]
        for part in parts
    )
    # ATen hands out logarithms to the base of 2.
    return cast(result, query.dtype), total / math.log(2), most / math.log(2)


def _in_blocks(x: Any, size: int, batch: int) -> Any:
    """``[batch, heads, blocks, size, width]``, with zeros at the end."""
    x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0)])
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])


def _over_positions(body: Body, buffers: Sequence[Any], *, scores: bool) -> Callable[..., Any]:
    """A modification of one score as a function of ``[batch, heads, queries, keys]`` of them.

    Positions of keys are ``[batch, heads, keys]``: each head may be at another block.
    """

    def one(*arguments: Any) -> Any:
        (found,), _ = body(*arguments, *buffers, checked=False)  # padding is out of range
        return found

    axes: tuple[tuple[int | None, ...], ...] = (
        (None, None, None, 0),
        (None, None, 0, None),
        (None, 0, None, 0),
        (0, None, None, 0),
    )
    function = one
    for axis in axes:
        function = jax.vmap(function, in_axes=(0, *axis) if scores else axis)
    return function


def _attend(
    problem: _Problem, query: Any, number: Any, lists: Sequence[_Blocks], whole: bool
) -> tuple[Any, Any, Any]:
    """The result, log of the sum of exponentials and maximum for one block of queries."""
    batch, heads, rows, _ = query.shape
    row = number * rows + jnp.arange(rows)
    mask_row = 0 if whole else number
    state = (
        jnp.zeros((batch, heads, rows, problem.values.shape[-1]), query.dtype),
        jnp.zeros((batch, heads, rows), query.dtype),
        jnp.full((batch, heads, rows), -jnp.inf, query.dtype),
    )
    for blocks in lists:
        state = _add_blocks(problem, query, row, blocks, mask_row, state)
    result, total, most = state
    empty = total == 0
    result = jnp.where(empty[..., None], 0, result / jnp.where(empty, 1, total)[..., None])
    return result, jnp.where(empty, -jnp.inf, most + jnp.log(total)), most


def _add_blocks(
    problem: _Problem, query: Any, row: Any, blocks: _Blocks, mask_row: Any, state: Any
) -> Any:
    """Meet the listed blocks of keys, as many as any head has; others turn without effect."""
    batch, heads = query.shape[:2]
    count, index = blocks.count[:, :, mask_row], blocks.index[:, :, mask_row]

    def step(turn: Any, state: Any) -> Any:
        listed = jnp.broadcast_to(index[:, :, turn], (batch, heads))
        listed = jnp.minimum(listed, problem.keys.shape[2] - 1)
        used = jnp.broadcast_to(turn < count, (batch, heads))
        return _add_block(problem, query, row, listed, used, blocks.masked, state)

    return jax.lax.fori_loop(0, jnp.max(count), step, state)


def _add_block(
    problem: _Problem, query: Any, row: Any, listed: Any, used: Any, masked: bool, state: Any
) -> tuple[Any, Any, Any]:
    """One step of the online softmax: block ``listed[batch, head]`` of the keys."""
    result, total, most = state
    batch, heads = listed.shape
    b, h = jnp.arange(batch), jnp.arange(heads)
    size = problem.keys.shape[3]
    place = b[:, None], (h // problem.groups)[None, :], listed
    keys, values = problem.keys[place], problem.values[place]
    column = listed[..., None] * size + jnp.arange(size)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) * problem.scale
    scores = problem.score(scores, b, h, row, column).astype(scores.dtype)
    kept = (column < problem.length) & used[..., None]
    kept = kept[:, :, None]
    if masked:
        kept = kept & problem.mask(b, h, row, column)
    scores = jnp.where(kept, scores, -jnp.inf)
    highest = jnp.maximum(most, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.exp(scores - base[..., None])
    decay = jnp.exp(most - base)
    result = result * decay[..., None] + jnp.einsum("bhqk,bhkd->bhqd", weights, values)
    return result, total * decay + jnp.sum(weights, axis=-1), highest
