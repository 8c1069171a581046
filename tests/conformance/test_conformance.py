"""The suite's default size: two samples an entry, float32 with gradients, int64, and errors.

``make conformance`` runs every sample in every dtype; what came of that is ``results.json``.
"""

from __future__ import annotations

import pytest

from . import page
from .catalog import Case, cases
from .expected import FAILURES, expected_failure
from .judge import DEVICE, FAILED, UPSTREAM, judge

# The samples of PyTorch's tests call what PyTorch deprecates and warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 2
STATUS = {item["key"]: page.status(item) for item in page.load()["cases"]}


@pytest.mark.parametrize("case", list(cases(("float32", "int64"))), ids=lambda case: case.key)
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
