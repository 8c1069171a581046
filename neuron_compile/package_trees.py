"""Structures of arguments and results in a package: tuples, lists, dicts and records, as JSON.

A structure is one of::

    {"tensor": index}                         a tensor of the call, or of the results
    {"value": null | bool | int | float | str | {"float": "nan"}}
    {"tuple": [...]}, {"list": [...]}
    {"dict": [[key, ...], [...]], "ordered": bool}
    {"record": kind, "type": "module:Name", "fields": [name, ...], "items": [...]}

A record is a named tuple, a dataclass (also transformers' ``ModelOutput``) or one of
``torch.return_types``. Reading a package imports nothing: a record's class is taken where it was
imported already, and else :class:`Record` or a new named tuple stands in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import keyword
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .errors import InputError
from .runtime import NeffError, strict

NAMED_TUPLE, DATACLASS, STRUCT_SEQUENCE = "namedtuple", "dataclass", "structseq"
_KINDS = (NAMED_TUPLE, DATACLASS, STRUCT_SEQUENCE)
_DEEPEST = 64


class Record(dict[str, Any]):
    """The fields of a dataclass that was not imported where a package was loaded.

    Fields are items and attributes: ``record["logits"]``, ``record.logits``.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the record has no field {name!r}, only {list(self)}") from None


@dataclasses.dataclass(frozen=True)
class Tree:
    """One node of a structure. ``kind`` is ``tensor``, ``value``, ``tuple``, ``list``, ``dict``,
    ``ordered_dict`` or a record's; ``keys`` are those of a dict or the fields of a record."""

    kind: str
    items: tuple[Tree, ...] = ()
    keys: tuple[Any, ...] = ()
    index: int = -1
    value: Any = None
    type: str = ""


def to_plain(tree: Tree) -> dict[str, Any]:
    """A structure as JSON's data."""
    items = [to_plain(item) for item in tree.items]
    if tree.kind == "tensor":
        return {"tensor": tree.index}
    if tree.kind == "value":
        value = tree.value
        if isinstance(value, float) and not math.isfinite(value):
            value = {"float": repr(value)}
        return {"value": value}
    if tree.kind in ("tuple", "list"):
        return {tree.kind: items}
    if tree.kind in ("dict", "ordered_dict"):
        return {"dict": [list(tree.keys), items], "ordered": tree.kind == "ordered_dict"}
    fields = list(tree.keys)
    return {"record": tree.kind, "type": tree.type, "fields": fields, "items": items}


def from_plain(data: Any, where: str, tensors: int, depth: int = 0) -> Tree:
    """The inverse of :func:`to_plain`, where there are so many tensors.

    Raises:
        NeffError: naming the first place that is wrong.
    """
    if depth > _DEEPEST:
        raise NeffError(f"{where} is nested too deeply")

    def inner(item: Any, place: str) -> Tree:
        return from_plain(item, place, tensors, depth + 1)

    names = set(data) if isinstance(data, dict) else set()
    if names == {"tensor"}:
        index = strict.integer(data["tensor"], where)
        if not 0 <= index < tensors:
            raise NeffError(f"{where} is tensor {index} of {tensors}")
        return Tree("tensor", index=index)
    if names == {"value"}:
        return Tree("value", value=_value(data["value"], where))
    for kind in ("tuple", "list"):
        if names == {kind}:
            return Tree(kind, strict.array(data[kind], where, inner))
    if names == {"dict", "ordered"}:
        pair = strict.array(data["dict"], where, lambda item, place: item)
        if len(pair) != 2:
            raise NeffError(f"{where} has not keys and items")
        keys = strict.array(pair[0], where, _key)
        items = strict.array(pair[1], where, inner)
        if len(set(keys)) < len(keys) or len(keys) != len(items):
            raise NeffError(f"{where} has other keys than items")
        ordered = strict.boolean(data["ordered"], where)
        return Tree("ordered_dict" if ordered else "dict", items, keys)
    if names == {"record", "type", "fields", "items"}:
        return _record(data, where, inner)
    raise NeffError(f"{where} is no structure")


def _record(data: dict[str, Any], where: str, inner: Callable[[Any, str], Tree]) -> Tree:
    kind = strict.text(data["record"], where)
    if kind not in _KINDS:
        raise NeffError(f"{where} is a record of kind {kind[:40]!r}")
    fields = strict.array(data["fields"], where, _identifier)
    items = strict.array(data["items"], where, inner)
    if len(set(fields)) < len(fields) or len(fields) != len(items):
        raise NeffError(f"{where} has other fields than items")
    name = strict.text(data["type"], where)
    if kind == NAMED_TUPLE:
        for field in (*fields, name.rpartition(":")[2].rpartition(".")[2]):
            if field.startswith("_"):
                raise NeffError(f"{where} is a named tuple with the name {field[:40]!r}")
            _identifier(field, where)
    return Tree(kind, items, fields, type=name)


def _key(data: Any, where: str) -> str | int:
    if not isinstance(data, str | int):
        raise NeffError(f"{where} has a key that is neither a string nor an integer")
    return data


def _identifier(data: Any, where: str) -> str:
    name = strict.text(data, where)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise NeffError(f"{where} has a field {name[:40]!r}, which is no name")
    return name


