"""``neuron-compile doctor``: what is wrong here, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .cache import findings as cache_findings
from .console import Column, add_command, counted, print_json, progress, say, table
from .environment import NOTE, OK, PROBLEM, Finding, findings
from .selftest import TOLERANCE

_MORE = """\
Versions, registration, environment variables and the cache are looked at; then a self-test
compiles a small model, forward and backward, in a process of its own and compares with eager.

exit status: 0; 1 where there is a problem."""
_FIRST_LINES, _LONGEST = 8, 400


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "doctor", _run, "what is wrong here, and what to do", _MORE)
    parser.add_argument("--no-self-test", action="store_true", help="compile nothing")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS", help="of the self-test (300)"
    )


def _run(options: argparse.Namespace) -> int:
    found = [*findings(), *cache_findings()]
    if not options.no_self_test:
        with progress("self-test"):
            found += self_test(options.timeout)
    problems = sum(item.status == PROBLEM for item in found)
    if options.json:
        print_json({"problems": problems, "findings": [dataclasses.asdict(x) for x in found]})
        return min(problems, 1)
    columns: list[Column | str] = [Column("check", whole=True), Column("", whole=True), "found"]
    table("", columns, [(item.check, item.status, item.detail) for item in found])
    advised = [(item.check, item.status, item.advice) for item in found if item.advice]
    table("What to do", [Column("about", whole=True), Column("", whole=True), "do"], advised)
    print()
    say(counted(problems, "problem", "problems"))
    return min(problems, 1)


def self_test(
    timeout: float,
    command: Sequence[str] = (
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        f"{__package__}.selftest",
    ),
) -> list[Finding]:
    """Compile a small model in a process of its own.

    Args:
        timeout: seconds until it is taken for hung.
        command: prints what :func:`neuron_compile.cli.selftest.run` returns, as JSON.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            # It is the compiler that is tested, not what it made before.
            env={**os.environ, "NEURON_COMPILE_CACHE": "0"},
        )
    except subprocess.TimeoutExpired:
        return [
            Finding(
                "self-test",
                PROBLEM,
                f"not done after {timeout:g} seconds",
                "try --timeout with more; TORCH_LOGS=+neuron_compile shows how far it comes",
            )
        ]
    if done.returncode:
        return [_failure(done)]
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return [Finding("self-test", PROBLEM, f"printed {done.stdout!r}", _REPORT)]
    return [*_platforms(result), _judged(result)]


_REPORT = f"run '{sys.executable} -m {__package__}.selftest' and report what it prints"


def _failure(done: subprocess.CompletedProcess[str]) -> Finding:
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        said = " / ".join(line.strip() for line in lines[:_FIRST_LINES])
        return Finding(
            "self-test",
            PROBLEM,
            f"native code ended the process by {name}: {said or 'no word'}",
            "first mend the problems and notes above, versions and XLA_FLAGS above all; then "
            + _REPORT,
        )
    return Finding("self-test", PROBLEM, _raised(lines) or "failed without a word", _REPORT)


def _raised(lines: Sequence[str]) -> str:
    """The error of the last traceback, whose message may have several lines; else the last line."""
    places = [index for index, line in enumerate(lines) if line.startswith("Traceback ")]
    if not places:
        return lines[-1] if lines else ""
    behind = (line for line in lines[places[-1] + 1 :] if not line.startswith(" "))
    return next(behind, lines[-1])[:_LONGEST]


def _platforms(result: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("PJRT platforms", OK, ", ".join(result["platforms"]))
    for name, error in result["platform_errors"].items():
        yield Finding(
            f"PJRT {name}", NOTE, f"does not open: {error}", "uninstall its plugin, or mend it"
        )


def _judged(result: dict[str, Any]) -> Finding:
    took = f"{result['compilations']} compilations in {result['seconds']:.1f} s"
    if not result["compilations"]:
        return Finding("self-test", PROBLEM, "nothing was compiled", _REPORT)
    # Written so that NaN, too, is a problem.
    if not result["difference"] <= TOLERANCE:
        detail = f"results or gradients differ from eager by {result['difference']:.1e}"
        return Finding("self-test", PROBLEM, f"{detail} ({took})", _REPORT)
    if result["in_fallback"]:
        reasons = "; ".join(f"{op}: {why}" for op, why in result["fallback_reasons"].items())
        detail = f"{result['in_fallback']} operators ran in eager PyTorch: {reasons}"
        return Finding("self-test", PROBLEM, detail, _REPORT)
    detail = f"forward and backward equal eager's within {result['difference']:.0e}; {took}"
    return Finding("self-test", OK, detail)
