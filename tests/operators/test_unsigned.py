"""uint16, uint32 and uint64, which travel through a program as signed integers of the same width.

Torch itself has few operators for them; those that it has give the same values compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import neuron_compile

from ..support import equal, neuron

DTYPES = [torch.uint16, torch.uint32, torch.uint64]


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """All bits at random, with both ends of the range among them."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    info = torch.iinfo(signed[dtype])
    count = torch.Size(shape).numel()
    drawn = torch.randint(info.min, info.max, (count,), dtype=signed[dtype])
    drawn[:3] = torch.tensor([0, -1, info.min], dtype=signed[dtype])
    return drawn.view(dtype).reshape(shape)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "multiply": lambda x: x * x,
    "exclusive_or": lambda x: x ^ x.t().t().clone(),
    "equal": lambda x: x == x.flip(0),
    "gather": lambda x: x[:, torch.tensor([2, 0, 2])],
    "concatenate": lambda x: torch.cat([x, x[1:]]),
    "choose": lambda x: torch.where(torch.tensor([[True], [False], [True], [False]]), x, x * x),
    "sum": lambda x: x.sum(),
    "sort": lambda x: x.sort(1),
    "to_float": lambda x: x.to(torch.float64) + 0.5,
    "to_signed": lambda x: x.to(torch.int64),
    "there_and_back": lambda x: (x.to(torch.float64) / 2).to(x.dtype),
    "bits": lambda x: x.view(torch.uint8),
    "constant": lambda x: (torch.full((2,), 7, dtype=x.dtype), x.clone()),
    "views": lambda x: (x.t(), x[1:, ::2], x.clone().t(), x.clone()[:, ::2]),
    "expanded": lambda x: x.clone()[:, :1].expand(4, 5),
    "fill": lambda x: x.clone().fill_(3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], numbers(dtype, 4, 5)
    equal(neuron(function)(x), function(x))
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("layout", ["transposed", "gaps", "unaligned"])
def test_layouts_of_inputs(layout: str) -> None:
    x = numbers(torch.uint32, 6, 7)
    x = {"transposed": x.t(), "gaps": x[::2, 1::2], "unaligned": x.view(-1)[1:7]}[layout]
    equal(neuron(lambda x: x * 3)(x), x * 3)


def test_an_input_changed_in_place() -> None:
    mine, theirs = (numbers(torch.uint64, 4, 4) for _ in range(2))
    theirs.copy_(mine)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x[1:]

    compiled = neuron(function)
    for _ in range(3):
        equal(compiled(mine), function(theirs))
        equal(mine, theirs)


def test_a_table_that_the_graph_holds() -> None:
    table = numbers(torch.uint64, 5)
    equal(neuron(lambda index: table[index])(torch.tensor([4, 1])), table[[4, 1]])


HASHED = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", HASHED, ids=str)
@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"dim": (0, 2), "keepdim": True}], ids=str)
def test_hash_tensor(dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = (torch.randn(3, 4, 5) * 3).to(dtype)
    equal(neuron(lambda x: torch.hash_tensor(x, **options))(x), torch.hash_tensor(x, **options))
    assert neuron_compile.report().operators_in_fallback == 0
