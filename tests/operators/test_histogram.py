"""Histograms: ranges, edges, weights, densities, values outside and not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .compare import check, check_on_device

VALUES = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 0.99, 1.0, 1.5, -0.5, 0.1])

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "histc": lambda x: torch.histc(x, 7),
    "histc_range": lambda x: torch.histc(x, 4, 0, 1),
    "histc_point": lambda x: torch.histc(x * 0 + 3, 5),
    "count": lambda x: torch.histogram(x, 10),
    "range": lambda x: torch.histogram(x, 4, range=(0.0, 1.0)),
    "point": lambda x: torch.histogram(x * 0, 3),
    "edges": lambda x: torch.histogram(x, torch.tensor([0, 0.1, 0.3, 1.0], dtype=x.dtype)),
    "weight": lambda x: torch.histogram(x, 5, weight=x * x),
    "density": lambda x: torch.histogram(
        x, torch.tensor([0, 0.5, 2.0], dtype=x.dtype), density=True
    ),
    "dd": lambda x: torch.histogramdd(torch.stack([x, x * x], -1), [3, 4]),
    "dd_range": lambda x: torch.histogramdd(
        torch.stack([x, -x], -1), [3, 2], range=[0.0, 1.0, -1.0, 0.5], density=True
    ),
    "dd_edges": lambda x: torch.histogramdd(
        torch.stack([x, x], -1), [torch.linspace(0, 1, 4).to(x), torch.linspace(-1, 2, 3).to(x)]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], VALUES.to(dtype))
    check(CASES[name], torch.randn(5, 40, dtype=dtype)[:, ::2].reshape(-1))


def test_what_is_not_in_the_range_is_not_counted() -> None:
    x = torch.tensor([0.5, math.nan, math.inf, -math.inf, 2.0])
    check(lambda x: torch.histc(x, 4, 0, 1), x)
    check(lambda x: torch.histogram(x, 4, range=(0.0, 1.0)), x)


def test_nothing_to_count() -> None:
    check(lambda x: torch.histc(x, 4), torch.zeros(0))


def test_a_range_that_is_not_finite_raises() -> None:
    with pytest.raises(RuntimeError, match="finite"):
        check_on_device(lambda x: torch.histc(x, 4), torch.tensor([0.0, math.inf]))
