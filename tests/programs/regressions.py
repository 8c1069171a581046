"""Programs that once differed from eager, as small as they were made, and why they did."""

from __future__ import annotations

import dataclasses

import torch

from .program import Input, Program, parsed


@dataclasses.dataclass(frozen=True)
class Regression:
    """A program, and what was wrong with it."""

    program: Program
    reason: str


REGRESSIONS = {
    "a_view_in_another_dtype": Regression(
        parsed(
            "plain",
            """
            v0 = x0 + x0
            v1 = v0.view(torch.int32)
            return (v0, v1, )
            """,
            Input((3,), dtype=torch.int64),
        ),
        "the view was a result of its own: writing to one did not change the other",
    ),
}