def _value(data: Any, where: str) -> Any:
    if isinstance(data, dict):
        text = strict.text(strict.fields_of(data, where, ("float",))["float"], where)
        if text not in ("nan", "inf", "-inf"):
            raise NeffError(f"{where} is no number")
        return float(text)
    if not isinstance(data, bool | int | float | str | None):
        raise NeffError(f"{where} is no value")
    return data


def leaves(tree: Tree, path: str = "") -> list[tuple[str, Tree]]:
    """The leaves of a structure, each with the way to it: ``[0]``, ``['mask']``, ``.logits``."""
    if tree.kind in ("tensor", "value"):
        return [(path, tree)]
    return [
        leaf
        for position, item in enumerate(tree.items)
        for leaf in leaves(item, path + _step(tree, position))
    ]


def _step(tree: Tree, position: int) -> str:
    if tree.kind in ("tuple", "list"):
        return f"[{position}]"
    key = tree.keys[position]
    return f"[{key!r}]" if tree.kind in ("dict", "ordered_dict") else f".{key}"


_CLASSES: Mapping[str, type] = {
    "tuple": tuple,
    "list": list,
    "dict": dict,
    "ordered_dict": collections.OrderedDict,
}


def flatten(tree: Tree, value: Any, path: str, found: list[tuple[str, Tree, Any]]) -> None:
    """Take a call's argument apart as ``tree`` says: append path, leaf and value of each leaf.

    Raises:
        InputError: naming the first place where the structure differs.
    """
    if tree.kind in ("tensor", "value"):
        found.append((path, tree, value))
        return
    for position, (item, part) in enumerate(
        zip(tree.items, _parts(tree, value, path), strict=True)
    ):
        flatten(item, part, path + _step(tree, position), found)


def _parts(tree: Tree, value: Any, path: str) -> Sequence[Any]:
    wanted: Any = _CLASSES.get(tree.kind)
    if tree.kind == STRUCT_SEQUENCE and type(value).__module__ == "torch.return_types":
        wanted = type(value)
    if tree.kind in ("tuple", "list", STRUCT_SEQUENCE):
        if type(value) is not wanted or len(value) != len(tree.items):
            raise InputError(
                f"{path}: a {tree.kind} of {len(tree.items)} is wanted, not {_described(value)}"
            )
        return list(value)
    if wanted is not None:
        if not isinstance(value, wanted) or set(value) != set(tree.keys):
            raise InputError(
                f"{path}: a dict with the keys {list(tree.keys)} is wanted, not {_described(value)}"
            )
        return [value[key] for key in tree.keys]
    missing = [name for name in tree.keys if not hasattr(value, name)]
    if missing:
        raise InputError(f"{path}: {tree.type} is wanted, not {_described(value)}")
    return [getattr(value, name) for name in tree.keys]


def _described(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, dict):
        return f"a {name} with the keys {list(value)}"
    return f"a {name} of {len(value)}" if isinstance(value, tuple | list) else f"a {name}"


def builder(tree: Tree, imported: bool = True) -> Callable[[Sequence[Any]], Any]:
    """A function from all tensors to the structure that holds them.

    ``imported``: whether records are of the classes that were imported here.
    """
    if tree.kind == "tensor":
        index = tree.index
        return lambda tensors: tensors[index]
    if tree.kind == "value":
        return lambda tensors: tree.value
    inner = [builder(item, imported) for item in tree.items]
    if tree.kind == "tuple":
        return lambda tensors: tuple([make(tensors) for make in inner])
    if tree.kind == "list":
        return lambda tensors: [make(tensors) for make in inner]
    make_it = _maker(tree, imported)
    return lambda tensors: make_it([make(tensors) for make in inner])


def _maker(tree: Tree, imported: bool) -> Callable[[list[Any]], Any]:
    keys = tree.keys
    if tree.kind in ("dict", "ordered_dict"):
        container = _CLASSES[tree.kind]
        return lambda items: container(zip(keys, items, strict=True))
    found = _imported(tree) if imported or tree.kind == NAMED_TUPLE else None
    if tree.kind == STRUCT_SEQUENCE:
        return found or tuple
    if tree.kind == NAMED_TUPLE:
        named: Any = found or collections.namedtuple(
            tree.type.rpartition(":")[2].rpartition(".")[2], keys
        )
        return lambda items: named(*items)
    record = found or Record
    return lambda items: record(**dict(zip(keys, items, strict=True)))


def _imported(tree: Tree) -> Any:
    """The class of a record, if its module was imported already and it is what it should be."""
    module, _, name = tree.type.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None) if found is not None else None
    if not isinstance(found, type):
        return None
    if tree.kind == DATACLASS:
        fields = (
            {field.name for field in dataclasses.fields(found) if field.init}
            if (dataclasses.is_dataclass(found))
            else set()
        )
        return found if fields >= set(tree.keys) and fields else None
    if not issubclass(found, tuple):
        return None
    if tree.kind == STRUCT_SEQUENCE:
        known = module == "torch.return_types" and getattr(found, "n_fields", -1) == len(tree.keys)
        return found if known else None
    return found if getattr(found, "_fields", None) == tree.keys else None


def described(tensor: torch.Tensor) -> str:
    """``float32[2, 3]``."""
    return f"{strict.dtype_name(tensor.dtype)}{list(tensor.shape)}"
