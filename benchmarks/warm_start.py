"""``python -m benchmarks.warm_start``: the first call in a fresh process, by what caches hold.

Each figure is of processes of its own: ``cold`` with empty caches, ``warm`` with those that a cold
one left. ``eager`` is the first call with the backend of that name, which every backend pays:
Dynamo's tracing, and imports; it has no caches. ``precompiled`` (not by default) is this backend
with PyTorch's experimental ``torch._dynamo.config.caching_precompile``: a warm process loads a
bundle of artifacts instead of tracing, and ``warm_s`` counts that too. Backends take turns, and so
do rounds; a summary has medians over the rounds.

By default: all eight models in inference, and four of them in training, in 8 minutes a round.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import study
from benchmarks.study import Row

MODULE = "benchmarks.warm_start"
MODELS = ("mlp", "resnet18", "convnext", "bert", "gpt2", "llama", "vit", "t5")
TRAINED = ("mlp", "resnet18", "bert", "gpt2")
MODES = ("inference", "training")
PRECOMPILED = "precompiled"
EAGER = "eager"
BACKENDS = (EAGER, "neuron", "inductor")
FIGURES = ("cold_s", "warm_s", "call_s", "steady_s", "load_s")


def first_calls(name: str, mode: str, backend: str, bundle: Path, small: bool) -> Row:
    """Seconds until the end of the first call, of that call, and of later ones, in this process."""
    import torch
    import torch._dynamo.config

    from benchmarks.models import architectures

    architecture = architectures(small)[name]
    module, inputs = architecture.build(0), architecture.inputs(0)
    module.train(mode == "training")
    started = time.perf_counter()
    if backend == PRECOMPILED:
        torch._dynamo.config.caching_precompile = True
        if bundle.exists():
            torch.compiler.load_cache_artifacts(bundle.read_bytes())
    run = torch.compile(module, backend="neuron" if backend == PRECOMPILED else backend)

    def call() -> float:
        started = time.perf_counter()
        if mode == "inference":
            with torch.no_grad():
                run(**inputs)
        else:
            architecture.loss(run(**inputs), inputs).backward()
        return time.perf_counter() - started

    first = call()
    ready = time.perf_counter() - started
    found = {"ready": ready, "first": first, "steady": statistics.median(call() for _ in range(7))}
    if backend in ("neuron", PRECOMPILED):
        import neuron_compile

        report = neuron_compile.report()
        phases = [graph.seconds for graph in report.graphs]
        found["compilations"] = report.compilations
        found["load"] = sum(p.get("read", 0) + p.get("load", 0) for p in phases)
    if backend == PRECOMPILED and not bundle.exists():
        saved = torch.compiler.save_cache_artifacts()
        bundle.write_bytes(saved[0] if saved else b"")
    return found


def measure(key: Mapping[str, Any], small: bool) -> Row:
    """A cold process and, where there are caches, a warm one."""
    case = (key["model"], key["mode"], key["backend"])
    with tempfile.TemporaryDirectory() as folder:
        command = (*case, folder, study.size(small))
        cold = study.in_process(MODULE, command, folder)
        warm = cold if key["backend"] == EAGER else study.in_process(MODULE, command, folder)
    row = {
        "cold_s": cold["ready"],
        "warm_s": warm["ready"],
        "call_s": warm["first"],
        "steady_s": warm["steady"],
    }
    if "load" in warm:
        row["load_s"] = warm["load"]
    found = {name: round(value, 4) for name, value in row.items()}
    if "compilations" in warm:
        found["compilations"] = warm["compilations"]
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each model, mode and backend: medians over the rounds, and how many there were."""
    keys = dict.fromkeys((row["model"], row["mode"], row["backend"]) for row in rows)
    found = []
    for model, mode, backend in keys:
        mine = [
            row
            for row in rows
            if (row["model"], row["mode"], row["backend"]) == (model, mode, backend)
            and "cold_s" in row
        ]
        if mine:
            medians = {
                name: statistics.median(row[name] for row in mine)
                for name in FIGURES
                if name in mine[0]
            }
            key = {"model": model, "mode": mode, "backend": backend, "rounds": len(mine)}
            found.append({**key, **medians, "compilations": mine[0].get("compilations")})
    return found


def ratios(rows: Sequence[Row], mode: str, figure: str, base: str = "inductor") -> list[float]:
    """This backend's seconds over those of another one, for each model that has both."""
    seconds = {
        (row["model"], row["backend"]): row[figure] for row in summary(rows) if row["mode"] == mode
    }
    return [
        value / seconds[model, base]
        for (model, backend), value in seconds.items()
        if backend == "neuron" and (model, base) in seconds
    ]


def cases(
    models: Sequence[str] | None, modes: Sequence[str], backends: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """What is measured, round by round, backends in turn."""
    return [
        {"round": number, "model": model, "mode": mode, "backend": backend}
        for number in range(1, rounds + 1)
        for mode in modes
        for model in models or (MODELS if mode == "inference" else TRAINED)
        for backend in backends
    ]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = study.parser(MODULE, __doc__, "warm_start.json")
    parser.add_argument("--models", type=study.names, help=f"of {','.join(MODELS)}")
    parser.add_argument("--modes", type=study.names, default=list(MODES))
    parser.add_argument("--backends", type=study.names, default=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.one:
        name, mode, backend, folder, size = options.one
        found = first_calls(name, mode, backend, Path(folder) / "bundle", size == "small")
        print(json.dumps(found))
        return 0
    kept = study.Study(options.results, {"small": options.small}, options.resume)
    kept.run(
        cases(options.models, options.modes, options.backends, options.rounds),
        lambda key: measure(key, options.small),
    )
    for mode in options.modes:
        for figure in ("cold_s", "warm_s"):
            shares = ratios(kept.rows, mode, figure)
            if shares:
                print(
                    f"{mode}, {figure}: {statistics.geometric_mean(shares):.2f} of Inductor's, "
                    f"geometric mean over {len(shares)} models, {max(shares):.2f} at most"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
