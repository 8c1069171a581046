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
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

from .lowering.region import held
from .torch_internals import fake_inputs, fake_mode, size_expression

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


def pad_graph(
    module: fx.GraphModule,
    args: Sequence[Any],
    padded: Mapping[Any, int],
    exact: Mapping[Any, int],
) -> fx.GraphModule:
    """``module`` for the ``padded`` and ``exact`` values of its symbols, a static graph.

    After the arguments of the original, it takes the real values of the padded symbols, in their
    order, each an int64 tensor of rank 0. ``args`` are those of a call; only the layouts of
    tensors without symbolic sizes are used.

    Raises:
        CannotPad: naming the first operator without a rule.
    """
    try:
        return _Builder(module, padded, exact).run(args)
    except (RuntimeError, ArithmeticError, TypeError, ValueError, LookupError) as error:
        # A form of an operator that its rule does not know: torch refuses the padded one.
        raise CannotPad(f"{type(error).__name__}: {error}") from error


class _Builder:
    """Writes the padded graph, node by node of the symbolic one."""

    def __init__(
        self, module: fx.GraphModule, padded: Mapping[Any, int], exact: Mapping[Any, int]
    ) -> None:
        self._module = module
        self._padded = padded
        self._exact = exact
        self._mode = fake_mode()
        self._graph = fx.Graph()
        self._dims: dict[fx.Node, Any] = {}
        self._real: dict[Any, fx.Node] = {}
        self._source: fx.Node | None = None

    def run(self, args: Sequence[Any]) -> fx.GraphModule:
        """The padded graph."""
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
                self._check_results(node, made)
                self._graph.output(fx.map_arg(node.args[0], made.__getitem__))
            elif node.op == "get_attr":
                made[node] = self._held(node)
            elif node.op == "call_function":
                made[node] = self._call(node, made)
        return fx.GraphModule(self._module, self._graph)

    def _argument(self, node: fx.Node, arg: Any) -> Any:
        value = node.meta["val"]
        copy = self._graph.placeholder(str(node.target))
        if not isinstance(value, torch.Tensor):
            number = self.padded(self.expression(value)) if _is_size(value) else arg
            copy.meta["val"] = number
            return number
        dims = self.dims_of(value)
        if any(factor.loose for dim in dims for factor in dim):
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
        if isinstance(size, int):
            return size
        number = size.subs(self._padded)
        if not number.is_Integer:
            raise CannotPad(f"the size {size} is no integer")
        return int(number)

    def expression(self, size: Any) -> Any:
        """A size as an int or an expression in padded symbols alone."""
        found = size_expression(size)
        if not isinstance(found, int):
            found = found.subs(self._exact)
            found = int(found) if found.is_Integer else found
        return found

    def factor(self, size: Any) -> Factor:
        """One factor of a dimension."""
        if not isinstance(size, int) and not _grows(size):
            raise CannotPad(f"the size {size} may shrink as others grow")
        return Factor(size, self.padded(size))

    def dims_of(self, value: torch.Tensor) -> Dims:
        """The dimensions of a symbolic tensor, each a factor by itself."""
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CannotPad(f"a tensor of layout {value.layout}")
        return tuple((self.factor(self.expression(size)),) for size in value.shape)

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
            leaves = pytree.tree_map(lambda leaf: tuple((Factor(s, s),) for s in leaf.shape), value)
            dims = leaves
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
        if _is_size(value) or isinstance(value, int | float | bool):
            if not _is_size(value):
                return value
            return self.padded(self.expression(value))
        operands = [made[operand] for operand in node.all_input_nodes]
        tensors = [operand for operand in operands if isinstance(operand, fx.Node)]
        sizes = [source for source in node.all_input_nodes if self._depends(source)]
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        grows = any(is_loose(dim) for leaf in leaves for dim in self.dims_of(leaf))
        rule = _RULES.get(node.target)
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
        elif sizes and rule not in _TAKE_SIZES:
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
        if _is_size(value):
            return not isinstance(self.expression(value), int)
        return isinstance(value, torch.SymFloat | torch.SymBool) and source.op != "placeholder"

    def _has_garbage(self, node: fx.Node) -> bool:
        dims = self._dims[node]
        leaves = pytree.tree_leaves(dims)
        return any(leaf.loose for leaf in leaves if isinstance(leaf, Factor))

    def _check_results(self, output: fx.Node, made: Mapping[fx.Node, Any]) -> None:
        for item in pytree.tree_leaves(output.args[0]):
            node = made.get(item) if isinstance(item, fx.Node) else None
            if isinstance(node, fx.Node) and any(
                len(dim) > 1 and is_loose(dim) for dim in self.dims(node)
            ):
                raise CannotPad("a result has a dimension that is a product of padded ones")


