"""Compares a file's signature with its program, so that no view reaches beyond a tensor's memory.

Checksums say that a file is whole, not that its author meant well. Before a program from a file
that is not trusted is compiled, its types must be those that the signature promises, results must
lie within what they are made of, and the program must call nothing but itself: a custom call could
name any function that is registered in the process, with any addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import pjrt
from .neff_file import NeffError
from .types import ArgumentSpec, ResultSpec, RuntimeCompileError, Signature, View

Shape = tuple[int, ...]
#: MLIR's names of the types of elements.
_ELEMENTS: dict[torch.dtype, tuple[str, ...]] = {
    torch.bool: ("i1",),
    torch.uint8: ("ui8", "i8"),
    torch.int8: ("i8",),
    torch.int16: ("i16",),
    torch.int32: ("i32",),
    torch.int64: ("i64",),
    torch.float16: ("f16",),
    torch.bfloat16: ("bf16",),
    torch.float32: ("f32",),
    torch.float64: ("f64",),
    torch.complex64: ("complex<f32>",),
    torch.complex128: ("complex<f64>",),
}
_BYTES = {name: dtype.itemsize for dtype, names in _ELEMENTS.items() for name in names}


def check_program(stablehlo: str, signature: Signature, constants: Sequence[torch.Tensor]) -> None:
    """Raise :class:`NeffError` where the program is not what the signature says."""
    try:
        types = pjrt.program_types(stablehlo)
    except RuntimeCompileError as error:
        raise NeffError(str(error)) from error
    if types.custom_calls:
        raise NeffError(
            f"the program calls {', '.join(types.custom_calls)}, outside of itself; that is run "
            "only from files that are trusted (trust=True)"
        )
    wanted = [_entered(spec) for spec in signature.arguments]
    wanted += [(tuple(x.shape), x.dtype) for x in constants]
    wanted += [((2,), torch.int64)] * signature.seeded
    if len(wanted) != len(types.arguments):
        raise NeffError(f"the program takes {len(types.arguments)} tensors, not {len(wanted)}")
    for index, ((shape, dtype), found) in enumerate(zip(wanted, types.arguments, strict=True)):
        if shape != found[0] or found[1] not in _ELEMENTS.get(dtype, ()):
            raise NeffError(f"argument {index} of the program is {found}, not {shape} of {dtype}")
    results = list(types.results)
    if signature.checks and (not results or results.pop() != ((), "i32")):
        raise NeffError("the program's last result does not say which check failed")
    for index, spec in enumerate(signature.results):
        _check_result(spec, results, signature.arguments, f"result {index}")


def _entered(spec: ArgumentSpec) -> tuple[Shape, torch.dtype]:
    """The shape and dtype in which an argument enters the program."""
    order = spec.permutation or range(len(spec.shape))
    return tuple(spec.shape[dim] for dim in order), spec.carrier or spec.dtype


def _check_result(
    spec: ResultSpec,
    results: Sequence[tuple[Shape, str]],
    arguments: Sequence[ArgumentSpec],
    where: str,
) -> None:
    if spec.kind == "input":
        if not 0 <= spec.index < len(arguments):
            raise NeffError(f"{where} is argument {spec.index} of {len(arguments)}")
        if spec.view is not None:
            taken = arguments[spec.index]
            if len(spec.view.base) != len(taken.shape):
                raise NeffError(f"{where}.view.base is for another number of dimensions")
            _check_view(spec.view, taken.dtype.itemsize, _reach(taken.shape, spec.view.base), where)
    elif spec.kind == "tensor":
        if not 0 <= spec.index < len(results):
            raise NeffError(f"{where} is result {spec.index} of a program with {len(results)}")
        shape, element = results[spec.index]
        size = _BYTES.get(element)
        if size is None or (spec.dtype is not None and spec.dtype.itemsize != size):
            raise NeffError(f"{where} has elements of {element}, which are not {spec.dtype}")
        if spec.view is not None:
            _check_view(spec.view, size, math.prod(shape), where)
            return
        if spec.permutation is not None and len(spec.permutation) != len(shape):
            raise NeffError(f"{where}.permutation is for another number of dimensions")
        if spec.stride is not None and (
            len(spec.stride) != len(shape) or _reach(shape, spec.stride) > _MOST
        ):
            raise NeffError(f"{where}.stride does not fit the shape {shape}")
        if spec.expand is not None and not _expands(shape, spec.expand):
            raise NeffError(f"{where}.expand does not fit the shape {shape}")


#: Elements of the largest allocation that strides may ask for.
_MOST = 1 << 40


def _expands(shape: Shape, sizes: Shape) -> bool:
    extra = len(sizes) - len(shape)
    return extra >= 0 and all(
        old in (1, new) for old, new in zip(shape, sizes[extra:], strict=True)
    )


def _reach(shape: Shape, stride: Shape) -> int:
    """How many elements of memory a tensor spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _check_view(view: View, size: int, elements: int, where: str) -> None:
    """A view must lie within ``elements`` of ``size`` bytes each."""
    own = view.dtype.itemsize if view.dtype is not None else size
    reach = _reach(view.shape, view.stride)
    if view.offset < 0 or (reach and (view.offset + reach) * own > elements * size):
        raise NeffError(f"{where}.view reaches beyond the memory of its tensor")
