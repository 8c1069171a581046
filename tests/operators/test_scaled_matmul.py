"""Scaled products of float8 matrices, against eager, which has them on the CPU, or in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import neuron_compile

from ..support import IGNORE_TORCH, layout, neuron

F = torch.nn.functional
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
WIDE = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TENSOR_WISE, ROW_WISE = F.ScalingType.TensorWise, F.ScalingType.RowWise
SCALES = {
    "tensor": (lambda: torch.tensor(0.37), lambda: torch.tensor([0.21])),
    "rows": (lambda: torch.rand(24, 1) + 0.1, lambda: torch.rand(1, 40) + 0.1),
}


def matrices(
    a: torch.dtype = FLOAT8[0], b: torch.dtype = FLOAT8[0]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-major and column-major, as kernels have them."""
    return torch.randn(24, 64).to(a), torch.randn(40, 64).to(b).t()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Eager scales the operands where this scales the product, so float32 differs."""
    assert (actual.dtype, layout(actual)) == (wanted.dtype, layout(wanted))
    unit = max(torch.finfo(wanted.dtype).eps, 2e-6)
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=unit, atol=1e-5)


def check(function: Any, *args: Any) -> None:
    """Compare with eager; all of it must run on the device."""
    close(neuron(function)(*args), function(*args))
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("left", FLOAT8, ids=str)
def test_formats(left: torch.dtype) -> None:
    for right in FLOAT8:
        a, b = matrices(left, right)
        check(torch._scaled_mm, a, b, torch.ones(()), torch.ones(()))


@pytest.mark.parametrize("dtype", [None, *WIDE, *FLOAT8], ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_results(scales: str, dtype: torch.dtype | None) -> None:
    a, b = matrices()
    scale_a, scale_b = (make() for make in SCALES[scales])
    bias, result = torch.randn(40), torch.tensor(3.0)
    for options in ({}, {"bias": bias}, {"bias": bias.bfloat16()}, {"scale_result": result}):
        check(
            lambda a, b, s, t, o: torch._scaled_mm(a, b, s, t, out_dtype=dtype, **o),
            *(a, b, scale_a, scale_b, options),
        )


@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_changes_nothing(fast: bool) -> None:
    a, b = matrices()
    check(lambda a, b, s: torch._scaled_mm(a, b, s, s, use_fast_accum=fast), a, b, torch.ones(()))


@pytest.mark.parametrize("sizes", [(0, 8, 5), (3, 0, 5), (3, 7, 0), (1, 1, 1)], ids=str)
def test_sizes(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    a, b = (x.to(torch.float8_e5m2) for x in (torch.ones(rows, inner), torch.ones(inner, columns)))
    check(
        lambda a, b, s: torch._scaled_mm(a, b, s, s, out_dtype=torch.float32), a, b, torch.ones(1)
    )


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_mm(bias: bool, dtype: torch.dtype) -> None:
    a, b = matrices()
    for (make_a, make_b), recipe in zip(SCALES.values(), (TENSOR_WISE, ROW_WISE), strict=True):
        check(
            lambda a, b, s, t, bias, recipe=recipe: F.scaled_mm(
                a, b, s, recipe, t, recipe, bias=bias, output_dtype=dtype
            ),
            *(a, b, make_a(), make_b(), torch.randn(40) if bias else None),
        )


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_scales_that_eager_refuses_are_refused() -> None:
    a, b = torch.ones(16, 256).to(FLOAT8[0]), torch.ones(256, 256).to(FLOAT8[0]).t()
    compiled = neuron(lambda a, b, s, t: torch._scaled_mm(a, b, s, t, out_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="Invalid scaling configuration"):
        compiled(a, b, torch.ones(16, 2), torch.ones(2, 256))


@IGNORE_TORCH
def test_a_linear_layer_in_float8() -> None:
    """Scales are found and both operands converted in the same graph; backward in bfloat16."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            scales = [448 / item.abs().amax().float() for item in (x, weight)]
            a, b = ((item * s).to(FLOAT8[0]) for item, s in zip((x, weight), scales, strict=True))
            inverse = [s.reciprocal() for s in scales]
            return torch._scaled_mm(a, b.t(), *inverse, out_dtype=torch.bfloat16)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return grads[0] @ weight, grads[0].t() @ x

    tensors = [torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16()]
    mine, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    actual, wanted = neuron(Product.apply, fullgraph=True)(*mine), Product.apply(*theirs)
    torch.testing.assert_close(actual, wanted)
    actual.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1.0)
    assert neuron_compile.report().operators_in_fallback == 0


FORMS = list(itertools.product((2, 3), repeat=2))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scaled_grouped_mm(form: tuple[int, int]) -> None:
    """No kernel on the CPU: compared with a loop in float64."""
    groups, rows, inner, columns = 3, 32, 48, 64
    ends = torch.tensor([16, 16, 40 if form == (2, 2) else 24], dtype=torch.int32)
    bounds = list(itertools.pairwise([0, *ends.tolist()]))
    a = torch.randn(*((groups,) if form[0] == 3 else ()), rows, inner).to(FLOAT8[0])
    b = torch.randn(*((groups,) if form[1] == 3 else ()), columns, inner).to(FLOAT8[0])
    b = b.transpose(-2, -1)
    many = groups if form == (2, 2) else 1
    scale_a = torch.rand(groups, rows) if form[0] == 3 else torch.rand(many * rows)
    scale_b = torch.rand(groups, columns) if form[1] == 3 else torch.rand(many * columns)
    offs = None if form == (3, 3) else ends
    compiled = neuron(
        lambda *args: torch._scaled_grouped_mm(*args, offs=offs, out_dtype=torch.bfloat16)
    )
    actual = compiled(a, b, scale_a, scale_b).double()

    wide_a, wide_b = a.double(), b.double()
    if form == (2, 2):
        by_group = scale_a.view(groups, rows, 1), scale_b.view(groups, 1, columns)
        products = [wide_a[:, s:e] @ wide_b[s:e] for s, e in bounds]
        wanted = torch.stack(products) * by_group[0] * by_group[1]
    else:
        wide_a, wide_b = wide_a * scale_a[..., None], wide_b * scale_b[..., None, :]
        if form == (3, 3):
            wanted = wide_a @ wide_b
        elif form == (2, 3):
            wanted = torch.cat([wide_a[s:e] @ wide_b[g] for g, (s, e) in enumerate(bounds)])
            actual = actual[: ends[-1]]
        else:
            wanted = torch.cat([wide_a[g] @ wide_b[:, s:e] for g, (s, e) in enumerate(bounds)], 1)
            actual = actual[:, : ends[-1]]
    torch.testing.assert_close(actual, wanted, rtol=8e-3, atol=1e-3)
    assert neuron_compile.report().operators_in_fallback == 0
