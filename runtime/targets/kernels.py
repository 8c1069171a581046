"""The CPU target's kernels: ATen's and MKL's implementations of composites.

A kernel is built once a call site from its :class:`KernelSpec`. ``wants`` says for which shapes
it was measured to beat what XLA:CPU makes of the composite's decomposition.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import static_memory
from ..torch_memory import tensor_at
from .ffi import Kernel

aten = torch.ops.aten

_DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "complex<f32>": torch.complex64,
    "complex<f64>": torch.complex128,
    "i1": torch.bool,
    "i32": torch.int32,
    "i64": torch.int64,
}


#: The attribute of a call site that says whether its kernel may keep weights packed.
PACKS = "packs"


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """A call site: the kernel's name, element type and shape of operands and results, settings."""

    kernel: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    attributes: tuple[tuple[str, Any], ...]

    def to_json(self) -> str:
        """A stable text form."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """The inverse of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(
            fields["kernel"],
            tuple((dtype, tuple(shape)) for dtype, shape in fields["operands"]),
            tuple((dtype, tuple(shape)) for dtype, shape in fields["results"]),
            tuple((name, value) for name, value in fields["attributes"]),
        )

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    def integers(self, name: str) -> list[int]:
        """A list attribute, stored as text."""
        text = self[name]
        return [int(item) for item in text.split(",")] if text else []


Wants = Callable[[KernelSpec], bool]
Builder = Callable[[KernelSpec], Kernel]
_KERNELS: dict[str, tuple[Wants, Builder]] = {}


def kernel(name: str, *, when: Wants) -> Callable[[Builder], Builder]:
    """Register the decorated builder as the kernel of composite ``neuron.<name>``."""

    def decorate(builder: Builder) -> Builder:
        if name in _KERNELS:
            raise ValueError(f"kernel {name!r} is registered twice")
        _KERNELS[name] = (when, builder)
        return builder

    return decorate


def wants(spec: KernelSpec) -> bool:
    """Whether a kernel exists and takes this call site."""
    found = _KERNELS.get(spec.kernel)
    return found is not None and found[0](spec)


def build(spec: KernelSpec) -> Kernel:
    """The kernel of a call site."""
    return _KERNELS[spec.kernel][1](spec)


_VIEW_LIMIT = 64


class _View:
    """Tensors over raw addresses. The last few are kept, since XLA's arena repeats addresses."""

    def __init__(self, described: tuple[str, tuple[int, ...]]) -> None:
        name, self._shape = described
        self._dtype = _DTYPES[name]
        self._bytes = math.prod(self._shape) * self._dtype.itemsize
        self._stride = torch.empty(self._shape, device="meta").stride()
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, address: int) -> torch.Tensor:
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= _VIEW_LIMIT:
                self._kept.clear()
            found = self._kept[address] = self._make(address)
        return found

    def _make(self, address: int) -> torch.Tensor:
        return tensor_at(address, self._shape, self._stride, self._dtype, self._bytes)


def _aten_kernel(
    spec: KernelSpec, run: Callable[[list[torch.Tensor], list[torch.Tensor]], None]
) -> Kernel:
    operands = [_View(item) for item in spec.operands]
    results = [_View(item) for item in spec.results]

    def call(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        run(
            [view(address) for view, address in zip(operands, inputs, strict=True)],
            [view(address) for view, address in zip(results, outputs, strict=True)],
        )

    return call


def _all_of(spec: KernelSpec, *dtypes: str) -> bool:
    return all(dtype in dtypes for dtype, _ in (*spec.operands, *spec.results))


# --- matrix products -----------------------------------------------------------------------

#: Multiplications below which a call into MKL costs more than it saves.
_GEMM_THRESHOLD = 1 << 23


@functools.cache
def _mkl_is_fast() -> bool:
    """Whether ATen's matrix products and attention (MKL) beat XLA's own.

    On Intel's AVX-512 machines XLA's products reached 0.65-0.9 of MKL's speed; on AMD's, MKL
    runs a slower road, and XLA's were 1.1-1.25 times faster over whole models.
    """
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return "Intel" in platform.processor()


def _bfloat16_is_fast() -> bool:
    """Whether ATen multiplies bfloat16 by oneDNN on this processor.

    512x384 by 384x1536: 1.5 ms where XLA takes 2.0, and 8.1 for a transposed left operand; the
    values are then eager's to the bit.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def _wants_gemm(spec: KernelSpec) -> bool:
    (_, a), (_, result) = spec.operands[0], spec.results[0]
    inner = a[-2] if spec["transpose_a"] else a[-1]
    large = math.prod(result) * inner >= _GEMM_THRESHOLD
    if _all_of(spec, "bf16"):
        return large and _bfloat16_is_fast()
    # XLA walks a transposed left operand (a weight's gradient) at half of MKL's speed.
    return _all_of(spec, "f32") and large and bool(spec["transpose_a"] or _mkl_is_fast())


@kernel("gemm", when=_wants_gemm)
def _gemm(spec: KernelSpec) -> Kernel:
    transpose_a, transpose_b = bool(spec["transpose_a"]), bool(spec["transpose_b"])

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        a, b = inputs
        torch.matmul(
            a.transpose(-1, -2) if transpose_a else a,
            b.transpose(-1, -2) if transpose_b else b,
            out=outputs[0],
        )

    return _aten_kernel(spec, run)


@kernel("gemm_bias", when=_wants_gemm)
def _gemm_bias(spec: KernelSpec) -> Kernel:
    transpose_a, transpose_b = bool(spec["transpose_a"]), bool(spec["transpose_b"])

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        a, b, bias = inputs
        torch.addmm(bias, a.t() if transpose_a else a, b.t() if transpose_b else b, out=outputs[0])

    return _aten_kernel(spec, run)


# --- convolutions --------------------------------------------------------------------------


def _convolution_settings(spec: KernelSpec) -> tuple[Any, ...]:
    return (
        spec.integers("stride"),
        spec.integers("padding"),
        spec.integers("dilation"),
        bool(spec["transposed"]),
        spec.integers("output_padding"),
        spec["groups"],
    )


def _wants_convolution(spec: KernelSpec) -> bool:
    return _all_of(spec, "f32") and all(0 not in shape for _, shape in spec.operands)


def _channels_second(spec: KernelSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sees a buffer with channels last as ``[N, C, ...]``, without moving it."""
    if spec["channels_last"]:
        return lambda tensor: tensor.movedim(-1, 1)
    return lambda tensor: tensor


#: oneDNN's convolutions over packed weights, which torch keeps for Inductor's frozen graphs.
_pack = getattr(torch.ops.mkldnn, "_reorder_convolution_weight", None)
_convolve = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)


