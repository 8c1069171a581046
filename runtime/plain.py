"""Signatures and options as JSON's data, and back: strictly, for files are not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from .neff_file import NeffError
from .types import ArgumentSpec, Check, CompilerOptions, ResultSpec, Signature, View

T = TypeVar("T")

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_NAMES = {value: name for name, value in _DTYPES.items()}
#: What a check may raise.
_ERRORS: Mapping[str, type[Exception]] = {
    "IndexError": IndexError,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "LinAlgError": torch.linalg.LinAlgError,  # type: ignore[attr-defined]
}
_ERROR_NAMES = {error: name for name, error in _ERRORS.items()}
_KINDS = ("tensor", "input", "none", "constant")
_MOST_DIMENSIONS, _WIDEST = 64, 1 << 62


def signature_to_plain(signature: Signature) -> dict[str, Any]:
    """A signature as JSON's data.

    Raises:
        NeffError: for a constant among the results, or a check's error, that a file cannot hold.
    """
    return {
        "arguments": [
            {
                "name": spec.name,
                "shape": spec.shape,
                "dtype": _NAMES[spec.dtype],
                "permutation": spec.permutation,
                "static": spec.static,
                "dense": spec.dense,
                "carrier": _name(spec.carrier),
            }
            for spec in signature.arguments
        ],
        "results": [_result_to_plain(spec) for spec in signature.results],
        "seeded": signature.seeded,
        "checks": [
            {"error": _error_name(check.error), "message": check.message}
            for check in signature.checks
        ],
    }


def _result_to_plain(spec: ResultSpec) -> dict[str, Any]:
    if not isinstance(spec.value, bool | int | float | None):
        raise NeffError(f"a result is a constant of type {type(spec.value).__name__}")
    if isinstance(spec.value, float) and not math.isfinite(spec.value):
        raise NeffError(f"a result is the constant {spec.value}")
    view = spec.view
    return {
        "kind": spec.kind,
        "index": spec.index,
        "value": spec.value,
        "permutation": spec.permutation,
        "expand": spec.expand,
        "stride": spec.stride,
        "dtype": _name(spec.dtype),
        "view": view
        and {
            "shape": view.shape,
            "stride": view.stride,
            "offset": view.offset,
            "base": view.base,
            "dtype": _name(view.dtype),
        },
    }


def _error_name(error: type[Exception]) -> str:
    if error not in _ERROR_NAMES:
        raise NeffError(f"a check raises {error.__name__}, which a file does not know")
    return _ERROR_NAMES[error]


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else _NAMES[dtype]


def signature_from_plain(data: Any) -> Signature:
    """The inverse of :func:`signature_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    fields = _fields(data, "signature", ("arguments", "results", "seeded", "checks"))
    return Signature(
        _each(fields["arguments"], "arguments", _argument),
        _each(fields["results"], "results", _result),
        _boolean(fields["seeded"], "seeded"),
        _each(fields["checks"], "checks", _check),
    )


def _argument(data: Any, where: str) -> ArgumentSpec:
    names = ("name", "shape", "dtype", "permutation", "static", "dense", "carrier")
    fields = _fields(data, where, names)
    shape = _sizes(fields["shape"], f"{where}.shape")
    dtype = _dtype(fields["dtype"], f"{where}.dtype")
    carrier = _optional(fields["carrier"], f"{where}.carrier", _dtype)
    if carrier is not None and carrier.itemsize != dtype.itemsize:
        raise NeffError(f"{where}.carrier has another width than the dtype")
    return ArgumentSpec(
        _text(fields["name"], f"{where}.name"),
        shape,
        dtype,
        _permutation(fields["permutation"], f"{where}.permutation", len(shape)),
        _boolean(fields["static"], f"{where}.static"),
        _boolean(fields["dense"], f"{where}.dense"),
        carrier,
    )


def _result(data: Any, where: str) -> ResultSpec:
    names = ("kind", "index", "value", "permutation", "expand", "stride", "dtype", "view")
    fields = _fields(data, where, names)
    kind, value = _text(fields["kind"], f"{where}.kind"), fields["value"]
    if kind not in _KINDS:
        raise NeffError(f"{where}.kind is {kind[:40]!r}, none of {', '.join(_KINDS)}")
    if not isinstance(value, bool | int | float | None):
        raise NeffError(f"{where}.value is no number")
    permutation = fields["permutation"]
    rank = len(permutation) if isinstance(permutation, list) else 0
    return ResultSpec(
        kind,
        _integer(fields["index"], f"{where}.index"),
        value,
        _permutation(permutation, f"{where}.permutation", rank),
        _optional(fields["expand"], f"{where}.expand", _sizes),
        _optional(fields["stride"], f"{where}.stride", _sizes),
        _optional(fields["view"], f"{where}.view", _view),
        _optional(fields["dtype"], f"{where}.dtype", _dtype),
    )


def _view(data: Any, where: str) -> View:
    fields = _fields(data, where, ("shape", "stride", "offset", "base", "dtype"))
    shape = _sizes(fields["shape"], f"{where}.shape")
    stride = _sizes(fields["stride"], f"{where}.stride")
    if len(stride) != len(shape):
        raise NeffError(f"{where} has {len(shape)} sizes and {len(stride)} strides")
    return View(
        shape,
        stride,
        _integer(fields["offset"], f"{where}.offset"),
        _sizes(fields["base"], f"{where}.base"),
        _optional(fields["dtype"], f"{where}.dtype", _dtype),
    )


def _check(data: Any, where: str) -> Check:
    fields = _fields(data, where, ("error", "message"))
    name = _text(fields["error"], f"{where}.error")
    if name not in _ERRORS:
        raise NeffError(f"{where}.error is {name[:40]!r}, none of {', '.join(_ERRORS)}")
    return Check(_ERRORS[name], _text(fields["message"], f"{where}.message"))


def options_to_plain(options: CompilerOptions) -> dict[str, Any]:
    """Options as JSON's data."""
    return {
        "platform": options.platform,
        "xla_options": dict(options.xla_options),
        "vendor_kernels": options.vendor_kernels,
    }


def options_from_plain(data: Any) -> CompilerOptions:
    """The inverse of :func:`options_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    fields = _fields(data, "options", ("platform", "xla_options", "vendor_kernels"))
    flags = fields["xla_options"]
    if not isinstance(flags, dict) or not all(
        isinstance(value, bool | int | float | str) for value in flags.values()
    ):
        raise NeffError("options.xla_options is no object of numbers and strings")
    return CompilerOptions(
        _text(fields["platform"], "options.platform"),
        tuple(sorted(flags.items())),
        _boolean(fields["vendor_kernels"], "options.vendor_kernels"),
    )


