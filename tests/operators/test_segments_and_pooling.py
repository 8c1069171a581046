"""``segment_reduce`` and fractional max-pooling."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check

REDUCTIONS = ["sum", "mean", "max", "min", "prod"]


@pytest.mark.parametrize("initial", [None, 2.5])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments(reduce: str, initial: float | None) -> None:
    x = torch.randn(9, 2)
    x[1], x[4, 0], x[5, 0], x[7, 1] = x[2], 0, 0, math.nan
    lengths = torch.tensor([3, 0, 4, 2])
    function = functools.partial(
        torch.segment_reduce, reduce=reduce, axis=0, initial=initial, unsafe=True
    )
    check(lambda x, n: function(x, lengths=n), x.requires_grad_(), lengths, grad=True)
    offsets = torch.tensor([0, 3, 3, 7, 9])
    check(lambda x, n: function(x, offsets=n), x, offsets, grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_segments_of_rows(reduce: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 3).to(dtype).requires_grad_()
    lengths = torch.tensor([[2, 3, 0], [1, 1, 3]])
    check(
        lambda x, n: torch.segment_reduce(x, reduce, lengths=n, axis=1, unsafe=True, initial=1),
        x,
        lengths,
        grad=True,
        scale=2,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function, size, arguments",
    [
        (F.fractional_max_pool2d, (2, 3, 9, 11), {"kernel_size": 2, "output_size": (4, 7)}),
        (F.fractional_max_pool2d, (3, 9, 11), {"kernel_size": (3, 2), "output_ratio": (0.5, 0.6)}),
        (F.fractional_max_pool2d, (2, 3, 5, 5), {"kernel_size": 3, "output_size": (1, 3)}),
        (F.fractional_max_pool3d, (2, 2, 5, 7, 6), {"kernel_size": 2, "output_size": (3, 4, 1)}),
    ],
)
def test_fractional_max_pool(
    function: Any, size: tuple[int, ...], arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    rank = 3 if function is F.fractional_max_pool3d else 2
    torch.manual_seed(0)
    x = torch.randn(size).to(dtype)
    x[..., 2, 3] = math.nan
    samples = torch.rand(*((1,) if len(size) == rank + 1 else ()), *size[:-rank], rank).to(dtype)
    call = functools.partial(function, return_indices=True, **arguments)
    check(lambda x, s: call(x, _random_samples=s), x.requires_grad_(), samples, grad=True)
