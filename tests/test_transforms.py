"""Transforms of torch.func, custom functions of autograd, and checkpoints, in compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import neuron_compile

from .support import IGNORE_TORCH, cases, check, equal, equal_modules, neuron

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def leaf(*shape: int) -> Tensor:
    """A leaf with a gradient."""
    return torch.randn(shape, requires_grad=True)


# ------------------------------------------------------------------------------------- torch.func


LAYER = nn.Linear(4, 2)
WEIGHTS = {name: value.detach() for name, value in LAYER.named_parameters()}


def _loss(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def _vector(x: Tensor) -> Tensor:
    return torch.stack([x.sin().sum(), x.square().sum(), x.prod()])


def _squared(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return func.functional_call(LAYER, weights, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap_in_and_out_dims": lambda x: func.vmap(
        lambda a, b: a * b.sum(), in_dims=(0, None), out_dims=1
    )(x, x[0]),
    "vmap_of_vmap_in_chunks": func.vmap(func.vmap(torch.exp), chunk_size=2),
    "grad_and_value": lambda x: func.grad_and_value(lambda a, b: (a * b.sin()).sum(), (0, 1))(x, x),
    "grad_with_aux": func.grad(lambda a: (a.square().sum(), a * 2), has_aux=True),
    "grad_of_grad": func.grad(lambda a: func.grad(_loss)(a).sum()),
    "gradients_of_samples": lambda x: func.vmap(func.grad(_squared), (None, 0))(WEIGHTS, x),
    "jvp": lambda x: func.jvp(_loss, (x,), (x.cos(),)),
    "vjp": lambda x: func.vjp(torch.sin, x)[1](x),
    "jacrev": lambda x: func.jacrev(_vector)(x[0]),
    "jacfwd": lambda x: func.jacfwd(_vector)(x[0]),
    "hessian": lambda x: func.hessian(_loss)(x[0]),
    "linearize": lambda x: func.linearize(torch.sin, x)[1](x),
}


# Of Dynamo and of torch.jit, about themselves.
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated", "ignore:Attempted to insert a get_attr Node"
)
@pytest.mark.parametrize(
    "name", cases(TRANSFORMS, {"jacfwd", "vjp", "grad_of_grad", "grad_with_aux", "linearize"})
)
def test_transforms_inside(name: str) -> None:
    check(TRANSFORMS[name], torch.randn(3, 4), **CLOSE)
    assert neuron_compile.report().operators_in_fallback == 0


def test_a_gradient_through_transforms() -> None:
    def function(x: Tensor) -> Tensor:
        return func.vmap(func.grad(lambda a: a.sin().sum() * a.sum()))(x).square()

    check(function, leaf(3, 4), backward=True, **CLOSE)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize(
    "transform",
    [func.jacrev, lambda f: lambda x: func.jvp(f, (x,), (x,))],
    ids=["jacrev", "jvp"],
)
def test_transforms_of_a_compiled_function(transform: Callable[[Any], Any]) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * x

    compiled = neuron(function)
    for _ in range(3):
        x = torch.randn(4)
        equal(transform(compiled)(x), transform(function)(x), **CLOSE)


def test_an_ensemble() -> None:
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3)]
    stacked, buffers = func.stack_module_state(models)  # type: ignore[arg-type]
    twins = {name: value.detach().clone().requires_grad_() for name, value in stacked.items()}
    base = copy.deepcopy(models[0]).to("meta")

    def function(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        def one(weights: dict[str, Tensor], buffers: Any, x: Tensor) -> Any:
            return func.functional_call(base, (weights, buffers), (x,))

        return func.vmap(one, in_dims=(0, 0, None))(weights, buffers, x)

    compiled = neuron(function)
    for _ in range(3):
        x = torch.randn(3, 4)
        actual, wanted = compiled(stacked, x), function(twins, x)
        equal(actual, wanted, **CLOSE)
        actual.square().sum().backward()
        wanted.square().sum().backward()
        for name, twin in twins.items():
            equal(stacked[name].grad, twin.grad, **CLOSE)


# ------------------------------------------------------------------------------- custom functions


class Scaled(torch.autograd.Function):
    """Arguments that are no tensors, one of them with a default."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, mode: str | None = None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale, ctx.mode = scale, mode
        return (x * scale).exp() if mode == "exp" else x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        factor = (x * ctx.scale).exp() if ctx.mode == "exp" else 3
        return grad * ctx.scale * factor, None, None


