"""float8, which travels through a program as bytes: every code and every rounding, as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import neuron_compile

from ..support import layout, neuron

FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
OTHERS = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


def codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """All 256 numbers of a format, over and over."""
    count = torch.Size(shape).numel() if shape else 256
    numbers = torch.arange(count, dtype=torch.int64).remainder(256).to(torch.uint8).view(dtype)
    return numbers.reshape(shape) if shape else numbers


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every magnitude with every leading digit: ties, and both neighbours of ties."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        low, high = max(info.min, -70_000), min(info.max, 70_000)
        ends = torch.tensor([info.min, info.max], dtype=dtype)
        middle = torch.arange(low, high + 1, dtype=torch.int64).to(dtype)
        return torch.cat([middle.view(ends.dtype), ends])
    top = torch.arange(65_536, dtype=torch.int32)
    if dtype in (torch.float16, torch.bfloat16):
        return top.to(torch.int16).view(dtype)
    high = top << 16
    single = torch.cat([high, high + 1, high - 1, high + 0x8000]).view(torch.float32)
    if dtype is torch.float64:
        # ATen rounds these to float32 first.
        wide = single.double()
        return torch.cat([wide, wide * (1 + 2.0**-40), wide * (1 - 2.0**-40)])
    return torch.complex(single, single.flip(0)) if dtype is torch.complex64 else single


def same(actual: Any, wanted: Any) -> None:
    """Assert equal bits (but for the payload of a NaN of a wider type) and strides."""
    for mine, theirs in zip(pytree.tree_leaves(actual), pytree.tree_leaves(wanted), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert layout(mine) == layout(theirs)
        if theirs.dtype in FLOAT8:
            mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)  # noqa: PLW2901
        elif theirs.is_floating_point():
            # The sign of a zero is a bit that a comparison does not see.
            mine, theirs = (  # noqa: PLW2901
                torch.where(x == 0, x.sign().copysign(x) + (1 / x), x) for x in (mine, theirs)
            )
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def check(function: Callable[..., Any], *args: Any) -> None:
    """Compare with eager; all of it must run on the device."""
    same(neuron(function)(*args), function(*args))
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_code_to_every_dtype(dtype: torch.dtype) -> None:
    others = [other for other in [*FLOAT8, *OTHERS] if other is not dtype]
    check(lambda x: [x.to(other) for other in others], codes(dtype))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_rounding_from_every_dtype(dtype: torch.dtype) -> None:
    check(lambda x: [x.to(float8) for float8 in FLOAT8], grid(dtype))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_rounds_between_two_operators(dtype: torch.dtype) -> None:
    check(lambda x: ((x * 1.5).to(dtype).float() + 1).to(dtype), grid(torch.float32))


MOVEMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reshape": lambda x: x.reshape(8, 64).clone(),
    "transpose": lambda x: (x.t(), x.t().contiguous(), x.permute(1, 0)[:3].clone()),
    "slices": lambda x: (x[2:9, ::3], x[5], x[:, 3].clone(), x.clone()[1:, ::2]),
    "concatenate": lambda x: (torch.cat([x, x[:3]]), torch.stack([x, x], 1)),
    "select": lambda x: x.index_select(0, torch.tensor([3, 0, 15])),
    "gather_rows": lambda x: (x[torch.tensor([4, -1])], x[:, torch.tensor([2, 0])]),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([[3, 1]]), x),
    "where": lambda x: torch.where(x.view(torch.uint8) > 100, x, x[3]),
    "expand": lambda x: (x[:, None].expand(16, 2, 32), x.clone()[:1].expand(4, 32)),
    "repeat": lambda x: (x.repeat(2, 1, 2), x.repeat_interleave(2, 0)),
    "split": lambda x: (*x.split(5), *x.chunk(2, 1), *x.unbind(0)),
    "roll": lambda x: x.roll(3, 1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=1.0),
    "unfold": lambda x: x.unfold(0, 3, 2).clone(),
    "diagonal": lambda x: x.diagonal().clone(),
    "as_strided": lambda x: x.clone().as_strided((3, 4), (2, 5), 1).clone(),
    "written_slice": lambda x: torch.slice_scatter(x, x[:4], 0, 2, 6),
    "written_row": lambda x: torch.select_scatter(x, x[3], 0, 2),
    "bytes": lambda x: x.view(torch.uint8).clone(),
    "bytes_and_back": lambda x: x.view(torch.uint8).bitwise_xor(1).view(x.dtype),
    "wider": lambda x: (x.view(torch.int16).clone(), x.view(torch.float32).clone()),
    "narrower": lambda x: x.view(torch.bfloat16).clone().view(x.dtype),
    "zeros": lambda x: (torch.zeros_like(x), x.new_zeros(3), torch.zeros(2, dtype=x.dtype)),
    "ones": lambda x: (torch.ones_like(x), torch.full((2, 3), 1.4, dtype=x.dtype), x.new_ones(2)),
    "eye": lambda x: torch.eye(3, 4, dtype=x.dtype),
    "fill": lambda x: x.clone().fill_(2.6),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "copy_wide": lambda x: torch.empty(x.shape).copy_(x).nan_to_num(),
    "equal": lambda x: (x.eq(x), x != x.roll(1, 0), x == 1.3, x == x[0]),
    "nan": lambda x: x.isnan(),
    "multiply": lambda x: x[:8].reshape(256, 1) * x[8:].reshape(256),
}


@pytest.mark.parametrize("name", MOVEMENTS)
def test_movement(name: str) -> None:
    function = MOVEMENTS[name]
    check(lambda *all: [function(x) for x in all], *(codes(dtype, 16, 32) for dtype in FLOAT8))


@pytest.mark.parametrize("dtype", FLOAT8[:4], ids=str)
def test_index_put(dtype: torch.dtype) -> None:
    x, index = codes(dtype, 16, 32), torch.tensor([3, 7])
    check(lambda x: x.index_put((index,), x[8:10]), x)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("steps", [(1, 1), (2, 3)], ids=str)
def test_layouts_of_inputs(dtype: torch.dtype, steps: tuple[int, int]) -> None:
    x = codes(dtype, 16, 32)[:: steps[0], 1 :: steps[1]]
    check(lambda x: (x.float().nan_to_num() + 1, x.clone()), x)
    check(lambda x: (x.float().nan_to_num() + 1, x.clone()), x.t())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_an_input_changed_in_place(dtype: torch.dtype) -> None:
    mine, theirs = codes(dtype, 4, 8), codes(dtype, 4, 8)

    def function(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache[1].copy_(row)
        cache[3:] = cache[:1]
        return cache[1:].float()

    compiled = neuron(function)
    for call in range(3):
        row = torch.linspace(-3 - call, 500, 8)
        same(compiled(mine, row), function(theirs, row))
        same(mine, theirs)
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_table_that_the_graph_holds(dtype: torch.dtype) -> None:
    table = codes(dtype, 32)
    check(lambda index: table[index].clone(), torch.tensor([4, 1]))


@pytest.mark.parametrize("dtype", FLOAT8[:2], ids=str)
def test_weights_stored_in_float8(dtype: torch.dtype) -> None:
    """A parameter and a buffer, replaced between two calls, and gradients of what follows."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 4).to(dtype), requires_grad=False)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.float() * self.scale).t()

    model = Model()
    compiled = neuron(model)
    for _ in range(3):
        mine, theirs = (torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_() for _ in range(2))
        actual, wanted = compiled(mine), model(theirs)
        torch.testing.assert_close(actual, wanted)
        actual.square().sum().backward()
        wanted.square().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        model.weight.data.copy_(torch.randn(8, 4))
    assert neuron_compile.report().operators_in_fallback == 0


