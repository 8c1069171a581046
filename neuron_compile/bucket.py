"""Graphs with symbolic sizes as programs of a padded size that are told the real one.

In a tensor of a padded program, elements beyond the real sizes are garbage. A graph is padded only
if each operator in it is known to keep garbage out of the rest: because results depend only on
operands at the same position (pointwise operators, rows of a product), or because its rule here
masks the garbage by the real size, an argument of the program. For any other operator the graph is
specialized instead. A dimension is a product of factors, so that a batch of sequences may become
the rows of a matrix and be told apart again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

from .lowering.region import held
from .torch_internals import fake_inputs, fake_mode, results_alias, size_expression

aten = torch.ops.aten


class CannotPad(Exception):
    """Why a graph has to be specialized."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor of a dimension: its size as an expression in the symbols, and padded."""

    size: Any
    padded: int

    @property
    def loose(self) -> bool:
        """Whether the real size may be smaller than the padded one."""
        return not isinstance(self.size, int)


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Padding:
    """The sizes of a padded program: those of padded symbols, and those of others.

    A dimension whose size is a number times a symbol is two factors. ``numbers_first`` is in which
    order: rows of a batch of sequences, or the other way. Either is right, if all agree.
    """

    padded: Mapping[Any, int]
    exact: Mapping[Any, int]
    numbers_first: bool = True

    def expression(self, size: Any) -> Any:
        """A size as an int or an expression in padded symbols alone."""
        if not isinstance(size, int):
            size = size.subs(self.exact)
            size = int(size) if size.is_Integer else size
        return size

    def number(self, size: Any) -> int:
        """A size in the padded program."""
        if isinstance(size, int):
            return size
        number = size.subs(self.padded)
        if not number.is_Integer:
            raise CannotPad(f"the size {size} is no integer")
        return int(number)

    def factor(self, size: Any) -> Factor:
        """One factor of a dimension."""
        if not isinstance(size, int) and not _grows(size):
            raise CannotPad(f"the size {size} may shrink as others grow")
        return Factor(size, self.number(size))

    def dim(self, size: Any) -> Dim:
        """The factors of a dimension."""
        if isinstance(size, int):
            return (Factor(size, size),)
        number, rest = size.primitive()
        order = {symbol: position for position, symbol in enumerate(self.padded)}
        parts = sorted(
            sympy.Mul.make_args(rest),
            key=lambda part: min(order.get(symbol, -1) for symbol in part.free_symbols),
        )
        loose = [self.factor(part) for part in parts]
        if number == 1:
            return tuple(loose)
        fixed = Factor(int(number), int(number))
        return (fixed, *loose) if self.numbers_first else (*loose, fixed)


@dataclasses.dataclass(frozen=True)
class PaddedGraph:
    """A padded graph. ``splits`` has for each result ``None``, or its sizes in factors."""

    module: fx.GraphModule
    padding: Padding
    splits: tuple[Any, ...]


