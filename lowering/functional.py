"""Operators that change their arguments, as calls that return the new values instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Functional:
    """The target of a node that calls a mutating operator by a lowering of the user's.

    The call takes the operator's arguments, no two of which share memory if one is changed. It
    returns a tuple: the operator's results, without those that are changed arguments themselves,
    then the new value of each argument that the schema says is changed, in its order. A list
    gives as many values as it has tensors, ``None`` gives none.
    """

    op: torch._ops.OpOverload

    @property
    def __name__(self) -> str:  # torch.fx prints a call by the name of its target
        return str(self.op).replace(".", "_")

    def __str__(self) -> str:
        return str(self.op)

    def changed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
        """What the operator changes of these arguments, of whatever kind they are."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from (leaf for leaf in pytree.tree_leaves(value) if leaf is not None)

    def own_results(self) -> tuple[int, ...]:
        """Positions of the results that are not changed arguments."""
        returns = self.op._schema.returns
        return tuple(index for index, item in enumerate(returns) if item.alias_info is None)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run in eager PyTorch, on copies."""
        changed = {id(value) for value in self.changed(args, kwargs)}
        args, kwargs = pytree.tree_map(
            lambda leaf: _copy(leaf, leaf.stride()) if id(leaf) in changed else leaf, (args, kwargs)
        )
        results = self.op(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        own = (results[index] for index in self.own_results())
        return (*own, *self.changed(args, kwargs))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a view lies in its base: strides and offset count from the base's first element.

    ``whole`` means all of it; ``slice`` is the dimension, start and end if it is such.
    """

    base: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool = False
    slice: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Opaque:
    """The target of a node that calls a mutating operator in eager PyTorch.

    The call takes bases, and arguments by name; ``places`` says where in which base each argument
    lies that is changed. It returns the operator's results (``None`` without any) and new bases.
    PyTorch's ``auto_functionalized_v2`` would do as much, but takes offsets from the storage that
    an input had while it was traced, and hides changes from an argument that is only read.
    """

    op: torch._ops.OpOverload
    places: tuple[tuple[str, Any], ...]
    strides: tuple[tuple[int, ...], ...]
    reason: str

    @property
    def __name__(self) -> str:
        return str(self.op).replace(".", "_")

    def __str__(self) -> str:
        return str(self.op)

    def __call__(self, bases: Sequence[torch.Tensor], arguments: dict[str, Any]) -> tuple[Any, ...]:
        """Run in eager PyTorch, on copies of the bases."""
        copies = [_copy(*pair) for pair in zip(bases, self.strides, strict=True)]
        addresses = [base.untyped_storage().data_ptr() for base in bases]

        def seen(leaf: Any) -> Any:
            """An argument that is read, as a view of the copy if it shares memory with a base."""
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                return leaf
            address = leaf.untyped_storage().data_ptr()
            if address not in addresses or not leaf.numel():
                return leaf
            index = addresses.index(address)
            if bases[index].stride() != copies[index].stride():
                return leaf
            offset = leaf.storage_offset() - bases[index].storage_offset()
            return copies[index].as_strided(leaf.shape, leaf.stride(), offset)

        def changed(place: Any) -> Any:
            if isinstance(place, tuple):
                return [changed(each) for each in place]
            if place is None:
                return None
            return copies[place.base].as_strided(place.size, place.stride, place.offset)

        views = {name: changed(place) for name, place in self.places}
        results = self.op(**pytree.tree_map(seen, arguments), **views)
        return (*(results if isinstance(results, tuple) else (results,)), *copies)


# A view of a base that is dense, and the base with another value there: functional, unlike ATen's
# ``as_strided``, and by offsets from the base's first element. ``base_stride`` says how the base
# lies in memory for the other strides.
torch.library.define(
    "neuron_compile::take_view",
    "(Tensor base, int[] base_stride, int[] size, int[] stride, int offset) -> Tensor",
)
torch.library.define(
    "neuron_compile::put_view",
    "(Tensor base, Tensor value, int[] base_stride, int[] size, int[] stride, int offset)"
    " -> Tensor",
)
take_view = torch.ops.neuron_compile.take_view.default
put_view = torch.ops.neuron_compile.put_view.default


@torch.library.impl("neuron_compile::take_view", "CompositeExplicitAutograd")
def _take_view(
    base: torch.Tensor,
    base_stride: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    return _copy(base, base_stride).as_strided(size, stride, offset).contiguous()


@torch.library.impl("neuron_compile::put_view", "CompositeExplicitAutograd")
def _put_view(
    base: torch.Tensor,
    value: torch.Tensor,
    base_stride: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    copy = _copy(base, base_stride)
    copy.as_strided(size, stride, offset).copy_(value)
    return copy


def _copy(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides, whatever they are."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
