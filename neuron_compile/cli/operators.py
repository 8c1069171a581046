"""``neuron-compile operators``: where operators run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .console import Column, UsageError, add_command, print_json, say, table

if TYPE_CHECKING:
    from ..operators import Support

#: ``DEVICE``, ``DECOMPOSED`` and ``EAGER`` of neuron_compile.operators, whose import is slow.
WHERE = ("device", "decomposed", "eager")
_MORE = """\
device: lowered to StableHLO. decomposed: PyTorch breaks it into other operators. eager: it runs in
ATen, between two compiled partitions.

example: neuron-compile operators gelu cummax
exit status: 0; 2 where there is no operator of a name."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "operators", _run, "where operators run", _MORE)
    parser.add_argument(
        "names", nargs="*", help="operators, such as aten.add or gelu; all that are known if none"
    )
    parser.add_argument("--where", choices=WHERE, help="only these")


def _run(options: argparse.Namespace) -> int:
    answers = [item for item in _answers(options.names) if options.where in (None, item.where)]
    if options.json:
        print_json([dataclasses.asdict(item) for item in answers])
        return 0
    columns: list[Column | str] = [
        Column("operator"),
        Column("where", whole=True),
        Column("lowering"),
        Column("note"),
    ]
    table("", columns, [(x.operator, x.where, x.how, x.reason) for x in answers])
    counts = collections.Counter(item.where for item in answers)
    say(", ".join(f"{counts[where]} {where}" for where in WHERE if counts[where]) or "none")
    return 0


def _answers(names: Sequence[str]) -> Sequence[Support]:
    from ..operators import all_operators, support

    if not names:
        return all_operators()
    try:
        return [answer for name in names for answer in support(name)]
    except ValueError as error:
        raise UsageError(f"{error}; 'neuron-compile operators' lists those known") from error
