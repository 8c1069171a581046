"""Signatures and options as JSON's data, and back: strictly, for files are not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import strict
from .neff_file import NeffError
from .types import ArgumentSpec, Check, CompilerOptions, ResultSpec, Signature, View

#: What a check may raise.
_ERRORS: Mapping[str, type[Exception]] = {
    "IndexError": IndexError,
    "RuntimeError": RuntimeError,
    "ValueError": ValueError,
    "LinAlgError": torch.linalg.LinAlgError,  # type: ignore[attr-defined]
}
_ERROR_NAMES = {error: name for name, error in _ERRORS.items()}
_KINDS = ("tensor", "input", "none", "constant")


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
                "dtype": strict.dtype_name(spec.dtype),
                "permutation": spec.permutation,
                "static": spec.static,
                "dense": spec.dense,
                "carrier": strict.optional_dtype_name(spec.carrier),
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
        "dtype": strict.optional_dtype_name(spec.dtype),
        "view": view
        and {
            "shape": view.shape,
            "stride": view.stride,
            "offset": view.offset,
            "base": view.base,
            "dtype": strict.optional_dtype_name(view.dtype),
        },
    }


def _error_name(error: type[Exception]) -> str:
    if error not in _ERROR_NAMES:
        raise NeffError(f"a check raises {error.__name__}, which a file does not know")
    return _ERROR_NAMES[error]


def signature_from_plain(data: Any) -> Signature:
    """The inverse of :func:`signature_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    fields = strict.fields_of(data, "signature", ("arguments", "results", "seeded", "checks"))
    return Signature(
        strict.array(fields["arguments"], "arguments", _argument),
        strict.array(fields["results"], "results", _result),
        strict.boolean(fields["seeded"], "seeded"),
        strict.array(fields["checks"], "checks", _check),
    )


def _argument(data: Any, where: str) -> ArgumentSpec:
    names = ("name", "shape", "dtype", "permutation", "static", "dense", "carrier")
    fields = strict.fields_of(data, where, names)
    shape = strict.sizes(fields["shape"], f"{where}.shape")
    dtype = strict.dtype(fields["dtype"], f"{where}.dtype")
    carrier = strict.optional(fields["carrier"], f"{where}.carrier", strict.dtype)
    if carrier is not None and carrier.itemsize != dtype.itemsize:
        raise NeffError(f"{where}.carrier has another width than the dtype")
    return ArgumentSpec(
        strict.text(fields["name"], f"{where}.name"),
        shape,
        dtype,
        strict.permutation(fields["permutation"], f"{where}.permutation", len(shape)),
        strict.boolean(fields["static"], f"{where}.static"),
        strict.boolean(fields["dense"], f"{where}.dense"),
        carrier,
    )


def _result(data: Any, where: str) -> ResultSpec:
    names = ("kind", "index", "value", "permutation", "expand", "stride", "dtype", "view")
    fields = strict.fields_of(data, where, names)
    kind, value = strict.text(fields["kind"], f"{where}.kind"), fields["value"]
    if kind not in _KINDS:
        raise NeffError(f"{where}.kind is {kind[:40]!r}, none of {', '.join(_KINDS)}")
    if not isinstance(value, bool | int | float | None):
        raise NeffError(f"{where}.value is no number")
    permutation = fields["permutation"]
    rank = len(permutation) if isinstance(permutation, list) else 0
    return ResultSpec(
        kind,
        strict.integer(fields["index"], f"{where}.index"),
        value,
        strict.permutation(permutation, f"{where}.permutation", rank),
        strict.optional(fields["expand"], f"{where}.expand", strict.sizes),
        strict.optional(fields["stride"], f"{where}.stride", strict.sizes),
        strict.optional(fields["view"], f"{where}.view", _view),
        strict.optional(fields["dtype"], f"{where}.dtype", strict.dtype),
    )


def _view(data: Any, where: str) -> View:
    fields = strict.fields_of(data, where, ("shape", "stride", "offset", "base", "dtype"))
    shape = strict.sizes(fields["shape"], f"{where}.shape")
    stride = strict.sizes(fields["stride"], f"{where}.stride")
    if len(stride) != len(shape):
        raise NeffError(f"{where} has {len(shape)} sizes and {len(stride)} strides")
    return View(
        shape,
        stride,
        strict.integer(fields["offset"], f"{where}.offset"),
        strict.sizes(fields["base"], f"{where}.base"),
        strict.optional(fields["dtype"], f"{where}.dtype", strict.dtype),
    )


def _check(data: Any, where: str) -> Check:
    fields = strict.fields_of(data, where, ("error", "message"))
    name = strict.text(fields["error"], f"{where}.error")
    if name not in _ERRORS:
        raise NeffError(f"{where}.error is {name[:40]!r}, none of {', '.join(_ERRORS)}")
    return Check(_ERRORS[name], strict.text(fields["message"], f"{where}.message"))


def options_to_plain(options: CompilerOptions) -> dict[str, Any]:
    """Options as JSON's data."""
    return {
        "platform": options.platform,
        "xla_options": dict(options.xla_options),
        "vendor_kernels": options.vendor_kernels,
        "pack_weights": options.pack_weights,
    }


def options_from_plain(data: Any) -> CompilerOptions:
    """The inverse of :func:`options_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    names = ("platform", "xla_options", "vendor_kernels", "pack_weights")
    fields = strict.fields_of(data, "options", names)
    flags = fields["xla_options"]
    if not isinstance(flags, dict) or not all(
        isinstance(value, bool | int | float | str) for value in flags.values()
    ):
        raise NeffError("options.xla_options is no object of numbers and strings")
    return CompilerOptions(
        strict.text(fields["platform"], "options.platform"),
        tuple(sorted(flags.items())),
        strict.boolean(fields["vendor_kernels"], "options.vendor_kernels"),
        strict.boolean(fields["pack_weights"], "options.pack_weights"),
    )


def specs_to_plain(tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Shapes and dtypes of tensors as JSON's data."""
    return [{"shape": list(x.shape), "dtype": strict.dtype_name(x.dtype)} for x in tensors]


def specs_from_plain(data: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """The inverse of :func:`specs_to_plain`.

    Raises:
        NeffError: naming the first field that is missing, is one too many or has a wrong value.
    """
    return strict.array(data, "constants", _spec)


def _spec(data: Any, where: str) -> tuple[tuple[int, ...], torch.dtype]:
    fields = strict.fields_of(data, where, ("shape", "dtype"))
    return strict.sizes(fields["shape"], f"{where}.shape"), strict.dtype(
        fields["dtype"], f"{where}.dtype"
    )
