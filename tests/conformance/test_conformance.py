"""The suite's default size: two samples an entry, float32 with gradients, int64, and errors.

Without the slow ones, entries with gradients have no case of their own for inference.
``make conformance`` runs every sample in every dtype; what came of that is ``results.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import page
from .catalog import INFERENCE, TRAINING, Case, cases
from .expected import FAILURES, expected_failure
from .judge import DEVICE, FAILED, UPSTREAM, judge

# The samples of PyTorch's tests call what PyTorch deprecates and warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 2
STATUS = {item["key"]: page.status(item) for item in page.load()["cases"]}


def chosen() -> Iterator[Any]:
    """The cases; slow are those whose forward another one runs, with a backward."""
    found = list(cases(("float32", "int64")))
    trained = {(x.kind, x.entry, x.dtype) for x in found if x.mode == TRAINING}
    for case in found:
        again = case.mode == INFERENCE and (case.kind, case.entry, case.dtype) in trained
        yield pytest.param(case, id=case.key, marks=[pytest.mark.slow] * again)


@pytest.mark.parametrize("case", list(chosen()))
def test_case(case: Case) -> None:
    result = judge(case, SAMPLES)
    if result.status == FAILED and (reason := expected_failure(case)) is not None:
        pytest.xfail(reason)
    assert result.status != FAILED, "\n".join(result.failures)
    if STATUS[case.key] == DEVICE:
        assert result.status in (DEVICE, UPSTREAM), result.fallback


def test_lists_agree_with_the_results() -> None:
    """Nothing fails or falls back that the lists do not name, and they name nothing else."""
    assert not page.disagreements(page.load()["cases"])
    assert len(FAILURES) <= 15


def test_page_is_made_from_the_results() -> None:
    assert page.PAGE.read_text() == page.text(page.load())
