"""torch's tree specs in the form that a package has; see ``package_trees``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from .errors import PackageError
from .package_trees import DATACLASS, NAMED_TUPLE, STRUCT_SEQUENCE, Tree


def leaf(value: Any, what: str) -> Tree:
    """A number, a string or ``None`` in a structure.

    Raises:
        PackageError: for anything else.
    """
    if isinstance(value, bool | int | float | str | None):
        return Tree("value", value=value)
    raise PackageError(
        f"{what} is a {type(value).__name__}; a package takes tensors, numbers, strings and None"
    )


def structure(spec: Any, leaves: Sequence[Tree]) -> Tree:
    """A package's form of torch's tree spec.

    Raises:
        PackageError: for a container that a package cannot name.
    """
    if spec.is_leaf():
        (only,) = leaves
        return only
    items, begin = [], 0
    for child in spec.children():
        items.append(structure(child, leaves[begin : begin + child.num_leaves]))
        begin += child.num_leaves
    inner, found = tuple(items), spec.type
    if found in (tuple, list):
        return Tree(found.__name__, inner)
    if found is dict or found.__name__ == "OrderedDict":
        keys = tuple(spec.context)
        if not all(isinstance(key, str | int) for key in keys):
            raise PackageError(f"a dict has the keys {keys}; a package has strings and integers")
        return Tree("dict" if found is dict else "ordered_dict", inner, keys)
    return _record(spec, inner)


def _record(spec: Any, items: tuple[Tree, ...]) -> Tree:
    """A named tuple, a dataclass or a struct sequence, by what its own unflattening makes."""
    marks = [object() for _ in items]
    example = pytree.SUPPORTED_NODES[spec.type].unflatten_fn(marks, spec.context)
    found = type(example)
    name = f"{found.__module__}:{found.__qualname__}"
    if isinstance(example, tuple):
        fields = getattr(example, "_fields", None)
        if fields is not None:
            return Tree(NAMED_TUPLE, items, tuple(fields), type=name)
        if found.__module__ == "torch.return_types":
            named = tuple(f"field_{index}" for index in range(len(items)))
            return Tree(STRUCT_SEQUENCE, items, named, type=name)
    if dataclasses.is_dataclass(example):
        held = {id(mark): item for mark, item in zip(marks, items, strict=True)}
        fields_by_item = {
            field.name: held[id(value)]
            for field in dataclasses.fields(example)
            for value in [getattr(example, field.name, None)]
            if id(value) in held
        }
        if len(fields_by_item) == len(items):
            values = tuple(fields_by_item.values())
            return Tree(DATACLASS, values, tuple(fields_by_item), type=name)
    raise PackageError(
        f"a package cannot hold a {name}; use tuples, lists, dicts, named tuples or dataclasses "
        "(torch.export.register_dataclass)"
    )
