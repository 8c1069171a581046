"""Rules by which losses and backward operators bear padded sizes; see :mod:`.bucket`.

A gradient that sums over padded rows must not see the garbage in them: the gradient that comes in
is zero there, and what it is multiplied with is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .bucket import Builder, CannotPad, Dim, Factor, is_loose, rule, single

aten = torch.ops.aten

_ONE: Dim = (Factor(1, 1),)


def _cleared(b: Builder, node: fx.Node, neutral: Any = 0) -> fx.Node:
    """``node`` with ``neutral`` in the place of all garbage."""
    return b.masked(node, range(len(b.dims(node))), neutral)


def _fixed(b: Builder, node: Any) -> tuple[Dim, ...]:
    """The dimensions of an operand that must have no garbage."""
    if b.loose(node):
        raise CannotPad("a parameter of a padded size")
    return b.dims(node)


@rule(aten.native_layer_norm_backward.default, sizes=True)
def _layer_norm_backward(
    b: Builder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    shape: Sequence[int],
    mean: fx.Node,
    rstd: fx.Node,
    weight: Any,
    bias: Any,
    wanted: Sequence[bool],
) -> fx.Node:
    dims = b.dims(x)
    last = dims[len(dims) - len(shape) :]
    if any(map(is_loose, last)):
        raise CannotPad("a norm over a padded dimension")
    operands = [_cleared(b, operand) for operand in (grad, x, mean, rstd)]
    made = tuple(
        own if asked else () for own, asked in zip((dims, last, last), wanted, strict=True)
    )
    return b.emit(node.target, *operands[:2], shape, *operands[2:], weight, bias, wanted, dims=made)


@rule(aten.embedding_dense_backward.default, sizes=True)
def _embedding_backward(
    b: Builder, node: fx.Node, grad: fx.Node, index: fx.Node, rows: int, *rest: Any
) -> fx.Node:
    if rest[1]:
        raise CannotPad("a gradient of an embedding scaled by frequencies")
    width = b.dims(grad)[-1]
    if is_loose(width):
        raise CannotPad("a padded width of an embedding")
    operands = _cleared(b, grad), _cleared(b, index)
    return b.emit(node.target, *operands, rows, *rest, dims=((Factor(rows, rows),), width))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(
    b: Builder, node: fx.Node, grad: fx.Node, result: fx.Node, dim: int, dtype: torch.dtype
) -> fx.Node:
    axes = [dim % len(b.dims(grad))]
    operands = b.masked(grad, axes, 0), b.masked(result, axes, 0)
    return b.emit(node.target, *operands, dim, dtype, dims=b.dims(grad))


def _labelled(b: Builder, x: fx.Node, target: fx.Node, ignored: int) -> fx.Node:
    """Labels whose garbage says to ignore the row."""
    if is_loose(b.dims(x)[-1]) or len(b.dims(x)) != 2:
        raise CannotPad("a loss over a padded number of classes")
    return _cleared(b, target, ignored)


@rule(aten.nll_loss_forward.default)
def _nll_loss(
    b: Builder,
    node: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: Any,
    reduction: int,
    ignored: int,
) -> fx.Node:
    target = _labelled(b, x, target, ignored)
    rows = () if reduction else b.dims(x)[:1]
    return b.emit(node.target, x, target, weight, reduction, ignored, dims=(rows, ()))


@rule(aten.nll_loss_backward.default)
def _nll_loss_backward(
    b: Builder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: Any,
    reduction: int,
    ignored: int,
    total: fx.Node,
) -> fx.Node:
    target = _labelled(b, x, target, ignored)
    args = (grad, x, target, weight, reduction, ignored, total)
    return b.emit(node.target, *args, dims=b.dims(x))


_attention = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@rule(_attention)
def _flash_attention_backward(
    b: Builder,
    node: fx.Node,
    grad: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    out: fx.Node,
    logsumexp: fx.Node,
    dropout: float,
    causal: bool,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> fx.Node:
    dims = [b.dims(operand) for operand in (query, key, value)]
    if dropout or is_loose(dims[1][3]):
        raise CannotPad("dropout in attention, or a padded width")
    cleared = [_cleared(b, x) for x in (grad, query, key, value, out, logsumexp)]
    if is_loose(dims[1][2]):
        attn_mask = attention_mask(b, query, key, attn_mask)
    return b.emit(
        node.target, *cleared, dropout, causal, attn_mask=attn_mask, scale=scale, dims=tuple(dims)
    )


def attention_mask(b: Builder, query: fx.Node, key: fx.Node, mask: fx.Node | None) -> fx.Node:
    """A mask of attention that also hides the garbage among the keys."""
    queries, keys = b.dims(query)[2], b.dims(key)[2]
    if mask is None:
        shape = [math.prod(factor.padded for factor in dim) for dim in (queries, keys)]
        dtype = query.meta["val"].dtype
        mask = b.emit(aten.zeros.default, shape, dtype=dtype, dims=(queries, keys))
    elif mask.meta["val"].dtype is torch.bool:
        raise CannotPad("a boolean mask of attention")
    return b.masked(mask, [len(b.dims(mask)) - 1], -math.inf)


@rule(aten.convolution_backward.default)
def _convolution_backward(
    b: Builder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: Any,
    *rest: Any,
) -> fx.Node:
    first, kernel = b.dims(x), _fixed(b, weight)
    if any(map(is_loose, first[1:])):
        raise CannotPad("a convolution over a padded dimension")
    channels = (b.dims(grad)[1],)
    made = tuple(
        own if asked else () for own, asked in zip((first, kernel, channels), rest[-1], strict=True)
    )
    grad, x = _cleared(b, grad), _cleared(b, x)
    return b.emit(node.target, grad, x, weight, bias, *rest, dims=made)


@rule(
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
)
def _pool_backward(b: Builder, node: fx.Node, grad: fx.Node, x: fx.Node, *rest: Any) -> fx.Node:
    dims = b.dims(x)
    if any(map(is_loose, dims[1:])):
        raise CannotPad("a pooling over a padded dimension")
    # The places of maxima among the garbage are out of range.
    places = [_cleared(b, item) if isinstance(item, fx.Node) else item for item in rest]
    return b.emit(node.target, grad, x, *places, dims=dims)


@rule(aten.slice_scatter.default, sizes=True)
def _slice_scatter(
    b: Builder,
    node: fx.Node,
    x: fx.Node,
    source: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> fx.Node:
    dims = b.dims(x)
    axis = dim % len(dims)
    if not is_loose(dims[axis]) and not is_loose(b.dims(source)[axis]):
        numbers = [arg for arg in node.args[2:] if isinstance(arg, fx.Node)]
        if numbers:
            raise CannotPad("a slice whose bounds depend on a padded size")
        return b.emit(node.target, x, source, axis, start, end, step, dims=dims)
    whole, part = single(dims[axis]), single(b.dims(source)[axis])
    begin: Any = node.args[3] if len(node.args) > 3 else None
    begin = 0 if begin is None else begin
    if step != 1 or not isinstance(begin, int):
        raise CannotPad("a slice of a padded dimension in steps or from a position that depends")
    # Where each position of the whole lies in the part.
    place = b.emit(aten.arange.default, whole.padded)
    first = b.emit(aten.full.default, [], begin, dtype=torch.int64)
    if begin < 0:
        first = b.emit(aten.add.Tensor, first, b.real(whole.size))
    place = b.emit(aten.sub.Tensor, place, first)
    inside = b.emit(
        aten.logical_and.default,
        b.emit(aten.ge.Scalar, place, 0),
        b.emit(aten.lt.Tensor, place, b.real(part.size)),
    )
    place = b.emit(aten.clamp.default, place, 0, part.padded - 1)
    shape = [1] * len(dims)
    shape[axis] = whole.padded
    moved = b.emit(aten.index_select.default, source, axis, place, dims=dims)
    return b.emit(aten.where.self, b.emit(aten.view.default, inside, shape), moved, x, dims=dims)


@rule(aten.select_scatter.default)
def _select_scatter(
    b: Builder, node: fx.Node, x: fx.Node, source: fx.Node, dim: int, index: int
) -> fx.Node:
    dims = b.dims(x)
    axis = dim % len(dims)
    if not is_loose(dims[axis]) or index >= 0:
        return b.emit(node.target, x, source, axis, index, dims=dims)
    whole = single(dims[axis])
    offset = b.emit(aten.full.default, [], index, dtype=torch.int64)
    place = b.emit(aten.add.Tensor, offset, b.real(whole.size))
    chosen = b.emit(aten.eq.Tensor, b.emit(aten.arange.default, whole.padded), place)
    shape = [1] * len(dims)
    shape[axis] = whole.padded
    row = (*dims[:axis], _ONE, *dims[axis + 1 :])
    source = b.emit(aten.unsqueeze.default, source, axis, dims=row)
    return b.emit(aten.where.self, b.emit(aten.view.default, chosen, shape), source, x, dims=dims)


@rule(aten.constant_pad_nd.default, sizes=True)
def _constant_pad(
    b: Builder, node: fx.Node, x: fx.Node, pad: Sequence[int], value: float = 0
) -> fx.Node:
    dims = list(b.dims(x))
    widths = [0] * (2 * len(dims))
    for position in range(len(pad) // 2):
        axis = len(dims) - 1 - position
        before, after = pad[2 * position : 2 * position + 2]
        if is_loose(dims[axis]) or not all(isinstance(width, int) for width in (before, after)):
            made = b.factor(b.expression(node.meta["val"].shape[axis]))
            own = single(dims[axis])
            if before < 0 or not isinstance(before, int):
                raise CannotPad("a crop at the beginning of a padded dimension")
            x = b.masked(x, [axis], value)
            after = made.padded - own.padded - before
            dims[axis] = (made,)
        else:
            size = math.prod(factor.padded for factor in dims[axis]) + before + after
            dims[axis] = (Factor(size, size),) if before or after else dims[axis]
        widths[2 * position : 2 * position + 2] = before, after
    return b.emit(node.target, x, widths, value, dims=tuple(dims))


@rule(aten.native_dropout.default)
def _dropout(b: Builder, node: fx.Node, x: fx.Node, p: float, train: Any) -> fx.Node:
    # Elements are drawn for each by itself; that garbage draws too changes nothing.
    return b.emit(node.target, x, p, train, dims=(b.dims(x), b.dims(x)))
