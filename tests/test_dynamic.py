"""Graphs with symbolic sizes: one executable for each size seen, no recompilation by Dynamo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import neuron_compile

from .support import IGNORE_TORCH, equal, equal_modules, neuron


@torch.library.custom_op("neuron_tests::first_rows", mutates_args=())
def first_rows(x: torch.Tensor) -> torch.Tensor:
    """An operator that no compiler knows."""
    return x[:3].clone()


@first_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x[:3].clone()


SIZES = (3, 5, 2, 9, 5, 3, 17)


def frames(function: Any, inputs: list[Any]) -> int:
    """How many graphs Dynamo makes of a differentiated function for another backend."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, dynamic=True)
    for args in inputs:
        result = compiled(args)
        if result.requires_grad:
            result.sum().backward()
    torch._dynamo.reset()
    return counter.frame_count


def counted(function: Any, **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """``function`` compiled, and the counter of the graphs that Dynamo hands over."""
    counter = CompileCounterWithBackend("neuron")
    return torch.compile(function, backend=counter, **options), counter


def test_forward_with_dynamic_true() -> None:
    compiled, counter = counted(lambda x: F.softmax(x @ x.t(), -1).sum(0), dynamic=True)
    for size in SIZES:
        x = torch.randn(size, 4)
        equal(compiled(x), F.softmax(x @ x.t(), -1).sum(0))
    assert counter.frame_count == 1
    assert neuron_compile.report().specializations == len(set(SIZES))
    assert neuron_compile.report().compilations == len(set(SIZES))


def test_backward_with_dynamic_true() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    eager = copy.deepcopy(model)
    wanted_frames = frames(
        copy.deepcopy(model), [torch.randn(size, 4, requires_grad=True) for size in SIZES]
    )
    compiled, counter = counted(model, dynamic=True)
    for size in SIZES:
        mine = torch.randn(size, 4, requires_grad=True)
        theirs = mine.detach().clone().requires_grad_()
        actual, wanted = compiled(mine), eager(theirs)
        equal(actual, wanted)
        for module in (model, eager):
            module.zero_grad()
        actual.square().sum().backward()
        wanted.square().sum().backward()
        equal(mine.grad, theirs.grad)
        equal_modules(model, eager)
    assert counter.frame_count <= wanted_frames
    assert neuron_compile.report().specializations >= 2 * len(set(SIZES)) - 2


def test_mark_dynamic() -> None:
    compiled, counter = counted(lambda x: x.cumsum(0) / x.shape[0])
    for size in SIZES:
        x = torch.randn(size, 4)
        torch._dynamo.mark_dynamic(x, 0)
        equal(compiled(x), x.cumsum(0) / size)
    assert counter.frame_count == 1


def test_automatic_dynamic_after_two_sizes() -> None:
    compiled, counter = counted(lambda x: x.relu() + x.shape[0])
    for size in SIZES:
        x = torch.randn(size, 4)
        equal(compiled(x), x.relu() + size)
    assert counter.frame_count == 2
    assert neuron_compile.report().specializations == len(set(SIZES) - {SIZES[0]}) + 1


def test_sizes_zero_and_one() -> None:
    compiled, _ = counted(lambda x: (x * 2, x.sum()), dynamic=True)
    for size in (4, 1, 0, 2, 1, 0):
        x = torch.randn(size, 3)
        equal(compiled(x), (x * 2, x.sum()))


def test_several_dynamic_sizes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        z = torch.cat([x, y]).reshape(-1, 2)
        return z, x.shape[0] + y.shape[1], z.t()[:, : x.shape[0]], torch.zeros(x.shape[0], 2)

    compiled, counter = counted(function, dynamic=True)
    for rows, more, columns in ((2, 3, 4), (5, 2, 6), (2, 3, 8), (3, 7, 4)):
        x, y = torch.randn(rows, columns), torch.randn(more, columns)
        equal(compiled(x, y), function(x, y))
    assert counter.frame_count == 1


def test_sizes_among_the_results() -> None:
    compiled, _ = counted(lambda x: (x.shape[0] * 2, x + 1, x.shape, x.numel()), dynamic=True)
    for size in (2, 3, 4):
        x = torch.randn(size, 3)
        equal(compiled(x), (size * 2, x + 1, x.shape, x.numel()))


def test_a_size_that_only_the_backward_needs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mean(0).expand(x.shape[0], -1) * x

    compiled, counter = counted(function, dynamic=True)
    for size in (2, 5, 3):
        mine = torch.randn(size, 3, requires_grad=True)
        theirs = mine.detach().clone().requires_grad_()
        compiled(mine).square().sum().backward()
        function(theirs).square().sum().backward()
        equal(mine.grad, theirs.grad)
    assert counter.frame_count == 1


@IGNORE_TORCH
def test_dynamic_layouts() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.t() * 2

    compiled = neuron(function, dynamic=True)
    for x in (
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(12, 5)[::3],
        torch.randn(5, 6),
        torch.randn(6, 5).t(),
        torch.randn(9, 1).expand(9, 4),
    ):
        equal(compiled(x), function(x))


def test_dynamic_mutation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x[1:].add_(x.shape[0])
        return x.sum()

    compiled = neuron(function, dynamic=True)
    for size in (3, 4, 6, 3):
        mine = torch.randn(size, 2)
        theirs = mine.clone()
        equal((compiled(mine), mine), (function(theirs), theirs))


def test_dynamic_channels_last_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(
        memory_format=torch.channels_last
    )
    eager = copy.deepcopy(model)
    inputs = [
        torch.randn(size, 3, 6, 6).to(memory_format=torch.channels_last) for size in (2, 3, 5)
    ]
    wanted_frames = frames(copy.deepcopy(model), inputs)
    compiled, counter = counted(model, dynamic=True)
    for x in inputs:
        actual, wanted = compiled(x), eager(x)
        equal(actual, wanted, rtol=1e-4, atol=1e-5)
        actual.square().mean().backward()
        wanted.square().mean().backward()
        equal_modules(model, eager, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= wanted_frames


def test_dynamic_dropout_and_constants() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) * torch.tensor([1.0, 2.0])

    compiled = neuron(function, dynamic=True)
    for size in (50, 60, 50):
        x = torch.ones(size, 2, requires_grad=True)
        result = compiled(x)
        result.sum().backward()
        assert set(result.detach().unique().tolist()) == {0.0, 2.0, 4.0}
        equal(x.grad, result.detach())


def test_dynamic_floats_and_ints() -> None:
    compiled = neuron(lambda x, n, f: x * n + f, dynamic=True)
    for n, f in ((2, 0.5), (3, 1.5), (7, 2.5), (2, 0.5)):
        x = torch.randn(3)
        equal(compiled(x, n, f), x * n + f)


@pytest.mark.parametrize("bound", [1, 2])
def test_the_table_is_bounded(bound: int) -> None:
    compiled = neuron(
        lambda x: x * 2,
        dynamic=True,
        options={"dynamic_shapes": "specialize", "max_specializations": bound},
    )
    for size in (2, 3, 4, 2, 3, 4):
        x = torch.randn(size)
        equal(compiled(x), x * 2)
    assert neuron_compile.report().specializations == 6


@pytest.mark.parametrize("way", ["specialize", "bucket"])
def test_a_graph_compiled_many_times_is_said(way: str, caplog: pytest.LogCaptureFixture) -> None:
    compiled = neuron(lambda x: x.sort()[0], dynamic=True, options={"dynamic_shapes": way})
    with caplog.at_level("WARNING", "neuron_compile"):
        for size in range(2, 19):
            compiled(torch.randn(size))
    (said,) = [record.message for record in caplog.records if record.name == "neuron_compile"]
    assert "compiled for 16 combinations" in said
    assert ("'dynamic_shapes': 'bucket'" in said) == (way == "specialize")


def test_the_least_recently_used_is_dropped() -> None:
    compiled = neuron(lambda x: x * 2, dynamic=True, options={"max_specializations": 2})
    for size in (2, 3, 2, 4, 2, 4):
        compiled(torch.randn(size))
    assert neuron_compile.report().specializations == 3
    compiled(torch.randn(3))
    assert neuron_compile.report().specializations == 4


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_a_fallback_in_a_dynamic_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return first_rows(x + 1).abs() * 2

    inputs = [torch.randn(size, 3) for size in (5, 4, 6)]
    wanted_frames = frames(function, inputs)
    compiled, counter = counted(function, dynamic=True)
    for x in inputs:
        equal(compiled(x), function(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= wanted_frames
    assert neuron_compile.report().operators_in_fallback > 0


def test_a_result_of_unknown_size_is_right() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = neuron(lambda x: x[x > 0] * 2)
        with pytest.warns(neuron_compile.FallbackWarning):
            equal(compiled(torch.tensor([1.0, -1.0, 2.0])), torch.tensor([2.0, 4.0]))
        for x in (torch.tensor([1.0, 3.0, 2.0]), torch.tensor([-1.0, -3.0, -2.0])):
            equal(compiled(x), x[x > 0] * 2)


def test_an_item_in_the_graph() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = neuron(lambda x: x * x.sum().item())
        for _ in range(3):
            x = torch.randn(4)
            equal(compiled(x), x * x.sum().item())
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_an_integer_item_in_the_graph() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        number = n.sum().item()
        torch._check(number > 0)
        return (x * number).sin() + number

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = neuron(function, dynamic=dynamic)
            for number in (1, 2, 5):
                x, n = torch.randn(4), torch.tensor([number, 1])
                equal(compiled(x, n), function(x, n))


def cut(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """As many rows as a tensor says."""
    count = size[0].item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return x[:count].sin() * 2


# Each: a function whose sizes depend on data, and the operator that makes them so.
UNBACKED: dict[str, tuple[Any, str]] = {
    "item": (cut, "aten._local_scalar_dense.default"),
    "mask": (lambda x, i: x[x > 0].exp().sum() + x.sum(), "aten.index.Tensor"),
    "nonzero": (lambda x, i: torch.nonzero(x > 0).float().mean(0), "aten.nonzero.default"),
    "unique": (lambda x, i: torch.unique(x.round()) * 2, "aten._unique2.default"),
    "narrow": (
        lambda x, i: x.narrow(0, i[0].item(), 2) + torch.zeros(2, 4),
        "aten._local_scalar_dense.default",
    ),
}


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("name", UNBACKED)
def test_what_follows_a_size_that_depends_on_data_runs_on_the_device(name: str) -> None:
    function, origin = UNBACKED[name]
    captured = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(captured):
        compiled = neuron(function, fullgraph=True)
        for size in (1, 2, 3):
            x, count = torch.randn(5, 4), torch.tensor([size])
            equal(compiled(x, count), function(x, count))
        if name in ("item", "narrow"):
            with pytest.raises(RuntimeError, match="assertion failed"):
                compiled(x, torch.tensor([9]))
    report = neuron_compile.report()
    assert set(report.fallback_reasons) == {origin}
    assert report.operators_on_device > 0
