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
    "a_view_of_one_of_several_results": Regression(
        parsed(
            "plain",
            """
            v0 = torch.max(x0, dim=-1).indices
            v1 = v0[...]
            return (v1, v0, )
            """,
            Input((2,)),
        ),
        "views of one of an operator's several results were results of their own",
    ),
    "an_input_saved_and_changed": Regression(
        parsed(
            "grad",
            """
            v0 = torch.atan2(x0, x1.abs() + 1)
            v1 = x1.neg_()
            return (v0, )
            """,
            Input((), grad=True),
            Input((8, 1, 8), dtype=torch.uint8),
        ),
        "the partitioner saved the input, the forward changed it, and the backward was refused",
    ),
    "what_lies_between_the_elements": Regression(
        parsed(
            "plain",
            """
            v3 = x0.select(-3, 3)
            v7 = x0.as_strided((2, 3), (0, 1), 1)
            v3.mT.mul_(1)
            return (v7, )
            """,
            Input((4, 4, 4), dtype=torch.int32, layout="stepped"),
        ),
        "as_strided, in eager, looked between the elements of a tensor that the device had made",
    ),
    "results_that_share_memory_with_gaps": Regression(
        parsed(
            "plain",
            """
            v3 = torch.slice_scatter(x0, x0[1:] + x0[:1], 0, 1)
            v4 = v3.squeeze(2)
            return (v3, v4, )
            """,
            Input((4, 5, 1, 5), dtype=torch.bfloat16, layout="stepped"),
        ),
        "a view of a result that has gaps was a result of its own",
    ),
}
