"""Distributions by their moments and functions; ``rrelu`` and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from .compare import check, check_on_device
from .test_random_operators import assert_uniform

SIZE = 50_000


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def filled(value: float) -> torch.Tensor:
    return torch.full((SIZE,), float(value))


MOMENTS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "geometric": (lambda: filled(0).geometric_(0.3), 1 / 0.3, 0.7 / 0.09),
    "log_normal": (
        lambda: filled(0).log_normal_(0.5, 0.25),
        math.exp(0.53125),
        (math.exp(0.0625) - 1) * math.exp(1.0625),
    ),
    "normal": (lambda: torch.normal(filled(2), filled(3)), 2, 9),
    "normal_mean": (lambda: torch.normal(filled(2), 3.0), 2, 9),
    "normal_std": (lambda: torch.normal(2.0, filled(3)), 2, 9),
    "bernoulli": (lambda: torch.empty(SIZE).bernoulli_(filled(0.3)), 0.3, 0.21),
    "poisson_small": (lambda: torch.poisson(filled(0.7)), 0.7, 0.7),
    "poisson_large": (lambda: torch.poisson(filled(60)), 60, 60),
    "binomial": (lambda: torch.binomial(filled(12), filled(0.3)), 3.6, 2.52),
    "binomial_large": (lambda: torch.binomial(filled(200), filled(0.8)), 160, 32),
    "gamma_small": (lambda: torch._standard_gamma(filled(0.4)), 0.4, 0.4),
    "gamma_large": (lambda: torch._standard_gamma(filled(7)), 7, 7),
    "dirichlet": (
        lambda: torch._sample_dirichlet(torch.tensor([1.0, 2, 5]).expand(SIZE, 3))[:, 1],
        0.25,
        0.25 * 0.75 / 9,
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str) -> None:
    function, mean, variance = MOMENTS[name]
    x = check_on_device(function).double()
    assert x.shape == (SIZE,)
    assert abs(x.mean() - mean) < 5 * (variance / SIZE) ** 0.5
    assert abs(x.var() / variance - 1) < 0.08


def test_cauchy() -> None:
    x = check_on_device(lambda: filled(0).cauchy_(2, 3)).double()
    assert_uniform((((x - 2) / 3).atan() / math.pi + 0.5).clamp(max=1 - 1e-12))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(replacement: bool) -> None:
    weights = torch.tensor([[1.0, 0, 3, 4], [2, 2, 0, 0]])
    expanded = weights[0].expand(SIZE, 4)
    x = check_on_device(lambda w: torch.multinomial(w, 2, replacement), expanded)
    assert (x[:, 0].bincount(minlength=4) / SIZE - weights[0] / 8).abs().max() < 0.01
    assert not (x == 1).any()
    assert replacement or (x[:, 0] != x[:, 1]).all()
    one = check_on_device(lambda w: torch.multinomial(w, 5, True), weights[1])
    assert one.shape == (5,) and one.max() < 2


def test_multinomial_of_improper_weights_raises() -> None:
    with pytest.raises(RuntimeError, match="probability tensor"):
        check_on_device(lambda w: torch.multinomial(w, 1), torch.tensor([1.0, -1]))


def test_gradient_of_gamma_samples() -> None:
    alpha, sample = torch.rand(200).double() * 9 + 0.1, torch.rand(200).double() * 9 + 0.1
    actual = check_on_device(torch._standard_gamma_grad, alpha, sample)
    # ATen's approximation is good to 5e-4.
    torch.testing.assert_close(
        actual, torch._standard_gamma_grad(alpha, sample), rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rrelu(dtype: torch.dtype) -> None:
    x = torch.randn(SIZE).to(dtype).requires_grad_()
    y = check_on_device(lambda x: F.rrelu(x, 0.1, 0.4, training=True), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.detach(), x.detach() * gradient)
    slopes = gradient[x < 0].double()
    assert slopes.min() >= 0.099 and slopes.max() <= 0.401
    assert abs(slopes.mean() - 0.25) < 0.005
    assert (gradient[x > 0] == 1).all()
    check(lambda x: F.rrelu(x, 0.1, 0.4, training=False), x, grad=True)
