"""``python -m benchmarks.warm_start``: the first call in a fresh process, by what caches hold.

Each figure is of processes of its own: ``cold`` with empty caches, ``warm`` with those that a cold
one left. ``dynamo`` is the first call with the backend ``eager``, which every backend pays:
Dynamo's tracing, and imports. ``precompiled`` is this backend with PyTorch's experimental
``torch._dynamo.config.caching_precompile``: a warm process loads a bundle of artifacts instead of
tracing, and ``warm_s`` counts that too. Backends take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "warm_start.json"
MODELS = ("bert", "resnet18")
MODES = ("inference", "training")
PRECOMPILED = "precompiled"
BACKENDS = ("eager", "neuron", PRECOMPILED, "inductor")
COLUMNS = (
    *("model", "mode", "backend", "cold_s", "warm_s", "call_s", "steady_s", "compilations"),
    "load_s",
)


def first_calls(name: str, mode: str, backend: str, bundle: Path) -> Mapping[str, Any]:
    """Seconds until the end of the first call, of that call, and of later ones, in this process."""
    import torch
    import torch._dynamo.config

    from benchmarks.models import architectures

    architecture = architectures()[name]
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


def in_process(name: str, mode: str, backend: str, folder: str) -> Mapping[str, Any]:
    """The same in a process of its own, with its caches in ``folder``."""
    command = [sys.executable, "-m", "benchmarks.warm_start", "--one", name, mode, backend, folder]
    caches = {
        "NEURON_COMPILE_CACHE_DIR": f"{folder}/neff",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
    }
    done = subprocess.run(
        command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for each model, mode and backend."""
    rows = []
    for name in MODELS:
        for mode in MODES:
            cold: dict[str, list[Mapping[str, Any]]] = {backend: [] for backend in BACKENDS}
            warm: dict[str, list[Mapping[str, Any]]] = {backend: [] for backend in BACKENDS}
            for _ in range(rounds):
                for backend in BACKENDS:
                    with tempfile.TemporaryDirectory() as folder:
                        for kept in (cold, warm):
                            kept[backend].append(in_process(name, mode, backend, folder))
            for backend in BACKENDS:
                row = {
                    "model": name,
                    "mode": mode,
                    "backend": backend,
                    "cold_s": _median(cold[backend], "ready"),
                    "warm_s": _median(warm[backend], "ready"),
                    "warm_samples_s": [round(x["ready"], 3) for x in warm[backend]],
                    "call_s": _median(warm[backend], "first"),
                    "steady_s": _median(warm[backend], "steady"),
                    "compilations": warm[backend][0].get("compilations", ""),
                    "load_s": _median(warm[backend], "load") if "load" in warm[backend][0] else "",
                }
                rows.append(row)
                print("  ".join(f"{row[name]!s:>10}" for name in COLUMNS), flush=True)
    return rows


def _median(found: list[Mapping[str, Any]], name: str) -> float:
    return round(statistics.median(item[name] for item in found), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "MODE", "BACKEND", "DIR"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.one:
        name, mode, backend, folder = options.one
        print(json.dumps(first_calls(name, mode, backend, Path(folder) / "bundle")))
        return
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    RESULTS.write_text(json.dumps(measure(options.rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
