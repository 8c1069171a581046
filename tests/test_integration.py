"""The backend together with the rest of torch: transforms, optimizers, control flow, weights."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuron_compile

from .support import IGNORE_TORCH, check, equal, equal_modules, neuron

# ---------------------------------------------------------------------------------- transforms


def test_vmap_over_a_compiled_function() -> None:
    compiled = neuron(lambda x: x.sin() * 2)
    for _ in range(2):
        x = torch.randn(3, 4)
        equal(torch.func.vmap(compiled)(x), x.sin() * 2)


def test_grad_of_a_compiled_function() -> None:
    compiled = neuron(lambda x: x.sin().sum())
    for _ in range(2):
        x = torch.randn(3)
        equal(torch.func.grad(compiled)(x), x.cos())


def test_functional_call() -> None:
    model = nn.Linear(3, 2)

    def function(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    weights = {name: value.detach() * 2 for name, value in model.named_parameters()}
    check(function, weights, torch.randn(4, 3))


def test_numpy_functions() -> None:
    compiled = neuron(lambda x: np.sin(x) * 2)
    for _ in range(2):
        x = np.random.default_rng(0).normal(size=3)
        np.testing.assert_allclose(compiled(x), np.sin(x) * 2)


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_a_tensor_subclass() -> None:
    compiled = neuron(lambda x: x * 2)
    for _ in range(2):
        x = torch.randn(3).as_subclass(Tagged)
        result = compiled(x)
        assert type(result) is Tagged
        equal(result.as_subclass(torch.Tensor), (x * 2).as_subclass(torch.Tensor))


@IGNORE_TORCH
def test_saved_tensors_hooks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    compiled = neuron(function)
    for _ in range(2):
        x = torch.randn(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = compiled(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        (wanted,) = torch.autograd.grad(function(x).sum(), x)
        equal(gradient, wanted)
    assert packed


@IGNORE_TORCH
def test_compiled_autograd() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            x = torch.randn(4, 3)
            compiled(x).sum().backward()
            eager(x).sum().backward()
            equal_modules(model, eager)


# -------------------------------------------------------------------------- modules and optimizers


@IGNORE_TORCH
@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=False),
    ],
    ids=["sgd", "adamw"],
)
def test_a_compiled_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    eager = copy.deepcopy(model)
    optimizers = [make(model.parameters()), make(eager.parameters())]
    steps = [neuron(optimizers[0].step), optimizers[1].step]
    for _ in range(4):
        x = torch.randn(4, 3)
        for module, step in zip((model, eager), steps, strict=True):
            module.zero_grad()
            module(x).square().sum().backward()
            step()
        equal_modules(model, eager)


@IGNORE_TORCH
def test_a_compiled_adamw_is_whole() -> None:
    model = nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    step = neuron(torch.optim.AdamW(model.parameters(), 0.01, foreach=False).step)
    step()
    assert neuron_compile.report().operators_in_fallback == 0


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        (4, 3),
    ),
    "spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
        (4, 3),
    ),
    "encoder_layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        (2, 5, 8),
    ),
    "group_norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv1d(4, 3, 2)), (2, 4, 6)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 4, 4)),
}


@IGNORE_TORCH
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch(name: str) -> None:
    make, shape = MODULES[name]
    check(make(), torch.randn(shape), backward=True, rtol=1e-4, atol=1e-4)
    assert neuron_compile.report().operators_in_fallback == 0


def test_changing_the_dtype_of_a_module() -> None:
    model = nn.Linear(3, 2)
    compiled = neuron(model)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9), (torch.bfloat16, 2e-2)):
        model.to(dtype)
        x = torch.randn(4, 3, dtype=dtype)
        for _ in range(2):
            equal(compiled(x), model(x), tolerance, tolerance)


def test_masks_drawn_by_the_user_reach_the_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand_like(x) < 0.5, x * 2, torch.zeros_like(x))

    compiled = neuron(function)
    for _ in range(3):
        x = torch.ones(300, requires_grad=True)
        result = compiled(x)
        result.sum().backward()
        equal(result.detach(), x.grad)
        assert 50 < (x.grad == 0).sum() < 250


# -------------------------------------------------------------------------------- control flow


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@IGNORE_TORCH
def test_cond_with_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    compiled = neuron(function)
    for value in (1.0, -1.0, 2.0):
        mine = torch.full((3,), value, requires_grad=True)
        theirs = torch.full((3,), value, requires_grad=True)
        compiled(mine).sum().backward()
        function(theirs).sum().backward()
        equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_through_a_result_of_unknown_size(dynamic: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x[x > 0].sin() * 2).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = neuron(function, dynamic=dynamic)
        for values in ([1.0, -1.0, 2.0], [1.0, 3.0, 2.0], [-1.0, -1.0, -2.0]):
            mine = torch.tensor(values, requires_grad=True)
            theirs = torch.tensor(values, requires_grad=True)
            compiled(mine).backward()
            function(theirs).backward()
            equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_a_sparse_gradient() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    index = torch.tensor([1, 2, 2])
    for _ in range(2):
        for module, call in ((model, compiled), (eager, eager)):
            module.zero_grad()
            call(index).sum().backward()
        assert model.weight.grad.is_sparse
        equal(model.weight.grad.to_dense(), eager.weight.grad.to_dense())


def test_stances() -> None:
    compiled = neuron(lambda x: x * 2)
    x = torch.ones(2)
    with torch.compiler.set_stance("force_eager"):
        equal(compiled(x), x * 2)
    assert neuron_compile.report().compilations == 0
    equal(compiled(x), x * 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        equal(compiled(x), x * 2)
    assert neuron_compile.report().compilations == 1


# ------------------------------------------------------------------------------ where memory lives


def test_mapped_weights(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    compiled = neuron(other)
    for _ in range(2):
        x = torch.randn(4, 3)
        equal(compiled(x), model(x))


def test_shared_memory() -> None:
    model = nn.Linear(3, 2)
    model.share_memory()
    compiled = neuron(model)
    for _ in range(2):
        x = torch.randn(4, 3).share_memory_()
        equal(compiled(x), model(x))


def test_memory_of_numpy() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = torch.from_numpy(array)
    compiled = neuron(lambda x: (x * 2, x.t()))
    for value in (5, 7):
        array[0, 0] = value
        equal(compiled(x), (x * 2, x.t()))


def test_an_address_that_is_not_even_aligned_for_its_dtype() -> None:
    raw = torch.zeros(84, dtype=torch.uint8)
    memory = (ctypes.c_char * 84).from_address(raw.data_ptr())
    x = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=20)
    assert x.data_ptr() % 4 == 1
    compiled = neuron(lambda x: F.relu(x * 2 + 1))
    for value in (1.0, 2.0):
        x.fill_(value)
        equal(compiled(x), torch.full((20,), value * 2 + 1))
