"""Operators of the user: in eager between partitions, or on the device by a lowering of theirs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

import neuron_compile
from neuron_compile import FallbackWarning

from .support import check, equal, neuron


@torch.library.custom_op("neuron_registered::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


@torch.library.custom_op("neuron_registered::softcap_backward", mutates_args=())
def softcap_backward(grad: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
    return grad * (1 - torch.tanh(x / cap) ** 2)


for _op in (softcap, softcap_backward):
    _op.register_fake(lambda x, *_: torch.empty_like(x))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.cap = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    return softcap_backward(grad, *ctx.saved_tensors, ctx.cap), None


softcap.register_autograd(_backward, setup_context=_setup)


@neuron_compile.register_lowering(softcap)
def _softcap(ctx: Any, x: Any, cap: float) -> Any:
    return cap * jnp.tanh(x / cap)


@neuron_compile.register_lowering(torch.ops.neuron_registered.softcap_backward)
def _softcap_backward(ctx: Any, grad: Any, x: Any, cap: float) -> Any:
    return grad * (1 - jnp.tanh(x / cap) ** 2)


def test_it_runs_on_the_device_with_gradients() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    check(lambda x, w: softcap(x @ w, 1.5).sin(), x, w, backward=True)
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0 and report.compilations == 2
    (answer,) = neuron_compile.support("neuron_registered::softcap".replace("::", "."))
    assert answer.where == "device"


def test_it_runs_in_a_branch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: softcap(x, 0.5), lambda x: x * 2, (x,))

    compiled = neuron(function, fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        equal(compiled(x), function(x))
    assert neuron_compile.report().operators_in_fallback == 0


def test_dynamic_sizes() -> None:
    compiled = neuron(lambda x: softcap(x, 2.0) + 1, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size)
        equal(compiled(x), softcap(x, 2.0) + 1)


@torch.library.custom_op("neuron_registered::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@neuron_compile.register_lowering(noise, random=True)
def _noise(ctx: Any, x: Any) -> Any:
    return jnp.broadcast_to(ctx.seed[0].astype(x.dtype), x.shape)


def test_a_random_operator_gets_a_seed() -> None:
    compiled = neuron(noise)
    torch.manual_seed(1)
    first, second = compiled(torch.ones(2)), compiled(torch.ones(2))
    torch.manual_seed(1)
    equal(compiled(torch.ones(2)), first)
    assert not torch.equal(first, second)


@torch.library.custom_op("neuron_registered::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@picky.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@neuron_compile.register_lowering(
    picky, refuse=lambda node: "too large" if node.meta["val"].numel() > 4 else None
)
def _picky(ctx: Any, x: Any) -> Any:
    return x + 1


def test_a_refusal_is_the_reason_of_the_fallback() -> None:
    compiled = neuron(lambda x: picky(x) * 2, dynamic=False)
    equal(compiled(torch.ones(4)), torch.full((4,), 4.0))
    with pytest.warns(FallbackWarning, match="too large"):
        equal(compiled(torch.ones(5)), torch.full((5,), 4.0))


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (torch.add, "is not an operator"),
        ("aten.add", "is not an operator"),
        (torch.ops.aten.add_.Tensor, "cannot make functional"),
        (softcap, "registered twice"),
    ],
    ids=["function", "name", "mutable", "twice"],
)
def test_what_cannot_be_registered(op: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        neuron_compile.register_lowering(op)(lambda ctx, x: x)
