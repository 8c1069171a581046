"""Judges the cases whose keys come in on standard input, one line of JSON each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings

from .catalog import Case
from .judge import judge


def main() -> None:
    """Read ``key limit`` lines until the input ends."""
    # What libraries print shall not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        key, limit = line.rstrip("\n").rsplit(" ", 1)
        # An empty line says that the case goes on.
        result = judge(
            Case.of(key),
            int(limit) or None,
            alive=lambda: print(file=answers, flush=True),
        )
        data = {**dataclasses.asdict(result), "status": result.status}
        answers.write(json.dumps(data) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
