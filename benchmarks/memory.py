"""Resident memory over many steps: ``python -m benchmarks.memory training 2000 neuron``.

The last line printed is JSON: samples of MiB, and by how much they leave that of step 200.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.training_tasks import TASKS, CheckpointedDigits

SETTLED = 200
EVERY = 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 2**20


def training(backend: str) -> Iterator[None]:
    """Training steps of the digits CNN, with dropout; AdamW's step is compiled, too."""
    task = TASKS[0]
    model = task.make(task.dropout, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    call = torch.compile(model, backend=backend)
    update = torch.compile(optimizer.step, backend=backend)
    for images, labels in task.batches(0):
        optimizer.zero_grad()
        F.cross_entropy(call(images), labels).backward()
        update()
        yield


def inference(backend: str) -> Iterator[None]:
    """The digits CNN on batches of changing sizes, 1 to 32."""
    model = CheckpointedDigits(0.0, False).eval()
    call = torch.compile(model, backend=backend, dynamic=True)
    step = 0
    while True:
        with torch.no_grad():
            call(torch.randn(1 + 7 * step % 32, 1, 8, 8))
        step += 1
        yield


LOOPS: dict[str, Callable[[str], Iterator[None]]] = {"training": training, "inference": inference}


def measure(loop: str, steps: int, backend: str, settled: int = SETTLED) -> dict[str, Any]:
    """Run a loop and sample its memory."""
    torch.manual_seed(0)
    turns = LOOPS[loop](backend)
    samples = []
    for step in range(1, steps + 1):
        next(turns)
        if step % EVERY == 0:
            samples.append((step, resident()))
    after = [size for step, size in samples if step >= settled]
    return {
        "loop": loop,
        "backend": backend,
        "steps": steps,
        "settled": after[0],
        "last": after[-1],
        "change": max(abs(size - after[0]) for size in after) / after[0],
        "samples": samples,
    }


def main() -> int:
    """Runs the command line; returns the exit status."""
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    loop, steps, backend = sys.argv[1:]
    print(json.dumps(measure(loop, int(steps), backend)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
