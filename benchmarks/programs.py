"""What each backend makes of a module: a program that the harness runs, times and compares.

A new kind of backend is one entry in ``FACTORIES``; any other name is taken for a backend of
``torch.compile``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.architecture import ADAMW, ALL_MODES, INFERENCE, TRAINING, Architecture, Inputs

EAGER = "eager"
INDUCTOR = "inductor"
FREEZING = "inductor_freezing"
NEURON = "neuron"
JAX = "jax"
BACKENDS = (EAGER, INDUCTOR, FREEZING, NEURON, JAX)
LEARNING_RATE = 1e-4
# The optimizer makes its state in the first step, and Dynamo compiles the step with it again in
# the second.
FIRST_CALLS = {INFERENCE: 1, TRAINING: 1, ADAMW: 2}


@dataclass(frozen=True)
class Observation:
    """What the first calls left behind, in copies, by kind and name.

    Kinds are ``output``, and for training steps ``gradients``, ``buffers`` (those of floats) and
    ``optimizer`` (the running averages of AdamW).
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(repr=False)


class Program(Protocol):
    """A backend's program. ``run`` calls it a number of times and waits for the results."""

    def run(self, calls: int) -> Any:
        """The output of the last call."""

    def observe(self, output: Any) -> Observation:
        """What is compared with eager, for the output of the first call or calls."""


Factory = Callable[[Architecture, str, nn.Module, Inputs], Program]

# ------------------------------------------------------------------------------------ PyTorch


@dataclass
class TorchProgram:
    """A module, compiled or not, with its inputs, and for training with its optimizer."""

    architecture: Architecture
    mode: str
    module: nn.Module
    inputs: Inputs
    forward: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer | None = None
    step: Callable[[], Any] | None = None

    def run(self, calls: int) -> Tensor:
        """The output of the last call."""
        return self._infer(calls) if self.mode == INFERENCE else self._train(calls)

    def _infer(self, calls: int) -> Tensor:
        forward, inputs = self.forward, self.inputs
        with torch.no_grad():
            for _ in range(calls):
                # Eager keeps weights that it has cast until the context ends, so each call has
                # a context of its own; the others are spared its microseconds.
                if self.architecture.autocast:
                    with torch.autocast("cpu", torch.bfloat16):
                        output = forward(**inputs)
                else:
                    output = forward(**inputs)
        return output

    def _train(self, calls: int) -> Tensor:
        assert self.optimizer is not None and self.step is not None
        for _ in range(calls):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.architecture.autocast):
                output = self.forward(**self.inputs)
                loss = self.architecture.loss(output, self.inputs)
            loss.backward()
            self.step()
        return output.detach()

    def observe(self, output: Tensor) -> Observation:
        """Output, gradients, buffers, and the optimizer's averages."""
        found: dict[str, dict[str, Tensor]] = {"output": {"output": output.clone()}}
        if self.optimizer is not None:
            named = dict(self.module.named_parameters())
            found["gradients"] = {
                name: parameter.grad.clone()
                for name, parameter in named.items()
                if parameter.grad is not None
            }
            found["buffers"] = {
                name: buffer.clone()
                for name, buffer in self.module.named_buffers()
                if buffer.is_floating_point()
            }
            found["optimizer"] = {
                f"{name}.{key}": self.optimizer.state[parameter][key].clone()
                for name, parameter in named.items()
                for key in ("exp_avg", "exp_avg_sq")
                if key in self.optimizer.state[parameter]
            }
        return Observation({kind: tensors for kind, tensors in found.items() if tensors})


def _compile(backend: str, function: Any) -> Any:
    if backend == EAGER:
        return function
    if backend == FREEZING:
        # Dynamo asks the global setting, see ``fresh_caches``; the option keeps it from taking
        # what plain Inductor has compiled for the same code.
        return torch.compile(function, backend=INDUCTOR, options={"freezing": True})
    return torch.compile(function, backend=backend)


