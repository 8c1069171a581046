"""The command line: ``python -m neuron_compile operators`` and ``… inspect FILE``."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Sequence

from .operators import DECOMPOSED, DEVICE, EAGER, Support, all_operators, support
from .runtime import NeffError, NeffFile, RuntimeCompileError, contents, load, read, stablehlo_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a wrong argument or file."""
    parser = argparse.ArgumentParser(prog="neuron-compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    operators = commands.add_parser("operators", help="where operators run")
    operators.add_argument("names", nargs="*", help="operators; all that are known by default")
    operators.add_argument("--where", choices=(DEVICE, DECOMPOSED, EAGER), help="only these")
    operators.add_argument("--json", action="store_true", help="for programs")
    operators.set_defaults(run=_operators)
    inspect = commands.add_parser("inspect", help="what a NEFF file holds (options: dump_dir)")
    inspect.add_argument("file")
    inspect.add_argument("--stablehlo", action="store_true", help="print the program")
    inspect.add_argument("--hlo", action="store_true", help="compile it and print XLA's HLO")
    inspect.add_argument("--json", action="store_true", help="print all metadata, for programs")
    inspect.set_defaults(run=_inspect)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except BrokenPipeError:  # who reads has seen enough
        return 0
    except (ValueError, NeffError, RuntimeCompileError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _operators(options: argparse.Namespace) -> None:
    answers = _answers(options.names)
    _print([item for item in answers if options.where in (None, item.where)], options.json)


def _inspect(options: argparse.Namespace) -> None:
    file = read(options.file)
    if options.json:
        sizes = {name: len(data) for name, data in file.sections.items()}
        print(json.dumps({**file.metadata, "sections": sizes}, indent=1))
    elif options.stablehlo:
        print(stablehlo_text(file))
    elif options.hlo:
        print(load(options.file).neff.optimized_hlo())
    else:
        print("\n".join(_lines(file)))


def _lines(file: NeffFile) -> list[str]:
    """A page about a file."""
    signature, options, constants = contents(file)
    lines = [f"{'section':<12} {'bytes':>12}"]
    lines += [f"{name:<12} {len(data):>12,}" for name, data in file.sections.items()]
    lines += ["", f"{'argument':<32} {'dtype':<16} shape"]
    for item in signature.arguments:
        kept = " (parameter)" if item.static else ""
        lines.append(f"{item.name:<32} {item.dtype!s:<16} {list(item.shape)}{kept}")
    lines += [f"{'constant':<32} {x.dtype!s:<16} {list(x.shape)}" for x in constants]
    kinds = collections.Counter(item.kind for item in signature.results)
    lines += ["", "results: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())]
    lines += [f"check: {item.error.__name__}: {item.message}" for item in signature.checks]
    lines += ["", f"platform: {options.platform}", f"vendor kernels: {options.vendor_kernels}"]
    lines += [f"{flag}: {value}" for flag, value in options.xla_options]
    rest = {k: v for k, v in file.metadata.items() if k not in ("signature", "options")}
    return lines + [f"{name}: {value}" for name, value in rest.items() if name != "constants"]


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
