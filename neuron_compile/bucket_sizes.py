"""The sizes of a padded program: buckets, padding of the arguments, cutting of the results."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

from .bucket import Padding
from .torch_internals import memory, size_expression

#: The smallest power of two that sizes are padded to.
_SMALLEST = 16


class Sizes:
    """The symbols of a graph that are sizes of its arguments, and what depends on them.

    At first all of them are padded. Once two calls have differed, only those that ever did: with
    ``dynamic=True`` all sizes are symbols, of weights too. A caller holds a lock around ``padded``.
    """

    def __init__(self, module: fx.GraphModule, buckets: tuple[int, ...]) -> None:
        self._buckets = buckets
        self._values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
        #: Shapes and strides of arguments in which there are symbols.
        self._loose: dict[int, list[Any]] = {}
        self._strides: dict[int, list[Any]] = {}
        #: Where the value of a symbol is found: an argument, a dimension of it (``None``: the
        #: argument is a number itself), and what that is a multiple by.
        places: dict[Any, tuple[int, int | None, int]] = {}
        numbers: dict[Any, int] = {}
        for index, value in enumerate(self._values):
            if isinstance(value, torch.SymInt):
                numbers[size_expression(value)] = index
                continue
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            shape = [size_expression(size) for size in value.shape]
            strides = [size_expression(step) for step in value.stride()]
            if not all(isinstance(number, int) for number in (*shape, *strides)):
                self._loose[index], self._strides[index] = shape, strides
            for dim, size in enumerate(shape):
                if not isinstance(size, int):
                    number, symbol = size.primitive()
                    if symbol.is_Symbol and (symbol not in places or number == 1):
                        places[symbol] = (index, dim, int(number))
        in_shapes = self._symbols()
        numbers = {s: n for s, n in numbers.items() if getattr(s, "is_Symbol", False)}
        places.update((s, (n, None, 1)) for s, n in numbers.items() if s in in_shapes - set(places))
        self._places = dict(sorted(places.items(), key=lambda item: str(item[0])))
        self._exact = {s: index for s, index in numbers.items() if s not in places}
        self._first: Mapping[Any, int] | None = None
        self._varied: set[Any] = set()
        self._refused: set[frozenset[Any]] = set()
        #: Whether no size can be padded, so that calls need not ask.
        self.hopeless = not self._places or not in_shapes <= set(self._places)
        placeholders = module.graph.find_nodes(op="placeholder")
        positions = {node: index for index, node in enumerate(placeholders)}
        results = pytree.tree_leaves(module.graph.output_node().args[0])
        self._results = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
        #: For each result: the argument that it is, or is a view of, and the first result that
        #: it is, if any.
        self._arguments = [positions.get(r) for r in results]
        memories = {memory(node): index for node, index in positions.items()}
        self._bases = [memories.get(memory(r)) if memory(r) is not None else None for r in results]
        self._first_of = [results.index(r) for r in results]
        self._shapes = self._function(self._layouts())

    def of(self, args: Sequence[Any]) -> dict[Any, int]:
        """The values of the symbols in a call."""
        return {
            symbol: args[index] if dim is None else args[index].shape[dim] // number
            for symbol, (index, dim, number) in self._places.items()
        }

    def exact(self, args: Sequence[Any], padded: Mapping[Any, int]) -> dict[Any, int]:
        """The values of the symbols that are not padded."""
        numbers = {symbol: args[index] for symbol, index in self._exact.items()}
        return {**numbers, **{s: n for s, n in self.of(args).items() if s not in padded}}

    def padded(self, real: Mapping[Any, int]) -> dict[Any, int] | None:
        """The buckets of the symbols that are to be padded; ``None`` where there are none."""
        if self._first is None:
            self._first = dict(real)
        self._varied |= {symbol for symbol, size in real.items() if self._first[symbol] != size}
        chosen = frozenset(self._varied or real)
        if chosen in self._refused:
            return None
        found = {}
        for symbol, size in real.items():
            if symbol in chosen:
                bucket = self._bucket(size)
                if bucket is None:
                    return None
                found[symbol] = bucket
        return found

    def refuse(self, padded: Mapping[Any, int]) -> None:
        """Note that the graph does not bear padding of these symbols."""
        self._refused.add(frozenset(padded))
        self.hopeless = self._varied == set(self._places) and bool(self._refused)

    def key(self, args: Sequence[Any], padded: Mapping[Any, int]) -> tuple[Any, ...]:
        """What a padded program depends on: buckets, other numbers, layouts of other tensors."""
        others = [
            (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg
            for index, arg in enumerate(args)
            if not self._depends(index, padded)
        ]
        return ("padded", *padded.items(), *self.exact(args, padded).values(), *others)

    def _depends(self, index: int, padded: Mapping[Any, int]) -> bool:
        value = self._values[index]
        if isinstance(value, torch.SymInt):
            return True  # it is among the padded or the exact ones
        return any(
            not isinstance(number, int) and not number.free_symbols.isdisjoint(padded)
            for number in (*self._loose.get(index, ()), *self._strides.get(index, ()))
        )

    def padder(self, padding: Padding) -> Callable[[Sequence[Any]], list[Any]]:
        """A function that gives the arguments of a padded program.

        Tensors of padded sizes go to larger ones with zeros at the ends, and after all arguments
        come the real sizes.
        """
        plans = []
        for index, shape in self._loose.items():
            if self._depends(index, padding.padded):
                dims = [padding.dim(padding.expression(size)) for size in shape]
                flat = [math.prod(factor.padded for factor in dim) for dim in dims]
                split = [factor.padded for dim in dims for factor in dim]
                real = self._function([factor.size for dim in dims for factor in dim])
                plans.append((index, flat, split, real))
        symbols = list(padding.padded)

        def pad(args: Sequence[Any]) -> list[Any]:
            sizes = self.of(args)
            padded = list(args)
            for index, flat, split, real in plans:
                arg = args[index]
                if list(arg.shape) != flat or not arg.is_contiguous():
                    padded[index] = _padded(arg.detach(), flat, split, real(*sizes.values()))
            return padded + [torch.tensor(sizes[symbol]) for symbol in symbols]

        return pad

    def returned(self, args: Sequence[Any]) -> dict[int, Any]:
        """The arguments that are results, by their positions."""
        return {index: args[index] for index in self._bases if index is not None}

    def cutter(self, splits: Sequence[Any]) -> Callable[..., list[Any]]:
        """A function that gives results of a padded program their real sizes and eager's strides.

        It takes those results, the values of the symbols and the arguments that are results.
        ``splits`` are the sizes in factors of results with products among their dimensions.
        """
        factors = [None if split is None else self._function(split) for split in splits]

        def cut(results: Any, real: Mapping[Any, int], returned: Mapping[int, Any]) -> list[Any]:
            numbers = iter(self._shapes(*real.values()))
            found: list[Any] = []
            for index, (result, value) in enumerate(zip(results, self._results, strict=True)):
                made = result
                if isinstance(value, torch.SymInt):
                    made = next(numbers)
                elif isinstance(value, torch.Tensor):
                    shape = [next(numbers) for _ in value.shape]
                    stride = [next(numbers) for _ in value.shape]
                    offset = next(numbers)
                    first, split = self._first_of[index], factors[index]
                    argument, base = self._arguments[index], self._bases[index]
                    if argument is not None:
                        made = returned[argument]
                    elif first < index:
                        made = found[first]
                    elif base is not None:
                        whole = returned[base]
                        made = whole.as_strided(shape, stride, whole.storage_offset() + offset)
                    else:
                        sizes = shape if split is None else split(*real.values())
                        made = _cut(result, shape, stride, sizes)
                found.append(made)
            return found

        return cut

    def _symbols(self) -> set[Any]:
        """The symbols in sizes of arguments."""
        return {
            symbol
            for shape in self._loose.values()
            for size in shape
            if not isinstance(size, int)
            for symbol in size.free_symbols
        }

    def _bucket(self, size: int) -> int | None:
        if not self._buckets:
            return max(_SMALLEST, 1 << (size - 1).bit_length())
        place = bisect.bisect_left(self._buckets, size)
        return self._buckets[place] if place < len(self._buckets) else None

    def _layouts(self) -> list[Any]:
        """Sizes, strides and offsets of the results, and numbers among them, in one list."""
        found: list[Any] = []
        for value, base in zip(self._results, self._bases, strict=True):
            if isinstance(value, torch.SymInt):
                found.append(size_expression(value))
            elif isinstance(value, torch.Tensor):
                found += map(size_expression, (*value.shape, *value.stride()))
                whole = value if base is None else self._values[base]
                begin = size_expression(value.storage_offset())
                found.append(begin - size_expression(whole.storage_offset()))
                alike = [(x.dtype, x.is_conj(), x.is_neg()) for x in (value, whole)]
                if alike[0] != alike[1]:
                    self.hopeless = True
        known = set(self._places)
        for expression in found:
            if not isinstance(expression, int) and not expression.free_symbols <= known:
                self.hopeless = True
        return found

    def _function(self, expressions: list[Any]) -> Any:
        if self.hopeless:
            return None
        return sympy.lambdify(list(self._places), expressions, "math")


def _padded(
    arg: torch.Tensor, flat: Sequence[int], split: Sequence[int], real: Sequence[int]
) -> torch.Tensor:
    """``arg``, whose sizes in factors are ``real``, with zeros up to those of ``split``."""
    whole = arg.new_zeros(split)
    whole[tuple(map(slice, real))].copy_(arg.reshape(real))
    return whole.view(flat)


def _cut(
    result: torch.Tensor, shape: list[int], stride: list[int], split: Sequence[int]
) -> torch.Tensor:
    if list(result.shape) == shape and list(result.stride()) == stride:
        return result
    whole = result[tuple(map(slice, split))].reshape(shape)
    # What is one element in memory along a dimension is written once.
    once = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
    real = torch.empty_strided(once, stride, dtype=result.dtype)
    real.copy_(whole[tuple(map(slice, once))])
    return real.expand(shape) if once != shape else real
