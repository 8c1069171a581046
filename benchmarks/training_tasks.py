"""What the training study trains: a CNN on handwritten digits, a small GPT on Python's manual."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.digits import DigitsNet, load_data

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model with its data. ``make`` takes the probability of dropout and whether activations
    are checkpointed; ``batches`` yields batches for ever, in an order that a seed gives."""

    name: str
    make: Callable[[float, bool], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    dropout: float
    learning_rate: float


class CheckpointedDigits(DigitsNet):
    """The demonstration's CNN; its convolutions can be computed again in the backward."""

    def __init__(self, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout

    def forward(self, images: Tensor) -> Tensor:
        """Ten logits for each image of shape (1, 8, 8)."""
        found = _maybe_checkpointed(self.features, images, self.checkpointed)
        logits: Tensor = self.classifier(found)
        return logits


class Block(nn.Module):
    """Causal attention and a perceptron, each after a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, length, width) to the same."""
        batch, length, width = x.shape
        parts = self.query_key_value(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        seen = self.projection(seen.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(seen, self.dropout, self.training)
        return x + F.dropout(self.perceptron(self.norms[1](x)), self.dropout, self.training)


class GPT(nn.Module):
    """A small GPT over characters."""

    def __init__(
        self,
        dropout: float,
        checkpointed: bool,
        characters: int,
        context: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, characters, length) of the character after each one."""
        x = self.characters(text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = _maybe_checkpointed(block, x, self.checkpointed)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


def _maybe_checkpointed(module: nn.Module, x: Tensor, checkpointed: bool) -> Tensor:
    result: Tensor = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
    return result


def _digits_batches(seed: int, size: int = 64) -> Iterator[Batch]:
    images, labels = load_data()[0].tensors
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(labels), generator=generator).split(size):
            if len(rows) == size:
                yield images[rows], labels[rows]


@functools.cache
def _text() -> tuple[Tensor, int]:
    """The manual's topics as numbers of characters, and how many there are."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    known = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def _text_batches(seed: int, size: int = 16, context: int = 64) -> Iterator[Batch]:
    text, _ = _text()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (size,), generator=generator)
        rows = starts[:, None] + torch.arange(context + 1)
        yield text[rows[:, :-1]], text[rows[:, 1:]]


TASKS = (
    Task("digits CNN", CheckpointedDigits, _digits_batches, 0.3, 2e-3),
    Task(
        "small GPT",
        lambda dropout, checkpointed: GPT(dropout, checkpointed, _text()[1]),
        _text_batches,
        0.1,
        2e-3,
    ),
)
