"""Denormal numbers, operands and results, are kept as in eager: in the caller's thread and in
XLA's pool, and a thread's own setting is as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from ..support import neuron

#: Elements for one loop in the caller's thread, and for one that XLA's pool shares.
SIZES = (3, 1000, 1 << 21)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of roundings: a few of the smallest steps apart."""
    kind = torch.finfo(expected.dtype) if expected.is_floating_point() else None
    atol = 4 * kind.smallest_normal * kind.eps if kind else 0
    torch.testing.assert_close(actual, expected, rtol=4 * kind.eps if kind else 0, atol=atol)


def denormals(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers around the smallest normal one, on both sides of it and of zero."""
    tiny = torch.finfo(dtype).tiny
    return (torch.linspace(-3, 3, size, dtype=torch.float64) * tiny).to(dtype)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halve": lambda x: x * 0.5,
    "divide": lambda x: x / 3,
    "add": lambda x: x + x * 0.25,
    "subtract": lambda x: x - x.flip(0) / 2,
    "compare": lambda x: (x != 0) & (x / 4 != 0),
    "relu": torch.relu,
    "maximum": lambda x: torch.maximum(x * 0.5, -x),
    "amax": lambda x: (x.abs() * 0.25).amax(),
    "widen": lambda x: x.double() * 3,
    "narrow": lambda x: (x * 0.5).bfloat16(),
    "sign": lambda x: torch.sign(x * 0.5),
    "cumulative": lambda x: x[:50].cumsum(0) * 0.125,
    "sort": lambda x: (x * 0.25).sort(descending=True).values,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_eager(name: str, size: int) -> None:
    function, x = FUNCTIONS[name], denormals(size)
    torch._dynamo.reset()
    assert_close(neuron(function, fullgraph=True, dynamic=False)(x), function(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = denormals(1000, dtype)
    assert_close(neuron(lambda x: x * 0.5 + x, dynamic=False)(x), x * 0.5 + x)


def test_products() -> None:
    x = torch.full((64, 64), 1e-20)
    assert_close(neuron(lambda x: x @ x)(x * 1e-2), (x * 1e-2) @ (x * 1e-2))


def test_backward() -> None:
    x = denormals(100).requires_grad_()
    neuron(lambda x: (x * 0.5).sum())(x).backward(torch.tensor(1e-38))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((100,), 1e-38) * 0.5)


def test_in_another_thread() -> None:
    compiled, x, results = neuron(lambda x: x * 0.5), denormals(1000), []
    compiled(x)
    thread = threading.Thread(target=lambda: results.append(compiled(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], x * 0.5)


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread flushes denormals in eager code."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


def test_the_setting_of_the_thread_stays(flushing: None) -> None:
    tiny = torch.tensor([1.5e-38])
    neuron(lambda x: x * 0.5)(tiny)
    assert not (tiny * 0.5).any()
