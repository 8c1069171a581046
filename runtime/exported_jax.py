"""The boundary to ``jax.export``: a StableHLO program as a function of JAX.

Tested with jax 0.10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from . import pjrt
from .types import RuntimeCompileError

#: MLIR's types of elements and JAX's. Integers are narrowed where JAX has no 64-bit types.
_DTYPES = {
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "ui8": "uint8",
    "ui16": "uint16",
    "ui32": "uint32",
    "ui64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}
_NARROW = {"i64": "i32", "ui64": "ui32"}
_WIDE = ("f64", "complex<f64>")


def as_jax(stablehlo_text: str, name: str) -> Callable[..., Sequence[Any]]:
    """A JAX function from the arguments of a program's ``main`` to the list of its results.

    It can be jitted, vectorized by nothing, and differentiated by nothing: it is a call. Without
    ``jax_enable_x64``, 64-bit integers come and go as 32-bit ones.

    Raises:
        RuntimeCompileError: for a program that takes or gives float64 without ``jax_enable_x64``.
    """
    types = pjrt.program_types(stablehlo_text)
    narrow = not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    elements = [element for _, element in (*types.arguments, *types.results)]
    if narrow and any(element in _WIDE for element in elements):
        raise RuntimeCompileError(
            "the program takes or returns float64 or complex128: set "
            "jax.config.update('jax_enable_x64', True) first"
        )
    module = pjrt.parse_module(stablehlo_text)
    if narrow and any(element in _NARROW for element in elements):
        _narrow(module)
    avals = [
        tuple(jax.core.ShapedArray(shape, _dtype(element, narrow)) for shape, element in found)
        for found in (types.arguments, types.results)
    ]
    inputs, outputs = avals
    exported = jax.export.Exported(
        fun_name=name,
        in_tree=jax.tree.structure((tuple(range(len(inputs))), {})),
        in_avals=inputs,
        out_tree=jax.tree.structure(list(range(len(outputs)))),
        out_avals=outputs,
        _has_named_shardings=False,
        _in_named_shardings=(None,) * len(inputs),
        _out_named_shardings=(None,) * len(outputs),
        in_shardings_hlo=(None,) * len(inputs),
        out_shardings_hlo=(None,) * len(outputs),
        nr_devices=1,
        platforms=("cpu",),
        ordered_effects=(),
        unordered_effects=(),
        # StableHLO with its decompositions belongs to no platform.
        disabled_safety_checks=(jax.export.DisabledSafetyCheck.platform(),),
        mlir_module_serialized=pjrt.portable(str(module)),
        calling_convention_version=jax.export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(inputs))),
        uses_global_constants=False,
        _get_vjp=None,
    )
    call: Callable[..., Sequence[Any]] = exported.call
    return call


def _dtype(element: str, narrow: bool) -> Any:
    name = _NARROW.get(element, element) if narrow else element
    if name not in _DTYPES:
        raise RuntimeCompileError(f"JAX has no dtype for elements of {element}")
    return jnp.dtype(_DTYPES[name])


def _narrow(module: ir.Module) -> None:
    """Put a ``main`` with 32-bit integers around the program."""
    with module.context, ir.Location.unknown():
        (main,) = (item for item in module.body if pjrt.is_main(item))
        function = ir.FunctionType(main.type)  # type: ignore[attr-defined]
        main.attributes["sym_name"] = ir.StringAttr.get("neuron_program")
        main.attributes["sym_visibility"] = ir.StringAttr.get("private")
        inputs, results = map(_narrowed, function.inputs), list(map(_narrowed, function.results))
        with ir.InsertionPoint(module.body):
            outer: Any = func.FuncOp("main", (list(inputs), results), visibility="public")  # type: ignore[call-arg]
        with ir.InsertionPoint(outer.add_entry_block()):
            pairs = zip(outer.arguments, function.inputs, strict=True)
            given = [_converted(value, wanted) for value, wanted in pairs]
            name = ir.FlatSymbolRefAttr.get("neuron_program")
            call = func.CallOp(list(function.results), name, given)
            func.ReturnOp(
                [_converted(x, wanted) for x, wanted in zip(call.results, results, strict=True)]
            )


def _narrowed(value: Any) -> Any:
    tensor = ir.RankedTensorType(value)
    name = _NARROW.get(str(tensor.element_type))
    if name is None:
        return tensor
    return ir.RankedTensorType.get(tensor.shape, ir.Type.parse(name))


def _converted(value: Any, wanted: Any) -> Any:
    return value if value.type == wanted else stablehlo.ConvertOp(wanted, value).result
