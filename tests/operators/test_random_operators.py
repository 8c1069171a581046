"""Random operators: their distributions, and that the seed governs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check_on_device

SIZE = 200_000


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a compiled function, all of whose operators are on the device."""
    return check_on_device(function, *args)


def assert_uniform(x: torch.Tensor) -> None:
    """Kolmogorov-Smirnov distance to the uniform distribution over [0, 1)."""
    assert x.min() >= 0 and x.max() < 1
    expected = torch.arange(1, x.numel() + 1, dtype=torch.float64) / x.numel()
    distance = (x.double().flatten().sort().values - expected).abs().max()
    assert distance < 1.95 / x.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uniform(dtype: torch.dtype) -> None:
    x = drawn(lambda: torch.rand(SIZE, dtype=dtype))
    assert x.dtype is dtype
    assert_uniform(x)
    assert_uniform(drawn(torch.rand_like, torch.zeros(SIZE)))


def test_normal() -> None:
    x = drawn(lambda: torch.randn(SIZE)).double()
    assert torch.isfinite(x).all()
    assert_uniform(torch.special.ndtr(x).clamp(max=1 - 1e-12))
    assert abs(x.mean()) < 0.01
    assert abs((x**4).mean() - 3) < 0.1


def test_complex_draws_have_two_parts() -> None:
    x = drawn(lambda: torch.rand(SIZE, dtype=torch.complex64))
    assert_uniform(x.real.contiguous())
    assert_uniform(x.imag.contiguous())
    y = drawn(lambda: torch.randn(SIZE, dtype=torch.complex128)) * 2**0.5
    for part in (y.real, y.imag):
        assert_uniform(torch.special.ndtr(part).clamp(max=1 - 1e-12))
    z = drawn(lambda x: x.uniform_(-3, -1), torch.zeros(SIZE, dtype=torch.complex64))
    assert_uniform((z.real + 3) / 2)
    assert_uniform((z.imag + 3) / 2)
    assert abs((x.real * x.imag).mean() - 0.25) < 0.01
    assert abs((y.real * y.imag).mean()) < 0.01


def test_two_draws_are_independent() -> None:
    x, y = drawn(lambda: (torch.randn(SIZE), torch.randn(SIZE)))
    assert abs((x * y).mean()) < 0.01
    assert not torch.equal(x, y)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout(p: float) -> None:
    x = torch.ones(SIZE)
    y = drawn(lambda x: F.dropout(x, p), x)
    kept = y != 0
    assert abs(kept.double().mean() - (1 - p)) < 0.005
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))


def test_dropout_at_the_ends() -> None:
    x = torch.ones(64)
    assert torch.equal(drawn(lambda x: F.dropout(x, 0.0), x), x)
    assert torch.equal(drawn(lambda x: F.dropout(x, 1.0), x), torch.zeros(64))
    assert torch.equal(drawn(lambda x: F.dropout(x, 0.5, training=False), x), x)


def test_dropout_masks_its_gradient() -> None:
    x = torch.ones(4096, requires_grad=True)
    y = drawn(lambda x: F.dropout(x, 0.3), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach())


def test_bernoulli() -> None:
    p = torch.rand(SIZE)
    assert abs((drawn(torch.bernoulli, p) - p).mean()) < 0.005
    assert abs(drawn(lambda x: torch.bernoulli(x, 0.3), p).mean() - 0.3) < 0.005


def test_the_seed_governs() -> None:
    function = torch.compile(lambda: torch.rand(8), backend="neuron", fullgraph=True)
    torch.manual_seed(3)
    first, second = function(), function()
    torch.manual_seed(3)
    assert torch.equal(function(), first)
    assert not torch.equal(first, second)
