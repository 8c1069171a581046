"""One LSTM layer over a whole sequence, as torch hands it to oneDNN, and its backward.

GRUs, plain RNNs and LSTMs with projections arrive cell by cell.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..lazy_jax import jax, jnp
from ..registry import lowers
from ..trace import Context
from ._shared import cast, opmath

aten = torch.ops.aten

#: The numbers of ``ideep::rnn_kind``; torch uses the operator for LSTMs alone.
_LSTM = 2


def _lstm(
    x: Any, w_input: Any, w_hidden: Any, b_input: Any, b_hidden: Any, h: Any, c: Any, reverse: bool
) -> tuple[Any, Any, Any]:
    """States ``[T, N, H]``, last state and last cell ``[N, H]`` for ``x`` ``[T, N, I]``.

    Gates are in torch's order: input, forget, cell, output.
    """

    def step(state: tuple[Any, Any], gates: Any) -> tuple[tuple[Any, Any], Any]:
        h, c = state
        i, f, g, o = jnp.split(gates + h @ w_hidden.T, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    # The products with the input need no recurrence: one large product for all steps.
    gates = x @ w_input.T + (b_input + b_hidden)
    (h, c), states = jax.lax.scan(step, (h, c), gates, reverse=reverse)
    return states, h, c


def _operands(
    x: Any, weights: Any, h: Any, c: Any, has_biases: bool
) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    wide = opmath(x.dtype)
    w_input, w_hidden, *biases = (cast(weight, wide) for weight in weights)
    if not has_biases:
        biases = [jnp.zeros(w_input.shape[0], wide)] * 2
    flat = (x.shape[1], w_hidden.shape[1])
    states = (cast(state, wide).reshape(flat) for state in (h, c))
    return cast(x, wide), w_input, w_hidden, *biases, *states


def _refuse(node: fx.Node) -> str | None:
    settings = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    if settings["mode"] != _LSTM or settings["num_layers"] != 1 or settings["bidirectional"]:
        return "not one direction of one LSTM layer"
    if settings["batch_first"] or settings["batch_sizes"]:
        return "batches first or of several lengths"
    return None


@lowers(aten.mkldnn_rnn_layer.default, refuse=_refuse)
def _mkldnn_rnn_layer(
    ctx: Context,
    x: Any,
    w_input: Any,
    w_hidden: Any,
    b_input: Any,
    b_hidden: Any,
    h: Any,
    c: Any,
    reverse: bool,
    batch_sizes: Any,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    *_: Any,
) -> tuple[Any, Any, Any, Any]:
    weights = (w_input, w_hidden, b_input, b_hidden)
    states, last, cell = _lstm(*_operands(x, weights, h, c, has_biases), reverse)
    workspace = jnp.zeros(ctx.outputs[3].shape, jnp.uint8)
    return states, last.reshape(h.shape), cell.reshape(c.shape), workspace


@lowers(aten.mkldnn_rnn_layer_backward.default, refuse=_refuse)
def _mkldnn_rnn_layer_backward(
    ctx: Context,
    x: Any,
    w_input: Any,
    w_hidden: Any,
    b_input: Any,
    b_hidden: Any,
    h: Any,
    c: Any,
    output: Any,
    last: Any,
    cell: Any,
    grad_output: Any,
    grad_h: Any,
    grad_c: Any,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    *_: Any,
) -> tuple[Any, ...]:
    """The forward is run again: its operator keeps no gates."""
    weights = (w_input, w_hidden, b_input, b_hidden)
    operands = _operands(x, weights, h, c, has_biases)
    results, pull = jax.vjp(lambda *operands: _lstm(*operands, reverse), *operands)  # type: ignore[call-arg]
    grads = (
        jnp.zeros_like(result) if grad is None else cast(grad, result.dtype).reshape(result.shape)
        for grad, result in zip((grad_output, grad_h, grad_c), results, strict=True)
    )
    found = pull(tuple(grads))
    shapes = (spec.shape for spec in ctx.outputs)
    return tuple(
        grad.reshape(shape) if grad.size == math.prod(shape) else jnp.zeros(shape, grad.dtype)
        for grad, shape in zip(found, shapes, strict=True)
    )
