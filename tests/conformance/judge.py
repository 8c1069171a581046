"""Runs the samples of a case compiled and in eager, and says of each what came out."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import neuron_compile

from ..support import GRADIENTS, VALUES, Comparison, Inaccurate, Mismatch, sharing
from .catalog import ERRORS, TRAINING, Case, Sample, copied, samples

DEVICE, FALLBACK, FAILED, UPSTREAM = "device", "fallback", "failed", "upstream"

#: Entries whose results are memory as it was found: only dtype, shape and strides are compared.
UNSPECIFIED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
KEPT_MESSAGES = 3
#: With how many seeds eager is asked whether a sample that draws random numbers depends on them.
_SEEDS = 8
_FRESH = torch.Generator().manual_seed(0).get_state()


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a case's samples, counted by outcome.

    ``fallback`` maps the operators that ran in eager to why; ``backward`` counts the backward
    graphs that were compiled and those with no operator in fallback; ``failures`` are the first
    few messages.
    """

    key: str
    samples: int = 0
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    fallback: dict[str, str] = dataclasses.field(default_factory=dict)
    backward: tuple[int, int] = (0, 0)
    failures: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """The worst outcome among the samples that work with ``aot_eager``, or ``upstream``."""
        return next((o for o in (FAILED, FALLBACK, DEVICE) if self.outcomes.get(o)), UPSTREAM)


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A sample with what eager made of it; ``random`` if another seed gives other values."""

    sample: Sample
    results: Any
    gradients: Any
    arguments: Any
    state: Any
    random: bool


@dataclasses.dataclass
class _Tally:
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fallback: dict[str, str] = dataclasses.field(default_factory=dict)
    backward: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    failures: list[str] = dataclasses.field(default_factory=list)


def judge(
    case: Case,
    limit: int | None = None,
    batch: int = 8,
    alive: Callable[[], Any] = lambda: None,
) -> Result:
    """Run a case's samples, ``batch`` of them in one compiled graph.

    The samples of a graph in which anything is wrong, or in eager fallback, are run again one
    by one; a sample that fails alone is ``upstream`` where ``backend="aot_eager"`` fails as well.
    ``alive`` is called after each graph.
    """
    tally = _Tally()
    count = 0
    if case.mode == ERRORS:
        for sample in samples(case, limit):
            count += _judge_error(sample, tally)
    else:
        references = list(_references(case, limit))
        count = len(references)
        if case.kind != "operator":
            batch = 1
        for start in range(0, count, batch):
            _judge_batch(case, references[start : start + batch], tally)
            alive()
    return Result(
        case.key,
        count,
        dict(tally.outcomes),
        tally.fallback,
        (tally.backward[0], tally.backward[1]),
        tuple(tally.failures[:KEPT_MESSAGES]),
    )


def _references(case: Case, limit: int | None) -> Iterator[_Reference]:
    """The samples that eager takes, with its results."""
    for sample in samples(case, limit):
        try:
            first = _call_eager(case, sample, seed=0)
            drawn = not torch.equal(torch.get_rng_state(), _FRESH)
            others = [_call_eager(case, sample, seed) for seed in range(1, _SEEDS) if drawn]
        except Exception:  # noqa: BLE001 - what eager refuses, in any way, is no sample
            continue
        random = case.entry in UNSPECIFIED or not all(_equal(first[:2], o[:2]) for o in others)
        yield _Reference(sample, *first, random)


def _call_eager(case: Case, sample: Sample, seed: int) -> tuple[Any, Any, Any, Any]:
    function, (args, kwargs) = sample.make(), copied((sample.args, sample.kwargs))
    torch.manual_seed(seed)
    results = function(*args, **kwargs)
    (outcome,) = _outcomes(case, [sample], [function], [results], [(args, kwargs)])
    return outcome


def _outcomes(
    case: Case,
    batch: Sequence[Sample],
    functions: Sequence[Any],
    results: Sequence[Any],
    arguments: Sequence[Any],
) -> list[tuple[Any, Any, Any, Any]]:
    """Results, gradients, arguments and module state of each of the calls in a graph."""
    states = [
        dict(function.state_dict()) if isinstance(function, torch.nn.Module) else {}
        for function in functions
    ]
    grads: Sequence[Any] = [()] * len(batch)
    if case.mode == TRAINING:
        processed = [s.process(result) for s, result in zip(batch, results, strict=True)]
        parameters = [
            list(f.parameters()) if s else [] for f, s in zip(functions, states, strict=True)
        ]
        grads = _gradients(processed, list(zip(arguments, parameters, strict=True)))
    return list(zip(results, grads, arguments, states, strict=True))


def _gradients(results: Sequence[Any], inputs: Sequence[Any]) -> list[list[Any]]:
    """Gradients of each call's inputs for fixed pseudo-random gradients of its results.

    All of them in one backward pass: calls that were compiled as one graph have one.
    """
    outputs, seeds = [], []
    for result in results:
        generator = torch.Generator().manual_seed(0)
        for leaf in _differentiable(result):
            outputs.append(leaf)
            wide = torch.complex128 if leaf.is_complex() else torch.float64
            seed = torch.randn(leaf.shape, generator=generator, dtype=wide)
            seeds.append(seed.to(leaf.dtype))
    sources = [_differentiable(tree) for tree in inputs]
    if not outputs or not any(sources):
        return [[] for _ in inputs]
    flat = torch.autograd.grad(outputs, list(itertools.chain(*sources)), seeds, allow_unused=True)
    iterator = iter(flat)
    return [list(itertools.islice(iterator, len(leaves))) for leaves in sources]


def _differentiable(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _equal(a: Any, b: Any) -> bool:
    try:
        Comparison("value", {}, random=False).trees(a, b)
    except AssertionError:
        return False
    return True


def _judge_batch(case: Case, batch: Sequence[_Reference], tally: _Tally) -> None:
    try:
        report = _run(case, batch, "neuron")
    except Exception as error:  # noqa: BLE001 - any failure is what this suite looks for
        if len(batch) > 1:
            for reference in batch:
                _judge_batch(case, [reference], tally)
        else:
            _judge_failure(case, batch[0], error, tally)
        return
    if report.operators_in_fallback and len(batch) > 1:
        for reference in batch:
            _judge_batch(case, [reference], tally)
        return
    outcome = FALLBACK if report.operators_in_fallback else DEVICE
    tally.outcomes[outcome] += len(batch)
    tally.fallback.update(report.fallback_reasons)
    backward = [graph for graph in report.graphs if graph.kind == "backward"]
    if backward:
        tally.backward[0] += len(batch)
        tally.backward[1] += len(batch) * all(graph.in_fallback == 0 for graph in backward)


def _judge_failure(case: Case, reference: _Reference, error: Exception, tally: _Tally) -> None:
    try:
        _run(case, [reference], "aot_eager")
    except Exception:  # noqa: BLE001
        tally.outcomes[UPSTREAM] += 1
        return
    tally.outcomes[FAILED] += 1
    lines = traceback.format_exception_only(error)
    shapes = _describe((reference.sample.args, reference.sample.kwargs))
    tally.failures.append(f"{''.join(lines).strip()[:600]}\n  of {shapes[:400]}")


def _describe(tree: Any) -> str:
    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return leaf

    return str(pytree.tree_map(describe, tree))


def _run(case: Case, batch: Sequence[_Reference], backend: str) -> Any:
    """Compile one graph of the samples and compare them all with eager.

    Raises:
        Mismatch: naming the first difference.
    """
    torch._dynamo.reset()
    neuron_compile.reset_report()
    functions = [reference.sample.make() for reference in batch]
    arguments = [copied((item.sample.args, item.sample.kwargs)) for item in batch]
    torch.manual_seed(0)
    results = _compiled(functions, backend)(arguments)
    made = _outcomes(case, [item.sample for item in batch], functions, results, arguments)
    for actual, reference in zip(made, batch, strict=True):
        try:
            _compare_all(actual, reference)
        except Inaccurate:
            if len(batch) > 1:
                raise
            _compare_all(actual, reference, _exact(case, reference))
    return neuron_compile.report()


def _compiled(functions: Sequence[Any], backend: str) -> Callable[[Any], Any]:
    settings: Any = {"backend": backend, "fullgraph": True, "dynamic": False}
    if isinstance(functions[0], torch.nn.Module):
        module = torch.compile(functions[0], **settings)
        return lambda arguments: [module(*args, **kwargs) for args, kwargs in arguments]
    function = functions[0]

    def run(arguments: Any) -> Any:
        return [function(*args, **kwargs) for args, kwargs in arguments]

    return torch.compile(run, **settings)


def _as_is(tree: Any) -> Any:
    return tree


def _exact(case: Case, reference: _Reference) -> Sequence[Any]:
    """What eager makes of the sample in float64; nothing where it does not take that."""
    widened = dataclasses.replace(
        reference.sample,
        args=pytree.tree_map(_widened, reference.sample.args),
        kwargs=pytree.tree_map(_widened, reference.sample.kwargs),
    )
    try:
        return _call_eager(case, widened, seed=0)
    except Exception:  # noqa: BLE001 - then eager in its own dtype stays the only measure
        return ()


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return _WIDE.get(leaf, leaf)
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE:
        return leaf.detach().to(_WIDE[leaf.dtype]).requires_grad_(leaf.requires_grad)
    return leaf


def _compare_all(actual: Sequence[Any], reference: _Reference, exact: Sequence[Any] = ()) -> None:
    expected = (reference.results, reference.gradients, reference.arguments, reference.state)
    kinds = (
        ("result", VALUES, True),
        # AOT Autograd lays gradients out as their inputs, eager as they happen to come about.
        ("gradient", GRADIENTS, False),
        ("argument", VALUES, True),
        ("state", VALUES, True),
    )
    for index, (what, tolerances, strides) in enumerate(kinds):
        comparison = Comparison(what, tolerances, reference.random, strides)
        settle = reference.sample.settle if what == "result" else _as_is
        comparison.trees(
            settle(actual[index]),
            settle(expected[index]),
            settle(exact[index]) if exact else None,
        )
    wanted = sharing((reference.results, reference.arguments))
    if sharing((actual[0], actual[2])) != wanted:
        raise Mismatch("other results and arguments share memory than in eager")


def _judge_error(sample: Sample, tally: _Tally) -> int:
    """Count a call that eager refuses: compiled, it must raise as well."""
    if not _raises(sample, None):
        return 0
    if _raises(sample, "neuron"):
        tally.outcomes[DEVICE] += 1
    elif not _raises(sample, "aot_eager"):
        tally.outcomes[UPSTREAM] += 1
    else:
        tally.outcomes[FAILED] += 1
        tally.failures.append(f"no error for {_describe((sample.args, sample.kwargs))[:400]}")
    return 1


def _raises(sample: Sample, backend: str | None) -> bool:
    function = sample.make()
    if backend is not None:
        torch._dynamo.reset()
        function = torch.compile(function, backend=backend, dynamic=False)
    args, kwargs = copied((sample.args, sample.kwargs))
    try:
        function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - eager's error may come wrapped by Dynamo
        return True
    return False
