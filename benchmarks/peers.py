"""``python -m benchmarks.peers BACKEND``: a peer that needs an environment of its own.

Measures eager and the peer in turns, as the suite does, and prints the same rows: JSON lines, then
a Markdown table; ``--output`` keeps them in a file that ``benchmarks.report`` takes in. It needs
torch, numpy and the peer, and transformers only for the models that are made of it. Run it in the
repository's root, in the peer's environment:

- ``openxla``: ``torch_xla`` with its torch (2.9), on ``PJRT_DEVICE=CPU``
- ``torchax``: with a torch that it knows (0.0.13 does not import with 2.13) and jax; inference
- any backend of ``torch.compile``, to compare environments: ``inductor``, ``neuron``

Times across environments compare only as speed-ups over the eager of the same run: its versions of
torch are others.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks import harness, tables
from benchmarks.architecture import ALL_MODES, INFERENCE, Architecture, Inputs
from benchmarks.machine import machine
from benchmarks.programs import (
    BACKEND_MODES,
    EAGER,
    FACTORIES,
    Observation,
    supports,
    torch_program,
    warm_up,
)
from benchmarks.record import Results, Settings
from benchmarks.study import names
from benchmarks.suites import NEED_TRANSFORMERS, SUITES, suites


class OpenXla:
    """A module on torch_xla's device, compiled with its backend ``openxla``."""

    def __init__(
        self, architecture: Architecture, mode: str, module: nn.Module, inputs: Inputs
    ) -> None:
        self.torch_xla: Any = importlib.import_module("torch_xla")
        device = self.torch_xla.device()
        there = {name: tensor.to(device) for name, tensor in inputs.items()}
        self.program = torch_program("openxla", architecture, mode, module.to(device), there)

    def run(self, calls: int) -> Tensor:
        """The output of the last call; each is waited for."""
        for _ in range(calls):
            output = self.program.run(1)
            self.torch_xla.sync(wait=True)
        return output

    def observe(self, output: Tensor) -> Observation:
        """As in eager, with all tensors on the CPU."""
        found = self.program.observe(output).tensors
        return Observation(
            {
                kind: {name: tensor.cpu() for name, tensor in tensors.items()}
                for kind, tensors in found.items()
            }
        )


class Torchax:
    """A module as torchax makes a JAX function of it, jitted; weights are arguments."""

    def __init__(
        self, architecture: Architecture, mode: str, module: nn.Module, inputs: Inputs
    ) -> None:
        self.torchax: Any = importlib.import_module("torchax")
        jax: Any = importlib.import_module("jax")
        self.states, function = self.torchax.extract_jax(module.eval())
        self.function = jax.jit(function)
        self.inputs = self.torchax.default_env().t2j_copy(inputs)

    def run(self, calls: int) -> Any:
        """The output of the last call; each is waited for."""
        for _ in range(calls):
            output = self.function(self.states, (), self.inputs).block_until_ready()
        return output

    def observe(self, output: Any) -> Observation:
        """The output alone."""
        return Observation({"output": {"output": self.torchax.default_env().j2t_copy(output)}})


FACTORIES.update(openxla=OpenXla, torchax=Torchax)
BACKEND_MODES["torchax"] = (INFERENCE,)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("backends", nargs="+", help="openxla, torchax, or torch.compile's")
    parser.add_argument("--suites", type=names, default=list(SUITES))
    parser.add_argument("--models", type=names, help="all of the suites that can be built here")
    parser.add_argument("--modes", type=names, default=list(ALL_MODES))
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="tiny models, to try things out")
    parser.add_argument("--output", type=Path, help="such as benchmarks/results/peers-openxla.json")
    return parser


def main() -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args()
    # Dynamo tells on each first call that its profile is not used, as wanted.
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    results = Results(Settings(options.samples, options.small), machine())
    has_transformers = importlib.util.find_spec("transformers") is not None
    for backend in options.backends:
        warm_up(backend)
    for suite, members in suites(options.small).items():
        for name, architecture in members.items():
            chosen = suite in options.suites and name in (options.models or members)
            if not chosen or (name in NEED_TRANSFORMERS and not has_transformers):
                continue
            for mode in options.modes:
                backends = [each for each in options.backends if supports(each, architecture, mode)]
                if not backends:
                    continue
                cells = harness.measure(
                    suite, architecture, mode, [EAGER, *backends], options.samples, _say
                )
                results.replace(cells)
                for cell in cells:
                    print(json.dumps(dataclasses.asdict(cell)), flush=True)
                if options.output:
                    results.save(options.output)
    print()
    print("\n".join(tables.table(tables.HEADERS, [tables.row(c) for c in results.cells], left=4)))
    print("\n".join(tables.failures(results)))
    return int(any(cell.error for cell in results.cells))


def _say(description: str) -> None:
    if description.endswith("first call"):
        print(description, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
