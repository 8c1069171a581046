"""The sizes of a padded program: buckets, padding of the arguments, cutting of the results."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils import _pytree as pytree

from .torch_internals import size_expression

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
        places = {}
        self._loose: dict[int, list[Any]] = {}
        for index, value in enumerate(self._values):
            shape = [size_expression(size) for size in getattr(value, "shape", ())]
            for dim, size in enumerate(shape):
                if not isinstance(size, int):
                    self._loose[index] = shape
                    if size.is_Symbol:
                        places[size] = (index, dim)
        self._places = dict(sorted(places.items(), key=str))
        self._exact = {
            expression: index
            for index, value in enumerate(self._values)
            if isinstance(value, torch.SymInt)
            and getattr(expression := size_expression(value), "is_Symbol", False)
            and expression not in self._places
        }
        self._first: Mapping[Any, int] | None = None
        self._varied: set[Any] = set()
        self._refused: set[frozenset[Any]] = set()
        #: Whether no size can be padded, so that calls need not ask.
        self.hopeless = not self._places or not self._known()
        results = pytree.tree_leaves(module.graph.output_node().args[0])
        self._results = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
        self._shapes = self._function(self._layouts())

    def of(self, args: Sequence[Any]) -> dict[Any, int]:
        """The values of the symbols in a call."""
        return {symbol: args[i].shape[dim] for symbol, (i, dim) in self._places.items()}

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
            not isinstance(size, int) and not size.free_symbols.isdisjoint(padded)
            for size in self._loose.get(index, ())
        )

    def pad(self, args: Sequence[Any], padded: Mapping[Any, int]) -> list[Any]:
        """The arguments, those of symbolic sizes in larger tensors with zeros at the end.

        After them the real sizes, as the padded program takes them.
        """
        real = self.of(args)
        values = {**real, **padded}
        padded_args = list(args)
        for index, shape in self._loose.items():
            arg = args[index]
            if self._depends(index, padded):
                whole = [s if isinstance(s, int) else int(s.subs(values)) for s in shape]
                if list(arg.shape) != whole or not arg.is_contiguous():
                    padded_args[index] = _padded(arg.detach(), whole)
        return padded_args + [torch.tensor(real[symbol]) for symbol in padded]

    def cut(self, results: Any, real: Mapping[Any, int]) -> list[Any]:
        """The results of the padded program in their real sizes and eager's strides."""
        numbers = iter(self._shapes(*real.values()))
        found = []
        for result, value in zip(results, self._results, strict=True):
            if isinstance(value, torch.SymInt):
                found.append(next(numbers))
            elif isinstance(value, torch.Tensor):
                shape = [next(numbers) for _ in value.shape]
                stride = [next(numbers) for _ in value.shape]
                found.append(_cut(result, shape, stride))
            else:
                found.append(result)
        return found

    def _known(self) -> bool:
        symbols = {
            symbol
            for shape in self._loose.values()
            for size in shape
            if not isinstance(size, int)
            for symbol in size.free_symbols
        }
        return symbols <= set(self._places)

    def _bucket(self, size: int) -> int | None:
        if not self._buckets:
            return max(_SMALLEST, 1 << (size - 1).bit_length())
        place = bisect.bisect_left(self._buckets, size)
        return self._buckets[place] if place < len(self._buckets) else None

    def _layouts(self) -> list[Any]:
        """Sizes and strides of the results, and numbers among them, in one list."""
        found: list[Any] = []
        for value in self._results:
            if isinstance(value, torch.SymInt):
                found.append(size_expression(value))
            elif isinstance(value, torch.Tensor):
                found += map(size_expression, (*value.shape, *value.stride()))
        known = set(self._places)
        for expression in found:
            if not isinstance(expression, int) and not expression.free_symbols <= known:
                self.hopeless = True
        return found

    def _function(self, expressions: list[Any]) -> Any:
        if self.hopeless:
            return None
        return sympy.lambdify(list(self._places), expressions, "math")


def _padded(arg: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    whole = arg.new_zeros(shape)
    whole[tuple(map(slice, arg.shape))].copy_(arg)
    return whole


def _cut(result: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    if list(result.shape) == shape and list(result.stride()) == stride:
        return result
    real = torch.empty_strided(shape, stride, dtype=result.dtype)
    return real.copy_(result[tuple(map(slice, shape))])
