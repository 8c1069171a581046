"""Custom operators that change their arguments, out of the form that AOT Autograd gives them.

``auto_functionalized_v2(op, **arguments, _all_bases=bases)`` describes each changed argument as a
view of one of the bases; it returns the operator's results and the new bases.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .classify import dense_permutation
from .lowering.functional import Functional, Opaque, Place, put_view, take_view
from .lowering.registry import lookup
from .torch_internals import copied, is_out_operator, memory, mutated_places

aten = torch.ops.aten
auto_functionalized = torch.ops.higher_order.auto_functionalized_v2


def functional_calls(module: fx.GraphModule) -> fx.GraphModule:
    """``module`` (static sizes), or a copy in which mutating operators are called another way.

    Those with a lowering take values and return new ones, between views of the bases and their
    scatters; all others stay opaque, with the reason.
    """
    if not any(map(_is_call, module.graph.nodes)):
        return module
    module = copied(module)
    for node in list(filter(_is_call, module.graph.nodes)):
        call = _Call(module.graph, node)
        reason = call.why_not()
        if reason is None:
            with module.graph.inserting_before(node):
                call.replace()
        else:
            call.keep(reason)
    return module


def _is_call(node: fx.Node) -> bool:
    # Higher-order operators that change their operands come in this form, too.
    return node.target is auto_functionalized and isinstance(node.args[0], torch._ops.OpOverload)


class _Call:
    """One call, and the functional one to take its place."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        op: Any = node.args[0]
        self.target = Functional(op)
        self._graph = graph
        self._node = node
        bases: Any = node.kwargs.get("_all_bases", ())
        self._bases: list[fx.Node] = list(bases)
        self._out = is_out_operator(op)
        arguments = {name: arg for name, arg in node.kwargs.items() if name != "_all_bases"}
        places: Mapping[str, Any] = {}
        if not self._out:
            arguments, places = mutated_places(op, arguments, [_value(x) for x in self._bases])
        self._arguments = arguments
        self._places = places
        self._views: list[Place] = [
            place for place in pytree.tree_leaves(dict(places)) if place is not None
        ]
        value = node.meta["val"]
        self._promised: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)

    def keep(self, reason: str) -> None:
        """Leave the operator to eager PyTorch."""
        if self._out:
            return
        places = tuple(
            (name, tuple(place) if isinstance(place, list) else place)
            for name, place in self._places.items()
        )
        strides = tuple(tuple(_value(base).stride()) for base in self._bases)
        self._node.target = Opaque(self.target.op, places, strides, reason)
        self._node.args, self._node.kwargs = (self._bases, dict(self._arguments)), {}

    def why_not(self) -> str | None:
        """Why the operator stays in eager PyTorch."""
        if lookup(self.target) is None:
            return f"no lowering is registered for {self.target}"
        if any(itertools.starmap(_overlap, itertools.combinations(self._views, 2))):
            return "arguments that it changes share memory"
        read = [arg for arg in pytree.tree_leaves(self._arguments) if isinstance(arg, fx.Node)]
        memories = {memory(base) for base in self._bases}
        if any(memory(arg) in memories for arg in read):
            return "an argument that it reads shares memory with one that it changes"
        strided = [view for view in self._views if not view.whole and view.slice is None]
        if any(dense_permutation(_value(self._bases[view.base])) is None for view in strided):
            return "it changes a part of a tensor with gaps"
        if strided and self._returned_in_place():
            return "it returns a strided view that it changed"
        return None

    def _returned_in_place(self) -> bool:
        returns = self.target.op._schema.returns
        return not self._out and any(item.alias_info is not None for item in returns)

    def replace(self) -> None:
        """Add the functional call and what surrounds it, and remove the node."""
        target = self.target
        args, kwargs = _by_schema(target.op, self._outs() if self._out else self._cut())
        own = [self._promised[index] for index in target.own_results()]
        new = self._promised if self._out else [self._new_value(view) for view in self._views]
        call = self._add(target, args, (*own, *new), kwargs)
        parts: list[fx.Node | None] = [
            self._add(operator.getitem, (call, index), value)
            for index, value in enumerate(call.meta["val"])
        ]
        if not self._out:
            parts = [*parts[: len(own)], *self._pasted(parts[len(own) :])]
        self._hand_over(parts)

    def _outs(self) -> dict[str, Any]:
        """The arguments, with empty tensors for ``out`` operators to fill."""
        given = dict(self._arguments)
        for argument, value in zip(_written(self.target.op), self._promised, strict=True):
            for what in ("size", "stride", "dtype", "device"):
                del given[f"_{argument.name}_{what}"]
            place = (list(value.shape), list(value.stride()))
            options = {"dtype": value.dtype, "device": value.device}
            empty = value.new_empty_strided(*place)
            given[argument.name] = self._add(aten.empty_strided.default, place, empty, options)
        return given

    def _cut(self) -> dict[str, Any]:
        """The arguments, with those that change cut out of their bases."""

        def cut(view: Place | None) -> fx.Node | None:
            return None if view is None else self._view(self._bases[view.base], view)

        return {**self._arguments, **pytree.tree_map(cut, dict(self._places))}

    def _view(self, base: fx.Node, view: Place) -> fx.Node:
        if view.whole:
            return base
        if view.slice is not None:
            args = (base, *view.slice)
            return self._add(aten.slice.Tensor, args, aten.slice.Tensor(_value(base), *view.slice))
        return self._add(take_view, (base, *self._place(view)), self._fresh(view))

    def _new_value(self, view: Place) -> torch.Tensor:
        """What describes the new value of an argument: the new base itself if it is all of it."""
        return self._new_base(view.base) if view.whole else self._fresh(view)

    def _new_base(self, index: int) -> torch.Tensor:
        value: torch.Tensor = self._promised[index - len(self._bases)]
        return value

    def _fresh(self, view: Place) -> torch.Tensor:
        """What describes a view's values in memory of their own."""
        value: torch.Tensor = _value(self._bases[view.base]).new_empty(view.size)
        return value

    def _place(self, view: Place) -> tuple[list[int], list[int], list[int], int]:
        """The last arguments of ``take_view`` and ``put_view``."""
        base = _value(self._bases[view.base])
        return list(base.stride()), list(view.size), list(view.stride), view.offset

    def _pasted(self, new: Sequence[Any]) -> list[fx.Node | None]:
        """The results that are no results of the functional call, then the new bases."""
        bases = list(self._bases)
        last = {view.base: position for position, view in enumerate(self._views)}
        for position, (view, value) in enumerate(zip(self._views, new, strict=True)):
            base = bases[view.base]
            # Only the last one shares memory with results that are views of the base.
            final = last[view.base] == position
            described = (
                self._new_base(view.base) if final else _value(base).new_empty(_value(base).shape)
            )
            if view.whole:
                bases[view.base] = value
            elif view.slice is not None:
                bases[view.base] = self._add(
                    aten.slice_scatter.default, (base, value, *view.slice), described
                )
            else:
                bases[view.base] = self._add(put_view, (base, value, *self._place(view)), described)
        before: list[fx.Node | None] = []
        if self._returned_in_place():
            (view,) = self._views
            before = [self._view(bases[view.base], view)]
        elif not self.target.op._schema.returns:
            before = [None]
        return [*before, *bases]

    def _hand_over(self, results: Sequence[fx.Node | None]) -> None:
        """Let the users of the node take ``results``."""
        for user in list(self._node.users):
            if user.target is operator.getitem:
                found = results[user.args[1]]  # type: ignore[index]
                if found is not None:  # else nobody uses it
                    user.replace_all_uses_with(found)
                self._graph.erase_node(user)
        if self._node.users:  # an ``out`` operator of one result
            self._node.replace_all_uses_with(results[0])  # type: ignore[arg-type]
        self._graph.erase_node(self._node)

    def _add(
        self,
        target: Any,
        args: tuple[Any, ...],
        value: Any,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs or {})
        node.meta = {**self._node.meta, "val": value}
        return node


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _overlap(one: Place, other: Place) -> bool:
    """Whether two views have an element of memory in common."""
    if one.base != other.base or 0 in one.size or 0 in other.size:
        return False
    touched = torch.zeros(max(map(_end, (one, other))), dtype=torch.bool)
    touched.as_strided(one.size, one.stride, one.offset).fill_(True)
    return bool(touched.as_strided(other.size, other.stride, other.offset).any())


def _end(view: Place) -> int:
    steps = zip(view.size, view.stride, strict=True)
    return view.offset + 1 + sum((size - 1) * stride for size, stride in steps)


def _written(op: Any) -> list[Any]:
    return [
        argument
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _by_schema(op: Any, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as they are called: by position, but those that have names only."""
    arguments = op._schema.arguments
    args = tuple(given[argument.name] for argument in arguments if not argument.kwarg_only)
    kwargs = {item.name: given[item.name] for item in arguments if item.kwarg_only}
    return args, kwargs