def _packed_convolution(spec: KernelSpec) -> Callable[..., torch.Tensor | None] | None:
    """A convolution whose weight, if it is a parameter that stays, is packed once."""
    if _pack is None or _convolve is None or spec["transposed"] or len(spec.operands[0][1]) != 4:
        return None
    stride, padding, dilation, _, _, groups = _convolution_settings(spec)
    key = spec.to_json()

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        memory = static_memory.at(weight.data_ptr())
        weights = memory and memory.kept(
            key, lambda: _pack(weight, padding, stride, dilation, groups, list(x.shape))
        )
        if weights is None:
            return None
        return _convolve(x, weights, bias, padding, stride, dilation, groups, "none", [], "")

    return run


@kernel("convolution", when=_wants_convolution)
def _convolution(spec: KernelSpec) -> Kernel:
    settings = _convolution_settings(spec)
    view = _channels_second(spec)

    # Graphs for training have channels second.
    packed = _packed_convolution(spec) if spec[PACKS] and spec["channels_last"] else None

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        x, weight, *biases = inputs
        bias = biases[0] if biases else None
        result = packed and packed(view(x), weight, bias)
        if result is None:
            result = torch.convolution(view(x), weight, bias, *settings)
        view(outputs[0]).copy_(result)

    return _aten_kernel(spec, run)


@kernel("convolution_backward", when=_wants_convolution)
def _convolution_backward(spec: KernelSpec) -> Kernel:
    settings = _convolution_settings(spec)
    view = _channels_second(spec)
    mask = [bool(wanted) for wanted in spec.integers("mask")]
    weight_shape = spec.operands[2][1]
    channels = weight_shape[1] * spec["groups"] if spec["transposed"] else weight_shape[0]
    bias_sizes = [channels] if mask[2] else None

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        grad, x, weight = inputs
        results = aten.convolution_backward(
            view(grad), view(x), weight, bias_sizes, *settings, mask
        )
        given = iter(outputs)
        for position, wanted in enumerate(mask):
            if wanted:
                output = next(given)
                (view(output) if position == 0 else output).copy_(results[position])

    return _aten_kernel(spec, run)


# --- attention -----------------------------------------------------------------------------


#: Scores of one head from which materializing them costs more than ATen's blocked kernel.
_SCORES_THRESHOLD = 1 << 15


def _wants_attention(spec: KernelSpec) -> bool:
    first = 1 if spec.kernel == "flash_attention_backward" else 0
    (_, query), (_, key) = spec.operands[first : first + 2]
    long = query[1] * key[1] >= _SCORES_THRESHOLD
    plain = all(dtype == "f32" and 0 not in shape for dtype, shape in spec.operands)
    return plain and (long or _mkl_is_fast())


def _heads_last(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, L, H, D]`` in memory, seen as ``[B, H, L, D]``."""
    return tensor.transpose(1, 2)


@kernel("flash_attention", when=_wants_attention)
def _flash_attention(spec: KernelSpec) -> Kernel:
    is_causal, scale = bool(spec["is_causal"]), spec["scale"]

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        query, key, value, *mask = inputs
        result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_last(query),
            _heads_last(key),
            _heads_last(value),
            0.0,
            is_causal,
            attn_mask=mask[0] if mask else None,
            scale=scale,
        )
        _heads_last(outputs[0]).copy_(result)
        outputs[1].copy_(logsumexp)

    return _aten_kernel(spec, run)


@kernel("flash_attention_backward", when=_wants_attention)
def _flash_attention_backward(spec: KernelSpec) -> Kernel:
    is_causal, scale = bool(spec["is_causal"]), spec["scale"]

    def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        grad, query, key, value, out, logsumexp, *mask = inputs
        results = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_last(tensor) for tensor in (grad, query, key, value, out)),
            logsumexp,
            0.0,
            is_causal,
            attn_mask=mask[0] if mask else None,
            scale=scale,
        )
        for output, result in zip(outputs, results, strict=True):
            _heads_last(output).copy_(result)

    return _aten_kernel(spec, run)


# --- rows ----------------------------------------------------------------------------------

#: Elements below which XLA's own loops win over a call.
_ROWS_THRESHOLD = 1 << 18


def _wants_rows(spec: KernelSpec) -> bool:
    return _all_of(spec, "f32") and math.prod(spec.operands[0][1]) >= _ROWS_THRESHOLD


def _row_kernel(out: Any) -> Builder:
    def builder(spec: KernelSpec) -> Kernel:
        dim = spec["dim"]

        def run(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            out(inputs[0], dim, False, out=outputs[0])

        return _aten_kernel(spec, run)

    return builder


kernel("softmax", when=_wants_rows)(_row_kernel(aten._softmax.out))
kernel("log_softmax", when=_wants_rows)(_row_kernel(aten._log_softmax.out))