def _grows(size: Any) -> bool:
    """Whether an expression is a polynomial that no growing symbol makes smaller."""
    symbols = sorted(size.free_symbols, key=str)
    if not size.is_polynomial(*symbols):
        return False
    slopes = [sympy.Poly(sympy.diff(size, symbol), *symbols) for symbol in symbols]
    return all(number >= 0 for slope in slopes for number in slope.coeffs())


def is_loose(dim: Dim) -> bool:
    """Whether a dimension has garbage."""
    return any(factor.loose for factor in dim)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _check_shape(value: Any, dims: Any) -> None:
    if not isinstance(value, torch.Tensor):
        for leaf, inner in zip(value, dims, strict=True):
            _check_shape(leaf, inner)
        return
    shape = tuple(math.prod(factor.padded for factor in dim) for dim in dims)
    if tuple(value.shape) != shape:
        raise CannotPad(f"a result has shape {tuple(value.shape)}, not {shape}")


# ---------------------------------------------------------------------------------------- rules
# Each takes the builder, the symbolic node, and the arguments in the padded graph.

Rule = Callable[..., Any]
_RULES: dict[Any, Rule] = {}
_TAKE_SIZES: set[Rule] = set()


def _rule(*ops: Any, sizes: bool = False) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, function))
        if sizes:
            _TAKE_SIZES.add(function)
        return function

    return register


#: Of integers, these raise for values that garbage may have.
_RAISE = {aten.div, aten.floor_divide, aten.remainder, aten.fmod, aten.bitwise_left_shift}


@_rule(
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
)
def _pointwise(b: _Builder, target: Any, value: Any, *args: Any, **kwargs: Any) -> fx.Node:
    random = torch.Tag.nondeterministic_seeded in target.tags
    raises = target.overloadpacket in _RAISE and not value.is_floating_point()
    if random or raises or not isinstance(value, torch.Tensor):
        raise CannotPad(f"{target} draws numbers, or may raise for what is padded")
    leaves = pytree.tree_leaves((args, kwargs))
    operands = [b.dims(leaf) for leaf in leaves if isinstance(leaf, fx.Node)]
    dims = _broadcast(operands, value.dim())
    return b.emit(target, *args, dims=dims, **kwargs)


def _with_tensor(target: Any) -> Any:
    """The overload that takes a tensor where ``target`` takes a number."""
    if target._overloadname in ("Scalar", "Tensor_Scalar"):
        packet = target.overloadpacket
        for name in ("Tensor", "Tensor_Tensor"):
            if name in packet.overloads():
                return getattr(packet, name)
    return target


def _broadcast(operands: Sequence[Dims], rank: int) -> Dims:
    result: list[Dim] = []
    for position in range(-rank, 0):
        found = [dims[position] for dims in operands if len(dims) >= -position]
        wide = [_tidy(dim) for dim in found if _tidy(dim)]
        if any(dim != wide[0] for dim in wide):
            raise CannotPad("operands of different padded sizes meet")
        result.append(wide[0] if wide else (Factor(1, 1),))
    return tuple(result)


def _tidy(dim: Dim) -> Dim:
    """A dimension with its static factors merged, without ones."""
    result: list[Factor] = []
    for factor in dim:
        if not factor.loose and result and not result[-1].loose:
            number = factor.padded * result[-1].padded
            result[-1] = Factor(number, number)
        elif factor.loose or factor.padded != 1:
            result.append(factor)
    return tuple(factor for factor in result if factor.loose or factor.padded != 1)


@_rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    sizes=True,
)
def _view(b: _Builder, node: fx.Node, x: fx.Node, *_: Any) -> fx.Node:
    rest = list(_tidy(tuple(factor for dim in b.dims(x) for factor in dim)))
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
    if isinstance(size, int):
        return size
    return int(size.as_coeff_Mul()[0]) if size.as_coeff_Mul()[0].is_Integer else 1


def _quotient(size: Any, divisor: Any) -> Any:
    quotient = sympy.cancel(sympy.sympify(size) / divisor)
    if sympy.denom(quotient) != 1:
        raise CannotPad("a view that cuts through a padded dimension")
    return int(quotient) if quotient.is_Integer else quotient


@_rule(aten.permute.default)
def _permute(b: _Builder, node: fx.Node, x: fx.Node, order: Sequence[int]) -> fx.Node:
    return b.emit(node.target, x, order, dims=tuple(b.dims(x)[axis] for axis in order))


