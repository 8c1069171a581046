"""Compiled ``optimizer.step()``: eager's parameters and states, and nothing compiled once warm."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal import common_methods_invocations as database

import neuron_compile

from .support import GRADIENTS, IGNORE_TORCH, equal, neuron

pytestmark = IGNORE_TORCH

Optimizer = torch.optim.Optimizer
Make = Callable[[Iterable[torch.Tensor]], Optimizer]
STEPS = 5
#: Steps that may compile: state is made in the first one, and numbers are seen to change later.
WARM = 2


def compiled_so_far() -> tuple[int, int]:
    """Executables of ours and graphs of Dynamo's."""
    return neuron_compile.report().compilations, counters["stats"]["unique_graphs"]


class Loop:
    """A model in training, whose optimizer's step is compiled or not."""

    def __init__(
        self,
        model: nn.Module,
        make: Make,
        compile_step: Callable[[Any], Any],
        schedule: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = make(model.parameters())
        self.schedule = schedule(self.optimizer) if schedule else None
        self.step = compile_step(self.optimizer.step)

    def run(self, x: torch.Tensor) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        self.step()
        if self.schedule is not None:
            self.schedule.step()

    def state(self) -> tuple[Any, Any]:
        """Parameters, and what the optimizer keeps."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        kept = [dict(self.optimizer.state[p]) for p in self.model.parameters()]
        return parameters, kept


def compare(
    make: Make,
    schedule: Callable[[Optimizer], Any] | None = None,
    theirs: Make | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> tuple[Loop, Loop]:
    """Train with a compiled step and with eager's, and compare after every step.

    ``theirs`` makes eager's optimizer where it must be another one.
    """
    counters.clear()
    model = nn.Linear(3, 2, dtype=dtype)
    mine = Loop(copy.deepcopy(model), make, neuron, schedule)
    eager = Loop(model, theirs or make, lambda step: step, schedule)
    counts = []
    for _ in range(steps):
        x = torch.randn(4, 3, dtype=dtype)
        mine.run(x)
        eager.run(x)
        equal(mine.state(), eager.state(), *GRADIENTS[dtype])
        counts.append(compiled_so_far())
    assert counts[WARM - 1 :] == counts[WARM - 1 : WARM] * (steps - WARM + 1)
    assert neuron_compile.report().operators_in_fallback == 0
    return mine, eager


optim = torch.optim
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p, **k: optim.SGD(p, 0.1, **k),
    "momentum": lambda p, **k: optim.SGD(p, 0.01, 0.9, dampening=0.1, maximize=True, **k),
    "nesterov": lambda p, **k: optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01, **k),
    "adam": lambda p, **k: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, **k),
    "adamw": lambda p, **k: optim.AdamW(p, 0.01, **k),
    "adagrad": lambda p, **k: optim.Adagrad(p, 0.01, lr_decay=0.1, weight_decay=0.1, **k),
    "rmsprop": lambda p, **k: optim.RMSprop(p, 0.01, momentum=0.9, centered=True, **k),
    "adadelta": lambda p, **k: optim.Adadelta(p, 0.5, **k),
    "adamax": lambda p, **k: optim.Adamax(p, 0.01, **k),
    "nadam": lambda p, **k: optim.NAdam(p, 0.01, **k),
    "radam": lambda p, **k: optim.RAdam(p, 0.01, **k),
    "asgd": lambda p, **k: optim.ASGD(p, 0.01, **k),
    "rprop": lambda p, **k: optim.Rprop(p, 0.01, **k),
}


#: Those of the fast tests; without lists of tensors, those in the second.
FAST = {"sgd", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "nadam", "radam"}
FAST_SINGLE = {"nesterov", "adamw", "rmsprop"}


def cases() -> list[Any]:
    """Every optimizer, with lists of tensors and without."""
    return [
        pytest.param(name, foreach, id=kind, marks=[] if name in fast else [pytest.mark.slow])
        for foreach, fast in ((True, FAST), (False, FAST_SINGLE))
        for name in OPTIMIZERS
        for kind in [f"{name}-foreach" if foreach else name]
    ]


@pytest.mark.parametrize(("name", "foreach"), cases())
def test_optimizers(name: str, foreach: bool) -> None:
    mine, _ = compare(lambda parameters: OPTIMIZERS[name](parameters, foreach=foreach))
    assert len(mine.optimizer.state) == 2
    assert neuron_compile.report().operators_on_device > 0


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
def test_adafactor(foreach: bool) -> None:
    """It makes Python floats of its step counts: without that option the step stays in eager."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compare(lambda p: optim.Adafactor(p, 0.01, foreach=foreach), steps=4)
    assert neuron_compile.report().compilations > 0


def test_muon() -> None:
    compare(lambda p: optim.Muon([x for x in p if x.dim() == 2], 0.01, ns_steps=2), steps=4)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_fused_steps_stay_in_eager(name: str) -> None:
    """Dynamo does not trace into fused kernels."""
    compare(lambda parameters: OPTIMIZERS[name](parameters, fused=True))


def test_lbfgs() -> None:
    """Its step is a loop over values, which PyTorch keeps out of Dynamo; the model is compiled."""
    model = nn.Linear(3, 2)
    eager = copy.deepcopy(model)
    calls = [neuron(model), eager]
    optimizers = [
        optim.LBFGS(m.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        for m in (model, eager)
    ]
    steps = [neuron(optimizers[0].step), optimizers[1].step]
    losses: list[list[float]] = [[], []]
    counts = []
    for _ in range(4):
        x = torch.randn(4, 3)
        for call, optimizer, step, seen in zip(calls, optimizers, steps, losses, strict=True):

            def closure(call: Any = call, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = call(x).square().mean()  # noqa: B023  (used within the turn)
                loss.backward()
                return loss

            seen.append(step(closure).item())
        counts.append(compiled_so_far())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    equal(dict(model.state_dict()), dict(eager.state_dict()), 1e-3, 1e-3)
    assert counts[0] == counts[-1]


# ----------------------------------------------------------------------- settings of an optimizer


@pytest.mark.parametrize(
    ("foreach", "tensor"), [(True, True), (False, False)], ids=["foreach-tensor", "single-float"]
)
def test_capturable(foreach: bool, tensor: bool) -> None:
    """Eager refuses it on the CPU, so it is compared with a step that is not capturable."""
    rate = torch.tensor(0.01) if tensor else 0.01
    compare(
        lambda p: optim.AdamW(p, rate, capturable=True, foreach=foreach),
        theirs=lambda p: optim.AdamW(p, 0.01),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    compare(lambda p: optim.AdamW(p, 0.01), dtype=dtype)


def test_groups_with_settings_of_their_own() -> None:
    def make(parameters: Iterable[torch.Tensor]) -> Optimizer:
        weight, bias = parameters
        groups = [{"params": [weight], "lr": 0.1}, {"params": [bias], "weight_decay": 0.0}]
        return optim.AdamW(groups, lr=0.01)

    compare(make)


def test_a_parameter_without_a_gradient() -> None:
    unused = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    spare = iter(unused)
    compare(lambda parameters: optim.Adam([*parameters, next(spare)], 0.01))
    equal(unused[0], unused[1])


def test_loading_a_state() -> None:
    mine, eager = compare(lambda p: optim.AdamW(p, 0.01), steps=3)
    mine.optimizer.load_state_dict(copy.deepcopy(eager.optimizer.state_dict()))
    for _ in range(3):
        x = torch.randn(4, 3)
        mine.run(x)
        eager.run(x)
        equal(mine.state(), eager.state(), *GRADIENTS[torch.float32])


# ------------------------------------------------------------------------------------- schedulers

rates = torch.optim.lr_scheduler
SCHEDULES: dict[str, tuple[Make, Callable[[Optimizer], Any]]] = {
    "sgd": (
        lambda p: optim.SGD(p, 0.1, 0.9, foreach=False),
        lambda o: rates.LambdaLR(o, lambda step: 1 / (1 + step)),
    ),
    "sgd-foreach": (
        lambda p: optim.SGD(p, 0.1, foreach=True),
        lambda o: rates.LinearLR(o, 0.1, total_iters=10),
    ),
    "adamw": (lambda p: optim.AdamW(p, 0.01), lambda o: rates.CosineAnnealingLR(o, 20)),
    "rmsprop": (
        lambda p: optim.RMSprop(p, 0.01, foreach=False),
        lambda o: rates.ExponentialLR(o, 0.9),
    ),
    # Its momentum changes, too.
    "one-cycle": (
        lambda p: optim.Adam(p, 0.01, foreach=True),
        lambda o: rates.OneCycleLR(o, 0.01, total_steps=20),
    ),
    "one-cycle-single": (
        lambda p: optim.Adam(p, 0.01, foreach=False),
        lambda o: rates.OneCycleLR(o, 0.01, total_steps=20),
    ),
    "tensor": (
        lambda p: optim.AdamW(p, torch.tensor(0.01), foreach=False),
        lambda o: rates.StepLR(o, 1, 0.5),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] if name in ("one-cycle-single", "adamw") else []
        )
        for name in SCHEDULES
    ],
)
def test_schedulers(name: str) -> None:
    make, schedule = SCHEDULES[name]
    mine, _ = compare(make, schedule, steps=6)
    assert mine.schedule.get_last_lr() != [0.01]


# ------------------------------------------------------------------------------ lists of tensors

DATABASES = {
    "unary": database.foreach_unary_op_db,
    "binary": database.foreach_binary_op_db,
    "pointwise": database.foreach_pointwise_op_db,
    "others": [*database.foreach_reduce_op_db, *database.foreach_other_op_db],
}
#: Dynamo does not trace them.
UNTRACED = ("_foreach_max", "_foreach_mm")


def samples(op: Any, dtype: torch.dtype) -> list[tuple[Any, Any, Any]]:
    """The operator's samples with arguments of different types, each by an overload of its own."""
    found = {}
    for sample in op.sample_inputs("cpu", dtype, num_input_tensors=[1]):
        settings = {k: v for k, v in sample.kwargs.items() if k != "disable_fastpath"}
        kinds = [type(x[0] if isinstance(x, list | tuple) else x) for x in sample.args]
        if torch.Tensor in kinds and not dtype.is_floating_point:
            continue  # torch's parser of arguments reads the number out of the tensor
        with contextlib.suppress(RuntimeError):  # what eager refuses
            op.method_variant(sample.input, *sample.args, **settings)
            found[str((kinds, list(settings)))] = (sample.input, sample.args, settings)
    return list(found.values())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.int64, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", DATABASES)
def test_foreach_operators(name: str, dtype: torch.dtype) -> None:
    """All overloads of all of them in one graph; in bfloat16 in place, too."""
    calls = [
        (op, *sample)
        for op in DATABASES[name]
        if dtype in op.supported_dtypes("cpu") and op.name not in UNTRACED
        for sample in samples(op, dtype)
    ]
    if not calls:
        pytest.skip("no operator of this kind takes the dtype")

    def function(inputs: list[list[torch.Tensor]]) -> list[Any]:
        results = []
        for (op, _, args, settings), tensors in zip(calls, inputs, strict=True):
            results.append(op.method_variant(tensors, *args, **settings))
            if op.inplace_variant is not None and dtype == torch.bfloat16:
                copies = [tensor.clone() for tensor in tensors]
                op.inplace_variant(copies, *args, **settings)
                results.append(copies)
        return results

    inputs = [tensors for _, tensors, _, _ in calls]
    wanted, actual = function(inputs), neuron(function, fullgraph=True)(inputs)
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(list(mine), list(theirs), equal_nan=True)
    assert neuron_compile.report().operators_in_fallback == 0
