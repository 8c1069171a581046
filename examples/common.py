"""What both jobs of the demonstration share: their result, timing and operator counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

EAGER: Final = "eager"
COMPILED: Final = "compiled"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Check:
    """One condition the demonstration must meet, with the figures it was judged by."""

    passed: bool
    description: str


@dataclass(frozen=True)
class OperatorCounts:
    """Operators the compiled graphs run on the device and in eager fallback."""

    on_device: int
    in_fallback: int


@dataclass(frozen=True)
class Timing:
    """How long one way of running a job takes."""

    first_call_seconds: float
    median_milliseconds: float


@dataclass(frozen=True)
class JobResult:
    """What a job hands back for the final table."""

    name: str
    call: str
    eager: Timing
    compiled: Timing
    operators: OperatorCounts | None
    checks: list[Check] = field(default_factory=list)

    @property
    def speed_up(self) -> float:
        """How many times faster than eager the compiled call is."""
        return self.eager.median_milliseconds / self.compiled.median_milliseconds


class OperatorMeter:
    """Reads how many operators were compiled since the last reading."""

    def __init__(self, backend: str) -> None:
        """Watch `backend`; only `neuron` keeps counts."""
        self._backend = backend
        self._seen = OperatorCounts(0, 0)

    def take(self) -> OperatorCounts | None:
        """Return the operators compiled since the last call, or None where nobody counts."""
        totals = self._totals()
        if totals is None:
            return None
        taken = OperatorCounts(
            totals.on_device - self._seen.on_device,
            totals.in_fallback - self._seen.in_fallback,
        )
        self._seen = totals
        return taken

    def _totals(self) -> OperatorCounts | None:
        if self._backend != "neuron":
            return None
        # Imported only once the compiled model has run: were it imported before, this demo
        # would work even if torch.compile did not find the backend by its entry point.
        try:
            from neuron_compile import report
        except ImportError:
            return None
        totals = report()
        return OperatorCounts(totals.operators_on_device, totals.operators_in_fallback)


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Run `call`; return what it returned and the seconds it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def interleaved_medians(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Time `calls` in turn, `rounds` times over; return each one's median in milliseconds.

    Interleaving spreads whatever else the machine does over all of them, and every other
    round goes through them backwards, so that none always runs on the other's warm cache.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(rounds):
        names = list(calls) if round_number % 2 == 0 else list(calls)[::-1]
        for name in names:
            seconds[name].append(timed(calls[name])[1])
        after_round()
    return {name: milliseconds(values) for name, values in seconds.items()}


def milliseconds(seconds: list[float]) -> float:
    """Return the median of `seconds` in milliseconds."""
    return 1000 * statistics.median(seconds)
