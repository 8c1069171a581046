"""Numbers that change from call to call and are no sizes do not compile anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import neuron_compile

from .support import IGNORE_TORCH, equal, neuron

pytestmark = IGNORE_TORCH

x = torch.linspace(-2, 2, 12).reshape(3, 4)
Function = Callable[[torch.Tensor, Any], Any]


def compare(function: Function, numbers: list[Any], tensor: torch.Tensor = x) -> int:
    """Call with each number; returns how many executables were made."""
    compiled = neuron(function)
    for number in numbers:
        actual, wanted = compiled(tensor, number), function(tensor, number)
        equal(actual, wanted, 1e-6, 1e-6)
    assert neuron_compile.report().operators_in_fallback == 0
    return neuron_compile.report().compilations


# One for the first number, as a constant, and one for all others.
SERVED: dict[str, Function] = {
    "product": lambda x, n: x * n,
    "quotient": lambda x, n: n / (x + 3),
    "power": lambda x, n: (x.abs() + 1) ** n,
    "base": lambda x, n: n ** (x / 2),
    "of-numbers": lambda x, n: x * min(0.9, (1 + n) / (10 + n)) + 0.9**n,
    "scaled-sum": lambda x, n: torch.add(x, x, alpha=1 / n) - torch.sub(x, x, alpha=0.5 * n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=1 / n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x + 3, value=0.5 * n),
    "lerp": lambda x, n: torch.lerp(x, 2 * x, 1 / n),
    "clamp": lambda x, n: x.clamp(-n / 10, n / 10).clamp_min(-0.5 * n),
    "addmm": lambda x, n: torch.addmm(x, x, x.mT @ x, beta=1 / n, alpha=0.5 * n),
    "full": lambda x, n: torch.full((3, 4), 0.5 * n) + torch.full_like(x, 1 / n),
    "comparison": lambda x, n: torch.where(torch.arange(12).view(3, 4) < n, x, -x),
    "where": lambda x, n: torch.where(x > 0, n, 0.5),
    "returned": lambda x, n: (x * n, n + 1),
    "no-dimensions": lambda x, n: x[0, 0] * n / 7 + n,
}


FLOATS = sorted({*SERVED} - {"comparison", "returned", "where"})


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_integers_one_by_one(name: str) -> None:
    assert compare(SERVED[name], [3, 4, 5, 7]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOATS)
def test_floats_one_by_one(name: str) -> None:
    assert compare(SERVED[name], [3.5, 4.25, 5.5, 7.75]) == 2


def test_integers() -> None:
    assert compare(lambda x, n: [SERVED[name](x, n) for name in SERVED], [3, 4, 5, 7]) == 2
    assert neuron_compile.report().specializations == 0


def test_floats() -> None:
    numbers = [3.5, 4.25, 5.5, 7.75]
    assert compare(lambda x, n: [SERVED[name](x, n) for name in FLOATS], numbers) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    """Half types keep the number in full: each one is compiled."""
    made = compare(lambda x, n: x * n + n, [3, 4, 5, 7], x.to(dtype))
    assert made == (4 if dtype == torch.bfloat16 else 2)


def test_half_types_are_rounded_once() -> None:
    def function(x: torch.Tensor, n: float) -> Any:
        y, z = x.sin(), x.cos()
        return torch.add(y, z, alpha=n), torch.addcmul(x, y, z, value=n), torch.lerp(x, y, n)

    compiled = neuron(function)
    half = torch.randn(1000).bfloat16()
    for number in (0.3, 0.11, 0.7):
        for mine, theirs in zip(compiled(half, number), function(half, number), strict=True):
            assert (mine != theirs).float().mean() < 0.01
    assert neuron_compile.report().compilations == 2


def test_large_integers() -> None:
    assert compare(lambda x, n: x + n, [2**53 + n for n in range(1, 5)], torch.arange(3)) == 2


def test_a_number_saved_for_the_backward() -> None:
    compiled = neuron(lambda x, n: (x * n * (1 / n**2)).sin())
    for number in (3, 4, 5, 7):
        leaf = x.clone().requires_grad_()
        compiled(leaf, number).sum().backward()
        equal(leaf.grad, (x / number).cos() / number, 1e-5, 1e-6)
    assert neuron_compile.report().compilations == 4
    assert neuron_compile.report().specializations == 0


def test_a_number_that_is_a_size_as_well() -> None:
    assert compare(lambda x, n: torch.arange(float(n)) * n, [3, 4, 5, 7]) == 4


def test_a_number_beside_changing_sizes() -> None:
    compiled = neuron(lambda x, n: (x * n).sum(0) / x.shape[0], dynamic=True)
    for number in (3, 4, 5, 7, 9):
        tensor = x[: 2 + number % 2]
        equal(compiled(tensor, number), (tensor * number).sum(0) / len(tensor))
    assert neuron_compile.report().specializations == 2
