"""The command line: ``python -m neuron_compile operators``."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Sequence

from .operators import DECOMPOSED, DEVICE, EAGER, Support, all_operators, support


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="neuron-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    operators = commands.add_parser("operators", help="where operators run")
    operators.add_argument("names", nargs="*", help="operators; all that are known by default")
    operators.add_argument("--where", choices=(DEVICE, DECOMPOSED, EAGER), help="only these")
    operators.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        answers = _answers(options.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _print([item for item in answers if options.where in (None, item.where)], options.json)
    return 0


def _answers(names: Sequence[str]) -> Sequence[Support]:
    if not names:
        return all_operators()
    return [answer for name in names for answer in support(name)]


def _print(answers: Sequence[Support], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(item) for item in answers], indent=1))
        return
    width = max((len(item.operator) for item in answers), default=0)
    for item in answers:
        detail = "; ".join(filter(None, (item.how, item.reason)))
        print(f"{item.operator:<{width}}  {item.where:<10}  {detail}".rstrip())
    counts = collections.Counter(item.where for item in answers)
    print(", ".join(f"{count} {where}" for where, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
