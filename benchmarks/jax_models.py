"""Three of the models written by hand for ``jax.jit``: what XLA itself makes of them.

Weights are those of the torch modules. A call takes JAX's arrays and waits for the result; nothing
is converted to or from torch while it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import Tensor, nn

from benchmarks.architecture import INFERENCE, TRAINING, Inputs
from benchmarks.programs import LEARNING_RATE, Observation, Program

Weights = dict[str, Any]
Function = Callable[..., Any]


def _to_jax(tensors: Mapping[str, Tensor]) -> Weights:
    """Copies: a training step gives its weights' memory away."""
    return {name: jnp.array(tensor.detach().numpy()) for name, tensor in tensors.items()}


def _to_torch(array: Array) -> Tensor:
    return torch.from_numpy(np.array(array))


# ------------------------------------------------------------------------------------- models


def mlp(weights: Weights, x: Array) -> Array:
    """``benchmarks.models.MLP``."""
    layers = len(weights) // 2
    for layer in range(layers):
        x = x @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]
        if layer < layers - 1:
            x = jax.nn.gelu(x, approximate=False)
    return x


def pointwise_chain(weights: Weights, x: Array) -> Array:
    """``benchmarks.kernels.PointwiseChain``."""
    y = jnp.tanh(jax.nn.gelu(x, approximate=False) * 1.5)
    y = jnp.where(x > 0, y, jnp.exp(-(y * y)))
    y = (y * jax.nn.sigmoid(y) + 0.5 * x).clip(-3, 3)
    return y / (1 + jnp.abs(y))


def _layer_norm(weights: Weights, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    scaled = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _conv1d(weights: Weights, name: str, x: Array) -> Array:
    """GPT-2's linear layer, whose weight stands the other way round."""
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gpt2(heads: int, weights: Weights, input_ids: Array) -> Array:
    """GPT-2 of transformers, without dropout: the logits."""
    prefix = "model.transformer"
    batch, length = input_ids.shape
    embedding = weights[f"{prefix}.wte.weight"]
    x = embedding[input_ids] + weights[f"{prefix}.wpe.weight"][:length]
    width = x.shape[-1]
    layer = 0
    while f"{prefix}.h.{layer}.ln_1.weight" in weights:
        block = f"{prefix}.h.{layer}"
        parts = _conv1d(weights, f"{block}.attn.c_attn", _layer_norm(weights, f"{block}.ln_1", x))
        query, key, value = jnp.moveaxis(
            parts.reshape(batch, length, 3, heads, width // heads), 2, 0
        )
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + _conv1d(weights, f"{block}.attn.c_proj", seen.reshape(batch, length, width))
        hidden = _conv1d(weights, f"{block}.mlp.c_fc", _layer_norm(weights, f"{block}.ln_2", x))
        hidden = jax.nn.gelu(hidden, approximate=True)
        x = x + _conv1d(weights, f"{block}.mlp.c_proj", hidden)
        layer += 1
    return _layer_norm(weights, f"{prefix}.ln_f", x) @ embedding.T


def _ramp_square(output: Array) -> Array:
    return (jnp.square(output) * jnp.linspace(0, 1, output.shape[-1])).mean()


# ------------------------------------------------------------------------------------ programs


@dataclass
class Inference:
    """A jitted function with its weights and inputs."""

    function: Function
    weights: Weights
    inputs: Weights

    def run(self, calls: int) -> Array:
        """The output of the last call."""
        for _ in range(calls):
            output = self.function(self.weights, **self.inputs).block_until_ready()
        return output

    def observe(self, output: Array) -> Observation:
        """The output alone."""
        return Observation({"output": {"output": _to_torch(output)}})


class Training:
    """Forward, loss, backward and SGD in one jitted function, which updates weights in place."""

    def __init__(self, model: Function, module: nn.Module, inputs: Weights) -> None:
        def loss(weights: Weights, inputs: Weights) -> tuple[Array, Array]:
            output = model(weights, **inputs)
            return _ramp_square(output), output

        def step(weights: Weights, inputs: Weights) -> tuple[Weights, Array]:
            gradients, output = jax.grad(loss, has_aux=True)(weights, inputs)
            update = partial(jax.tree.map, lambda weight, grad: weight - LEARNING_RATE * grad)
            return update(weights, gradients), output

        self.step = jax.jit(step, donate_argnums=0)
        self.gradients = jax.jit(jax.grad(loss, has_aux=True))
        self.module, self.inputs = module, inputs
        self.weights = _to_jax(dict(module.named_parameters()))

    def run(self, calls: int) -> Array:
        """The output of the last step."""
        for _ in range(calls):
            self.weights, output = self.step(self.weights, self.inputs)
            jax.block_until_ready(self.weights)
        return output

    def observe(self, output: Array) -> Observation:
        """The output, and the gradients of the module's weights, which no step has changed."""
        gradients, _ = self.gradients(_to_jax(dict(self.module.named_parameters())), self.inputs)
        return Observation(
            {
                "output": {"output": _to_torch(output)},
                "gradients": {name: _to_torch(array) for name, array in gradients.items()},
            }
        )


def _mlp(module: nn.Module) -> Function:
    return mlp


def _chain(module: nn.Module) -> Function:
    return pointwise_chain


def _gpt2(module: Any) -> Function:
    return partial(gpt2, module.model.config.n_head)


PROGRAMS: dict[tuple[str, str], Callable[[nn.Module], Function]] = {
    ("mlp", INFERENCE): _mlp,
    ("mlp", TRAINING): _mlp,
    ("mlp64", INFERENCE): _mlp,
    ("gpt2", INFERENCE): _gpt2,
    ("pointwise_chain", INFERENCE): _chain,
}


def program(name: str, mode: str, module: nn.Module, inputs: Inputs) -> Program:
    """The program of a name and mode in ``PROGRAMS``."""
    model = PROGRAMS[name, mode](module)
    arguments = _to_jax(inputs)
    if mode == TRAINING:
        return Training(model, module, arguments)
    weights = _to_jax(dict(module.named_parameters()))
    return Inference(jax.jit(model), weights, arguments)