class Builder:
    """Writes the padded graph, node by node of the symbolic one."""

    def __init__(self, module: fx.GraphModule, padding: Padding) -> None:
        self._module = module
        self._padding = padding
        self._padded = padding.padded
        self._mode = fake_mode()
        self._graph = fx.Graph()
        self._dims: dict[fx.Node, Any] = {}
        self._real: dict[Any, fx.Node] = {}
        self._source: fx.Node | None = None

    def run(self, args: Sequence[Any]) -> PaddedGraph:
        """The padded graph for arguments like these."""
        made: dict[fx.Node, Any] = {}  # what stands for a node: a node or a number
        nodes = list(self._module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, arg in zip(placeholders, args, strict=True):
            made[node] = self._argument(node, arg)
        for symbol in self._padded:
            real = self._graph.placeholder(f"real_{symbol}")
            with self._mode:
                real.meta["val"] = torch.empty((), dtype=torch.int64)
            self._real[symbol] = real
            self._dims[real] = ()
        for node in nodes:
            self._source = node
            if node.op == "output":
                splits = self._return(node, made)
            elif node.op == "get_attr":
                made[node] = self._held(node)
            elif node.op == "call_function":
                made[node] = self._call(node, made)
        return PaddedGraph(fx.GraphModule(self._module, self._graph), self._padding, splits)

    def _argument(self, node: fx.Node, arg: Any) -> Any:
        value = node.meta["val"]
        copy = self._graph.placeholder(str(node.target))
        if not isinstance(value, torch.Tensor):
            number = self.padded(self.expression(value)) if is_size(value) else arg
            copy.meta["val"] = number
            return number
        dims = self.dims_of(value)
        steps = map(self.expression, value.stride())
        if any(map(is_loose, dims)) or not all(isinstance(step, int) for step in steps):
            # It is copied, since it would lie elsewhere in memory from size to size.
            shape = [math.prod(factor.padded for factor in dim) for dim in dims]
            with self._mode:
                copy.meta["val"] = torch.empty(shape, dtype=value.dtype)
        else:
            (copy.meta["val"],) = fake_inputs(self._mode, [arg])
        self._dims[copy] = dims
        return copy

    def _held(self, node: fx.Node) -> fx.Node:
        value = held(self._module, node.target)
        if not isinstance(value, torch.Tensor):
            raise CannotPad(f"it holds {node.target}, a {type(value).__name__}")
        copy = self._graph.get_attr(str(node.target))
        (copy.meta["val"],) = fake_inputs(self._mode, [value])
        self._dims[copy] = self.dims_of(value)
        return copy

    def padded(self, size: Any) -> int:
        """A size in the padded program."""
        return self._padding.number(size)

    def expression(self, size: Any) -> Any:
        """A size as an int or an expression in padded symbols alone."""
        return self._padding.expression(size_expression(size))

    def factor(self, size: Any) -> Factor:
        """One factor of a dimension."""
        return self._padding.factor(size)

    def dims_of(self, value: torch.Tensor) -> Dims:
        """The dimensions of a symbolic tensor."""
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CannotPad(f"a tensor of layout {value.layout}")
        return tuple(self._padding.dim(self.expression(size)) for size in value.shape)

    def dims(self, node: fx.Node) -> Dims:
        """The dimensions of a node of the padded graph."""
        found: Dims = self._dims[node]
        return found

    def loose(self, node: Any) -> bool:
        """Whether a node has garbage."""
        return isinstance(node, fx.Node) and any(map(is_loose, self.dims(node)))

    def emit(self, target: Any, *args: Any, dims: Any = None, **kwargs: Any) -> fx.Node:
        """Add a call; ``dims`` are those of the result, by default static ones."""
        node = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self._mode:
            value = node.meta["val"] = target(*values[0], **values[1])
        if self._source is not None:
            node.meta["stack_trace"] = self._source.meta.get("stack_trace")
        if dims is None:
            dims = pytree.tree_map(_static, value)
        else:
            _check_shape(value, dims)
        self._dims[node] = dims
        return node

    def real(self, size: Any) -> fx.Node:
        """A size as the program is told it: int64 of rank 0."""
        if isinstance(size, int):
            return self.emit(aten.full.default, [], size, dtype=torch.int64)
        if size.is_Symbol:
            return self._real[size]
        if size.is_Integer:
            return self.emit(aten.full.default, [], int(size), dtype=torch.int64)
        if not (size.is_Add or size.is_Mul):
            raise CannotPad(f"the size {size} is neither a sum nor a product")
        target = aten.add.Tensor if size.is_Add else aten.mul.Tensor
        total = self.real(size.args[0])
        for part in size.args[1:]:
            total = self.emit(target, total, self.real(part))
        return total

    def valid(self, dim: Dim) -> fx.Node:
        """Which positions along a dimension are no garbage: bool of the padded size."""
        sizes = [factor.padded for factor in dim]
        mask: fx.Node | None = None
        for position, factor in enumerate(dim):
            if factor.loose:
                index = self.emit(aten.arange.default, factor.padded)
                inside = self.emit(aten.lt.Tensor, index, self.real(factor.size))
                shape = [size if p == position else 1 for p, size in enumerate(sizes)]
                inside = self.emit(aten.view.default, inside, shape)
                mask = inside if mask is None else self.emit(aten.logical_and.default, mask, inside)
        assert mask is not None
        mask = self.emit(aten.expand.default, mask, sizes)
        return self.emit(aten.reshape.default, mask, [math.prod(sizes)])

    def masked(self, node: fx.Node, axes: Sequence[int], neutral: Any) -> fx.Node:
        """``node`` with ``neutral`` in the place of the garbage along ``axes``."""
        dims = self.dims(node)
        for axis in axes:
            if is_loose(dims[axis]):
                shape = [1] * len(dims)
                shape[axis] = -1
                mask = self.emit(aten.view.default, self.valid(dims[axis]), shape)
                dtype = node.meta["val"].dtype
                fill = self.emit(aten.full.default, [], neutral, dtype=dtype)
                node = self.emit(aten.where.self, mask, node, fill, dims=dims)
        return node

    def _call(self, node: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
        value = node.meta.get("val")
        if is_size(value) or isinstance(value, int | float | bool):
            if not is_size(value):
                return value
            return self.padded(self.expression(value))
        operands = [made[operand] for operand in node.all_input_nodes]
        tensors = [operand for operand in operands if isinstance(operand, fx.Node)]
        sizes = [source for source in node.all_input_nodes if self._depends(source)]
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        grows = any(is_loose(dim) for leaf in leaves for dim in self.dims_of(leaf))
        rule = RULES.get(node.target)
        if rule is None and isinstance(node.target, torch._ops.OpOverload):
            rule = _pointwise if torch.Tag.pointwise in node.target.tags else None
        target: Any = node.target
        if rule is _pointwise and sizes:
            # A size that is computed with is the real one.
            made = {
                **made,
                **{size: self.real(self.expression(size.meta["val"])) for size in sizes},
            }
            target = _with_tensor(target)
        elif sizes and rule not in TAKE_SIZES:
            raise CannotPad(f"{node.target} computes with a size")
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        if not (grows or sizes or any(map(self._has_garbage, tensors))):
            return self.emit(target, *args, **kwargs)
        if rule is None:
            raise CannotPad(f"{node.target} has no rule for padding")
        if rule is _pointwise:
            return rule(self, target, value, *args, **kwargs)
        return rule(self, node, *args, **kwargs)

    def _depends(self, source: fx.Node) -> bool:
        """Whether a number depends on padded sizes, or may."""
        value = source.meta.get("val")
        if is_size(value):
            return not isinstance(self.expression(value), int)
        return isinstance(value, torch.SymFloat | torch.SymBool) and source.op != "placeholder"

    def _has_garbage(self, node: fx.Node) -> bool:
        dims = self._dims[node]
        leaves = pytree.tree_leaves(dims)
        return any(leaf.loose for leaf in leaves if isinstance(leaf, Factor))

    def _return(self, output: fx.Node, made: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
        """Return the results; those with products among their dimensions in their factors.

        Their sizes in factors are the answer, ``None`` for each other result.
        """
        if results_alias(self._module):
            raise CannotPad("results share memory")
        results: list[Any] = []
        splits: list[Any] = []
        for item in output.args[0]:  # type: ignore[union-attr]
            node = made[item] if isinstance(item, fx.Node) else item
            split = None
            if isinstance(node, fx.Node) and item.op != "placeholder":  # type: ignore[union-attr]
                dims = self.dims(node)
                if any(len(dim) > 1 and is_loose(dim) for dim in dims):
                    split = tuple(factor.size for dim in dims for factor in dim)
                    shape = [factor.padded for dim in dims for factor in dim]
                    parts = tuple((factor,) for dim in dims for factor in dim)
                    node = self.emit(aten.reshape.default, node, shape, dims=parts)
            results.append(node)
            splits.append(split)
        self._graph.output(tuple(results))
        return tuple(splits)


def _grows(size: Any) -> bool:
    """Whether an expression is a polynomial that no growing symbol makes smaller."""
    symbols = sorted(size.free_symbols, key=str)
    if not size.is_polynomial(*symbols):
        return False
    slopes = [sympy.Poly(sympy.diff(size, symbol), *symbols) for symbol in symbols]
    return all(number >= 0 for slope in slopes for number in slope.coeffs())


def _static(leaf: Any) -> Any:
    """The dimensions of a tensor without garbage; a check has no result."""
    return tuple((Factor(size, size),) for size in getattr(leaf, "shape", ()))


def is_loose(dim: Dim) -> bool:
    """Whether a dimension has garbage."""
    return any(factor.loose for factor in dim)


def is_size(value: Any) -> bool:
    """Whether a value is a symbolic size."""
    return isinstance(value, torch.SymInt)


def _check_shape(value: Any, dims: Any) -> None:
    if not isinstance(value, torch.Tensor):
        for leaf, inner in zip(value, dims, strict=True):
            _check_shape(leaf, inner)
        return
    shape = tuple(math.prod(factor.padded for factor in dim) for dim in dims)
    if tuple(value.shape) != shape:
        raise CannotPad(f"a result has shape {tuple(value.shape)}, not {shape}")


# The rules; most are in ``bucket_rules``.

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
TAKE_SIZES: set[Rule] = set()


def rule(*ops: Any, sizes: bool = False) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        if sizes:
            TAKE_SIZES.add(function)
        return function

    return register


#: Of integers, these raise for a divisor that garbage may be.
_DIVIDE = {aten.div, aten.floor_divide, aten.remainder, aten.fmod}


@rule(
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy.default,
    aten.complex.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide.default,
    aten.full_like.default,
    aten.lift_fresh_copy.default,
    aten.masked_fill.Tensor,
    aten.ones_like.default,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.zeros_like.default,
)
def _pointwise(b: Builder, target: Any, value: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    if not isinstance(value, torch.Tensor):
        raise CannotPad(f"{target} has other results than one tensor")
    divides = target.overloadpacket in _DIVIDE and not value.is_floating_point()
    if divides and b.loose(args[1]):
        divisor = args[1]
        args = (args[0], b.masked(divisor, range(len(b.dims(divisor))), 1), *args[2:])
    leaves = pytree.tree_leaves((args, kwargs))
    operands = [b.dims(leaf) for leaf in leaves if isinstance(leaf, fx.Node)]
    dims = broadcast(operands, value.dim())
    return b.emit(target, *args, dims=dims, **kwargs)


def _with_tensor(target: Any) -> Any:
    """The overload that takes a tensor where ``target`` takes a number."""
    if target._overloadname in ("Scalar", "Tensor_Scalar"):
        packet = target.overloadpacket
        for name in ("Tensor", "Tensor_Tensor"):
            if name in packet.overloads():
                return getattr(packet, name)
    return target


def broadcast(operands: Sequence[Dims], rank: int) -> Dims:
    result: list[Dim] = []
    for position in range(-rank, 0):
        found = [dims[position] for dims in operands if len(dims) >= -position]
        wide = [tidy(dim) for dim in found if tidy(dim)]
        if any(dim != wide[0] for dim in wide):
            raise CannotPad("operands of different padded sizes meet")
        result.append(wide[0] if wide else (Factor(1, 1),))
    return tuple(result)


def single(dim: Dim) -> Factor:
    """The one factor of a dimension."""
    factors = tidy(dim)
    if len(factors) > 1:
        raise CannotPad("a position in a product of padded dimensions")
    return factors[0] if factors else Factor(1, 1)


def tidy(dim: Dim) -> Dim:
    """A dimension with its static factors merged, without ones."""
    result: list[Factor] = []
    for factor in dim:
        if not factor.loose and result and not result[-1].loose:
            number = factor.padded * result[-1].padded
            result[-1] = Factor(number, number)
        elif factor.loose or factor.padded != 1:
            result.append(factor)
    return tuple(factor for factor in result if factor.loose or factor.padded != 1)
