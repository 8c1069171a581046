"""Plain data that the lowering phases hand to each other and to their callers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)

#: Dtypes that Torch-MLIR has no type for, and the signed integers that carry their bits through a
#: program. Traced lowerings see them as what they are.
CARRIERS: Mapping[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(FLOAT8, torch.int8),
}

#: torch dtype -> builtin MLIR element type. A dtype that is absent cannot be lowered.
MLIR_DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "i1",
    torch.uint8: "ui8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint16: "i16",
    torch.uint32: "i32",
    torch.uint64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
    **dict.fromkeys(FLOAT8, "i8"),
}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape (elements) and dtype of one operand or result of an operator."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a (fake) tensor, whose sizes must be plain integers."""
        return cls(tuple(int(size) for size in tensor.shape), tensor.dtype)

    @property
    def mlir_type(self) -> str:
        """The builtin tensor type, for example ``tensor<3x4xf32>``."""
        return f"tensor<{'x'.join([*map(str, self.shape), MLIR_DTYPES[self.dtype]])}>"

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Check:
    """What is raised where a run-time check fails, and the FX node that it belongs to."""

    error: type[Exception]
    message: str
    node_name: str = ""


@dataclasses.dataclass(frozen=True)
class LoweredModule:
    """One StableHLO module and the signature of its ``main``.

    ``inputs`` and ``outputs`` are dense row-major. Names of ``phases`` map to seconds. If there
    are ``checks``, ``main`` has one more result, an int32: the position, counted from 1, of the
    first check that failed, or 0.
    """

    stablehlo: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    torch_dialect: str
    phases: Mapping[str, float]
    spliced: int
    checks: tuple[Check, ...] = ()


class LoweringError(Exception):
    """An operator or a graph could not be lowered.

    ``node_name`` is the FX node at fault where it is known, else ``None``.
    """

    def __init__(self, message: str, node_name: str | None = None) -> None:
        super().__init__(message)
        self.node_name = node_name
