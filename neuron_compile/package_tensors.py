"""Tensors of a package, in safetensors: read strictly, into memory that PJRT can share.

The format is a JSON header of dtypes, shapes and offsets, then the tensors one after the other. The
library that reads it makes two more copies of everything; here the manifest says what must be
there, so that reading is a comparison.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any, Protocol

import torch

from .runtime import NeffError, strict

_LONGEST_HEADER = 1 << 26


class TensorSpec(Protocol):
    """What the manifest says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


def refuse(constant: str) -> Any:
    """What a JSON parser does with NaN and infinity."""
    raise ValueError(f"{constant} is no number of JSON's")


_SAFETENSORS: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as safetensors takes it: its elements in row-major order, or their bytes where the
    format has no such dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype in _SAFETENSORS.values():
        return plain
    return plain.reshape(-1).view(torch.uint8)


def read_tensors(
    stream: IO[bytes], size: int, wanted: Mapping[str, TensorSpec], digest: Any
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors stream of ``size`` bytes that holds those and no others.

    They are read into memory of their own, at addresses that PJRT shares; ``digest`` is updated by
    all that is read.

    Raises:
        NeffError: saying what is wrong.
    """
    found = {}
    for name in read_header(stream, size, wanted, digest):
        spec = wanted[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        if spec.nbytes:
            memory = tensor.reshape(-1).view(torch.uint8).numpy().data
            if stream.readinto(memory) != spec.nbytes:  # type: ignore[attr-defined]
                raise NeffError("the tensors end too early")
            digest.update(memory)
        found[name] = _restored(tensor, spec.stride)
    return found


def read_header(
    stream: IO[bytes], size: int, wanted: Mapping[str, TensorSpec], digest: Any
) -> list[str]:
    """The names of the tensors in the order in which they follow the header.

    Raises:
        NeffError: where they are others than those that are wanted, or leave gaps.
    """
    prefix = _take(stream, 8)
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size - 8, _LONGEST_HEADER):
        raise NeffError(f"a header of {length} bytes among {size}")
    header = _take(stream, length)
    digest.update(prefix + header)
    try:
        entries = json.loads(header, parse_constant=refuse)
    except RecursionError as error:
        raise NeffError("the header of the tensors is nested too deeply") from error
    if not isinstance(entries, dict):
        raise NeffError("the header of the tensors is no object")
    entries.pop("__metadata__", None)
    if set(entries) != set(wanted):
        raise NeffError("the tensors are others than the manifest lists")
    places = {name: _place(entries[name], name, spec) for name, spec in wanted.items()}
    order = sorted(wanted, key=places.__getitem__)
    end = 0
    for name in order:
        begin, after = places[name]
        if begin != end:
            raise NeffError("the tensors overlap, or have gaps between them")
        end = after
    if end != size - 8 - length:
        raise NeffError("the tensors are not as long as the header says")
    return order


def _take(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise NeffError("the tensors end too early")
    return data


def _place(entry: Any, name: str, spec: TensorSpec) -> tuple[int, int]:
    """Where a tensor lies, if it is the one that the manifest describes."""
    fields = strict.fields_of(entry, name, ("dtype", "shape", "data_offsets"))
    known = spec.dtype in _SAFETENSORS.values()
    wanted = (spec.dtype, spec.shape) if known else (torch.uint8, (spec.nbytes,))
    dtype = _SAFETENSORS.get(strict.text(fields["dtype"], name))
    if (dtype, strict.sizes(fields["shape"], name)) != wanted:
        raise NeffError(f"{name} has another shape or dtype than the manifest says")
    offsets = strict.sizes(fields["data_offsets"], name)
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.nbytes:
        raise NeffError(f"{name} has a wrong length")
    return offsets[0], offsets[1]


def _restored(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor with the strides that the model's has, where these leave no gaps."""
    if tensor.stride() == stride or not tensor.numel():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -stride[dim])
    moved = tensor.permute(order).contiguous()
    back = [order.index(dim) for dim in range(tensor.dim())]
    permuted = moved.permute(back)
    same = all(
        step == wanted or size == 1
        for size, step, wanted in zip(tensor.shape, permuted.stride(), stride, strict=True)
    )
    return permuted if same else tensor