def test_gradients_pass_through_a_conversion() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float8_e4m3fn).to(torch.float32) * 3).square().sum()

    mine, theirs = (torch.linspace(-9, 9, 37).requires_grad_() for _ in range(2))
    neuron(function)(mine).backward()
    function(theirs).backward()
    same(mine.grad, theirs.grad)


UNSUPPORTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + x,
    "times_a_number": lambda x: x * 2,
    "negate": lambda x: -x,
    "sum": lambda x: x.sum(),
    "less": lambda x: x.lt(x),
    "sort": lambda x: x.sort(),
}


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_eager_has_not_raises_as_in_eager(name: str) -> None:
    x = codes(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError) as wanted:
        UNSUPPORTED[name](x)
    with pytest.raises(NotImplementedError) as actual:
        neuron(UNSUPPORTED[name])(x)
    assert str(wanted.value).splitlines()[0] in str(actual.value)


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_what_only_eager_has_is_eagers() -> None:
    x = codes(torch.float8_e4m3fn, 16, 16)
    for function in (lambda x: x.abs(), lambda x: x @ x):
        same(neuron(function)(x), function(x))


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FLOAT8[:2])), ids=str)
def test_quantization_of_a_tensor(first: torch.dtype, second: torch.dtype) -> None:
    """Scale by the largest magnitude, convert, and back: as libraries quantize."""

    def function(x: torch.Tensor) -> Any:
        scale = torch.finfo(first).max / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        quantized = (x * scale).clamp(torch.finfo(first).min, torch.finfo(first).max).to(first)
        return quantized, quantized.float() / scale, quantized.to(second)

    check(function, torch.randn(8, 64))
