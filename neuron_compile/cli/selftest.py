"""The self-test of ``doctor``: ``python -m neuron_compile.cli.selftest``, in a process of its own.

A crash of native code ends this process, not the doctor's, which reads one line of JSON from it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import time
from typing import Any

#: float32, for sums over at most 64 elements near one.
TOLERANCE = 1e-4


def run() -> dict[str, Any]:
    """Compile and train a model of three layers, and compare with eager PyTorch.

    Returns:
        ``difference``: the largest of results, gradients and the next results after a step of
        SGD; ``compilations`` and ``in_fallback`` of the report; ``platforms``; ``seconds``.
    """
    import torch

    import neuron_compile
    from neuron_compile.runtime import platform_errors, platforms

    torch.manual_seed(0)
    eager = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4)
    )
    subject = copy.deepcopy(eager)
    started = time.perf_counter()
    compiled: Any = torch.compile(subject, backend="neuron")
    difference = 0.0
    for _ in range(2):
        x, wanted = torch.randn(8, 16), torch.randn(8, 4)
        results = []
        for model in (eager, compiled):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            output = model(x)
            torch.nn.functional.mse_loss(output, wanted).backward()
            gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
            results.append([output.detach(), *gradients])
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(*results, strict=True)
        difference = max(difference, *((a - b).abs().max().item() for a, b in pairs))
    report = neuron_compile.report()
    return {
        "difference": difference,
        "compilations": report.compilations,
        "in_fallback": report.operators_in_fallback,
        "fallback_reasons": dict(report.fallback_reasons),
        "platforms": platforms(),
        "platform_errors": platform_errors(),
        "seconds": time.perf_counter() - started,
        "torch": importlib.metadata.version("torch"),
    }


if __name__ == "__main__":
    print(json.dumps(run()))
