"""``neuron-compile inspect FILE.neffpkg``: what a package holds, and whether it is whole.

The only place of the command line that knows of packages: it prints what
``neuron_compile.package.describe(path).data()`` gives, and what ``verify(path)`` complains of.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .console import Column, UsageError, facts, print_json, say, size_text, table


def inspect_package(options: argparse.Namespace) -> int:
    """Describe and verify a package; 1 where parts of it are damaged."""
    if options.stablehlo or options.hlo or options.cost:
        raise UsageError("--stablehlo, --hlo and --cost are for NEFF files, not for packages")
    if not options.file.is_file():
        raise UsageError(f"{options.file}: there is no such file")
    from .. import package as reader
    from ..errors import NeuronError

    try:
        data = reader.describe(options.file).data()
        problems = reader.verify(options.file)
    except NeuronError as error:
        raise UsageError(str(error)) from error  # which names the file
    if options.json:
        print_json({**data, "problems": problems})
    else:
        package_page(data, problems)
    return 1 if problems else 0


def package_page(data: Mapping[str, Any], problems: Sequence[str]) -> None:
    """Print a description (see ``neuron_compile.package.PackageDescription``)."""
    weights = data["weights"]
    size = size_text(sum(item["nbytes"] for item in weights))
    where = "inside" if data["has_weights"] else "left out: load(path, weights=...)"
    versions = data["versions"].items()
    facts(
        {
            "file": f"{data['path']}, {size_text(data['size'])}",
            "weights": f"{len(weights)}, {size}, {where}" if weights else "none",
            "made with": ", ".join(f"{name} {version}" for name, version in versions),
            "whole": "no" if problems else "yes: all checksums agree",
        }
    )
    for name, programs in data["entry_points"].items():
        columns: list[Column | str] = [
            Column("#", right=True),
            "takes",
            "gives",
            "changes",
            Column("platform", whole=True),
            Column("code", right=True),
        ]
        rows = [
            (
                index,
                _listed(item["inputs"]),
                _listed(item["outputs"]),
                ", ".join(item["mutations"]),
                item["platform"] or "-",
                size_text(item["stablehlo_bytes"] + item["executable_bytes"]),
            )
            for index, item in enumerate(programs)
        ]
        table(f"Entry point {name}", columns, rows)
    for problem in problems:
        say(f"problem: {problem}")


def _listed(leaves: Mapping[str, str]) -> str:
    # A lone result stands at no path.
    return ", ".join(f"{path}: {what}" if path else what for path, what in leaves.items())
