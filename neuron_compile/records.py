"""What was compiled, what ran where, and why: the record behind ``report`` and ``explain``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from .compile_pool import pool
from .errors import FallbackWarning

#: Where an operator runs: on the device, in eager fallback, or (by ``eager_rng``) in ATen because
#: it draws random numbers.
DEVICE, EAGER, HOST = "device", "eager", "host"


@dataclasses.dataclass(frozen=True)
class OperatorRecord:
    """One operator of one graph: where it runs, why not on the device, the user's line."""

    operator: str
    signature: str
    where: str
    reason: str = ""
    user_line: str = ""


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """One compiled graph. ``seconds`` maps phases to their time; ``kind`` is inference, forward
    or backward; ``vendor_kernels`` counts the operators that a target's own kernel computes."""

    kind: str
    operators: tuple[OperatorRecord, ...]
    partitions: int
    vendor_kernels: int
    seconds: Mapping[str, float]

    @property
    def on_device(self) -> int:
        """Operators lowered to StableHLO."""
        return sum(record.where == DEVICE for record in self.operators)

    @property
    def in_fallback(self) -> int:
        """Operators that run in eager PyTorch for lack of a lowering."""
        return sum(record.where == EAGER for record in self.operators)


@dataclasses.dataclass(frozen=True)
class Report:
    """Totals of this process since its start or :func:`reset_report`.

    ``cache_hits`` and ``cache_misses`` count the graphs that were looked up in the cache on disk.
    ``specializations`` counts the executables of graphs with dynamic sizes; ``padded`` are those
    among them that serve a range of sizes, and ``unpadded_reasons`` says of graphs that do not
    bear padding why. ``in_background`` counts the compilations that wait or run now, and
    ``eager_calls`` the calls that eager PyTorch served meanwhile. ``graphs`` holds the records of
    the last thousand graphs.
    """

    compilations: int
    cache_hits: int
    cache_misses: int
    operators_on_device: int
    operators_in_fallback: int
    specializations: int
    padded: int
    refusals: int
    in_background: int
    eager_calls: int
    fallback_reasons: Mapping[str, str]
    unpadded_reasons: tuple[str, ...]
    graphs: tuple[GraphRecord, ...]

    def __str__(self) -> str:
        lines = [
            f"neuron: {self.compilations} compilations, {self.cache_hits} graphs from the cache, "
            f"{self.operators_on_device} operators on "
            f"the device, {self.operators_in_fallback} in eager fallback, "
            f"{self.specializations} specializations of dynamic graphs ({self.padded} padded), "
            f"{self.refusals} refusals by Torch-MLIR or XLA"
        ]
        if self.in_background or self.eager_calls:
            lines.append(
                f"  background: {self.in_background} compilations wait or run; eager PyTorch "
                f"served {self.eager_calls} calls meanwhile"
            )
        lines += [f"  eager: {op}: {reason}" for op, reason in self.fallback_reasons.items()]
        lines += [f"  not padded: {reason}" for reason in self.unpadded_reasons]
        return "\n".join(lines)


_KEPT_GRAPHS = 1000
_lock = threading.Lock()
_counters: collections.Counter[str] = collections.Counter()
_graphs: collections.deque[GraphRecord] = collections.deque(maxlen=_KEPT_GRAPHS)
_reasons: dict[str, str] = {}
_unpadded: dict[str, None] = {}  # in the order of their coming
_warned: set[str] = set()
_collectors: list[list[GraphRecord]] = []
_in_thread = threading.local()


def record_graph(record: GraphRecord) -> None:
    """Add a compiled graph; warns once a process about each operator in fallback.

    A graph that is only explained gives no warning, and uses none up.
    """
    eager = {item.operator: item for item in record.operators if item.where == EAGER}
    # What a thread of the pool compiles is not what somebody collects in the foreground.
    collectors = _collectors if getattr(_in_thread, "held", None) is None else []
    with _lock:
        _graphs.append(record)
        _counters["operators_on_device"] += record.on_device
        _counters["operators_in_fallback"] += record.in_fallback
        for collected in collectors:
            collected.append(record)
        _reasons.update((name, item.reason) for name, item in eager.items())
        fresh = [] if collectors else [name for name in eager if name not in _warned]
        _warned.update(fresh)
    for name in fresh:
        item = eager[name]
        _warn(
            f"{item.signature} runs in eager PyTorch: {item.reason}"
            + (f" (at {item.user_line})" if item.user_line else "")
            + ". neuron_compile.explain() lists every such operator; "
            "options={'fullgraph_on_device': True} makes it an error."
        )


def _warn(message: str) -> None:
    held = getattr(_in_thread, "held", None)
    if held is None:
        warnings.warn(message, FallbackWarning, stacklevel=3)
    else:
        held.append(message)


@contextlib.contextmanager
def holding_warnings() -> Iterator[list[str]]:
    """Hold back this thread's warnings about fallbacks; :func:`warn_held` gives them later.

    Python's filters of warnings belong to whoever calls compiled code, not to a thread that
    compiles for them.
    """
    held: list[str] = []
    _in_thread.held = held
    try:
        yield held
    finally:
        _in_thread.held = None


def warn_held(held: list[str]) -> None:
    """Give warnings that were held back, once."""
    while held:
        warnings.warn(held.pop(0), FallbackWarning, stacklevel=3)


def note_fallback(what: str, reason: str) -> None:
    """Give ``report`` a reason for a fallback that no compiled graph tells of."""
    with _lock:
        _reasons[what] = reason


def count(name: str, amount: int = 1) -> None:
    """Add to a counter, a field of :class:`Report`."""
    with _lock:
        _counters[name] += amount


def note_unpadded(reason: str) -> None:
    """Note why a graph with dynamic sizes could not be padded."""
    with _lock:
        _unpadded[reason] = None


def report() -> Report:
    """What this process compiled so far, and where its operators run."""
    with _lock:
        return Report(
            compilations=_counters["compilations"],
            cache_hits=_counters["cache_hits"],
            cache_misses=_counters["cache_misses"],
            operators_on_device=_counters["operators_on_device"],
            operators_in_fallback=_counters["operators_in_fallback"],
            specializations=_counters["specializations"],
            padded=_counters["padded"],
            refusals=_counters["refusals"],
            in_background=pool().pending(),
            eager_calls=_counters["eager_calls"],
            fallback_reasons=dict(_reasons),
            unpadded_reasons=tuple(_unpadded),
            graphs=tuple(_graphs),
        )


def reset_report() -> None:
    """Set every total to zero and let each operator's warning be given again."""
    with _lock:
        _counters.clear()
        _graphs.clear()
        _reasons.clear()
        _unpadded.clear()
        _warned.clear()


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphRecord]]:
    """Collect the records of the graphs that are compiled meanwhile."""
    collected: list[GraphRecord] = []
    with _lock:
        _collectors.append(collected)
    try:
        yield collected
    finally:
        with _lock:
            _collectors[:] = [item for item in _collectors if item is not collected]


def as_data(value: Any) -> Any:
    """A report, an explanation or a record as plain dicts and lists (for JSON)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_data(item) for item in value]
    return value
