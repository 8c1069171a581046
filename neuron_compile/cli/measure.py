"""Compiles a model, compares it with eager PyTorch, and times both in turn."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import NeuronError
from ..explainer import GraphBreak, watching
from ..records import GraphRecord, as_data, collecting, report, reset_report
from ..runtime import PlatformError
from ..settings import Settings
from .console import progress

#: Largest difference over eager's largest value; other dtypes must be equal.
TOLERANCES = {
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-9,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
#: Timing ends after this many seconds, be it after fewer calls than asked for.
_LONGEST = 20.0
GRADIENTS = "gradients"
_LEAST = 0.01


@dataclasses.dataclass(frozen=True)
class Compared:
    """What was compared: ``difference`` is the largest, over eager's largest value in that tensor
    (``inf`` for another structure, shape, dtype or place of NaN).

    Of gradients it is over a hundredth of the largest of all, if that is more: that of a bias
    before a normalization, for one, is nothing but rounding.
    """

    what: str
    tensors: int
    difference: float
    good: bool


@dataclasses.dataclass(frozen=True)
class Measured:
    """What :func:`measure` found; seconds are medians of ``calls``, but for first calls.

    ``totals`` are the counters of :class:`neuron_compile.Report`: compilations, hits of the cache.
    ``random``: eager's results differ under two seeds, so they were not compared.
    """

    training: bool
    calls: int
    eager_first: float
    eager_each: float
    compiled_first: float
    compiled_each: float
    random: bool
    totals: Mapping[str, int]
    compared: tuple[Compared, ...]
    dynamo_graphs: int
    breaks: tuple[GraphBreak, ...]
    graphs: tuple[GraphRecord, ...]

    @property
    def good(self) -> bool:
        """Whether something was compiled and all that was compared agrees."""
        return self.dynamo_graphs > 0 and all(item.good for item in self.compared)

    def data(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON; a difference that is not finite is ``None``."""
        data: dict[str, Any] = as_data(self)
        for item in data["compared"]:
            if not math.isfinite(item["difference"]):
                item["difference"] = None
        counts = {
            "operators_on_device": sum(graph.on_device for graph in self.graphs),
            "operators_in_fallback": sum(graph.in_fallback for graph in self.graphs),
        }
        return {**data, **counts, "good": self.good}


Call = Callable[[], dict[str, Any]]


def measure(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    settings: Settings,
    training: bool,
    repeat: int,
    tolerance: float | None = None,
) -> Measured:
    """Compile ``model`` and compare the first call's results with eager's, from equal states.

    Args:
        model: a module or function; it is copied, and not changed.
        args, kwargs: its arguments, copied likewise.
        training: forward and backward of the sum of the results, in training mode; else inference.
        repeat: calls to time.
        tolerance: in the place of :data:`TOLERANCES`.

    Raises:
        NeuronError, PlatformError: where the settings forbid what the model needs.
    """
    with progress("eager", 2, still=True) as step:
        eager, eager_first, wanted = _first(model, args, kwargs, training, None)
        step()
        *_, other = _first(model, args, kwargs, training, None, seed=1)
        step()
    random = not settings.eager_rng and not all(
        item.good for item in compare(other, wanted, tolerance)
    )
    backend, seen = watching(settings)
    reset_report()
    with progress("first call: compile", still=True), collecting() as graphs:
        try:
            compiled, compiled_first, actual = _first(model, args, kwargs, training, backend)
        except Exception as error:
            # Dynamo's error around ours says nothing more.
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, NeuronError | PlatformError):
                raise inner from None
            raise
        # A second call may compile once more, for an optimizer's state or a changed size.
        compiled()
    totals = as_data(report())
    eager()
    times = _timed(eager, compiled, repeat)
    return Measured(
        training=training,
        calls=len(times[0]),
        eager_first=eager_first,
        eager_each=statistics.median(times[0]),
        compiled_first=compiled_first,
        compiled_each=statistics.median(times[1]),
        random=random,
        totals={name: value for name, value in totals.items() if isinstance(value, int)},
        compared=() if random else tuple(compare(actual, wanted, tolerance)),
        dynamo_graphs=seen.graphs,
        breaks=tuple(seen.breaks),
        graphs=tuple(graphs),
    )


