"""Special functions over their whole domain: poles, ends, infinities, NaN, large arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .compare import check, check_on_device

special = torch.special
DTYPES = [torch.float32, torch.float64]


def line(dtype: torch.dtype) -> torch.Tensor:
    """The real line: dense near zero, sparse far off, with what is not finite."""
    far = torch.logspace(-20, 4, 100, dtype=torch.float64)
    marks = [0.0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 5, 8, 103.9, math.inf, -math.inf, math.nan]
    parts = (torch.linspace(-12, 12, 961, dtype=torch.float64), far, -far)
    return torch.cat([*parts, torch.tensor(marks, dtype=torch.float64)]).to(dtype)


def assert_accurate(function: Callable[..., Any], *args: Any, loose: float = 1) -> None:
    """Within relative rounding of eager; where both are next to nothing, they may differ."""
    actual, expected = check_on_device(function, *args), function(*args)
    rtol, atol = (1e-5, 2e-6) if expected.dtype is torch.float32 else (1e-9, 1e-11)
    torch.testing.assert_close(
        actual, expected, rtol=rtol * loose, atol=atol * loose, equal_nan=True
    )


NAMES = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erfcx i0 i0e i1 i1e log_ndtr
modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtri
scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc spherical_bessel_j0
"""
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(special, name) for name in NAMES.split()},
    **{f"polygamma_{n}": lambda x, n=n: torch.polygamma(n, x) for n in (0, 1, 2, 5)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype) -> None:
    assert_accurate(UNARY[name], line(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", ["digamma", "polygamma_1", "polygamma_2"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.25, 1.0, 3.0], [-2.5, 0.0, 40.0]]).to(dtype)
    check(UNARY[name], x.t())


@pytest.mark.parametrize("name", ["digamma", "erfcx", "log_ndtr", "polygamma_1", "i0e", "i1"])
def test_gradients(name: str) -> None:
    x = torch.linspace(0.1, 9, 200, dtype=torch.float64, requires_grad=True)
    check(UNARY[name], x, grad=True)


def grid(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    return [part.contiguous() for part in torch.meshgrid(first, second, indexing="ij")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeta(dtype: torch.dtype) -> None:
    x = torch.tensor([-1, 0.5, 1, 1.001, 1.5, 2, 3, 4, 7.5, 20, 100, math.inf, math.nan])
    q = torch.cat([torch.linspace(-6, 9, 61), torch.tensor([1e-12, -1e-12, 1e9, math.inf, -99.25])])
    assert_accurate(special.zeta, *grid(x.to(dtype), q.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma(function: Callable[..., Any], dtype: torch.dtype) -> None:
    marks = torch.tensor([0.0, -1, math.inf, math.nan, 1.0, 1.1, 0.5, 20, 200], dtype=dtype)
    values = torch.cat([torch.logspace(-6, 5, 40, dtype=dtype), marks])
    assert_accurate(function, *grid(values, values), loose=10)
    near = values[:, None] * torch.linspace(0.7, 1.4, 30, dtype=dtype)
    assert_accurate(function, values[:, None].expand_as(near), near, loose=10)


POLYNOMIALS = [
    *(f"{prefix}chebyshev_polynomial_{kind}" for prefix in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he"),
    *("laguerre_polynomial_l", "legendre_polynomial_p"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str, dtype: torch.dtype) -> None:
    marks = torch.tensor([0.0, 1, -1, 0.5, 1e-20, 0.9999999, -0.9999999, 50, -50, math.inf])
    x = torch.cat([torch.linspace(-3, 3, 61), marks]).to(dtype)
    # At NaN eager returns what was in the register.
    degrees = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 30, -1, 2.7, -0.5, math.inf, math.nan, 1e30]
    degrees += [129, 513] if "hermite" in name else []
    n = torch.tensor(degrees, dtype=dtype)
    assert_accurate(getattr(special, name), *grid(x, n), loose=4 if dtype is torch.float32 else 1)


def test_polynomials_of_numbers_and_integers() -> None:
    x = torch.linspace(-2, 2, 9)
    function = special.legendre_polynomial_p
    check(lambda x: (function(x, 3), function(0.25, x)), x)
    check(function, torch.arange(-3, 3), torch.arange(6))
    check(special.laguerre_polynomial_l, torch.zeros(0), torch.zeros(0))
