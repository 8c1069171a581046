"""The tools around compiled code: hooks, those of torch.compiler, modes of the caller."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import neuron_compile

from .support import IGNORE_TORCH, cases, check, equal, equal_modules, neuron

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def leaf(*shape: int) -> Tensor:
    """A leaf with a gradient."""
    return torch.randn(shape, requires_grad=True)


# ------------------------------------------------------------------------------------------ hooks


class Body(nn.Module):
    """Two layers, and a hook on what is between them."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.inside:
            hidden.register_hook(lambda grad: grad * 2)
        return self.last(self.act(hidden))


def _full_backward(model: Body, seen: list[Tensor]) -> None:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        seen.append(outputs[0].clone())
        return tuple(grad * 2 for grad in inputs)

    model.act.register_full_backward_hook(hook)


def _post_accumulate(model: Body, seen: list[Tensor]) -> None:
    def hook(parameter: Tensor) -> None:
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(3)

    model.first.weight.register_post_accumulate_grad_hook(hook)


HOOKS: dict[str, Callable[[Body, list[Tensor]], Any]] = {
    "forward": lambda model, seen: model.first.register_forward_hook(
        lambda module, args, result: result * 2
    ),
    "forward_pre": lambda model, seen: model.first.register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "of_the_whole": lambda model, seen: model.register_forward_hook(
        lambda module, args, kwargs, result: result - 1, with_kwargs=True
    ),
    "full_backward": _full_backward,
    "full_backward_pre": lambda model, seen: model.act.register_full_backward_pre_hook(
        lambda module, grads: (grads[0] * 3,)
    ),
    "tensor": lambda model, seen: model.first.weight.register_hook(lambda grad: grad * 5),
    "post_accumulate": _post_accumulate,
}


def _train_hooked(compiled: Any, model: Body, eager: Body, logs: list[list[Tensor]]) -> None:
    for _ in range(2):
        x = torch.randn(3, 4)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        actual, wanted = compiled(mine), eager(theirs)
        equal(actual, wanted, **CLOSE)
        actual.square().sum().backward()
        wanted.square().sum().backward()
        equal(mine.grad, theirs.grad, **CLOSE)
        equal_modules(model, eager, **CLOSE)
    equal(*logs, **CLOSE)


@IGNORE_TORCH
@pytest.mark.parametrize("name", cases(HOOKS, {"forward_pre", "full_backward_pre", "tensor"}))
def test_hooks_before_and_after_compilation(name: str) -> None:
    eager = Body()
    model = copy.deepcopy(eager)
    logs: list[list[Tensor]] = [[], []]
    compiled = neuron(model)
    handles = [HOOKS[name](each, log) for each, log in zip((model, eager), logs, strict=True)]
    _train_hooked(compiled, model, eager, logs)
    if name in ("forward", "tensor"):
        # By default Dynamo looks for no hooks on modules at later calls.
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            torch._dynamo.reset()
            _train_hooked(compiled, model, eager, logs)
            for handle in handles:
                handle.remove()
            _train_hooked(compiled, model, eager, logs)
            for each, log in zip((model, eager), logs, strict=True):
                HOOKS[name](each, log)
            _train_hooked(compiled, model, eager, logs)


@IGNORE_TORCH
def test_a_hook_on_a_tensor_inside() -> None:
    check(Body(inside=True), leaf(3, 4), backward=True, **CLOSE)


def test_a_hook_on_the_compiled_module() -> None:
    model = Body()
    compiled, eager = neuron(model), copy.deepcopy(model)
    for each in (compiled, eager):
        each.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    for _ in range(3):
        x = torch.randn(3, 4)
        equal(compiled(x), eager(x), **CLOSE)


SAVED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "scaled": lambda: saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2),
    "bytes": lambda: saved_tensors_hooks(
        lambda x: (x.detach().numpy().copy(), x.shape), lambda x: torch.from_numpy(x[0]).view(x[1])
    ),
    "on_cpu": save_on_cpu,
}


