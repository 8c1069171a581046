"""Control flow and other higher-order operators, on the device wherever their graphs can be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn import functional as F

import neuron_compile
from neuron_compile import FallbackWarning
from neuron_compile.higher_order import adopt
from neuron_compile.lowering.region import Region

from .support import IGNORE_TORCH, equal, neuron

pytestmark = IGNORE_TORCH

X, W = torch.randn(3, 4), torch.randn(4, 4)


def on_device() -> None:
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0, report.fallback_reasons


def branch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).relu(), lambda x: x.sin() @ w, (x,))


def branches_within(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x[:, -2:].repeat(1, 2), (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.cos(), (x,))


def loop(x: torch.Tensor, w: torch.Tensor) -> Any:
    def step(i: torch.Tensor, x: torch.Tensor) -> Any:
        return i + 1, (x @ w).tanh() + i

    return while_loop(lambda i, x: i < 5, step, (torch.tensor(0), x))


def loop_on_data(x: torch.Tensor, w: torch.Tensor) -> Any:
    return while_loop(lambda x: x.abs().max() > 0.1, lambda x: (x * 0.7,), (x,))


def recurrence(x: torch.Tensor, w: torch.Tensor) -> Any:
    return scan(lambda c, x: ((c @ w).tanh() + x, c * 2), x.new_zeros(4), x)


def backwards(x: torch.Tensor, w: torch.Tensor) -> Any:
    return scan(lambda c, x: (c * 0.5 + x, c * 1), x.new_zeros(4), x, reverse=True)


def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return map(lambda x, w: F.layer_norm(x @ w, (4,)), x, w)


def prefix(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a * b + 1, x, 0, combine_mode="generic")


@torch.compiler.nested_compile_region
def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w) + x


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = layer(x, w)
    return x


def layers_of_their_own(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = layer(x, w * (0.5 + number))
    return x


FORWARD = [
    branch,
    branches_within,
    loop,
    loop_on_data,
    recurrence,
    backwards,
    rows,
    prefix,
    layers,
    layers_of_their_own,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FORWARD, ids=lambda f: f.__name__)
def test_values(function: Callable[..., Any], dynamic: bool) -> None:
    compiled = neuron(function, fullgraph=True, dynamic=dynamic)
    for x in (X.abs(), -X.abs(), X):
        equal(compiled(x, W), function(x, W))
    on_device()


def test_sizes_that_change() -> None:
    compiled = neuron(recurrence, fullgraph=True, dynamic=True)
    for size in (3, 5, 2):
        x = torch.randn(size, 4)
        equal(compiled(x, W), recurrence(x, W))
    assert neuron_compile.report().specializations == 3
    on_device()


BACKWARD = [f for f in FORWARD if f not in (loop, loop_on_data)]


@pytest.mark.parametrize("function", BACKWARD, ids=lambda f: f.__name__)
def test_gradients(function: Callable[..., Any]) -> None:
    compiled = neuron(function, fullgraph=True)
    for x in (X.abs(), -X.abs()):
        mine, theirs = ([t.clone().requires_grad_() for t in (x, W)] for _ in range(2))
        for run, inputs in ((compiled, mine), (function, theirs)):
            results = run(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            sum((r * torch.arange(4.0)).sum() for r in results).backward()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
    on_device()


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_gradients_of_a_loop_of_unknown_length() -> None:
    """All states are kept in a tensor whose size depends on data: in eager, but right."""
    compiled = neuron(lambda x: loop(x, W)[1])
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled(mine).sum().backward()
    loop(theirs, W)[1].sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


# ------------------------------------------------------------------------------------ checks


def pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index)


picked = torch.compiler.nested_compile_region(pick)


def picked_in_a_branch(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, pick, lambda x, i: pick(x, i * 0), (x, i))


def picked_in_a_scan(x: torch.Tensor, i: torch.Tensor) -> Any:
    return scan(lambda c, i: (c + pick(x, i.reshape(1))[0], i + 1), x.new_zeros(4), i)


def picked_in_a_loop(x: torch.Tensor, i: torch.Tensor) -> Any:
    def step(n: torch.Tensor, total: torch.Tensor) -> Any:
        return n + 1, total + pick(x, i.select(0, 1).reshape(1) + n)[0]

    return while_loop(lambda n, total: n < 2, step, (torch.tensor(0), x.new_zeros(4)))


def picked_in_a_region(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return picked(x, i) * 2


@pytest.mark.parametrize(
    "function",
    [picked_in_a_branch, picked_in_a_scan, picked_in_a_loop, picked_in_a_region],
    ids=lambda f: f.__name__,
)
def test_an_index_out_of_range_raises(function: Callable[..., Any]) -> None:
    compiled = neuron(function, fullgraph=True)
    x, good, bad = X.abs(), torch.tensor([0, 1]), torch.tensor([0, 7])
    equal(compiled(x, good), function(x, good))
    with pytest.raises(IndexError, match=r"index out of range.*index_select"):
        compiled(x, bad)
    equal(compiled(x, good), function(x, good))
    on_device()


def test_a_check_in_the_other_branch_is_not_made() -> None:
    compiled = neuron(picked_in_a_branch, fullgraph=True)
    bad = torch.tensor([0, 7])
    equal(compiled(-X.abs(), bad), picked_in_a_branch(-X.abs(), bad))


# ------------------------------------------------------------------------------- randomness


def dropped_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, F.dropout, lambda x: x * 1, (x,))


def dropped_in_a_scan(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda c, x: (c * 1, F.dropout(x)), x.new_zeros(()), x)[1]


@torch.compiler.nested_compile_region
def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x)


def dropped_in_regions(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([dropped(x), dropped(x)])


@pytest.mark.parametrize(
    "function",
    [dropped_in_a_branch, dropped_in_a_scan, dropped_in_regions],
    ids=lambda f: f.__name__,
)
def test_random_numbers(function: Callable[..., Any]) -> None:
    compiled = neuron(function, fullgraph=True)
    x = torch.ones(8, 64)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    equal(compiled(x), first)
    assert not torch.equal(first, second), "each call draws anew"
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert abs((first == 0).float().mean() - 0.5) < 0.15
    halves = first[:4], first[4:]
    assert not torch.equal(*halves), "each turn and each call of a region draws anew"
    on_device()


# ------------------------------------------------------------------------- what is not lowered


@torch.library.custom_op("neuron_test::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cubed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_branch_with_an_operator_that_has_no_lowering() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, cubed, lambda x: x * 2, (x,)) + 1

    compiled = neuron(function, fullgraph=True)
    with pytest.warns(FallbackWarning, match=r"higher_order.cond.*neuron_test.cubed"):
        equal(compiled(X), function(X))
    equal(compiled(-X), function(-X))
    assert neuron_compile.report().operators_in_fallback == 1


# ---------------------------------------------------------------------------------- regions


def _regions(function: Callable[..., Any], *inputs: torch.Tensor) -> Iterator[Region]:
    found: list[Any] = []

    def keep(module: Any, example_inputs: Any) -> Any:
        found.append(adopt(module))
        return module.forward

    from torch._dynamo.backends.common import aot_autograd

    torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    return (n.target for n in found[0].graph.nodes if isinstance(n.target, Region))


def _branch(number: float, size: int = 4) -> str:
    torch._dynamo.reset()
    x = torch.randn(3, size)
    (region,) = _regions(
        lambda x: torch.cond(x.sum() > 0, lambda x: x * number, lambda x: x.sin(), (x,)), x
    )
    return region.key


def test_keys_differ_where_graphs_do() -> None:
    assert _branch(2.0) == _branch(2.0)
    assert len({_branch(2.0), _branch(3.0), _branch(2.0, size=5)}) == 3


def test_gradients_of_regions_with_weights_of_their_own() -> None:
    """What FakeTensor says of the second call's results was made for the first call's."""
    models = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def run(model: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for linear in model:
            x = layer(x, linear.weight)
        return x

    compiled = neuron(run, fullgraph=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        for model, function in zip(models, (compiled, run), strict=True):
            function(model, x).square().sum().backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    on_device()


def test_equal_regions_are_traced_once() -> None:
    first, second, third = _regions(layers, X, W)
    assert first.key == second.key == third.key
    assert dataclasses.is_dataclass(first) and str(first) == "higher_order.invoke_subgraph"


def test_a_region_runs_in_eager() -> None:
    (region,) = _regions(branch, X, W)
    made = region(torch.tensor(True), "graph:0", "graph:1", (W, X))
    equal(made[0], (X @ W).relu())
