"""Runs programs compiled and in eager, and says of each what came out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

import neuron_compile

from ..support import GRADIENTS, VALUES, Comparison, Inaccurate, Mismatch, sharing
from .generate import programs
from .program import GRAD, NO_GRAD, Program, arguments, function, widened
from .upstream import promised

DEVICE, FALLBACK, FAILED, UPSTREAM, REFUSED = "device", "fallback", "failed", "upstream", "refused"
CALLS = 2
#: How many hypothesis may draw for each program that is taken.
EXAMPLES = 20
#: Programs that are compiled to make a failing one smaller.
TRIALS = 40


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program.

    ``fallback`` names the operators that ran in eager, and why; ``padding`` holds how many of how
    many executables for dynamic sizes were padded, and why the others were not.
    """

    program: Program
    status: str
    fallback: tuple[tuple[str, str], ...] = ()
    failure: str = ""
    padding: tuple[int, int, tuple[str, ...]] = (0, 0, ())


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a call leaves: results, gradients of the leaves, arguments afterwards."""

    results: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    arguments: Sequence[torch.Tensor]


class _Enough(Exception):
    """Ends a stream."""


def stream(seed: int, count: int, steps: int = 2) -> list[Program]:
    """So many programs of a reproducible stream, of so many steps or more.

    hypothesis likes to vary what it has found: of programs with the same operations, one counts.
    """
    found: dict[tuple[str, ...], Program] = {}

    @_settings(seed, EXAMPLES * count, [Phase.generate])
    @hypothesis.given(programs())
    def collect(program: Program) -> None:
        if len(program.steps) >= steps:
            found.setdefault(tuple(step.operation for step in program.steps), program)
        if len(found) >= count:
            raise _Enough

    with contextlib.suppress(_Enough):
        collect()
    return list(found.values())


def minimized(seed: int, count: int, failing: Program, padded: bool = False) -> Program:
    """A small program that fails, made by hypothesis from one of a stream, and trimmed."""
    text, met, smallest = str(failing), False, failing
    judged: dict[str, bool] = {}

    def fails(program: Program) -> bool:
        key = str(program)
        if key not in judged and len(judged) < TRIALS:
            judged[key] = _fails(program, padded)
        return judged.get(key, False)

    @_settings(seed, EXAMPLES * count, [Phase.generate, Phase.shrink])
    @hypothesis.given(programs())
    def again(program: Program) -> None:
        nonlocal met, smallest
        met = met or str(program) == text
        if met and fails(program):
            smallest = program
            raise Mismatch

    with contextlib.suppress(Mismatch, hypothesis.errors.Flaky):
        again()
    return _trimmed(smallest, padded)


def _fails(program: Program, padded: bool) -> bool:
    return judge([program], padded=padded)[0].status == FAILED


def _trimmed(program: Program, padded: bool) -> Program:
    """Without the results and steps that the failure does not need."""
    for name in reversed(program.results):
        fewer = tuple(other for other in program.results if other != name)
        if fewer and _fails(smaller := dataclasses.replace(program, results=fewer), padded):
            program = smaller
    for step in reversed(program.steps):
        steps = tuple(other for other in program.steps if other is not step)
        # A program that misses a value is refused, which is no failure.
        if _fails(smaller := dataclasses.replace(program, steps=steps), padded):
            program = smaller
    return program


def _settings(seed: int, count: int, phases: list[Phase]) -> Any:
    settings = hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    return lambda test: hypothesis.seed(seed)(settings(test))


# --------------------------------------------------------------------------------------- judge


def judge(items: Sequence[Program], batch: int = 8, padded: bool = False) -> list[Outcome]:
    """The outcome of each program, in order; ``batch`` of them go into one compiled graph."""
    return list(outcomes(items, batch, padded))


def outcomes(
    items: Sequence[Program],
    batch: int = 8,
    padded: bool = False,
    begin: Callable[[Sequence[Program]], None] = lambda items: None,
) -> Iterator[Outcome]:
    """The outcomes as they come, those of one mode together; ``begin`` is told of each batch.

    If they are to be ``padded``, every size is dynamic, and larger in the compiled program where
    that is possible at all.
    """
    modes = collections.defaultdict(list)
    for item in items:
        modes[item.mode].append(item)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group in modes.values():
            for start in range(0, len(group), batch):
                part = group[start : start + batch]
                begin(part)
                yield from _batch(part, padded)


def _batch(items: Sequence[Program], padded: bool) -> Iterator[Outcome]:
    wanted = {}
    for item in items:
        try:
            wanted[item] = [_eager(item, call) for call in range(CALLS)]
        except Exception as error:  # noqa: BLE001 - what eager refuses is no program
            yield Outcome(item, REFUSED, failure=_said(error))
    yield from _judge(wanted, padded)


def _judge(wanted: dict[Program, list[_Made]], padded: bool) -> Iterator[Outcome]:
    """Halve what is wrong, or in fallback, until it is one program."""
    if not wanted:
        return
    try:
        _compare(wanted, "neuron", padded)
    except Exception as error:  # noqa: BLE001 - any failure is what this suite looks for
        if len(wanted) == 1:
            yield _failure(wanted, error, padded)
            return
    else:
        report = neuron_compile.report()
        if not report.operators_in_fallback or len(wanted) == 1:
            reasons = tuple(report.fallback_reasons.items())
            status = FALLBACK if report.operators_in_fallback else DEVICE
            shares = report.padded, report.specializations, report.unpadded_reasons
            yield from (Outcome(item, status, reasons, padding=shares) for item in wanted)
            return
    items = list(wanted.items())
    middle = len(items) // 2
    yield from _judge(dict(items[:middle]), padded)
    yield from _judge(dict(items[middle:]), padded)


def _failure(wanted: dict[Program, list[_Made]], error: Exception, padded: bool) -> Outcome:
    (item,) = wanted
    try:
        _compare(wanted, promised, padded)
    except Exception as theirs:  # noqa: BLE001
        return Outcome(item, UPSTREAM, failure=_said(theirs))
    return Outcome(item, FAILED, failure=_said(error))


def _said(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:1500]


def _compare(wanted: dict[Program, list[_Made]], backend: Any, padded: bool) -> None:
    """Compile one graph of the programs, call it twice, compare each call with eager.

    Raises:
        Mismatch: naming the first difference.
    """
    torch._dynamo.reset()
    neuron_compile.reset_report()
    functions = [function(item.source) for item in wanted]

    def run(tensors: list[list[torch.Tensor]]) -> list[Any]:
        return [function(*group) for function, group in zip(functions, tensors, strict=True)]

    options = {"dynamic_shapes": "bucket"} if padded and backend == "neuron" else None
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=padded, options=options)
    for call in range(CALLS):
        made = _call(list(wanted), compiled, call)
        for (item, eager), actual in zip(wanted.items(), made, strict=True):
            _same(item, actual, eager[call], call, alone=len(wanted) == 1)


def _eager(item: Program, call: int) -> _Made:
    program = function(item.source)
    (made,) = _call([item], lambda tensors: [program(*tensors[0])], call)
    return made


def _call(items: Sequence[Program], run: Any, call: int) -> list[_Made]:
    tensors = [arguments(item.inputs, call) for item in items]
    leaves = [[x for x in group if x.requires_grad] for group in tensors]
    torch.manual_seed(0)
    with torch.set_grad_enabled(items[0].mode != NO_GRAD):
        results = run(tensors)
    gradients: list[list[torch.Tensor]] = [[] for _ in items]
    if items[0].mode == GRAD:
        gradients = _gradients(results, tensors, leaves)
    return [_Made(*parts) for parts in zip(results, gradients, tensors, strict=True)]


def _gradients(
    results: Sequence[Any], tensors: Sequence[Any], leaves: Sequence[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Gradients of each program's leaves, in one backward pass; zeros where there are none."""
    outputs, seeds = [], []
    for made, group in zip(results, tensors, strict=True):
        generator = torch.Generator().manual_seed(0)
        for tensor in [*made, *group]:
            if tensor.requires_grad:
                outputs.append(tensor)
                wide = torch.randint(-4, 5, tensor.shape, generator=generator) / 4
                seeds.append(wide.to(tensor.dtype))
    flat = [leaf for group in leaves for leaf in group]
    if not outputs or not flat:
        return [[] for _ in leaves]
    found = iter(torch.autograd.grad(outputs, flat, seeds, allow_unused=True))
    return [
        [torch.zeros_like(leaf) if (grad := next(found)) is None else grad for leaf in group]
        for group in leaves
    ]


def _same(item: Program, actual: _Made, wanted: _Made, call: int, alone: bool) -> None:
    try:
        _trees(actual, wanted)
    except Inaccurate:
        if not alone:
            raise
        try:
            exact = _eager(widened(item), call)
        except Exception:  # noqa: BLE001 - then eager in its own dtypes stays the only measure
            exact = None
        _trees(actual, wanted, exact)
    if sharing((actual.results, actual.arguments)) != sharing((wanted.results, wanted.arguments)):
        raise Mismatch("other results and arguments share memory than in eager")


def _trees(actual: _Made, wanted: _Made, exact: _Made | None = None) -> None:
    for what, tolerances, strides in (
        ("result", VALUES, True),
        # AOT Autograd lays gradients out as their inputs, eager as they happen to come about.
        ("gradient", GRADIENTS, False),
        ("argument", VALUES, True),
    ):
        field = f"{what}s"
        Comparison(what, tolerances, random=False, strides=strides).trees(
            getattr(actual, field),
            getattr(wanted, field),
            getattr(exact, field) if exact is not None else None,
        )
