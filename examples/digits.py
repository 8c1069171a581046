"""Job two: a small CNN trained on scikit-learn's handwritten digits, eager against compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.common import (
    COMPILED,
    EAGER,
    Check,
    JobResult,
    OperatorMeter,
    Timing,
    milliseconds,
    timed,
)
from examples.plots import plot_losses

SEED = 0
EPOCHS = 15
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
ACCURACY_NEEDED = 0.97


class DigitsNet(nn.Module):
    """Three convolutions with batch normalization, then a dropout classifier."""

    def __init__(self) -> None:
        """Draw fresh weights from torch's global generator."""
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, 16),
            *_convolution(16, 32),
            nn.MaxPool2d(2),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.3),
            nn.Linear(64 * 2 * 2, 64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return ten logits for each image of shape (1, 8, 8)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


@dataclass
class Trainer:
    """A model with its optimizer; `network` is what is called, `model` owns the weights."""

    model: DigitsNet
    network: Callable[[Tensor], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the optimizer over the model's own parameters."""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Run one whole training step; record its loss and how long it took."""
        loss, seconds = timed(partial(self._step, images, labels))
        self.losses.append(loss)
        self.seconds.append(seconds)

    def _step(self, images: Tensor, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.network(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        """Return the share of `images` recognized in evaluation mode."""
        self.model.eval()
        found = torch.cat([self.network(batch)[:rows].argmax(1) for batch, rows in full(images)])
        self.model.train()
        return (found == labels).double().mean().item()


def full(images: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield batches of one shape, the last padded with zeros, and how many rows are real."""
    for batch in images.split(BATCH_SIZE):
        missing = BATCH_SIZE - len(batch)
        yield F.pad(batch, (0, 0, 0, 0, 0, 0, 0, missing)), len(batch)


def run(backend: str, output: Path, progress: Progress, meter: OperatorMeter) -> JobResult:
    """Train two copies of one network on the same batches; draw their losses."""
    train, test_images, test_labels = load_data()
    trainers = make_trainers(backend)
    train_interleaved(trainers, train, progress)
    accuracies = {
        name: trainer.accuracy(test_images, test_labels) for name, trainer in trainers.items()
    }
    plot_losses(
        {name: trainer.losses for name, trainer in trainers.items()},
        accuracies,
        backend,
        output / "digits_loss.png",
    )
    timings = {name: timing(trainer) for name, trainer in trainers.items()}
    return JobResult(
        name="Digits CNN (training)",
        call=f"training step, {BATCH_SIZE} images",
        eager=timings[EAGER],
        compiled=timings[COMPILED],
        operators=meter.take(),
        checks=[
            Check(
                accuracy >= ACCURACY_NEEDED,
                f"{name}: {accuracy:.2%} of {len(test_labels)} test digits recognized"
                f" (>= {ACCURACY_NEEDED:.0%})",
            )
            for name, accuracy in accuracies.items()
        ],
    )


def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training set, and the test set's images and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=0.25, random_state=SEED, stratify=labels
    )
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def make_trainers(backend: str) -> dict[str, Trainer]:
    """Return an eager and a compiled trainer that start from the same weights."""
    torch.manual_seed(SEED)
    eager = DigitsNet()
    compiled = copy.deepcopy(eager)
    return {
        EAGER: Trainer(eager, eager),
        COMPILED: Trainer(compiled, torch.compile(compiled, backend=backend)),
    }


def train_interleaved(
    trainers: dict[str, Trainer], data: TensorDataset, progress: Progress
) -> None:
    """Give every batch to each trainer in turn.

    Their step times can then be compared: whatever else the machine did, it did to both.
    """
    generator = torch.Generator().manual_seed(SEED)
    # Without the last, smaller batch every step has the same shape.
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True, generator=generator)
    task = progress.add_task("Digits, eager and compiled in turn", total=EPOCHS * len(loader))
    for _ in range(EPOCHS):
        for images, labels in loader:
            number = len(trainers[EAGER].losses)
            for trainer in trainers.values():
                # The same dropout masks for both, where the backend follows torch's generator.
                torch.manual_seed(number)
                trainer.step(images, labels)
            progress.advance(task)


def timing(trainer: Trainer) -> Timing:
    """Return the time of the first step, and the median of the others."""
    return Timing(trainer.seconds[0], milliseconds(trainer.seconds[1:]))