@IGNORE_TORCH
@pytest.mark.parametrize("name", cases(SAVED, {"on_cpu"}))
def test_hooks_on_saved_tensors(name: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh() @ w).sin().sum()

    compiled = neuron(function)
    for _ in range(3):
        x, w = torch.randn(3, 4), torch.randn(4, 4)
        found = []
        for each in (compiled, function):
            inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            with SAVED[name]():
                result = each(*inputs)
            found.append(torch.autograd.grad(result, inputs))
        equal(*found, **CLOSE)


# -------------------------------------------------------------------------- torch.compiler's tools


def test_stances_while_training() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled = neuron(function)
    set_stance, compilations = torch.compiler.set_stance, []
    for stance in ("force_eager", "default", "eager_on_recompile", "fail_on_recompile", "default"):
        with set_stance(stance):
            x = leaf(3)
            compiled(x).sum().backward()
            equal(x.grad, 2 * x.detach().cos())
        compilations.append(neuron_compile.report().compilations)
    assert compilations == [0, 2, 2, 2, 2]
    other = torch.ones(2, 2, dtype=torch.float64)
    with set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        compiled(other)
    with set_stance("eager_on_recompile"):
        equal(compiled(other), function(other))
    assert neuron_compile.report().compilations == 2
    equal(compiled(other), function(other))
    assert neuron_compile.report().compilations == 3


@torch.compiler.allow_in_graph
def in_graph(x: Tensor) -> Tensor:
    """A function that Dynamo does not look into."""
    return x.sin() + 1


@IGNORE_TORCH
def test_disabled_code_and_what_asks_for_compilation() -> None:
    seen: list[bool] = []

    @torch.compiler.disable
    def host(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + float(x.detach().numpy().sum())

    @torch.compiler.disable(recursive=False)
    def outer(x: Tensor) -> Tensor:
        return in_graph(x) * 2

    check(lambda x: host(x.sin()) * outer(x), leaf(3), backward=True)
    assert seen and not any(seen)

    def asking(x: Tensor) -> Tensor:
        return in_graph(x) + (1 if torch.compiler.is_compiling() else -1)

    compiled = neuron(asking, fullgraph=True)
    before = neuron_compile.report().compilations
    for _ in range(3):
        x = torch.randn(3)
        torch.compiler.cudagraph_mark_step_begin()
        equal(compiled(x), x.sin() + 2)
        with torch.compiler.set_stance("force_eager"):
            equal(compiled(x), x.sin())
        torch._dynamo.reset()
    assert neuron_compile.report().compilations == before + 3


# ------------------------------------------------------------------------------------------ modes


def test_gradients_switched_inside() -> None:
    @torch.no_grad()
    def constant(x: Tensor) -> Tensor:
        return x * 2

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(False):
            y = x * 4
        return constant(x) + x.sin() * torch.is_grad_enabled(), y

    x = leaf(3)
    check(lambda x: function(x)[0], x, backward=True)
    check(function, x)
    check(function, x, mode=torch.no_grad)


def test_results_of_inference_mode() -> None:
    model = nn.Linear(4, 4)
    compiled = neuron(model)
    for mode in (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.inference_mode):
        x = torch.randn(3, 4)
        with mode():
            actual, wanted = compiled(x), model(x)
        equal(actual, wanted, **CLOSE)
        assert actual.is_inference() == wanted.is_inference()


class Cosines(TorchFunctionMode):
    """A mode under which sines are cosines."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.cos if func is torch.sin else func
        return func(*args, **(kwargs or {}))


def test_modes_of_the_caller() -> None:
    compiled = neuron(lambda x: torch.sin(x) * 2)
    for _ in range(3):
        x = torch.randn(3)
        with Cosines():
            equal(compiled(x), x.cos() * 2)
        equal(compiled(x), x.sin() * 2)
    with FlopCounterMode(display=False):
        equal(compiled(x), x.sin() * 2)
    y = leaf(3)
    with torch.autograd.set_detect_anomaly(True):
        compiled(y).sum().backward()
    equal(y.grad, y.detach().cos() * 2)
