"""What a benchmarked model is, and the inputs and losses that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Tensor]

INFERENCE = "inference"
TRAINING = "training"
ADAMW = "adamw"
ALL_MODES = (INFERENCE, TRAINING, ADAMW)


@dataclass(frozen=True)
class Architecture:
    """One benchmarked model.

    ``build(seed)`` returns a fresh module in training mode, ``inputs(seed)`` its keyword
    arguments, and ``loss(output, inputs)`` the scalar that a training step minimises. Equal
    seeds give equal tensors, and the global random state is left untouched.

    ``modes`` are the ways in which it is measured: ``inference``, ``training`` (forward, loss,
    backward and SGD in eager PyTorch) and ``adamw`` (the same with AdamW, whose step is compiled
    too). ``autocast`` runs forward and loss under ``torch.autocast("cpu", torch.bfloat16)``.
    """

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[int], Inputs]
    loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    modes: tuple[str, ...] = (INFERENCE, TRAINING)
    autocast: bool = False


# ------------------------------------------------------------------------------------- losses


def ramp_square(output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The mean square of the output, weighted from 0 to 1 along its last dimension.

    Without weights it would be constant on a layer-normalised output, and all gradients noise.
    """
    weights = torch.linspace(0, 1, output.shape[-1], device=output.device)
    return (output.square() * weights).mean()


def next_token(key: str) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """Cross entropy of (batch, length, vocabulary) logits with the next token of inputs[key]."""

    def loss(output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), inputs[key][:, 1:].flatten())

    return loss


# ------------------------------------------------------------------------------------- inputs


def generator(seed: int) -> torch.Generator:
    """A random generator of its own, so that the global one stays as it is."""
    return torch.Generator().manual_seed(seed)


def normal(key: str, *shape: int) -> Callable[[int], Inputs]:
    """Standard normal values of the given shape under one key."""
    return lambda seed: {key: torch.randn(*shape, generator=generator(seed))}


def tokens(vocabulary: int, **shapes: tuple[int, int]) -> Callable[[int], Inputs]:
    """Uniformly drawn int64 token numbers, one (batch, length) tensor for each keyword."""

    def inputs(seed: int) -> Inputs:
        drawn = generator(seed)
        return {
            key: torch.randint(vocabulary, shape, generator=drawn) for key, shape in shapes.items()
        }

    return inputs


def padded_tokens(vocabulary: int, batch: int, length: int) -> Callable[[int], Inputs]:
    """Token numbers with an attention mask that hides padding at the ends of later rows."""
    draw = tokens(vocabulary, input_ids=(batch, length))

    def inputs(seed: int) -> Inputs:
        lengths = length - torch.arange(batch) * (length // (2 * batch))
        mask = (torch.arange(length) < lengths[:, None]).long()
        return {**draw(seed), "attention_mask": mask}

    return inputs


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """``build`` with torch's global random state set to a seed, and restored afterwards."""

    def build_seeded(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build().train()

    return build_seeded
