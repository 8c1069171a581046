"""``python -m benchmarks.peak_memory``: resident memory of training and inference, by backend.

Each case has a process of its own. After three warm-up steps, a garbage collection and
``malloc_trim``, what is resident is the steady size; then the kernel's peak is reset, and after
three more steps read again. All in MiB. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import study
from benchmarks.study import Row

MODULE = "benchmarks.peak_memory"
MODELS = ("bert", "gpt2", "resnet18", "vit")
MODES = ("training", "inference")
BACKENDS = ("eager", "inductor", "neuron")
_STEPS = 3


def status_mib(name: str) -> float:
    """A size of this process's, ``VmRSS`` or ``VmHWM``, in MiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found[1]) / 1024


def reset_peak() -> None:
    """Makes the peak that the kernel keeps for this process what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Gives back what is free: to the allocator by the garbage collector, to the system by it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def one(name: str, mode: str, backend: str, small: bool) -> Row:
    """The sizes of one case, in this process."""
    import torch

    from benchmarks.harness import INPUT_SEED, WEIGHT_SEED
    from benchmarks.programs import program
    from benchmarks.suites import suites

    architecture = suites(small)["models"][name]
    imported = status_mib("VmRSS")
    module, inputs = architecture.build(WEIGHT_SEED), architecture.inputs(INPUT_SEED)
    parameters = sum(each.numel() * each.element_size() for each in module.parameters())
    made = program(backend, architecture, mode, module, inputs)
    made.run(_STEPS)
    if backend != "eager" and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0:
        raise RuntimeError(f"{backend} compiled nothing of {name}")
    trim()
    steady = status_mib("VmRSS")
    reset_peak()
    made.run(_STEPS)
    peak = status_mib("VmHWM")
    sizes = {
        "parameters_mib": parameters / 2**20,
        "imported_mib": imported,
        "steady_mib": steady,
        "peak_mib": peak,
        "above_steady_mib": peak - steady,
    }
    return {key: round(value, 1) for key, value in sizes.items()}


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = study.parser(MODULE, __doc__, "peak_memory.json")
    parser.add_argument("--models", type=study.names, default=list(MODELS))
    parser.add_argument("--modes", type=study.names, default=list(MODES))
    parser.add_argument("--backends", type=study.names, default=list(BACKENDS))
    options = parser.parse_args()
    # Dynamo tells on each first call that its profile is not used, as wanted.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    if options.one:
        name, mode, backend, size = options.one
        print(json.dumps(one(name, mode, backend, size == "small")))
        return 0

    def measure(key: Mapping[str, Any]) -> Row:
        case = [key["model"], key["mode"], key["backend"], study.size(options.small)]
        return study.in_fresh_process(MODULE, case)

    keys = [
        {"model": model, "mode": mode, "backend": backend}
        for model in options.models
        for mode in options.modes
        for backend in options.backends
    ]
    study.Study(options.results, {"small": options.small}, options.resume).run(keys, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
