"""The committed data, one record a case, and the page ``docs/operators.md`` made from it."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .catalog import DTYPES, ERRORS, INFERENCE, MODULE, OPERATOR, TRAINED, TRAINING, Case
from .expected import FAILURES, FALLBACKS, expected_failure, expected_fallback

STATUSES = ("device", "fallback", "failed", "crashed", "hung", "upstream")
DATA = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

#: Python's functions on sizes carry an address in their name.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SYMBOLS = {
    "device": "●",
    "fallback": "eager",
    "expected failure": "✗",
    "failed": "**failed**",
    "upstream": "·",
}

_HEADER = """\
# Operators

PyTorch's own operator and module databases (`op_db`, `module_db`), run through
`torch.compile(fn, backend="neuron", fullgraph=True, dynamic=False)` and compared with eager:
values, dtypes, shapes, strides, `None`s, shared memory, changed arguments, and gradients. Made by
`make conformance`; the data behind it is `tests/conformance/results.json`.

- **●** every sample runs wholly on the device (lowered to StableHLO) with eager's results.
- **eager** the results are right, but in some sample an operator runs in eager PyTorch.
- **✗** an expected failure: see the list.
- **·** no sample that `backend="aot_eager"` can run (sparse layouts, sizes that depend on data).
- An empty cell: eager has no such dtype.
"""


def status(record: Mapping[str, Any]) -> str:
    """The status of a case in the page: a failure that the list names is an expected one."""
    found = str(record["status"])
    if found in ("failed", "crashed", "hung"):
        return "expected failure" if expected_failure(Case.of(record["key"])) else "failed"
    return found


def disagreements(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Where the lists of expected failures and fallbacks and the results are not the same.

    Both ways: a failure that no entry names, and an entry that nothing bears out.
    """
    found: dict[str, set[str]] = {"expected failure": set(), "fallback": set()}
    wrong = []
    for item in records:
        case, what = Case.of(item["key"]), status(item)
        found.setdefault(what, set()).add(case.entry)
        if what == "failed":
            wrong.append(f"{case.key} fails and is not in FAILURES")
        if what == "fallback" and expected_fallback(case) is None:
            wrong.append(f"{case.key} falls back and is not in FALLBACKS")
    stale = [(name, "FAILURES") for name in FAILURES if name not in found["expected failure"]]
    stale += [(name, "FALLBACKS") for name in FALLBACKS if name not in found["fallback"]]
    return wrong + [f"{name} is in {where} and nothing bears that out" for name, where in stale]


def save(results: Iterable[Mapping[str, Any]], samples: int) -> None:
    """Write the data: what was run, and of each case its outcomes and operators in fallback."""
    import jax
    import jaxlib
    import torch

    versions = {"torch": torch.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    lines = [
        json.dumps(
            {
                "key": item["key"],
                "status": item["status"],
                "samples": item["samples"],
                "outcomes": item["outcomes"],
                "backward": item["backward"],
                "fallback": sorted({_ADDRESS.sub("", name) for name in item["fallback"]}),
            }
        )
        for item in sorted(results, key=lambda item: str(item["key"]))
    ]
    head = json.dumps({"versions": versions, "samples_a_case_at_most": samples or "all"})
    DATA.write_text(head[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n")


def load() -> dict[str, Any]:
    """The committed data."""
    return dict(json.loads(DATA.read_text()))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else "0"


def _totals(records: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    grouped = collections.defaultdict(list)
    for item in records:
        case = Case.of(item["key"])
        grouped[case.kind, case.mode, case.dtype].append(item)
    order = [
        (kind, mode, dtype)
        for kind in (OPERATOR, MODULE)
        for mode in (INFERENCE, TRAINING, ERRORS)
        for dtype in DTYPES
    ]
    names = {INFERENCE: "forward", TRAINING: "forward and backward", ERRORS: "errors raised"}
    for group in order:
        items = grouped.get(group, [])
        counts = collections.Counter(map(status, items))
        counted = len(items) - counts["upstream"]
        if not counted:
            continue
        kind, mode, dtype = group
        yield (
            f"{kind}s, {names[mode]}",
            dtype if mode != ERRORS else "",
            counted,
            sum(item["samples"] for item in items),
            _share(counts["device"], counted),
            counts["fallback"],
            counts["expected failure"],
            counts["failed"],
            counts["upstream"],
        )


def _grid(records: Sequence[Mapping[str, Any]], kind: str) -> Iterator[str]:
    cells: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for item in records:
        case = Case.of(item["key"])
        if case.kind == kind and case.mode != ERRORS:
            column = case.dtype if case.mode == INFERENCE else f"{case.dtype} backward"
            cells[case.entry][column] = _SYMBOLS[status(item)]
    forward = DTYPES if kind == OPERATOR else TRAINED
    columns = [*forward, *(f"{dtype} backward" for dtype in TRAINED)]
    yield from _table(
        (kind, *columns),
        (
            (f"`{name}`", *(row.get(column, "") for column in columns))
            for name, row in sorted(cells.items())
        ),
    )


def _in_fallback(records: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    operators: dict[str, set[str]] = collections.defaultdict(set)
    for item in records:
        if status(item) == "fallback":
            operators[Case.of(item["key"]).entry].update(item["fallback"])
    for name, found in sorted(operators.items()):
        known = FALLBACKS.get(name)
        listed = ", ".join(f"`{operator}`" for operator in sorted(found))
        yield f"`{name}`", listed, known.reason if known else ""


def text(data: Mapping[str, Any]) -> str:
    """The page's Markdown."""
    records = data["cases"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    limit = data["samples_a_case_at_most"]
    how = "all samples" if limit == "all" else f"at most {limit} samples a case, evenly spread"
    columns = ("what", "dtype", "entries", "samples", "device", "eager fallback")
    lines = [
        _HEADER,
        f"Measured with {versions}, on {how}.\n",
        "## Totals\n",
        "Entries without a sample that `aot_eager` runs are counted in the last column alone.\n",
        *_table((*columns, "expected failure", "failed", "not run"), _totals(records)),
        "\n## In eager fallback\n",
        *_table(("entry", "operators in eager", "why"), _in_fallback(records)),
        "\n## Expected failures\n",
        *_table(
            ("entry", "where", "why"),
            (
                (f"`{name}`", ", ".join(sorted(item.dtypes | item.modes)) or "all", item.reason)
                for name, item in sorted(FAILURES.items())
            ),
        ),
        "\n## Every operator\n",
        *_grid(records, OPERATOR),
        "\n## Every module\n",
        *_grid(records, MODULE),
    ]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write the page from the committed data."""
    PAGE.write_text(text(load()))
