"""``python -m benchmarks.depth``: how the first call's seconds grow with the number of layers.

A narrow GPT-2 of 2 to 48 layers, for inference and for a training step, each in a process of its
own with empty caches. A trivial model is compiled first, so that one-time costs do not count.
Inductor takes part up to 8 layers by default, since it takes a minute or two beyond.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import study
from benchmarks.study import Row

MODULE = "benchmarks.depth"
LAYERS = (2, 4, 8, 16, 24, 48)
INDUCTOR_UP_TO = 8
MODES = ("inference", "training")
BACKENDS = ("neuron", "inductor")
_STEADY_CALLS = 7


@dataclass(frozen=True)
class Line:
    """A least-squares line through seconds over layers.

    ``deviation`` is the largest distance of a point from the line, over the line's value there.
    """

    slope: float
    intercept: float
    r_squared: float
    deviation: float


def fit(layers: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through three or more points."""
    x, y = np.array(layers, float), np.array(seconds, float)
    slope, intercept = np.polyfit(x, y, 1)
    line = slope * x + intercept
    total = float(((y - y.mean()) ** 2).sum())
    r_squared = 1.0 - float(((y - line) ** 2).sum()) / total if total else 1.0
    return Line(
        float(slope), float(intercept), r_squared, float(np.max(np.abs(y - line) / np.abs(line)))
    )


def lines(rows: Sequence[Row]) -> dict[tuple[str, str], Line]:
    """A line for each mode and backend with three depths or more."""
    found = {}
    for mode in MODES:
        for backend in dict.fromkeys(row["backend"] for row in rows):
            points = [
                (row["layers"], row["first_call_s"])
                for row in rows
                if (row["mode"], row["backend"]) == (mode, backend) and "first_call_s" in row
            ]
            if len(points) >= 3:
                layers, seconds = zip(*points, strict=True)
                found[mode, backend] = fit(layers, seconds)
    return found


def one(layers: int, mode: str, backend: str, small: bool) -> Row:
    """Seconds of the first call in this process, by phase for neuron, and of later calls."""
    import torch

    from benchmarks.architecture import INFERENCE, next_token, seeded, tokens
    from benchmarks.models import gpt2

    vocabulary = 100 if small else 1000
    width, length = (32, 12) if small else (128, 64)
    module = seeded(lambda: gpt2(width, layers, 4, vocabulary))(0).train(mode != INFERENCE)
    inputs = tokens(vocabulary, input_ids=(2, length))(0)
    loss = next_token("input_ids")
    # No warm-up by harness.warm_up: it would keep its caches aside, and those here are fresh.
    warm = torch.nn.Linear(64, 64)
    torch.compile(warm, backend=backend)(torch.ones(64, 64)).relu().sum().backward()
    torch._dynamo.reset()

    run = torch.compile(module, backend=backend)

    def call() -> float:
        started = time.perf_counter()
        if mode == INFERENCE:
            with torch.no_grad():
                run(**inputs)
        else:
            loss(run(**inputs), inputs).backward()
        return time.perf_counter() - started

    if backend == "neuron":
        import neuron_compile

        neuron_compile.reset_report()
    found: Row = {"first_call_s": round(call(), 4)}
    found["call_s"] = round(statistics.median(call() for _ in range(_STEADY_CALLS)), 6)
    if backend == "neuron":
        report = neuron_compile.report()
        phases: dict[str, float] = {}
        for graph in report.graphs:
            for phase, seconds in graph.seconds.items():
                phases[phase] = round(phases.get(phase, 0.0) + seconds, 4)
        found["phases_s"] = phases
        found["operators_in_fallback"] = report.operators_in_fallback
    return found


def keys(
    layers: Sequence[int], modes: Sequence[str], backends: Sequence[str], inductor_up_to: int
) -> list[dict[str, Any]]:
    """The cases, shallow ones first, backends in turn."""
    return [
        {"mode": mode, "backend": backend, "layers": depth}
        for depth in layers
        for mode in modes
        for backend in backends
        if backend == "neuron" or depth <= inductor_up_to
    ]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = study.parser(MODULE, __doc__, "depth.json")
    parser.add_argument("--layers", type=study.names, default=[str(each) for each in LAYERS])
    parser.add_argument("--modes", type=study.names, default=list(MODES))
    parser.add_argument("--backends", type=study.names, default=list(BACKENDS))
    parser.add_argument("--inductor-up-to", type=int, default=INDUCTOR_UP_TO, metavar="LAYERS")
    options = parser.parse_args()
    # Dynamo tells on each first call that its profile is not used, as wanted.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    if options.one:
        layers, mode, backend, size = options.one
        print(json.dumps(one(int(layers), mode, backend, size == "small")))
        return 0

    def measure(key: Mapping[str, Any]) -> Row:
        case = [str(key["layers"]), key["mode"], key["backend"], study.size(options.small)]
        return study.in_fresh_process(MODULE, case)

    found = study.Study(options.results, {"small": options.small}, options.resume)
    layers = [int(each) for each in options.layers]
    found.run(keys(layers, options.modes, options.backends, options.inductor_up_to), measure)
    for (mode, backend), line in lines(found.rows).items():
        print(
            f"{mode}, {backend}: {line.slope:.3f} s a layer, {line.intercept:+.2f} s, "
            f"R² {line.r_squared:.4f}, at most {100 * line.deviation:.0f} % off the line"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
