"""Keeps XLA:CPU's reductions from reading numbers that were not rounded to bfloat16.

Operators of ATen round their results to bfloat16, and so do programs: a conversion to bfloat16 and
back stands between two operators. XLA keeps it (``xla_allow_excess_precision=false``), but its
library of fused reductions (YNN) drops it inside of a fusion. The library has no operation that
rounds in float32, so one of those after the conversion back leaves the pair outside of the fusion.
It changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

#: Exponent and mantissa of bfloat16.
_BITS = (8, 7)
#: Reductions, and what may hold one.
_REDUCING = ("stablehlo.reduce", "stablehlo.composite", "func.call")
_CONVERT = "stablehlo.convert"
#: What brings a number of an argument, or of a kernel, to a conversion as it was.
_MOVING = (
    "stablehlo.broadcast_in_dim",
    "stablehlo.reshape",
    "stablehlo.slice",
    "stablehlo.transpose",
)
_GIVEN = ("stablehlo.constant", "stablehlo.custom_call")


def keep(module: Any) -> None:
    """Let what reductions read in a StableHLO module, changed in place, be rounded before."""
    with module.context, ir.Location.unknown():
        seen: set[Any] = set()
        for reduction in list(_reductions(module.operation)):
            for widening in list(_widenings(reduction, seen)):
                _round_after(widening)


def _reductions(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name in _REDUCING:
                    yield inner.operation
                yield from _reductions(inner.operation)


def _widenings(operation: Any, seen: set[Any]) -> Iterator[Any]:
    """Conversions of computed bfloat16 numbers that an operation depends on, the nearest ones."""
    pending = [operation]
    while pending:
        for value in pending.pop().operands:
            if isinstance(value.owner, ir.Block) or value.owner in seen or _is_bfloat16(value):
                continue
            seen.add(value.owner)
            found = value.owner.operation
            if found.name == _CONVERT and _is_bfloat16(found.operands[0]):
                if _is_computed(found.operands[0]):
                    yield found
            elif not list(found.regions):
                pending.append(found)


def _is_bfloat16(value: Any) -> bool:
    kind = value.type
    return isinstance(kind, ir.RankedTensorType) and isinstance(kind.element_type, ir.BF16Type)


def _is_computed(value: Any) -> bool:
    while not isinstance(value.owner, ir.Block):
        source = value.owner.operation
        if source.name in _GIVEN:
            return False
        if source.name not in _MOVING:
            return True
        value = source.operands[0]
    return False


def _round_after(widening: Any) -> None:
    result = widening.results[0]
    exponent, mantissa = (ir.IntegerAttr.get(ir.IntegerType.get_signless(32), n) for n in _BITS)
    rounded = ir.Operation.create(
        "stablehlo.reduce_precision",
        results=[result.type],
        operands=[result],
        attributes={"exponent_bits": exponent, "mantissa_bits": mantissa},
        ip=ir.InsertionPoint.after(widening),
    )
    result.replace_all_uses_except(rounded.results[0], rounded)
