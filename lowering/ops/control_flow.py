"""Control flow: ``cond``, ``while_loop``, ``scan``, ``map`` and calls of a region compiled once.

They become StableHLO's ``case``, ``while`` and ``call``. What fails within is raised after it, as
eager would have; a loop ends with the first failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..interpret import Body, fold
from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context

higher_order = torch.ops.higher_order


@lowers(higher_order.cond)
def _cond(ctx: Context, chosen: Any, yes: str, no: str, operands: Sequence[Any]) -> Any:
    first, second = Body(ctx, yes), Body(ctx, no)
    none = jnp.int32(0)

    def run_first(*arrays: Any) -> Any:
        found, failed = first(*arrays)
        return found, failed, none

    def run_second(*arrays: Any) -> Any:
        found, failed = second(*arrays)
        return found, none, failed

    found, *failed = jax.lax.cond(jnp.asarray(chosen).reshape(()), run_first, run_second, *operands)
    for body, position in zip((first, second), failed, strict=True):
        body.report(position)
    return found


@lowers(higher_order.while_loop)
def _while_loop(
    ctx: Context, condition: str, body: str, carried: Sequence[Any], additional: Sequence[Any]
) -> Any:
    goes_on, step = Body(ctx, condition), Body(ctx, body)

    def run(state: Any) -> Any:
        values, _, count = state
        found, failed = step(*values, *additional, seed=fold(ctx.seed, count))
        return found, failed, count + 1

    def check(state: Any) -> Any:
        values, failed, _ = state
        # A check made here could not be told from one that the loop's result would make.
        (wanted,), _ = goes_on(*values, *additional, checked=False)
        return wanted.reshape(()) & (failed == 0)

    start = tuple(carried), jnp.int32(0), jnp.int64(0)
    found, failed, _ = jax.lax.while_loop(check, run, start)
    step.report(failed)
    return found


@lowers(higher_order.scan)
def _scan(
    ctx: Context, body: str, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any]
) -> Any:
    step = Body(ctx, body)

    def run(state: Any, part: Any) -> Any:
        values, before, count = state
        found, failed = step(*values, *part, *additional, seed=fold(ctx.seed, count))
        failed = jnp.where(before != 0, before, failed)
        return (found[: len(init)], failed, count + 1), found[len(init) :]

    start = tuple(init), jnp.int32(0), jnp.int64(0)
    (last, failed, _), stacked = jax.lax.scan(run, start, tuple(xs))
    step.report(failed)
    return (*last, *stacked)


@lowers(higher_order.map_impl)
def _map(ctx: Context, body: str, xs: Sequence[Any], operands: Sequence[Any]) -> Any:
    return _scan(ctx, body, (), xs, operands)


@lowers(higher_order.invoke_subgraph)
def _invoke_subgraph(ctx: Context, body: str, name: str, *operands: Any) -> Any:
    called = Body(ctx, body)
    found, failed = called(*operands)
    called.report(failed)
    return found
