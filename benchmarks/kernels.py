"""Small programs bound by one thing: dispatch, pointwise operators, reductions or attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architecture import (
    ALL_MODES,
    INFERENCE,
    TRAINING,
    Architecture,
    Inputs,
    generator,
    normal,
    ramp_square,
    seeded,
    tokens,
)
from benchmarks.models import MLP, llama_config

# ----------------------------------------------------------------------------------- dispatch


class Linear(nn.Module):
    """One linear layer: the least that a call of compiled code can do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Policy(nn.Module):
    """A policy network of the size that reinforcement learning uses for locomotion."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Decode(nn.Module):
    """Llama's step for one token over a ``StaticCache`` that holds a prompt.

    Each call writes the place behind the prompt again, so that a loop of any length repeats the
    same work.
    """

    def __init__(self, model: nn.Module, cache: Any, prompt: Tensor) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.position = prompt.shape[1]
        # The older name is deprecated, and the newer one unknown to earlier versions.
        known = inspect.signature(model.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"
        with torch.no_grad():
            model(input_ids=prompt, **{self.keyword: cache})

    def forward(self, input_ids: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.position)
        return self.model(input_ids=input_ids, **{self.keyword: self.cache}).logits


def _decode(hidden: int, layers: int, heads: int, vocabulary: int, prompt: int) -> nn.Module:
    from transformers import LlamaForCausalLM, StaticCache

    config = llama_config(hidden, layers, heads, vocabulary, 2 * prompt)
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=2 * prompt)
    return Decode(model, cache, torch.randint(vocabulary, (1, prompt)))


def dispatch(small: bool = False) -> list[Architecture]:
    """Programs of so little work that what surrounds it counts: microseconds a call in eager."""
    llama = (48, 2, 4, 100, 8) if small else (256, 4, 8, 1000, 128)
    return [
        Architecture(
            "linear64",
            seeded(lambda: Linear(64)),
            normal("x", 1, 64),
            ramp_square,
            (INFERENCE,),
        ),
        Architecture(
            "mlp64",
            seeded(lambda: MLP((64, 64, 64, 64))),
            normal("x", 1, 64),
            ramp_square,
            (INFERENCE,),
        ),
        Architecture("policy", seeded(Policy), normal("x", 1, 17), ramp_square, (INFERENCE,)),
        Architecture("policy_update", seeded(Policy), normal("x", 64, 17), ramp_square, ALL_MODES),
        Architecture(
            "llama_decode",
            seeded(lambda: _decode(*llama)),
            tokens(llama[3], input_ids=(1, 1)),
            ramp_square,
            (INFERENCE,),
        ),
    ]


# ---------------------------------------------------------------------------------- pointwise


class PointwiseChain(nn.Module):
    """Sixteen pointwise operators on one tensor, which eager reads and writes as many times."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(F.gelu(x) * 1.5)
        y = torch.where(x > 0, y, torch.exp(-(y * y)))
        y = (y * torch.sigmoid(y) + 0.5 * x).clamp(-3, 3)
        return y / (1 + y.abs())


class PointwiseBroadcasts(nn.Module):
    """Pointwise operators between a matrix, rows and columns; sums over both in the backward."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(0.1 * torch.randn(columns))
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(columns))
        self.shift = nn.Parameter(0.1 * torch.randn(rows, 1))
        self.gain = nn.Parameter(torch.randn(rows, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu((x - self.mean) * self.scale + self.shift)
        y = y * torch.rsqrt(1 + self.gain * self.gain)
        y = torch.where(y > 0, y, 0.1 * y)
        return y + x * self.scale + torch.tanh(self.gain)


def pointwise(small: bool = False) -> list[Architecture]:
    """Programs that fusion of pointwise operators makes faster."""
    rows, columns = (16, 32) if small else (1024, 1024)
    return [
        Architecture(
            "pointwise_chain",
            seeded(PointwiseChain),
            normal("x", 4 * rows, columns),
            ramp_square,
            (INFERENCE,),
        ),
        Architecture(
            "pointwise_broadcasts",
            seeded(lambda: PointwiseBroadcasts(rows, columns)),
            normal("x", rows, columns),
            ramp_square,
        ),
    ]


# --------------------------------------------------------------------------------- reductions


class Normalize(nn.Module):
    """Softmax and layer normalization over rows, then mean and variance over columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.softmax(-1) * x.shape[-1])
        return torch.stack((y.mean(0), y.var(0)))


class CrossEntropy(nn.Module):
    """Log-softmax and loss of biased logits: the loss of each row."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(0.1 * torch.randn(classes))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits + self.bias, target, reduction="none")


def _classification(rows: int, classes: int) -> Callable[[int], Inputs]:
    def inputs(seed: int) -> Inputs:
        drawn = generator(seed)
        return {
            "logits": torch.randn(rows, classes, generator=drawn),
            "target": torch.randint(classes, (rows,), generator=drawn),
        }

    return inputs


def _mean(output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return output.mean()


def reduction(small: bool = False) -> list[Architecture]:
    """Programs of reductions over rows and columns."""
    rows, width, classes = (16, 32, 50) if small else (4096, 1024, 8000)
    return [
        Architecture(
            "normalize", seeded(lambda: Normalize(width)), normal("x", rows, width), ramp_square
        ),
        Architecture(
            "cross_entropy",
            seeded(lambda: CrossEntropy(classes)),
            _classification(rows // 4, classes),
            _mean,
        ),
    ]


# ---------------------------------------------------------------------------------- attention


class AttentionBlock(nn.Module):
    """Causal attention after a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.projection(seen.transpose(1, 2).reshape(batch, length, width))


def attention(small: bool = False) -> list[Architecture]:
    """Attention over a sequence so long that its scores must not be kept in memory."""
    length, width, heads = (32, 32, 4) if small else (2048, 384, 6)
    return [
        Architecture(
            "attention_2048",
            seeded(lambda: AttentionBlock(width, heads)),
            normal("x", 1, length, width),
            ramp_square,
            (INFERENCE, TRAINING),
        )
    ]