@_rule(aten.t.default)
def _t(b: _Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    return b.emit(node.target, x, dims=tuple(reversed(b.dims(x))))


@_rule(aten.transpose.int)
def _transpose(b: _Builder, node: fx.Node, x: fx.Node, first: int, second: int) -> fx.Node:
    dims = list(b.dims(x))
    dims[first], dims[second] = dims[second], dims[first]
    return b.emit(node.target, x, first, second, dims=tuple(dims))


@_rule(aten.expand.default, sizes=True)
def _expand(b: _Builder, node: fx.Node, x: fx.Node, size: Any, **_: Any) -> fx.Node:
    wanted = b.dims_of(node.meta["val"])
    own = b.dims(x)
    dims = list(wanted)
    for position in range(-len(own), 0):
        if _tidy(own[position]):
            dims[position] = own[position]
    shape = [math.prod(factor.padded for factor in dim) for dim in dims]
    return b.emit(aten.expand.default, x, shape, dims=tuple(dims))


def _single(dim: Dim) -> Factor:
    loose = [factor for factor in _tidy(dim) if factor.loose]
    if len(loose) != 1 or len(_tidy(dim)) != 1:
        raise CannotPad("a position in a product of padded dimensions")
    return loose[0]


@_rule(aten.slice.Tensor, sizes=True)
def _slice(
    b: _Builder,
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
        if any(_is_size(arg.meta.get("val")) for arg in node.args[2:] if isinstance(arg, fx.Node)):
            raise CannotPad("a slice whose bounds depend on a padded size")
        dims[axis] = (made,)
        return b.emit(node.target, x, axis, start, end, step, dims=tuple(dims))
    whole = _single(own)
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


@_rule(aten.select.int)
def _select(b: _Builder, node: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node:
    dims = list(b.dims(x))
    axis = dim % len(dims)
    own = dims.pop(axis)
    if not is_loose(own) or index >= 0:
        return b.emit(node.target, x, axis, index, dims=tuple(dims))
    offset = b.emit(aten.full.default, [1], index, dtype=torch.int64)
    place = b.emit(aten.add.Tensor, offset, b.real(_single(own).size))
    kept = [*dims[:axis], (Factor(1, 1),), *dims[axis:]]
    row = b.emit(aten.index_select.default, x, axis, place, dims=tuple(kept))
    return b.emit(aten.squeeze.dim, row, axis, dims=tuple(dims))


@_rule(aten.unbind.int)
def _unbind(b: _Builder, node: fx.Node, x: fx.Node, dim: int = 0) -> fx.Node:
    dims = list(b.dims(x))
    if is_loose(dims.pop(dim)):
        raise CannotPad("as many results as a padded size")
    return b.emit(node.target, x, dim, dims=(tuple(dims),) * len(node.meta["val"]))


@_rule(aten.split.Tensor, aten.split_with_sizes.default)
def _split(b: _Builder, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> fx.Node:
    dims = list(b.dims(x))
    axis = dim % len(dims)
    if is_loose(dims[axis]):
        raise CannotPad("parts of a padded dimension")
    parts = [int(part.shape[axis]) for part in node.meta["val"]]
    made = tuple((*dims[:axis], (Factor(n, n),), *dims[axis + 1 :]) for n in parts)
    return b.emit(node.target, x, sizes, axis, dims=made)


@_rule(aten.cat.default)
def _cat(b: _Builder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> fx.Node:
    parts = [part for part in tensors if part.meta["val"].dim() == node.meta["val"].dim()]
    rank = node.meta["val"].dim()
    axis = dim % rank
    others = [
        _broadcast([(b.dims(part)[position],) for part in parts], 1)[0]
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
        size = b.real(_single(before).size if is_loose(before) else math.prod(_padded(before)))
        begin = size if begin is None else b.emit(aten.add.Tensor, begin, size)
        steps = b.emit(aten.arange.default, math.prod(_padded(length)))
        place = b.emit(aten.add.Tensor, steps, begin)
        result = b.emit(aten.index_copy.default, result, axis, place, part, dims=dims)
    return result


def _padded(dim: Dim) -> list[int]:
    return [factor.padded for factor in dim]


@_rule(
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
def _create(b: _Builder, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
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


def _lowest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _reduction(neutral: Callable[[torch.dtype], Any]) -> Rule:
    def rule(
        b: _Builder,
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

    return rule


for _ops, _neutral in (
    ((aten.sum.default, aten.sum.dim_IntList, aten.any.default, aten.any.dim), lambda _: 0),
    ((aten.prod.default, aten.prod.dim_int, aten.all.default, aten.all.dim), lambda _: 1),
    ((aten.amax.default, aten.max.default), _lowest),
    ((aten.amin.default, aten.min.default), _highest),
):
    _rule(*_ops)(_reduction(_neutral))


@_rule(aten.mean.default, aten.mean.dim)
def _mean(
    b: _Builder, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False, **kwargs: Any
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


@_rule(aten._softmax.default, aten._log_softmax.default)
def _softmax(b: _Builder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    dims = b.dims(x)
    x = b.masked(x, [dim % len(dims)], -math.inf)
    return b.emit(node.target, x, dim, half_to_float, dims=dims)


@_rule(aten.cumsum.default, aten.cumprod.default)
def _cumulative(b: _Builder, node: fx.Node, x: fx.Node, dim: int, **kwargs: Any) -> fx.Node:
    # What comes before does not depend on the garbage behind it.
    if len(b.dims(x)[dim]) > 1:
        raise CannotPad("a cumulative operator over a product of padded dimensions")
    return b.emit(node.target, x, dim, dims=b.dims(x), **kwargs)


@_rule(aten.native_layer_norm.default, sizes=True)
def _layer_norm(
    b: _Builder, node: fx.Node, x: fx.Node, shape: Sequence[int], *rest: Any
) -> fx.Node:
    dims = b.dims(x)
    kept = len(dims) - len(shape)
    if any(map(is_loose, dims[kept:])):
        raise CannotPad("a norm over a padded dimension")
    rows = (*dims[:kept], *[(Factor(1, 1),)] * len(shape))
    return b.emit(node.target, x, shape, *rest, dims=(dims, rows, rows))


@_rule(operator.getitem)
def _getitem(b: _Builder, node: fx.Node, source: fx.Node, index: int) -> fx.Node:
    return b.emit(node.target, source, index, dims=b.dims(source)[index])


# Products: rows are independent; garbage along the contracted dimension becomes zero.


def _product(b: _Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> tuple[fx.Node, fx.Node, Dims]:
    left, right = b.dims(x), b.dims(y)
    if is_loose(left[-1]) or is_loose(right[-2]):
        x, y = b.masked(x, [len(left) - 1], 0), b.masked(y, [len(right) - 2], 0)
    batch = tuple(
        _broadcast([(p,), (q,)], 1)[0] for p, q in zip(left[:-2], right[:-2], strict=True)
    )
    return x, y, (*batch, left[-2], right[-1])


@_rule(aten.mm.default, aten.bmm.default)
def _matmul(b: _Builder, node: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
    x, y, dims = _product(b, node, x, y)
    return b.emit(node.target, x, y, dims=dims)


@_rule(aten.addmm.default)
def _addmm(
    b: _Builder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, **scales: Any
) -> fx.Node:
    x, y, dims = _product(b, node, x, y)
    _broadcast([b.dims(bias), dims], 2)
    return b.emit(node.target, bias, x, y, dims=dims, **scales)


@_rule(aten.embedding.default)
def _embedding(b: _Builder, node: fx.Node, weight: fx.Node, index: fx.Node, *rest: Any) -> fx.Node:
    dims = b.dims(index)
    if b.loose(weight):
        raise CannotPad("a padded table of an embedding")
    index = b.masked(index, range(len(dims)), 0)  # garbage is out of range
    return b.emit(node.target, weight, index, *rest, dims=(*dims, b.dims(weight)[1]))


_attention = aten._scaled_dot_product_flash_attention_for_cpu.default


@_rule(_attention)
def _flash_attention(
    b: _Builder,
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
        dtype = query.meta["val"].dtype
        if attn_mask is None:
            shape = [math.prod(_padded(queries[2])), math.prod(_padded(keys[2]))]
            attn_mask = b.emit(aten.zeros.default, shape, dtype=dtype, dims=(queries[2], keys[2]))
        elif attn_mask.meta["val"].dtype is torch.bool:
            raise CannotPad("a boolean mask of attention")
        attn_mask = b.masked(attn_mask, [len(b.dims(attn_mask)) - 1], -math.inf)
    dims = (*queries[:3], b.dims(value)[3])
    made = (dims, queries[:3])
    return b.emit(
        node.target, query, key, value, dropout, causal, attn_mask=attn_mask, scale=scale, dims=made
    )


def _batched(*operands: int) -> Rule:
    """Operators that treat each element of dimension 0 by itself."""

    def rule(b: _Builder, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
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

    return rule


_rule(
    aten.convolution.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten._native_batch_norm_legit_no_training.default,
)(_batched())
