"""AOT Autograd's side: gradients, partial gradients, hooks, checkpoints, custom functions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuron_compile

from .support import IGNORE_TORCH, check, equal, equal_modules, neuron


def leaf(*shape: int) -> torch.Tensor:
    """A random leaf that requires grad."""
    return torch.randn(*shape, requires_grad=True)


# ------------------------------------------------------------------------------ which inputs


def test_gradients_of_some_inputs() -> None:
    check(lambda x, y, z: (x * y).sin() + z, leaf(3, 4), torch.randn(3, 4), leaf(4), backward=True)


def test_an_unused_input_has_no_gradient() -> None:
    check(lambda x, unused: x.exp(), leaf(3), leaf(3), backward=True)


def test_an_input_cut_off_by_detach_has_no_gradient() -> None:
    check(lambda x, y: x * y.detach(), leaf(3), leaf(3), backward=True)


def test_results_with_and_without_grad() -> None:
    check(
        lambda x, y: (x * 2, y * 2, x.detach() + 1, x.argmax()),
        leaf(3),
        torch.randn(3),
        backward=True,
    )


def test_an_undefined_gradient_of_one_result() -> None:
    def run(function: Callable[..., Any]) -> list[torch.Tensor | None]:
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        first, _ = function(x, y)
        first.sum().backward()
        return [x.grad, y.grad]

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), y.cos()

    compiled = neuron(function)
    for _ in range(2):
        x_grad, y_grad = run(compiled)
        equal(x_grad, run(function)[0])
        # AOT Autograd fills undefined tangents with zeros, so this may be zeros, as with Inductor.
        assert y_grad is None or not y_grad.any()


def test_integer_inputs_of_an_embedding() -> None:
    check(nn.Embedding(7, 3, padding_idx=1), torch.tensor([[1, 2], [6, 2]]), backward=True)


def test_one_tensor_as_two_arguments() -> None:
    compiled = neuron(lambda x, y: x * y + x)
    for _ in range(2):
        x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        compiled(x, x).sum().backward()
        (z * z + z).sum().backward()
        equal(x.grad, z.grad)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(index).tanh())

    check(Tied(), torch.tensor([0, 3, 3]), backward=True)


def test_a_frozen_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    check(model, torch.randn(3, 4), backward=True)


def test_freezing_a_parameter_between_calls() -> None:
    model = nn.Linear(4, 4)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    for requires in (True, False, True):
        for module in (model, eager):
            module.weight.requires_grad_(requires)
            module.zero_grad()
        x = torch.randn(3, 4)
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
        equal_modules(model, eager)


# --------------------------------------------------------------------------- ways backwards


def test_backward_twice_with_retain_graph() -> None:
    compiled = neuron(lambda x, w: (x @ w).tanh().square().sum())
    for _ in range(2):
        x, w = leaf(3, 4), leaf(4, 2)
        loss = compiled(x, w)
        loss.backward(retain_graph=True)
        once = x.grad.clone()
        loss.backward()
        equal(x.grad, 2 * once)


def test_backward_again_without_retain_graph_is_an_error() -> None:
    loss = neuron(lambda x: x.sin().sum())(leaf(3))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_autograd_grad() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.softmax(x @ w, -1)

    compiled = neuron(function)
    for _ in range(2):
        x, w, direction = leaf(3, 4), leaf(4, 2), torch.randn(3, 2)
        actual = torch.autograd.grad(compiled(x, w), (w, x), direction)
        equal(actual, torch.autograd.grad(function(x, w), (w, x), direction))
        assert x.grad is None


def test_grad_of_grad_is_the_error_of_aot_autograd() -> None:
    x = leaf(3)
    (gradient,) = torch.autograd.grad(neuron(lambda x: x.sin().sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def test_gradients_accumulate() -> None:
    check_model = nn.Linear(3, 2)
    eager = copy.deepcopy(check_model)
    compiled = neuron(check_model)
    for _ in range(3):
        x = torch.randn(4, 3)
        compiled(x).sum().backward()
        eager(x).sum().backward()
    equal_modules(check_model, eager)


def test_several_calls_before_any_backward() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sigmoid()

    compiled = neuron(function)
    w, v = leaf(3, 3), None
    v = w.detach().clone().requires_grad_()
    inputs = [torch.randn(2, 3) for _ in range(3)]
    sum(compiled(x, w).square().sum() for x in inputs).backward()
    sum(function(x, v).square().sum() for x in inputs).backward()
    equal(w.grad, v.grad)


def test_a_result_fed_back_in() -> None:
    compiled = neuron(lambda h, w: (h @ w).tanh())
    x, w = leaf(2, 3), leaf(3, 3)
    y, v = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    h, g = x, y
    for _ in range(3):
        h, g = compiled(h, w), (g @ v).tanh()
    h.sum().backward()
    g.sum().backward()
    equal((h, x.grad, w.grad), (g, y.grad, v.grad))


def test_hooks_on_tensors_and_parameters() -> None:
    def run(wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        seen: list[torch.Tensor] = []
        model.weight.register_hook(lambda grad: seen.append(grad.clone()))
        model.bias.register_hook(lambda grad: grad * 10)
        result = wrap(model)(torch.ones(2, 3))
        result.register_hook(lambda grad: seen.append(grad.clone()))
        result.square().sum().backward()
        return seen, model.bias.grad

    for _ in range(2):
        equal(run(neuron), run(lambda model: model))


def test_a_forward_hook_on_a_submodule() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    check(model, torch.randn(2, 3), backward=True)


@IGNORE_TORCH
def test_saved_tensors_changed_in_place_is_an_error() -> None:
    x = leaf(3)
    y = x * 1
    loss = neuron(lambda y: (y * y).sum())(y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("what", ["weight", "input"])
def test_a_saved_argument_changed_in_place_is_an_error(what: str) -> None:
    model = nn.Linear(3, 2, bias=False)
    x = leaf(4, 3)
    loss = neuron(lambda x: model(x).square().sum())(x)
    with torch.no_grad():
        (model.weight if what == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_results_that_cannot_have_a_gradient() -> None:
    check(lambda x: (x.argmax(), x > 0, x.detach() * 2), leaf(5))


def test_a_backward_in_another_thread() -> None:
    x = leaf(5)
    loss = neuron(lambda x: x.sin().sum())(x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    equal(x.grad, x.detach().cos())


def test_channels_last_gradients_arrive() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    check(conv, x, backward=True)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "strided"])
def test_a_tangent_of_another_layout(kind: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    tangents = {
        "transposed": torch.randn(4, 3).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "strided": torch.randn(6, 4)[::2],
    }
    compiled = neuron(function)
    for _ in range(2):
        x = leaf(3, 4)
        equal(
            torch.autograd.grad(compiled(x), x, tangents[kind])[0].contiguous(),
            torch.autograd.grad(function(x), x, tangents[kind])[0].contiguous(),
        )


# ------------------------------------------------------------------------------- checkpoints


class Block(nn.Module):
    """A checkpointed layer with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.p = p

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What is checkpointed."""
        return F.dropout(self.linear(x).tanh(), self.p, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpoint_without_dropout() -> None:
    check(nn.Sequential(Block(0.0), Block(0.0)), leaf(3, 4), backward=True)


# -------------------------------------------------------------------------- custom functions


class Clipped(torch.autograd.Function):
    """Identity whose gradient is clipped: not what differentiating the forward would give."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        """Save what the backward needs."""
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """A gradient of our own."""
        (x,) = ctx.saved_tensors
        return (grad * x).clamp(-ctx.bound, ctx.bound), None


@IGNORE_TORCH
def test_a_custom_function() -> None:
    check(lambda x: Clipped.apply(x.sin(), 0.3) + 1, leaf(3, 4), backward=True)


def test_func_grad_and_vmap_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    check(function, torch.randn(3, 4))


# ------------------------------------------------------------------------------- grad modes


def test_switching_grad_modes_on_one_function() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Tanh())
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for mode in [*modes, *reversed(modes)]:
        x = torch.randn(2, 3)
        with mode():
            actual, wanted = compiled(x), eager(x)
        equal(actual.clone(), wanted.clone())
        assert actual.requires_grad == wanted.requires_grad
        if actual.requires_grad:
            actual.sum().backward()
            wanted.sum().backward()
            equal_modules(model, eager)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradless_modes(mode: Callable[[], Any]) -> None:
    check(nn.Linear(3, 2), leaf(4, 3), mode=mode)


def test_no_grad_and_enable_grad_inside() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale, scale

    check(function, leaf(5), backward=True)


def test_results_of_inference_mode_can_be_used() -> None:
    compiled = neuron(lambda x: x.t() * 2)
    with torch.inference_mode():
        x = torch.randn(3, 4)
        y = compiled(x)
        y.add_(1)
        again = compiled(y)
    equal(again.clone(), ((x.t() * 2 + 1).t() * 2).clone())
    assert (y + 1).shape == (4, 3)


def test_inference_tensors_as_inputs_outside() -> None:
    compiled = neuron(lambda x: x.exp())
    with torch.inference_mode():
        x = torch.randn(3)
    for _ in range(2):
        equal(compiled(x).clone(), x.exp().clone())


def test_train_and_eval_switching() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    for training in (True, False, True, False):
        model.train(training)
        eager.train(training)
        x = torch.randn(5, 4)
        equal(compiled(x), eager(x))
        equal_modules(model, eager)


# ------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    ],
    ids=["sgd", "adam", "adam-single"],
)
def test_training_sees_the_optimizers_updates(make: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    optimizers = [make(model.parameters()), make(eager.parameters())]
    for _ in range(5):
        x, target = torch.randn(6, 4), torch.randn(6, 2)
        losses = []
        for module, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        equal(*losses)
        equal_modules(model, eager)
    assert neuron_compile.report().compilations == 2


@IGNORE_TORCH
def test_a_compiled_step_with_autograd_inside() -> None:
    model = nn.Linear(4, 2)
    eager = copy.deepcopy(model)

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = module(x).square().mean()
        loss.backward()
        return loss.detach()

    compiled = neuron(step)
    for _ in range(3):
        x = torch.randn(3, 4)
        equal(compiled(model, x), step(eager, x))
        equal_modules(model, eager)


def test_replaced_parameters_are_seen() -> None:
    model = nn.Linear(4, 2)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    for _ in range(4):
        x, new = torch.randn(3, 4), torch.randn(2, 4)
        model.weight.data, eager.weight.data = new.clone(), new.clone()
        for module in (model, eager):
            module.zero_grad()
        compiled(x).sum().backward()
        eager(x).sum().backward()
        equal_modules(model, eager)


def test_parameters_of_another_layout_after_replacement() -> None:
    model = nn.Linear(3, 3)
    eager = copy.deepcopy(model)
    compiled = neuron(model)
    x = torch.randn(2, 3)
    for turn in range(3):
        for module in (model, eager):
            data = module.weight.data.clone()
            module.weight.data = data.t() if turn % 2 else data
        equal(compiled(x), eager(x))


def test_loading_a_state_dict_is_seen() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    compiled = neuron(model)
    x = torch.randn(4, 3)
    compiled(x)
    model.load_state_dict(other.state_dict())
    equal(compiled(x), other(x))
    model.load_state_dict({k: v + 1 for k, v in other.state_dict().items()}, assign=True)
    equal(compiled(x), F.linear(x, other.weight + 1, other.bias + 1))


class Flat(nn.Module):
    """Two parameters that are unaligned views of one flat buffer, as FSDP and DDP make them."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.arange(32.0) / 32
        self.weight = nn.Parameter(torch.empty(0))
        self.bias = nn.Parameter(torch.empty(0))
        self.attach(self.flat)

    def attach(self, flat: torch.Tensor) -> None:
        """Let the parameters be views of ``flat``, at odd offsets."""
        self.flat = flat
        self.weight.data = flat[3:15].view(3, 4)
        self.bias.data = flat[17:20]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).tanh()


def test_unaligned_parameters_updated_in_place() -> None:
    model, eager = Flat(), Flat()
    compiled = neuron(model)
    for turn in range(4):
        x = torch.randn(2, 4)
        for module, call in ((model, compiled), (eager, eager)):
            if turn == 3:
                module.attach(module.flat.clone())
            module.zero_grad()
            call(x).square().sum().backward()
            module.flat[3:15].sub_(0.1 * module.weight.grad.flatten())
            module.flat.add_(0.01)
        equal_modules(model, eager)