class Maximum(torch.autograd.Function):
    """A result that is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.max(1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (indices,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter(1, indices[:, None], grad[:, None])


class Once(torch.autograd.Function):
    """A backward that is not to be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos() * 2


class Separate(torch.autograd.Function):
    """A context of its own, and a rule for vmap made of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: int) -> Tensor:
        return x.sin() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.factor = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].cos() * ctx.factor, None


class Dirty(torch.autograd.Function):
    """An argument that is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Needed(torch.autograd.Function):
    """Gradients that are ``None`` where nobody needs them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor | None, total: Tensor | None) -> Any:
        grads: list[Any] = [None, None]
        for index, other in enumerate(reversed(ctx.saved_tensors)):
            if ctx.needs_input_grad[index]:
                first = 0 if product is None else product * other
                grads[index] = first + (0 if total is None else total)
        return tuple(grads)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "numbers_and_strings": lambda x: Scaled.apply(x, 0.5, "exp") + Scaled.apply(x, 2),
    "not_differentiable": lambda x: Maximum.apply(x * 1),
    "once_differentiable": lambda x: Once.apply(x) * 2,
    "separate_context": lambda x: Separate.apply(x, 3) + func.vmap(Separate.apply, (0, None))(x, 2),
    "dirty": lambda x: Dirty.apply(x * 1) + 1,
    "unneeded_gradients": lambda x: (Needed.apply(x, x.detach() + 1), Needed.apply(x, x * 2)[0]),
}


@IGNORE_TORCH
@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions(name: str) -> None:
    check(FUNCTIONS[name], leaf(3, 4), backward=True, **CLOSE)


# ------------------------------------------------------------------------------------ checkpoints


def _saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _saves_by_policy() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.relu.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not_reentrant": {"use_reentrant": False, "preserve_rng_state": False},
    "selective": {"use_reentrant": False, "context_fn": _saves_products},
    "selective_by_policy": {"use_reentrant": False, "context_fn": _saves_by_policy},
}


@IGNORE_TORCH
@pytest.mark.parametrize("name", cases(CHECKPOINTS, {"not_reentrant", "selective_by_policy"}))
def test_checkpoints(name: str) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.addmm(b, F.relu(x @ a), a)

        return checkpoint(inner, x, **CHECKPOINTS[name]).sin()

    check(function, leaf(3, 4), leaf(4, 4), leaf(4), backward=True, **CLOSE)


@IGNORE_TORCH
@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpointed_dropout_has_one_mask(reentrant: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)

    compiled = neuron(function)
    for _ in range(3):
        x = torch.rand(20, 20).add(1).requires_grad_()
        result = compiled(x)
        result.sum().backward()
        kept = result.detach() != 0
        equal(x.grad, torch.where(kept, 4 * x.detach(), 0.0), **CLOSE)
        assert 100 < kept.sum() < 300


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_compiled_code(reentrant: bool) -> None:
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = copy.deepcopy(eager)
    compiled = neuron(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        checkpoint(compiled, mine, use_reentrant=reentrant).sum().backward()
        checkpoint(eager, theirs, use_reentrant=reentrant).sum().backward()
        equal(mine.grad, theirs.grad, **CLOSE)
        equal_modules(model, eager, **CLOSE)


def test_a_checkpointed_sequence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    check(
        lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False),
        leaf(3, 4),
        backward=True,
        **CLOSE,
    )
