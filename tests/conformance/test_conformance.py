"""The suite's default size: two samples an entry, float32 with gradients, int64, and errors.

``make conformance`` runs every sample in every dtype.
"""

from __future__ import annotations

import pytest

from .catalog import ERRORS, Case, cases
from .expected import expected_failure, expected_fallback
from .judge import DEVICE, FAILED, UPSTREAM, judge

# The samples of PyTorch's tests call what PyTorch deprecates and warns of.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 2
#: An error sample costs a compilation of its own, and eager's checks come from FakeTensor.
CASES = [
    case
    for case in cases(("float32", "int64"))
    if case.mode != ERRORS or expected_failure(case) is None
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_case(case: Case) -> None:
    result = judge(case, SAMPLES)
    if (reason := expected_failure(case)) is not None:
        if result.status != FAILED:
            pytest.skip("the samples that fail are not among these")
        pytest.xfail(reason)
    assert result.status != FAILED, "\n".join(result.failures)
    if expected_fallback(case) is None:
        assert result.status in (DEVICE, UPSTREAM), result.fallback
