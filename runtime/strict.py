"""Reads values out of JSON's data, strictly: for files that are not to be trusted.

Each function takes a value and where it stands, and raises :class:`NeffError` naming that place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .neff_file import NeffError

T = TypeVar("T")

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in _DTYPES.items()}
_MOST_DIMENSIONS, _WIDEST = 64, 1 << 62


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a file: ``float32``."""
    return _NAMES[dtype]


def optional_dtype_name(dtype: torch.dtype | None) -> str | None:
    """The same, or ``None``."""
    return None if dtype is None else _NAMES[dtype]


def fields_of(data: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """An object with exactly these fields."""
    if not isinstance(data, dict):
        raise NeffError(f"{where} is no object")
    if set(data) != set(names):
        raise NeffError(f"{where} must have the fields {', '.join(names)}")
    return data


def array(data: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    """An array, each item read by ``read``."""
    if not isinstance(data, list):
        raise NeffError(f"{where} is no array")
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(data))


def optional(data: Any, where: str, read: Callable[[Any, str], T]) -> T | None:
    """``None``, or what ``read`` makes of it."""
    return None if data is None else read(data, where)


def text(data: Any, where: str) -> str:
    """A string."""
    if not isinstance(data, str):
        raise NeffError(f"{where} is no string")
    return data


def boolean(data: Any, where: str) -> bool:
    """``true`` or ``false``."""
    if not isinstance(data, bool):
        raise NeffError(f"{where} is neither true nor false")
    return data


def integer(data: Any, where: str) -> int:
    """An integer below ``2 ** 62``."""
    if type(data) is not int or not -_WIDEST < data < _WIDEST:
        raise NeffError(f"{where} is no integer, or too large")
    return data


def sizes(data: Any, where: str) -> tuple[int, ...]:
    """Sizes, strides or an order of dimensions."""
    found = array(data, where, integer)
    if len(found) > _MOST_DIMENSIONS or any(size < 0 for size in found):
        raise NeffError(f"{where} has a negative number, or too many")
    return found


def permutation(data: Any, where: str, rank: int) -> tuple[int, ...] | None:
    """An order of ``rank`` dimensions, or ``None``."""
    if data is None:
        return None
    order = sizes(data, where)
    if sorted(order) != list(range(rank)):
        raise NeffError(f"{where} is no order of {rank} dimensions")
    return order


def dtype(data: Any, where: str) -> torch.dtype:
    """A dtype by its name."""
    name = text(data, where)
    if name not in _DTYPES:
        raise NeffError(f"{where} is {name[:40]!r}, which is no dtype")
    return _DTYPES[name]
