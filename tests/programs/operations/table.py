"""The table of operations, and conditions on their operands.

An operation draws its operands and parameters from the pool and returns its line.
"""

from __future__ import annotations

from collections.abc import Callable

from ..generate import Code, Pool, Value

Operation = Callable[[Pool], Code]
OPERATIONS: dict[str, Operation] = {}


def operation(make: Operation) -> Operation:
    """Enter a function under its name."""
    OPERATIONS[make.__name__] = make
    return make


def floating(value: Value) -> bool:
    """Holds floats."""
    return value.floating


def integral(value: Value) -> bool:
    """Holds integers."""
    return value.integral


def boolean(value: Value) -> bool:
    """Holds bools."""
    return str(value.tensor.dtype) == "torch.bool"


def numeric(value: Value) -> bool:
    """Holds no bools."""
    return not boolean(value)


def finite(value: Value) -> bool:
    """Has neither infinities nor NaN."""
    return bool(value.tensor.isfinite().all())


def ranked(low: int, high: int = 9) -> Callable[[Value], bool]:
    """Has at least ``low`` dimensions, and at most ``high``."""
    return lambda value: low <= value.dim <= high


def full(value: Value) -> bool:
    """Has elements."""
    return value.tensor.numel() > 0


def below(limit: float) -> Callable[[Value], bool]:
    """Has magnitudes below the limit."""

    def test(value: Value) -> bool:
        tensor = value.tensor.detach().double()
        return not tensor.numel() or float(tensor.nan_to_num(0, 0, 0).abs().max()) < limit

    return test


def same_dtype(value: Value) -> Callable[[Value], bool]:
    """Has the dtype of ``value``."""
    return lambda other: other.tensor.dtype == value.tensor.dtype
