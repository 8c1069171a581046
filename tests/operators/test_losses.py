"""``linear_cross_entropy`` in chunks: weights, ignored samples, chunks that do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.modules.linear_cross_entropy  # defines the operators

from .compare import check

torch_nn = torch.ops.torch_nn


def operands(dtype: torch.dtype, samples: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, generator=generator).to(dtype)
    linear_weight = torch.randn(5, 3, generator=generator).to(dtype)
    target = torch.randint(0, 5, (samples,), generator=generator)
    target[1:2] = 2
    bias = torch.randn(5, generator=generator).to(dtype)
    return [x, linear_weight, target, bias]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [2, 7, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_with_its_gradients(reduction: str, chunk: int, dtype: torch.dtype) -> None:
    function = torch_nn._linear_cross_entropy_batch_chunked.default
    policy = "uniform" if dtype is torch.bfloat16 else "compact"
    accumulator = torch.float32 if dtype is torch.bfloat16 else dtype
    weight = torch.rand(5).to(dtype)

    for ignored, wanted in ((2, (True, True, True)), (-100, (True, False, False))):

        def call(x, w, t, b, weight, ignored=ignored, wanted=wanted):  # type: ignore[no-untyped-def]
            return function(
                *(x, w, t, b, weight, reduction, ignored, 0.0, chunk, policy, accumulator),
                *(False, *wanted),
            )

        check(call, *operands(dtype), weight, scale=4)


@pytest.mark.parametrize("chunk", [2, 100])
def test_losses_of_samples(chunk: int) -> None:
    function = torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default
    x, linear_weight, target, bias = operands(torch.float32)
    check(
        lambda x, w, b: function(x, w, target, b, None, 2, chunk, "compact", torch.float32),
        x.requires_grad_(),
        linear_weight.requires_grad_(),
        bias.requires_grad_(),
        grad=True,
    )
