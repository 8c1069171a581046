"""The rules by which operators bear padded sizes; see :mod:`neuron_compile.bucket`.

Each takes the builder, the symbolic node, and the arguments in the padded graph.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from .bucket import (
    Builder,
    CannotPad,
    Dim,
    Dims,
    Factor,
    PaddedGraph,
    Padding,
    Rule,
    broadcast,
    is_loose,
    rule,
    single,
    tidy,
)
from .bucket_gradients import attention_mask
from .bucket_indexing import bounds

aten = torch.ops.aten


def pad_graph(
    module: fx.GraphModule,
    args: Sequence[Any],
    padded: Mapping[Any, int],
    exact: Mapping[Any, int],
) -> PaddedGraph:
    """``module`` for the ``padded`` and ``exact`` values of its symbols, a static graph.

    After the arguments of the original, it takes the real values of the padded symbols, in their
    order, each an int64 tensor of rank 0. ``args`` are those of a call; only the layouts of
    tensors without symbolic sizes are used.

    Raises:
        CannotPad: naming the first operator without a rule.
    """
    try:
        return _built(module, args, Padding(padded, exact))
    except CannotPad:
        with contextlib.suppress(CannotPad):
            return _built(module, args, Padding(padded, exact, numbers_first=False))
        raise


def _built(module: fx.GraphModule, args: Sequence[Any], padding: Padding) -> PaddedGraph:
    try:
        return Builder(module, padding).run(args)
    except (RuntimeError, ArithmeticError, TypeError, ValueError, LookupError) as error:
        # A form of an operator that its rule does not know: torch refuses the padded one.
        raise CannotPad(f"{type(error).__name__}: {error}") from error


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    sizes=True,
)
def _view(b: Builder, node: fx.Node, x: fx.Node, *_: Any) -> fx.Node:
    rest = list(tidy(tuple(factor for dim in b.dims(x) for factor in dim)))
    dims = tuple(_take(rest, b.expression(size)) for size in node.meta["val"].shape)
    if rest:
        raise CannotPad("a view that cuts through a padded dimension")
    shape = [math.prod(factor.padded for factor in dim) for dim in dims]
    return b.emit(aten.reshape.default, x, shape, dims=dims)


def _take(rest: list[Factor], size: Any) -> Dim:
    """Take factors that make up ``size`` off the front of ``rest``."""
    taken: list[Factor] = []
    while size != 1:
        if not rest:
            raise CannotPad("a view that cuts through a padded dimension")
        first = rest[0]
        if first.loose:
            size = _quotient(size, first.size)
            taken.append(rest.pop(0))
            continue
        number = math.gcd(first.padded, _content(size))
        if number == 1:
            raise CannotPad("a view that cuts through a padded dimension")
        size = _quotient(size, number)
        taken.append(Factor(number, number))
        left = first.padded // number
        rest[0] = Factor(left, left)
        if left == 1:
            rest.pop(0)
    return tuple(taken) or (Factor(1, 1),)


def _content(size: Any) -> int:
    """The largest integer that divides an expression whatever its symbols are."""
    return size if isinstance(size, int) else int(size.primitive()[0])


def _quotient(size: Any, divisor: Any) -> Any:
    quotient = sympy.cancel(sympy.sympify(size) / divisor)
    if sympy.denom(quotient) != 1:
        raise CannotPad("a view that cuts through a padded dimension")
    return int(quotient) if quotient.is_Integer else quotient


@rule(aten.permute.default)
def _permute(b: Builder, node: fx.Node, x: fx.Node, order: Sequence[int]) -> fx.Node:
    return b.emit(node.target, x, order, dims=tuple(b.dims(x)[axis] for axis in order))


@rule(aten.t.default)
def _t(b: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    return b.emit(node.target, x, dims=tuple(reversed(b.dims(x))))


@rule(aten.transpose.int)
def _transpose(b: Builder, node: fx.Node, x: fx.Node, first: int, second: int) -> fx.Node:
    dims = list(b.dims(x))
    dims[first], dims[second] = dims[second], dims[first]
    return b.emit(node.target, x, first, second, dims=tuple(dims))


@rule(aten.expand.default, sizes=True)
def _expand(b: Builder, node: fx.Node, x: fx.Node, size: Any, **_: Any) -> fx.Node:
    wanted = b.dims_of(node.meta["val"])
    own = b.dims(x)
    dims = list(wanted)
    for position in range(-len(own), 0):
        if tidy(own[position]):
            dims[position] = own[position]
    shape = [math.prod(factor.padded for factor in dim) for dim in dims]
    return b.emit(aten.expand.default, x, shape, dims=tuple(dims))


@rule(aten.slice.Tensor, sizes=True)
def _slice(
    b: Builder,
    node: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> fx.Node:
    dims = list(b.dims(x))
    axis = dim % len(dims)
    own = dims[axis]
    made = b.factor(b.expression(node.meta["val"].shape[axis]))
    if not is_loose(own):
        dims[axis] = (made,)
        if not any(isinstance(arg, fx.Node) for arg in node.args[2:]):
            return b.emit(node.target, x, axis, start, end, step, dims=tuple(dims))
        # Beyond the real end, any element will do.
        place = b.emit(aten.arange.start_step, 0, made.padded * step, step)
        given = _given(node, 2, 0)
        first = b.real(b.expression(given.meta["val"]) if isinstance(given, fx.Node) else given)
        size = math.prod(_padded(own))
        from_end = b.emit(aten.add.Scalar, first, size)
        first = b.emit(aten.where.self, b.emit(aten.lt.Scalar, first, 0), from_end, first)
        place = b.emit(aten.add.Tensor, place, first)
        place = b.emit(aten.clamp.default, place, 0, size - 1)
        return b.emit(aten.index_select.default, x, axis, place, dims=tuple(dims))
    whole = single(own)
    begin = _given(node, 2, 0)
    if step != 1 or not isinstance(begin, int):
        raise CannotPad("a slice of a padded dimension in steps or from a position that depends")
    if begin < 0:
        # From the end: that is the real one.
        if made.loose:
            raise CannotPad("a slice of a padded dimension that begins before its end")
        last = b.real(whole.size)
        index = b.emit(aten.arange.start, begin, begin + made.padded)
        place = b.emit(aten.add.Tensor, index, last)
        dims[axis] = (made,)
        return b.emit(aten.index_select.default, x, axis, place, dims=tuple(dims))
    dims[axis] = (made,)
    stop = begin + made.padded
    return b.emit(aten.slice.Tensor, x, axis, begin, stop, dims=tuple(dims))


def _given(node: fx.Node, position: int, default: Any) -> Any:
    """An argument as the symbolic graph has it."""
    found = node.args[position] if len(node.args) > position else None
    return default if found is None else found


@rule(aten.select.int)
def _select(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node:
    dims = list(b.dims(x))
    axis = dim % len(dims)
    own = dims.pop(axis)
    if not is_loose(own) or index >= 0:
        return b.emit(node.target, x, axis, index, dims=tuple(dims))
    offset = b.emit(aten.full.default, [1], index, dtype=torch.int64)
    place = b.emit(aten.add.Tensor, offset, b.real(single(own).size))
    kept = [*dims[:axis], (Factor(1, 1),), *dims[axis:]]
    row = b.emit(aten.index_select.default, x, axis, place, dims=tuple(kept))
    return b.emit(aten.squeeze.dim, row, axis, dims=tuple(dims))


@rule(aten.unbind.int)
def _unbind(b: Builder, node: fx.Node, x: fx.Node, dim: int = 0) -> fx.Node:
    dims = list(b.dims(x))
    if is_loose(dims.pop(dim)):
        raise CannotPad("as many results as a padded size")
    return b.emit(node.target, x, dim, dims=(tuple(dims),) * len(node.meta["val"]))


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(b: Builder, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> fx.Node:
    dims = list(b.dims(x))
    axis = dim % len(dims)
    if is_loose(dims[axis]):
        raise CannotPad("parts of a padded dimension")
    parts = [int(part.shape[axis]) for part in node.meta["val"]]
    made = tuple((*dims[:axis], (Factor(n, n),), *dims[axis + 1 :]) for n in parts)
    return b.emit(node.target, x, sizes, axis, dims=made)


@rule(aten.cat.default)
def _cat(b: Builder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    parts = [part for part in tensors if part.meta["val"].dim() == node.meta["val"].dim()]
    rank = node.meta["val"].dim()
    axis = dim % rank
    others = [
        broadcast([(b.dims(part)[position],) for part in parts], 1)[0]
        for position in range(rank)
        if position != axis
    ]
    lengths = [b.dims(part)[axis] for part in parts]
    total = b.factor(b.expression(node.meta["val"].shape[axis]))
    dims = (*others[:axis], (total,), *others[axis:])
    if not any(map(is_loose, lengths[:-1])):
        # Garbage stays at the end.
        return b.emit(node.target, parts, axis, dims=dims)
    if len(parts) != len(tensors):
        raise CannotPad("empty tensors among padded ones")
    # Each part goes to where it really begins, over the garbage of the one before.
    padding = [0, 0] * (rank - 1 - axis) + [0, total.padded - math.prod(_padded(lengths[0]))]
    result = b.emit(aten.constant_pad_nd.default, parts[0], padding, dims=dims)
    begin: Any = None
    for part, before, length in zip(parts[1:], lengths, lengths[1:], strict=False):
        size = b.real(single(before).size)
        begin = size if begin is None else b.emit(aten.add.Tensor, begin, size)
        steps = b.emit(aten.arange.default, math.prod(_padded(length)))
        place = b.emit(aten.add.Tensor, steps, begin)
        result = b.emit(aten.index_copy.default, result, axis, place, part, dims=dims)
    return result


def _padded(dim: Dim) -> list[int]:
    return [factor.padded for factor in dim]


@rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    sizes=True,
)
def _create(b: Builder, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    value = node.meta["val"]
    if node.target is aten.arange.start or node.target is aten.arange.start_step:
        fixed = (_given(node, 0, 0), _given(node, 2, 1))
        if any(isinstance(number, fx.Node) for number in fixed):
            raise CannotPad("a range that begins at a size")
    filled: dict[Any, int] = {aten.full.default: 1, aten.new_full.default: 2}
    fill = filled.get(node.target)
    if fill is not None and isinstance(_given(node, fill, 0), fx.Node):
        raise CannotPad("a tensor filled with a size")
    return b.emit(node.target, *args, dims=b.dims_of(value), **kwargs)


# Reductions: what leaves them as they are takes the place of the garbage.


def _axes(dim: Any, rank: int) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(rank))
    return tuple(sorted({axis % rank for axis in ([dim] if isinstance(dim, int) else dim)}))


def _reduced(dims: Dims, axes: Sequence[int], keepdim: bool) -> Dims:
    one = (Factor(1, 1),)
    kept = [one if axis in axes else dim for axis, dim in enumerate(dims)]
    return tuple(d for axis, d in enumerate(kept) if keepdim or axis not in axes)


def _reduction(neutral: Callable[[torch.dtype], Any]) -> Rule:
    def padded_rule(
        b: Builder,
        node: fx.Node,
        x: fx.Node,
        dim: Any = None,
        keepdim: bool = False,
        **kwargs: Any,
    ) -> fx.Node:
        dims = b.dims(x)
        axes = _axes(dim, len(dims))
        x = b.masked(x, axes, neutral(x.meta["val"].dtype))
        given = [axis for axis in (dim, keepdim) if len(node.args) > 1 or "dim" in node.kwargs]
        return b.emit(node.target, x, *given, dims=_reduced(dims, axes, keepdim), **kwargs)

    return padded_rule


for _ops, _neutral in (
    ((aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.any.dim), lambda _: 0),
    ((aten.prod.default, aten.prod.dim_int, aten.all.default, aten.all.dim), lambda _: 1),
    ((aten.amax.default, aten.max.default), lambda dtype: bounds(dtype)[0]),
    ((aten.amin.default, aten.min.default), lambda dtype: bounds(dtype)[1]),
):
    rule(*_ops)(_reduction(_neutral))


@rule(aten.mean.default, aten.mean.dim)
def _mean(
    b: Builder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> fx.Node:
    dims = b.dims(x)
    axes = _axes(dim, len(dims))
    result = node.meta["val"].dtype
    wide = torch.float64 if result is torch.float64 else torch.float32
    x = b.masked(x, axes, 0)
    after = _reduced(dims, axes, keepdim)
    total = b.emit(aten.sum.dim_IntList, x, list(axes), keepdim, dtype=wide, dims=after)
    count = b.real(1)
    for axis in axes:
        for factor in dims[axis]:
            count = b.emit(aten.mul.Tensor, count, b.real(factor.size))
    count = b.emit(aten._to_copy.default, count, dtype=wide)
    mean = b.emit(aten.div.Tensor, total, count, dims=after)
    return mean if result is wide else b.emit(aten._to_copy.default, mean, dtype=result, dims=after)


@rule(aten._softmax.default, aten._log_softmax.default)
def _softmax(b: Builder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    dims = b.dims(x)
    x = b.masked(x, [dim % len(dims)], -math.inf)
    return b.emit(node.target, x, dim, half_to_float, dims=dims)


@rule(aten.cumsum.default, aten.cumprod.default)
def _cumulative(b: Builder, node: fx.Node, x: fx.Node, dim: int, **kwargs: Any) -> fx.Node:
    # What comes before does not depend on the garbage behind it.
    if len(b.dims(x)[dim]) > 1:
        raise CannotPad("a cumulative operator over a product of padded dimensions")
    return b.emit(node.target, x, dim, dims=b.dims(x), **kwargs)


@rule(aten.native_layer_norm.default, sizes=True)
def _layer_norm(b: Builder, node: fx.Node, x: fx.Node, shape: Sequence[int], *rest: Any) -> fx.Node:
    dims = b.dims(x)
    kept = len(dims) - len(shape)
    if any(map(is_loose, dims[kept:])):
        raise CannotPad("a norm over a padded dimension")
    rows = (*dims[:kept], *[(Factor(1, 1),)] * len(shape))
    return b.emit(node.target, x, shape, *rest, dims=(dims, rows, rows))


@rule(operator.getitem)
def _getitem(b: Builder, node: fx.Node, source: fx.Node, index: int) -> fx.Node:
    return b.emit(node.target, source, index, dims=b.dims(source)[index])


# Products: rows are independent; garbage along the contracted dimension becomes zero.


def _product(b: Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> tuple[fx.Node, fx.Node, Dims]:
    left, right = b.dims(x), b.dims(y)
    if is_loose(left[-1]) or is_loose(right[-2]):
        x, y = b.masked(x, [len(left) - 1], 0), b.masked(y, [len(right) - 2], 0)
    batch = tuple(broadcast([(p,), (q,)], 1)[0] for p, q in zip(left[:-2], right[:-2], strict=True))
    return x, y, (*batch, left[-2], right[-1])


@rule(aten.mm.default, aten.bmm.default)
def _matmul(b: Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
    x, y, dims = _product(b, node, x, y)
    return b.emit(node.target, x, y, dims=dims)


@rule(aten.addmm.default)
def _addmm(
    b: Builder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, **scales: Any
) -> fx.Node:
    x, y, dims = _product(b, node, x, y)
    broadcast([b.dims(bias), dims], 2)
    return b.emit(node.target, bias, x, y, dims=dims, **scales)


@rule(aten.embedding.default)
def _embedding(b: Builder, node: fx.Node, weight: fx.Node, index: fx.Node, *rest: Any) -> fx.Node:
    dims = b.dims(index)
    if b.loose(weight):
        raise CannotPad("a padded table of an embedding")
    index = b.masked(index, range(len(dims)), 0)  # garbage is out of range
    return b.emit(node.target, weight, index, *rest, dims=(*dims, b.dims(weight)[1]))


_attention = aten._scaled_dot_product_flash_attention_for_cpu.default


@rule(_attention)
def _flash_attention(
    b: Builder,
    node: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> fx.Node:
    if dropout:
        raise CannotPad("dropout in attention")
    queries, keys = b.dims(query), b.dims(key)
    if is_loose(keys[3]):
        raise CannotPad("a padded width of attention, which the scale depends on")
    if is_loose(keys[2]):
        # Zero times a weight of zero is zero, which garbage need not be.
        key, value = b.masked(key, [2], 0), b.masked(value, [2], 0)
        attn_mask = attention_mask(b, query, key, attn_mask)
    dims = (*queries[:3], b.dims(value)[3])
    made = (dims, queries[:3])
    return b.emit(
        node.target, query, key, value, dropout, causal, attn_mask=attn_mask, scale=scale, dims=made
    )


def _batched(*operands: int) -> Rule:
    """Operators that treat each element of dimension 0 by itself."""

    def padded_rule(b: Builder, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
        first = b.dims(args[0])
        if any(map(is_loose, first[1:])) or any(b.loose(arg) for arg in args[1:]):
            raise CannotPad(f"{node.target} over a padded dimension")
        value = node.meta["val"]
        leaves = value if isinstance(value, tuple | list) else [value]
        made = tuple(
            (first[0], *b.dims_of(leaf)[1:]) if leaf.numel() else b.dims_of(leaf) for leaf in leaves
        )
        dims = made if isinstance(value, tuple | list) else made[0]
        return b.emit(node.target, *args, dims=dims, **kwargs)

    return padded_rule


rule(
    aten.convolution.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten._native_batch_norm_legit_no_training.default,
)(_batched())
