"""Autocast, loss scaling, rounding: in what precision programs compute and where they round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import neuron_compile

from .support import equal_modules, neuron

F = torch.nn.functional
HALVES = [torch.bfloat16, torch.float16]
#: Relative to the largest value; eager and compiled code may round a sum's last bit differently.
ROUNDING = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def near(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal dtypes, and values as near as ``dtype`` rounds."""
    assert actual.dtype == wanted.dtype
    unit = ROUNDING[dtype]
    atol = unit * float(wanted.detach().abs().max())
    torch.testing.assert_close(actual.detach(), wanted.detach(), rtol=unit, atol=atol)


class Block(torch.nn.Module):
    """What autocast treats in all its ways: to lower precision, to float32, and as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(16, 32)
        self.norm = torch.nn.LayerNorm(32)
        self.mix = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.leave = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.enter(x)))
        hidden = hidden + self.mix(hidden.unflatten(0, (-1, 8))).flatten(0, 1)
        weights = (hidden @ hidden.t()).softmax(-1)
        return self.leave(weights.to(hidden.dtype) @ hidden)


def train(
    make_step: Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]],
    model: torch.nn.Module,
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Three steps of SGD, with each loss and its gradients."""
    step = make_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(torch.randn(16, 16, generator=generator))
        loss.backward()
        yield loss, [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()


def check_training(
    eager: Callable[[torch.nn.Module], Any], compiled: Callable[[torch.nn.Module], Any], dtype: Any
) -> None:
    """Equal losses, gradients and parameters over three steps, all of it on the device."""
    theirs = Block()
    mine = copy.deepcopy(theirs)
    for actual, wanted in zip(train(compiled, mine), train(eager, theirs), strict=True):
        near(actual[0], wanted[0], dtype)
        largest = max(float(grad.abs().max()) for grad in wanted[1])
        for one, other in zip(actual[1], wanted[1], strict=True):
            unit = 4 * ROUNDING[dtype]
            torch.testing.assert_close(one, other, rtol=unit, atol=unit * largest)
    equal_state = {"rtol": 4 * ROUNDING[dtype], "atol": 4 * ROUNDING[dtype]}
    for model in (mine, theirs):
        model.zero_grad()
    equal_modules(mine, theirs, **equal_state)
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_around_compiled_code(dtype: torch.dtype) -> None:
    def steps(compile_: Callable[..., Any]) -> Callable[[torch.nn.Module], Any]:
        def make(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            call = compile_(model)

            def step(x: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", dtype):
                    result = call(x)
                    assert result.dtype is dtype
                return result.float().square().mean()

            return step

        return make

    check_training(steps(lambda model: model), steps(neuron), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_inside_of_compiled_code(dtype: torch.dtype) -> None:
    def make(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                result = model(x)
            return result.float().square().mean()

        return step

    check_training(make, lambda model: neuron(make(model), fullgraph=True), dtype)


def test_regions_within_regions() -> None:
    """Disabled inside of enabled, another dtype inside of that, and a function as decorated.

    Autocast keeps the conversion of a leaf, whatever the dtype, so the second dtype gets a copy.
    """

    @torch.autocast("cpu", torch.float16)
    def decorated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    def function(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        other = weight * 1
        with torch.autocast("cpu", torch.bfloat16):
            first = x @ weight
            with torch.autocast("cpu", enabled=False):
                second = first.float() @ weight
                with torch.autocast("cpu", torch.float16):
                    third = second @ other
            fourth = (second @ weight) + second
            fifth = decorated(x * 1, other)
        return [first, second, third, fourth, fifth, x @ weight]

    tensors = torch.randn(8, 8), torch.randn(8, 8)
    mine, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    actual, wanted = neuron(function, fullgraph=True)(*mine), function(*theirs)
    dtypes = [torch.bfloat16, *(torch.float32, torch.float16) * 2, torch.float32]
    assert [x.dtype for x in wanted] == dtypes
    for one, other in zip(actual, wanted, strict=True):
        near(one, other, torch.bfloat16)
    for results in (actual, wanted):
        sum(x.float().square().sum() for x in results).backward()  # type: ignore[union-attr]
    for one, other in zip(mine, theirs, strict=True):
        near(one.grad, other.grad, torch.bfloat16)
    assert neuron_compile.report().operators_in_fallback == 0


def test_autocast_on_and_off_between_calls() -> None:
    """The same compiled function under three states of autocast."""
    model = torch.nn.Linear(8, 8)
    compiled = neuron(model)
    x = torch.randn(4, 8)
    for _ in range(2):
        for dtype in (None, *HALVES):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                near(compiled(x), model(x), dtype or torch.float32)


def test_gradient_scaler() -> None:
    """Three steps, the second of which overflows: it is skipped, and the scale backs off."""

    def run(compile_: Callable[..., Any], model: torch.nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        call = compile_(model)
        seen: list[Any] = []
        generator = torch.Generator().manual_seed(2)
        for factor in (1.0, 1e30, 1.0):
            optimizer.zero_grad()
            x = torch.randn(16, 16, generator=generator)
            with torch.autocast("cpu", torch.float16):
                loss = call(x).float().square().mean() * factor
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), [p.detach().clone() for p in model.parameters()]))
        return seen

    theirs = Block()
    mine = copy.deepcopy(theirs)
    actual, wanted = run(neuron, mine), run(lambda model: model, theirs)
    assert [scale for scale, _ in wanted] == [2048.0, 1024.0, 2048.0]
    assert [scale for scale, _ in actual] == [2048.0, 1024.0, 2048.0]
    for one, other in zip(actual[0][1], actual[1][1], strict=True):
        assert torch.equal(one, other)
    for (_, mine_then), (_, theirs_then) in zip(actual, wanted, strict=True):
        for one, other in zip(mine_then, theirs_then, strict=True):
            # AdamW divides a gradient by its own size, the noise in a vanishing one, too.
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2.5e-2)
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_precision_of_float32_products(precision: str) -> None:
    """The CPU has one; the setting neither lowers it nor makes values wrong."""
    before = torch.get_float32_matmul_precision()
    a, b = torch.randn(64, 96), torch.randn(96, 64)
    try:
        torch.set_float32_matmul_precision(precision)
        actual = neuron(lambda a, b: (a @ b, F.linear(a, b.t(), b[0])))(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    wide = a.double() @ b.double()
    for result, wanted in zip(actual, (wide, wide + b[0].double()), strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_double_and_complex(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype is torch.complex64 else torch.float64

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight) * torch.sigmoid(x) + x.sum(0) / 3

    tensors = torch.randn(6, 6, dtype=dtype) / 3, torch.randn(6, 6, dtype=dtype) / 3
    mine, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    compiled = neuron(function)
    for _ in range(3):
        actual, wanted = compiled(*mine), function(*theirs)
        torch.testing.assert_close(actual, wanted, rtol=ROUNDING[real], atol=ROUNDING[real])
        for result in (actual, wanted):
            result.abs().square().sum().backward()
        for pair in (mine, theirs):
            for leaf in pair:
                leaf.data -= 0.01 * leaf.grad  # type: ignore[operator]
                leaf.grad = None
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING[real] * 10, atol=ROUNDING[real] * 10)
    assert neuron_compile.report().operators_in_fallback == 0


# Each operator that follows another reads what that one rounded, as in eager; so these are equal.
ROUNDED: dict[str, Callable[..., torch.Tensor]] = {
    "products_and_sums": lambda x, y: ((x * y + x) * y + x) * y - x,
    "functions": lambda x, y: torch.exp(x * 0.1) * torch.tanh(y) + torch.sigmoid(x) * y,
    "quotients": lambda x, y: (x / (y.abs() + 1)) / 3,
    "sum_of_products": lambda x, y: (x * y).sum(1) + 1,
    "mean_of_columns": lambda x, y: (x * y).mean(0) * 3,
    "product_of_a_product": lambda x, y: torch.relu(x @ y) * y + 1,
    "sum_of_a_product": lambda x, y: ((x @ y) * y).sum(1),
    "product_of_products": lambda x, y: (x * y) @ y,
    "largest": lambda x, y: (x + y).amax(1) * 2,
    "variance": lambda x, y: (x * y).var(1),
    "norm": lambda x, y: (x * y).norm(dim=1),
    "sum_of_a_reshape": lambda x, y: (x * y).t().reshape(32, 128).sum(1),
    "sum_of_a_choice": lambda x, y: torch.where(x > 0, x * y, y * 3).sum(1),
    "sum_of_sums": lambda x, y: ((x + y) + (x * y)).sum(),
    "loop": lambda x, y: (x * y).cumsum(1),
    "softmax": lambda x, y: (x * y).softmax(1) * 2,
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_operators_round_their_results(name: str, dtype: torch.dtype) -> None:
    """A product or a sum is summed in another order, so one in a hundred may round otherwise.

    Kept in float32 between two operators, a quarter to a half of the elements differ.
    """
    x, y = (torch.randn(64, 64).to(dtype) for _ in range(2))
    actual, wanted = neuron(ROUNDED[name])(x, y), ROUNDED[name](x, y)
    assert actual.dtype == wanted.dtype
    assert (actual != wanted).float().mean() <= 0.01


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_linear_layer_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((64, 64), (64, 64), (64,)))
    wanted = (x.double() @ weight.double().t() + bias.double()).to(dtype)
    actual = neuron(F.linear)(x, weight, bias)
    assert (actual != wanted).float().mean() <= 0.01


@pytest.mark.parametrize("allowed", [False, True])
def test_excess_precision_can_be_allowed(allowed: bool) -> None:
    """By XLA's own option, under which XLA may (it need not) leave out a rounding."""
    options = {"xla_options": {"xla_allow_excess_precision": allowed}}
    x, y = (torch.randn(64, 64).to(torch.bfloat16) for _ in range(2))
    function = ROUNDED["sum_of_products"]
    near(neuron(function, options=options)(x, y), function(x, y), torch.bfloat16)


@pytest.mark.parametrize("vendor", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_large_products_of_bfloat16_are_rounded_once(vendor: bool, bias: bool) -> None:
    """Forward and backward, by the vendor's kernel and by XLA."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 256, bias=bias).bfloat16()
    x = torch.randn(256, 256).bfloat16().requires_grad_()
    compiled = torch.compile(layer, backend="neuron", options={"vendor_kernels": vendor})
    results = []
    for call in (layer, compiled):
        layer.zero_grad()
        x.grad = None
        result = call(x)
        result.sum().backward()
        results.append([result, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for expected, actual in zip(*results, strict=True):
        # Sums of float32 in another order may round to another bfloat16.
        differing = (expected != actual).float().mean().item()
        assert differing < 0.01
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