def specs_to_plain(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Shapes and dtypes of tensors as JSON's data."""
    return [{"shape": list(x.shape), "dtype": _NAMES[x.dtype]} for x in tensors]


def specs_from_plain(data: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """The inverse of :func:`specs_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    return _each(data, "constants", _spec)


def _spec(data: Any, where: str) -> tuple[tuple[int, ...], torch.dtype]:
    fields = _fields(data, where, ("shape", "dtype"))
    return _sizes(fields["shape"], f"{where}.shape"), _dtype(fields["dtype"], f"{where}.dtype")


def _fields(data: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise NeffError(f"{where} is no object")
    if set(data) != set(names):
        raise NeffError(f"{where} must have the fields {', '.join(names)}")
    return data


def _each(data: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    if not isinstance(data, list):
        raise NeffError(f"{where} is no array")
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(data))


def _optional(data: Any, where: str, read: Callable[[Any, str], T]) -> T | None:
    return None if data is None else read(data, where)


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str):
        raise NeffError(f"{where} is no string")
    return data


def _boolean(data: Any, where: str) -> bool:
    if not isinstance(data, bool):
        raise NeffError(f"{where} is neither true nor false")
    return data


def _integer(data: Any, where: str) -> int:
    if type(data) is not int or not -_WIDEST < data < _WIDEST:
        raise NeffError(f"{where} is no integer, or too large")
    return data


def _sizes(data: Any, where: str) -> tuple[int, ...]:
    sizes = _each(data, where, _integer)
    if len(sizes) > _MOST_DIMENSIONS or any(size < 0 for size in sizes):
        raise NeffError(f"{where} has a negative number, or too many")
    return sizes


def _permutation(data: Any, where: str, rank: int) -> tuple[int, ...] | None:
    if data is None:
        return None
    order = _sizes(data, where)
    if sorted(order) != list(range(rank)):
        raise NeffError(f"{where} is no order of {rank} dimensions")
    return order


def _dtype(data: Any, where: str) -> torch.dtype:
    name = _text(data, where)
    if name not in _DTYPES:
        raise NeffError(f"{where} is {name[:40]!r}, which is no dtype")
    return _DTYPES[name]
