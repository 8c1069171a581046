"""What ``neuron-compile compile`` prints for people."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .console import Column, facts, heading, say, seconds_text, table

if TYPE_CHECKING:
    from ..records import GraphRecord, OperatorRecord, Report
    from .measure import Measured


def script_page(report: Report) -> None:
    """The report of a process, after a script."""
    heading("neuron-compile")
    totals = {
        field.name.replace("_", " "): getattr(report, field.name)
        for field in dataclasses.fields(report)
        if isinstance(getattr(report, field.name), int)
    }
    facts({name: value for name, value in totals.items() if value})
    _graphs(report.graphs)
    _elsewhere(report.graphs)
    told = {record.operator for graph in report.graphs for record in graph.operators}
    others = [item for item in report.fallback_reasons.items() if item[0] not in told]
    table("In eager PyTorch", ["what", "why"], others)
    table("Not padded", ["why"], [(reason,) for reason in report.unpadded_reasons])


def measured_page(target: str, measured: Measured) -> None:
    """What became of the model of a factory."""
    found = {name: measured.totals[name] for name in ("compilations", "cache_hits")}
    facts(
        {
            "model": target,
            "what": "forward and backward" if measured.training else "inference",
            **{name.replace("_", " "): count for name, count in found.items()},
        }
    )
    faster = measured.eager_each / measured.compiled_each if measured.compiled_each else 0.0
    rows = [
        (
            "first call",
            seconds_text(measured.eager_first),
            seconds_text(measured.compiled_first),
            "",
        ),
        (
            f"each call, median of {measured.calls}",
            seconds_text(measured.eager_each),
            seconds_text(measured.compiled_each),
            f"{faster:.2f}x",
        ),
    ]
    sides = [Column(name, right=True) for name in ("eager", "compiled", "speed-up")]
    table("Time", ["", *sides], rows)
    _comparison(measured)
    _graphs(measured.graphs)
    places = [(item.user_line or "-", item.reason) for item in measured.breaks]
    table("Graph breaks", ["your line", "why"], places)
    _elsewhere(measured.graphs)
    if not measured.dynamo_graphs:
        say("nothing was compiled: Dynamo found no tensor operators in the call")


def _comparison(measured: Measured) -> None:
    if measured.random:
        print()
        say(
            "not compared with eager, which differs from itself under two seeds: the model draws "
            "random numbers (--option eager_rng=true makes them eager's), or is not deterministic"
        )
        return
    rows = [
        (item.what, item.tensors, f"{item.difference:.1e}", "ok" if item.good else "problem")
        for item in measured.compared
    ]
    title = "Largest difference from eager, over eager's largest value"
    table(title, ["", Column("tensors", right=True), Column("difference", right=True), ""], rows)


def _graphs(graphs: Sequence[GraphRecord]) -> None:
    """One line a kind of graph."""
    kinds = list(dict.fromkeys(graph.kind for graph in graphs))
    rows = []
    for kind in kinds:
        same = [graph for graph in graphs if graph.kind == kind]
        rows.append(
            (
                kind,
                len(same),
                sum(graph.on_device for graph in same),
                sum(graph.in_fallback for graph in same),
                sum(graph.partitions for graph in same),
                sum(graph.vendor_kernels for graph in same),
                seconds_text(sum(sum(graph.seconds.values()) for graph in same)),
            )
        )
    names = ("graphs", "on device", "eager", "partitions", "vendor kernels", "compile time")
    table("Graphs", ["kind", *(Column(name, right=True) for name in names)], rows)


def _elsewhere(graphs: Iterable[GraphRecord]) -> None:
    """The operators that do not run on the device, with the user's lines."""
    found: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for graph in graphs:
        for record in graph.operators:
            if record.where != "device":
                found[_key(record)] += 1
    rows = [(count, *key) for key, count in found.most_common()]
    columns: list[Column | str] = [
        Column("", right=True),
        "operator",
        Column("where", whole=True),
        "why",
        "your line",
    ]
    table("Not on the device", columns, rows)


def _key(record: OperatorRecord) -> tuple[Any, ...]:
    return record.signature, record.where, record.reason, record.user_line or "-"
