"""Rules by which operators that look elements up bear padded sizes; see :mod:`.bucket`.

An index that is garbage becomes 0. One that is out of the real range must raise as in eager, so it
becomes one that is out of the padded range, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .bucket import (
    Builder,
    CannotPad,
    Dim,
    Dims,
    Factor,
    Rule,
    broadcast,
    is_loose,
    rule,
    single,
    tidy,
)

aten = torch.ops.aten

_ONE: Dim = (Factor(1, 1),)


def _index(b: Builder, index: fx.Node, dim: Dim, *, wraps: bool) -> fx.Node:
    """Indices into a dimension, without garbage. ``wraps``: negative ones count from the end."""
    if index.meta["val"].dtype in (torch.bool, torch.uint8):
        raise CannotPad("a mask as an index")
    dims = b.dims(index)
    index = b.masked(index, range(len(dims)), 0)
    if not is_loose(dim):
        return index
    size = single(dim)
    real = b.real(size.size)
    if wraps:
        turned = b.emit(aten.add.Tensor, index, real, dims=dims)
        index = b.emit(aten.where.self, _below(b, index, 0), turned, index, dims=dims)
    beyond = b.emit(aten.ge.Tensor, index, real, dims=dims)
    wrong = b.emit(aten.logical_or.default, beyond, _below(b, index, 0), dims=dims)
    outside = b.emit(aten.full.default, [], size.padded, dtype=index.meta["val"].dtype)
    return b.emit(aten.where.self, wrong, outside, index, dims=dims)


def _below(b: Builder, index: fx.Node, bound: int) -> fx.Node:
    return b.emit(aten.lt.Scalar, index, bound, dims=b.dims(index))


@rule(aten.gather.default)
def _gather(
    b: Builder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, **kwargs: Any
) -> fx.Node:
    own, dims = b.dims(x), b.dims(index)
    if not own:
        raise CannotPad("a gather from a number")
    axis = dim % len(own)
    for position, (mine, theirs) in enumerate(zip(own, dims, strict=True)):
        # An index may be shorter, but what is at a position of it must be there.
        if position != axis and tidy(mine) != tidy(theirs):
            single(mine), single(theirs)
    place = _index(b, index, own[axis], wraps=False)
    return b.emit(node.target, x, axis, place, dims=dims, **kwargs)


@rule(aten.index_select.default)
def _index_select(b: Builder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    dims = list(b.dims(x))
    if not dims:
        raise CannotPad("an element of a number")
    axis = dim % len(dims)
    place = _index(b, index, dims[axis], wraps=False)
    dims[axis] = b.dims(index)[0] if b.dims(index) else _ONE
    return b.emit(node.target, x, axis, place, dims=tuple(dims))


@rule(aten.index.Tensor)
def _index_tensor(b: Builder, node: fx.Node, x: fx.Node, indices: Sequence[Any]) -> fx.Node:
    dims = b.dims(x)
    given = [axis for axis, index in enumerate(indices) if index is not None]
    places = [
        None if index is None else _index(b, index, dims[axis], wraps=True)
        for axis, index in enumerate(indices)
    ]
    operands = [b.dims(indices[axis]) for axis in given]
    made = broadcast(operands, max(len(own) for own in operands))
    rest = [dim for axis, dim in enumerate(dims) if axis not in given]
    adjacent = given == list(range(given[0], given[-1] + 1))
    first = given[0] if adjacent else 0
    return b.emit(node.target, x, places, dims=(*rest[:first], *made, *rest[first:]))


# Where the extreme is: what cannot be it takes the place of the garbage. Even if all are equal to
# that, the first of them is found, which is no garbage.


def bounds(dtype: torch.dtype) -> tuple[Any, Any]:
    """The lowest and the highest number of a dtype."""
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _extreme(which: int) -> Rule:
    def padded_rule(
        b: Builder, node: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False
    ) -> fx.Node:
        dims = b.dims(x)
        axes = range(len(dims)) if dim is None else [dim % len(dims)] if dims else []
        if dim is None and any(map(is_loose, dims[1:])):
            raise CannotPad("a position among all elements of a padded tensor")
        x = b.masked(x, axes, bounds(x.meta["val"].dtype)[which])
        kept = [(p not in axes, own) for p, own in enumerate(dims)]
        made = tuple(own if far else _ONE for far, own in kept if far or keepdim)
        both = (made, made) if isinstance(node.meta["val"], tuple | list) else made
        return b.emit(node.target, x, dim, keepdim, dims=both)

    return padded_rule


rule(aten.argmax.default, aten.max.dim)(_extreme(0))
rule(aten.argmin.default, aten.min.dim)(_extreme(1))


@rule(aten.triu.default, aten.tril.default)
def _triangle(b: Builder, node: fx.Node, x: fx.Node, diagonal: int = 0) -> fx.Node:
    dims = b.dims(x)
    for dim in dims[-2:]:
        single(dim)
    return b.emit(node.target, x, diagonal, dims=dims)


@rule(aten.stack.default)
def _stack(b: Builder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    rank = node.meta["val"].dim()
    dims = list(broadcast([b.dims(x) for x in tensors], rank - 1))
    dims.insert(dim % rank, (Factor(len(tensors), len(tensors)),))
    return b.emit(node.target, tensors, dim, dims=tuple(dims))


@rule(aten.flip.default)
def _flip(b: Builder, node: fx.Node, x: fx.Node, axes: Sequence[int]) -> fx.Node:
    dims = b.dims(x)
    if any(is_loose(dims[axis]) for axis in axes):
        raise CannotPad("a padded dimension in reverse")
    return b.emit(node.target, x, axes, dims=dims)


@rule(aten.repeat.default)
def _repeat(b: Builder, node: fx.Node, x: fx.Node, repeats: Sequence[int]) -> fx.Node:
    own = [*[_ONE] * (len(repeats) - len(b.dims(x))), *b.dims(x)]
    dims = tuple(
        dim if number == 1 else (Factor(number, number), *dim)
        for dim, number in zip(own, repeats, strict=True)
    )
    return b.emit(node.target, x, repeats, dims=dims)


# Variances: around the mean of what is no garbage.


def _variance(finish: Callable[[Builder, fx.Node, fx.Node, Dims], Any]) -> Rule:
    def padded_rule(
        b: Builder,
        node: fx.Node,
        x: fx.Node,
        dim: Any = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> fx.Node:
        dims, dtype = b.dims(x), x.meta["val"].dtype
        if dtype not in (torch.float32, torch.float64):
            raise CannotPad(f"a variance of {dtype}")
        listed = (
            range(len(dims)) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
        )
        axes = sorted({axis % len(dims) for axis in listed})
        small = tuple(_ONE if axis in axes else own for axis, own in enumerate(dims))
        count = b.real(1)
        for axis in axes:
            for factor in dims[axis]:
                count = b.emit(aten.mul.Tensor, count, b.real(factor.size))
        count = b.emit(aten._to_copy.default, count, dtype=dtype)
        total = b.emit(aten.sum.dim_IntList, b.masked(x, axes, 0), axes, True, dims=small)
        mean = b.emit(aten.div.Tensor, total, count, dims=small)
        away = b.masked(b.emit(aten.sub.Tensor, x, mean, dims=dims), axes, 0)
        squares = b.emit(aten.mul.Tensor, away, away, dims=dims)
        total = b.emit(aten.sum.dim_IntList, squares, axes, True, dims=small)
        free = b.emit(aten.sub.Scalar, count, 1 if correction is None else correction)
        free = b.emit(aten.clamp.default, free, 0)
        variance = b.emit(aten.div.Tensor, total, free, dims=small)
        if not keepdim:
            made = tuple(own for axis, own in enumerate(dims) if axis not in axes)
            mean = b.emit(aten.squeeze.dims, mean, axes, dims=made)
            variance = b.emit(aten.squeeze.dims, variance, axes, dims=made)
        return finish(b, variance, mean, b.dims(variance))

    return padded_rule


rule(aten.var.correction)(_variance(lambda b, variance, mean, dims: variance))
rule(aten.std.correction)(
    _variance(lambda b, variance, mean, dims: b.emit(aten.sqrt.default, variance, dims=dims))
)
