"""The CPU target: composites that a vendor kernel computes faster become typed FFI calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from ..types import CompilerOptions
from . import denormals, division, ffi, linear_algebra, rounding  # noqa: F401 - it registers kernels
from .kernels import PACKS, KernelSpec, build, wants

PREFIX = "neuron."


class CpuTarget:
    """XLA:CPU with ATen's kernels for the heavy operators."""

    def prepare(self, module: Any, options: CompilerOptions) -> int:
        """Replace each composite whose kernel wants its shapes; the rest decompose."""
        replaced = 0
        if options.vendor_kernels:
            with module.context, ir.Location.unknown():
                composites = list(_composites(module.operation))
                packs = options.pack_weights
                replaced = sum(_replace(operation, packs) for operation in composites)
        division.keep(module)
        rounding.keep(module)
        denormals.keep(module)
        return replaced

    def register(self) -> None:
        """Register the handlers of kernels and of the call that keeps denormals."""
        _register()
        denormals.register()

    def xla_options(self) -> tuple[tuple[str, Any], ...]:
        """Options without which XLA:CPU's values differ from ATen's."""
        return (
            # Its minimum and maximum would drop NaN.
            ("xla_cpu_enable_fast_min_max", False),
            # float32 -> bfloat16 -> float32 must round.
            ("xla_allow_excess_precision", False),
        )


def _composites(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.composite":
                    yield inner.operation
                yield from _composites(inner.operation)


def _replace(operation: Any, packs: bool) -> bool:
    name = ir.StringAttr(operation.attributes["name"]).value
    if not name.startswith(PREFIX):
        return False
    spec = KernelSpec(
        kernel=name.removeprefix(PREFIX),
        operands=tuple(_described(value.type) for value in operation.operands),
        results=tuple(_described(value.type) for value in operation.results),
        attributes=tuple(sorted({**_attributes(operation), PACKS: int(packs)}.items())),
    )
    if not wants(spec):
        return False
    with ir.InsertionPoint(operation):
        call = _custom_call(operation, spec)
    for old, new in zip(operation.results, call.results, strict=True):
        old.replace_all_uses_with(new)
    operation.erase()
    return True


def _custom_call(operation: Any, spec: KernelSpec) -> Any:
    _register()
    config = ir.DictAttr.get({"spec": ir.StringAttr.get(spec.to_json())})
    return ir.Operation.create(
        "stablehlo.custom_call",
        results=[value.type for value in operation.results],
        operands=list(operation.operands),
        attributes={
            "call_target_name": ir.StringAttr.get(ffi.TARGET_NAME),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
            "backend_config": config,
            "operand_layouts": _row_major(value.type for value in operation.operands),
            "result_layouts": _row_major(value.type for value in operation.results),
        },
    )


@functools.cache
def _register() -> None:
    ffi.register(lambda text: build(KernelSpec.from_json(text)), "cpu")


def _row_major(types: Any) -> Any:
    layouts = []
    for item in types:
        rank = ir.RankedTensorType(item).rank
        order = ",".join(str(dim) for dim in reversed(range(rank)))
        layouts.append(ir.Attribute.parse(f"dense<[{order}]> : tensor<{rank}xindex>"))
    return ir.ArrayAttr.get(layouts)


def _described(item: Any) -> tuple[str, tuple[int, ...]]:
    tensor = ir.RankedTensorType(item)
    return str(tensor.element_type), tuple(tensor.shape)


def _attributes(operation: Any) -> dict[str, Any]:
    if "composite_attributes" not in operation.attributes:
        return {}
    values = ir.DictAttr(operation.attributes["composite_attributes"])
    return {item.name: _value(item.attr) for item in values}  # type: ignore[attr-defined]


def _value(attribute: Any) -> Any:
    if isinstance(attribute, ir.IntegerAttr | ir.FloatAttr | ir.StringAttr):
        return attribute.value
    raise TypeError(f"a composite attribute must be a number or a string, not {attribute}")
