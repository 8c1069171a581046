"""The command line: ``neuron-compile …``, or ``python -m neuron_compile …``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import cache, compile, devices, doctor, inspect, operators
from .console import UsageError

_DESCRIPTION = """\
Compile, inspect and diagnose for torch.compile(model, backend="neuron")."""
EXIT_STATUS = """\
exit status: 0 all is well; 1 problems were found (each is printed); 2 a wrong argument, or a file
that cannot be used. Every command takes --json, whose keys are those of docs/command-line.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as in ``sys.argv[1:]``, which is the default.

    Returns:
        the exit status: 0, 1 where problems were found, 2 for a wrong argument or file; that of
        the script for ``compile SCRIPT``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, behind = _split(given)
    options = _parser().parse_args(given)
    options.behind = behind
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads has seen enough; Python must not fail again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, OSError) as error:
        print(f"neuron-compile: {error}", file=sys.stderr)
        return 2
    return status


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """What stands behind ``--`` belongs to the script of ``compile``, options included."""
    if given[:1] == ["compile"] and "--" in given:
        place = given.index("--")
        return given[:place], given[place + 1 :]
    return given, []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="neuron-compile",
        description=_DESCRIPTION,
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (compile, inspect, operators, doctor, devices, cache):
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """``--version``, which looks the versions up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from .environment import version_line

        print(version_line())
        parser.exit()