def _first(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool,
    backend: Callable[..., Any] | None,
    seed: int = 0,
) -> tuple[Call, float, dict[str, Any]]:
    """Call a copy for the first time: further calls, the seconds, and what it gave."""
    model, args, kwargs = copy.deepcopy((model, tuple(args), dict(kwargs)))
    if isinstance(model, torch.nn.Module):
        model.train(training)
    subject: Callable[..., Any] = model
    if backend is not None:
        subject = torch.compile(  # type: ignore[call-overload]  # the stubs lack the last
            model, backend=backend, isolate_recompiles=True
        )
    call = (
        _training(subject, model, args, kwargs) if training else _inference(subject, args, kwargs)
    )
    torch.manual_seed(seed)
    started = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - started
    found = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), found)
    if training and isinstance(model, torch.nn.Module):
        found["buffers"] = {name: x.detach().clone() for name, x in model.named_buffers()}
    return call, seconds, found


def _inference(subject: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    def call() -> dict[str, Any]:
        with torch.no_grad():
            return {"results": subject(*args, **kwargs)}

    return call


def _training(
    subject: Callable[..., Any],
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call:
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    subjects = [x for x in (*parameters, *leaves) if x.requires_grad and x.is_leaf]

    def call() -> dict[str, Any]:
        for tensor in subjects:
            tensor.grad = None
        results = subject(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
        outputs = [x for x in outputs if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        return {"results": results, GRADIENTS: [x.grad for x in subjects]}

    return call


def _timed(eager: Call, compiled: Call, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of calls, in turn, so that both meet the same noise."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + _LONGEST
    with progress("timing", repeat, still=True) as step:
        for _ in range(repeat):
            for call, spent in zip((eager, compiled), times, strict=True):
                started = time.perf_counter()
                call()
                spent.append(time.perf_counter() - started)
            step()
            if time.perf_counter() > end:
                break
    return times


def compare(
    actual: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float | None = None
) -> list[Compared]:
    """Compare nested results by their names; what has nothing in it is left out."""
    found = [_compared(what, actual[what], wanted[what], tolerance) for what in wanted]
    return [item for item in found if item.tensors or not item.good]


def _compared(what: str, actual: Any, wanted: Any, tolerance: float | None) -> Compared:
    mine, my_structure = pytree.tree_flatten(actual)
    theirs, structure = pytree.tree_flatten(wanted)
    tensors = sum(isinstance(item, torch.Tensor) for item in theirs)
    if my_structure != structure:
        return Compared(what, tensors, math.inf, False)
    worst, good = 0.0, True
    least = _LEAST * max(map(_largest, theirs), default=0.0) if what == GRADIENTS else 0.0
    for a, b in zip(mine, theirs, strict=True):
        apart = _difference(a, b, least)
        allowed = tolerance
        if allowed is None:
            allowed = TOLERANCES.get(b.dtype, 0.0) if isinstance(b, torch.Tensor) else 0.0
        worst, good = max(worst, apart), good and apart <= allowed
    return Compared(what, tensors, worst, good)


def _largest(value: Any) -> float:
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0.0
    return value.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _difference(actual: Any, wanted: Any, least: float) -> float:
    """The largest difference of two leaves over the largest value of ``wanted``, or ``least``."""
    if not isinstance(wanted, torch.Tensor):
        return 0.0 if type(actual) is type(wanted) and actual == wanted else math.inf
    if not isinstance(actual, torch.Tensor) or actual.shape != wanted.shape:
        return math.inf
    if actual.dtype is not wanted.dtype:
        return math.inf
    if not wanted.numel():
        return 0.0
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    a, b = actual.to(wide), wanted.to(wide)
    ends = ~torch.isfinite(b)
    if not torch.equal(~torch.isfinite(a), ends):
        return math.inf
    # Infinities agree in sign, and NaN in place.
    if not torch.allclose(a[ends], b[ends], rtol=0, atol=0, equal_nan=True):
        return math.inf
    a, b = a[~ends], b[~ends]
    if not b.numel():
        return 0.0
    apart, largest = (a - b).abs().max().item(), max(b.abs().max().item(), least)
    return apart / largest if largest else (math.inf if apart else 0.0)
