"""``python -m tests.programs.worker SEED COUNT``: judges one part of the stream, for ``__main__``.

Answers with a line of JSON for each program, and one more before each batch, so that a crash can
be laid at somebody's door.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from typing import Any

import torch

from .check import FAILED, minimized, outcomes, stream


def main() -> None:
    """Judge ``--count`` programs of the stream with ``--seed``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--padded", action="store_true")
    options = parser.parse_args()
    # What libraries print shall not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # FakeTensor logs at length what upstream fails at.
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)

    def answer(**data: Any) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    programs = stream(options.seed, options.count)
    numbers = {program: index for index, program in enumerate(programs)}
    for outcome in outcomes(
        programs,
        # A graph is padded if each of its operators can be.
        1 if options.padded else options.batch,
        options.padded,
        lambda batch: answer(running=[str(item) for item in batch]),
    ):
        program, small = outcome.program, ""
        if outcome.status == FAILED and options.minimize:
            small = str(minimized(options.seed, options.count, program, options.padded))
        answer(
            seed=options.seed,
            number=numbers[program],
            status=outcome.status,
            mode=program.mode,
            operations=[step.operation for step in program.steps],
            fallback=dict(outcome.fallback),
            padding=outcome.padding,
            failure=outcome.failure,
            source=str(program) if outcome.failure else "",
            minimized=small,
        )


if __name__ == "__main__":
    sys.exit(main())
