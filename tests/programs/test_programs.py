"""Some random programs, always the same; ``make programs`` runs thousands.

And those that once failed, in ``regressions.py``.
"""

from __future__ import annotations

import pytest

from .check import DEVICE, FAILED, FALLBACK, REFUSED, UPSTREAM, judge, minimized, stream
from .program import parsed
from .regressions import REGRESSIONS

# Programs do what PyTorch warns of, and fall back.
pytestmark = pytest.mark.filterwarnings("ignore")

# So many programs of ten steps or more in each of the parts.
PARTS, PROGRAMS, STEPS = 4, 15, 10


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part % 2)) for part in range(PARTS)]
)
def test_programs(part: int) -> None:
    """Each part is a stream of its own seed, so that processes can share them."""
    outcomes = judge(stream(part, PROGRAMS, STEPS))
    for outcome in outcomes:
        if outcome.status == FAILED:
            smallest = minimized(part, PROGRAMS, outcome.program)
            pytest.fail(f"{smallest}\n{outcome.failure}\nfound as {outcome.program}")
    # Of what is drawn, most must be programs.
    wasted = [outcome for outcome in outcomes if outcome.status in (REFUSED, UPSTREAM)]
    assert len(wasted) <= PROGRAMS // 3


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions(name: str) -> None:
    regression = REGRESSIONS[name]
    (outcome,) = judge([regression.program])
    assert outcome.status in (DEVICE, FALLBACK), f"{regression.reason}\n{outcome.failure}"


def test_a_program_is_read_as_it_is_printed() -> None:
    scope = {"parsed": parsed}
    exec("import torch\nfrom tests.programs.program import Input", scope)
    for program in stream(0, PROGRAMS):
        again = eval(str(program), scope)
        assert (str(again), again.source) == (str(program), program.source)
