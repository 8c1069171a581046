"""Mutated inputs and buffers, and results that share memory with inputs or each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .support import IGNORE_TORCH, check, equal, equal_modules, neuron

# ------------------------------------------------------------------------------------ aliasing

ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "the_input": lambda x: x,
    "the_input_and_more": lambda x: (x, x + 1, x),
    "a_view_of_the_input": lambda x: (x.t(), x[1:], x.flatten()),
    "duplicates": lambda x: (y := x * 2, y, y),
    "a_value_and_its_view": lambda x: (y := x * 2, y.t(), y[0]),
    "views_alone": lambda x: ((y := x * 2).t(), y[1:]),
    "equal_expressions": lambda x: (x * 2, x * 2),
    "clones": lambda x: (x.clone(), x.clone(), x),
    "view_of_a_view": lambda x: (x.t()[1:], (x + 1).t()[1:].t()),
    "equal_constants": lambda x: (torch.zeros(3), torch.zeros(3), x + 1),
    "a_no_op": lambda x: (x + 0, x * 1, x.contiguous(), x.float()),
    "reshaped_equals": lambda x: ((x * 2).reshape(-1), x * 2),
    "detached": lambda x: ((y := x * 2), y.detach()),
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_aliases(name: str, grad: bool) -> None:
    check(ALIASES[name], torch.randn(3, 4, requires_grad=grad))


@pytest.mark.parametrize("name", [name for name in ALIASES if name != "the_input"])
def test_gradients_through_aliases(name: str) -> None:
    check(lambda x: ALIASES[name](x * 1.5), torch.randn(3, 4, requires_grad=True), backward=True)


def test_writing_into_a_result_changes_its_view_alone() -> None:
    compiled = neuron(lambda x: (y := x * 2, y[0], x * 2))
    for _ in range(3):
        x = torch.ones(2, 3)
        whole, row, other = compiled(x)
        whole.zero_()
        equal((row, other, x), (torch.zeros(3), torch.full((2, 3), 2.0), torch.ones(2, 3)))


def test_writing_into_results_does_not_reach_later_calls() -> None:
    compiled = neuron(lambda x: (x.clone(), x + 1, torch.ones(3)))
    x = torch.zeros(3)
    kept = []
    for turn in range(3):
        results = compiled(x)
        equal(results, (torch.zeros(3), torch.ones(3), torch.ones(3)))
        for result in results:
            result.fill_(100 + turn)
        kept.append(results)
    for turn, results in enumerate(kept):
        assert all((result == 100 + turn).all() for result in results)
    equal(x, torch.zeros(3))


def test_inputs_changed_by_the_caller_between_calls() -> None:
    compiled = neuron(lambda x: x.clone())
    x = torch.zeros(3)
    first = compiled(x)
    x.fill_(7)
    equal(first, torch.zeros(3))
    equal(compiled(x), torch.full((3,), 7.0))


def test_writing_into_a_view_of_an_input_reaches_the_input() -> None:
    compiled = neuron(lambda x: (x.t(), x[1:], x + 1))
    for _ in range(2):
        x = torch.zeros(2, 3)
        transposed, tail, other = compiled(x)
        transposed[0].fill_(5)
        tail.add_(1)
        equal(x, torch.tensor([[5.0, 0, 0], [6, 1, 1]]))
        equal(other, torch.ones(2, 3))


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "contiguous": lambda x: x * 2,
    "transposed": lambda x: x.t() * 2,
    "channels_last": lambda x: F.conv2d(
        x.reshape(1, 1, 3, 4).expand(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.ones(2, 2, 1, 1),
    ),
    "two": lambda x: (x.t() * 2, x + 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_differentiable_result(name: str) -> None:
    def run(function: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.ones(3, 4, requires_grad=True)
        result = function(x)
        result = result[0] if isinstance(result, tuple) else result
        result.mul_(3).relu_()
        result.square().sum().backward()
        return result, x.grad

    compiled = neuron(IN_PLACE[name])
    for _ in range(2):
        equal(run(compiled), run(IN_PLACE[name]))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_gradients_of_two_leaves_do_not_share_memory(layout: str) -> None:
    def make() -> torch.Tensor:
        x = torch.randn(2, 3, 4, 4)
        return x.to(memory_format=torch.channels_last) if layout == "channels_last" else x

    compiled = neuron(lambda x, y, w: (x + y) * w)
    for _ in range(2):
        x, y, w = make().requires_grad_(), make().requires_grad_(), make()
        compiled(x, y, w).backward(make())
        kept = x.grad.clone()
        y.grad.zero_()
        equal(x.grad, kept)


def test_results_outlive_everything() -> None:
    def make() -> torch.Tensor:
        compiled = neuron(lambda x: (x * 2).t())
        return compiled(torch.arange(12.0).reshape(3, 4))

    result = make()
    torch._dynamo.reset()
    equal(result, (torch.arange(12.0).reshape(3, 4) * 2).t())


# ------------------------------------------------------------------------------------ mutation


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    """Mutate and compute."""
    x.add_(1)
    return x * 2


MUTATIONS: dict[str, Callable[..., Any]] = {
    "add": add_in_place,
    "returns_it": lambda x: x.mul_(2),
    "nothing_returned": lambda x: (x.mul_(2), None)[1],
    "through_a_view": lambda x: (x[0].zero_(), x.sum())[1],
    "slice_assignment": lambda x: (x.__setitem__((slice(None), slice(1, 3)), 5.0), x + 1)[1],
    "index_assignment": lambda x: (x.__setitem__(torch.tensor([0, 2]), 5.0), x + 1)[1],
    "transposed_view": lambda x: (x.t().add_(torch.arange(3.0)), x * 1)[1],
    "copy": lambda x: (x.copy_(x.flip(0)), x + 1)[1],
    "fill": lambda x: (x.fill_(3.0), x.t())[1],
    "masked_fill": lambda x: x.masked_fill_(x > 0, 0.0),
    "twice": lambda x: (x.add_(1).mul_(2), x.t().sub_(1))[1],
    "out": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "unaligned"])
def test_mutated_inputs(name: str, layout: str) -> None:
    inputs = {
        "contiguous": torch.randn(3, 4),
        "transposed": torch.randn(4, 3).t(),
        "strided": torch.randn(3, 8)[:, ::2],
        "unaligned": torch.randn(13)[1:].view(3, 4),
    }
    if name == "out" and layout != "contiguous":
        pytest.skip("Dynamo breaks the graph here: nothing of ours")
    check(MUTATIONS[name], inputs[layout], calls=2)


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in ("fill", "out")])
def test_mutated_inputs_with_grad(name: str) -> None:
    def function(x: torch.Tensor) -> Any:
        y = x * 1.5
        return MUTATIONS[name](y), y

    check(function, torch.randn(3, 4, requires_grad=True), backward=True, calls=2)


@IGNORE_TORCH
def test_a_mutated_input_in_the_graph_of_the_caller() -> None:
    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        x = torch.ones(3, 4, requires_grad=True)
        y = x * 2
        z = function(y)
        (y.square() + z).sum().backward()
        return x.grad

    compiled = neuron(add_in_place)
    for _ in range(2):
        equal(run(compiled), run(add_in_place))


def test_a_leaf_mutated_under_no_grad() -> None:
    def function(x: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.sub_(update)
        return (x * 2).sum()

    check(function, torch.randn(3, requires_grad=True), torch.randn(3), backward=True)


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_two_views_of_one_storage_mutated() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.mul_(2)
        return x + y

    compiled = neuron(function)
    for _ in range(3):
        mine, theirs = torch.arange(6.0), torch.arange(6.0)
        actual = compiled(mine[:4], mine[2:])
        equal((actual, mine), (function(theirs[:4], theirs[2:]), theirs))


def test_the_same_tensor_twice_mutated() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    compiled = neuron(function)
    for _ in range(2):
        mine, theirs = torch.ones(3), torch.ones(3)
        equal((compiled(mine, mine), mine), (function(theirs, theirs), theirs))


def test_metadata_mutation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + 1

    check(function, torch.randn(3, 4))


# ------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_batch_norm_buffers(grad: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    mode = torch.enable_grad if grad else torch.no_grad
    check(model, torch.randn(6, 4), backward=grad, mode=mode, rtol=1e-4, atol=1e-5)


class Cache(nn.Module):
    """A key-value cache written at a position."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("cache", torch.zeros(2, 5, 3))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))

    def forward(self, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.how == "index_copy":
            self.cache.index_copy_(1, position, new)
        elif self.how == "index_put":
            self.cache[:, position] = new
        elif self.how == "slice":
            self.cache[:, 1:2] = new
        else:
            self.cache = torch.cat([self.cache[:, 1:], new], 1)
        self.length += 1
        return self.cache.sum(1) * self.length


@pytest.mark.parametrize("how", ["index_copy", "index_put", "slice", "reassigned"])
def test_cache_buffers(how: str) -> None:
    model = Cache(how)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    with torch.no_grad():
        for turn in range(4):
            new, position = torch.randn(2, 1, 3), torch.tensor([turn])
            equal(compiled(new, position), eager(new, position))
            equal_modules(model, eager)


def test_a_buffer_keeps_its_storage() -> None:
    model = nn.BatchNorm1d(4)
    before = model.running_mean.data_ptr()
    compiled = neuron(model)
    for _ in range(2):
        compiled(torch.randn(5, 4))
    assert model.running_mean.data_ptr() == before


def test_buffers_changed_by_the_user_between_calls() -> None:
    model = nn.BatchNorm1d(4)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    for turn in range(3):
        for module in (model, eager):
            module.running_mean.fill_(turn)
            module.running_var = torch.full((4,), 1.0 + turn)
        x = torch.randn(5, 4)
        equal(compiled(x), eager(x))
        equal_modules(model, eager)