def torch_program(
    backend: str, architecture: Architecture, mode: str, module: nn.Module, inputs: Inputs
) -> TorchProgram:
    """A module in eager or under ``torch.compile``."""
    module.train(mode != INFERENCE)
    compiled = partial(_compile, backend)

    program = TorchProgram(architecture, mode, module, inputs, compiled(module))
    if mode == TRAINING:
        program.optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        program.step = program.optimizer.step
    if mode == ADAMW:
        program.optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, foreach=True)
        program.step = compiled(program.optimizer.step)
    return program


def _jax_program(
    architecture: Architecture, mode: str, module: nn.Module, inputs: Inputs
) -> Program:
    from benchmarks import jax_models

    return jax_models.program(architecture.name, mode, module, inputs)


FACTORIES: dict[str, Factory] = {JAX: _jax_program}
# Those that do not take part in every mode.
BACKEND_MODES: dict[str, tuple[str, ...]] = {FREEZING: (INFERENCE,)}


def program(
    backend: str, architecture: Architecture, mode: str, module: nn.Module, inputs: Inputs
) -> Program:
    """What a backend makes of a module, not yet called."""
    if backend in FACTORIES:
        return FACTORIES[backend](architecture, mode, module, inputs)
    return torch_program(backend, architecture, mode, module, inputs)


def supports(backend: str, architecture: Architecture, mode: str) -> bool:
    """Whether a backend takes part: freezing is for inference, JAX for what was written in it."""
    if mode not in architecture.modes or mode not in BACKEND_MODES.get(backend, ALL_MODES):
        return False
    if backend == JAX:
        from benchmarks import jax_models

        return (architecture.name, mode) in jax_models.PROGRAMS
    return True


# ------------------------------------------------------------------------------------- caches

CACHE_DIR = "NEURON_COMPILE_CACHE_DIR"


@contextlib.contextmanager
def _cache_dir(folder: str) -> Iterator[None]:
    before = os.environ.get(CACHE_DIR)
    os.environ[CACHE_DIR] = folder
    try:
        yield
    finally:
        os.environ.pop(CACHE_DIR)
        if before is not None:
            os.environ[CACHE_DIR] = before


@contextlib.contextmanager
def fresh_caches(backend: str) -> Iterator[None]:
    """Keeps first calls from profiting from what an earlier compilation left behind.

    ``torch._dynamo.reset`` is not called here, since it would also drop the compiled code of the
    backends that are about to be timed; ``harness.measure`` calls it between groups of backends.
    """
    FakeTensorMode.cache_clear()
    if backend == NEURON:  # its caches are written, into empty folders
        from torch._inductor.utils import fresh_cache

        with tempfile.TemporaryDirectory() as folder, fresh_cache(), _cache_dir(folder):
            yield
    elif backend in (INDUCTOR, FREEZING):
        from torch._inductor import config
        from torch._inductor.utils import fresh_cache

        # Disabling the caches leaves that of compiled C++ kernels, hence the fresh directory too.
        # Dynamo looks at the global setting of freezing, not at the options of torch.compile.
        with config.patch(force_disable_caches=True), fresh_cache(), _freezing(backend):
            yield
    else:
        yield


def _freezing(backend: str) -> AbstractContextManager[Any]:
    from torch._inductor import config

    return config.patch(freezing=backend == FREEZING)


def warm_up(backend: str) -> None:
    """Compiles a trivial training step, so that first calls do not count one-time costs.

    Such costs are a backend's imports, its thread pools and Inductor's precompiled headers.
    A backend that fails here fails again, and is then recorded, when it meets a model.
    """
    if backend == EAGER or backend in FACTORIES:
        return
    model = nn.Linear(64, 64)
    compiler = INDUCTOR if backend == FREEZING else backend
    with contextlib.suppress(Exception), fresh_caches(backend):
        torch.compile(model, backend=compiler)(torch.ones(64, 64)).relu().sum().backward()
    torch._dynamo.reset()
