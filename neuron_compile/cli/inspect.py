"""``neuron-compile inspect``: what a NEFF file or a package holds."""

from __future__ import annotations

import argparse
import collections
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import (
    Column,
    UsageError,
    add_command,
    facts,
    print_json,
    progress,
    say,
    size_text,
    table,
)

if TYPE_CHECKING:
    from ..runtime import CompilerOptions, Neff, NeffFile, ResultSpec, Signature

_MORE = """\
Nothing in the file is executed; --hlo and --cost have XLA compile the StableHLO inside, or with
--trust load the machine code of the file. options={"dump_dir": ...} writes NEFF files.

exit status: 0; 1 where a part of a package is damaged; 2 where the file is none, or is damaged, or
cannot be compiled here."""
PACKAGE = ".neffpkg"
_MEMORY = {
    "argument": "arguments",
    "output": "results",
    "alias": "shared by both",
    "temp": "temporaries",
    "generated_code": "machine code",
    "peak": "peak",
}


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "inspect", _run, "what a NEFF file or a package holds", _MORE)
    parser.add_argument("file", type=Path)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--stablehlo", action="store_true", help="print the program")
    shown.add_argument("--hlo", action="store_true", help="print XLA's optimized HLO")
    shown.add_argument("--cost", action="store_true", help="XLA's cost and memory analysis")
    parser.add_argument(
        "--trust", action="store_true", help="load the machine code in the file: a file of yours"
    )


def _run(options: argparse.Namespace) -> int:
    if options.file.suffix == PACKAGE:
        from .package import inspect_package

        return inspect_package(options)
    from ..runtime import contents, read, stablehlo_text

    with _usable(options.file):
        file = read(options.file)
        signature, compiled_with, _ = contents(file)
        if options.stablehlo:
            text = stablehlo_text(file)
            _print(options.json, {"stablehlo": text}, text)
        elif options.hlo:
            text = _loaded(options).optimized_hlo()
            _print(options.json, {"hlo": text}, text)
        elif options.json:
            analysis = _analysis(_loaded(options)) if options.cost else {}
            print_json({**_data(options.file, file), **analysis})
        else:
            _page(options.file, file, signature, compiled_with)
            if options.cost:
                _analysis_page(_loaded(options))
    return 0


def _print(as_json: bool, data: dict[str, str], text: str) -> None:
    if as_json:
        print_json(data)
    else:
        print(text)


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Every way in which a file can be wrong is an error of whoever named it."""
    from ..runtime import NeffError, PlatformError, RuntimeCompileError

    try:
        yield
    except (NeffError, PlatformError, RuntimeCompileError) as error:
        raise UsageError(f"{path}: {error}") from error


def _loaded(options: argparse.Namespace) -> Neff:
    from ..runtime import load

    with progress("XLA"):
        return load(options.file, trust=options.trust).neff


def _data(path: Path, file: NeffFile) -> dict[str, Any]:
    from ..runtime.neff import why_rebuild

    sizes = {name: len(data) for name, data in file.sections.items()}
    return {
        **file.metadata,
        "sections": sizes,
        "file": str(path),
        "size": path.stat().st_size,
        "why_rebuild": why_rebuild(file, trust=True),
    }


def _analysis(neff: Neff) -> dict[str, Any]:
    return {"cost": neff.cost_analysis(), "memory": neff.memory_analysis()}


def _page(path: Path, file: NeffFile, signature: Signature, compiled_with: CompilerOptions) -> None:
    from ..runtime.neff import machine, why_rebuild

    metadata = file.metadata
    versions = metadata.get("versions") or {}
    kinds = collections.Counter(item.kind for item in signature.results)
    which = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if kind != "tensor")
    here = " (this one)" if metadata.get("machine") == machine() else " (another)"
    rebuilt = why_rebuild(file, trust=True)
    flags = " ".join(f"{flag}={value}" for flag, value in compiled_with.xla_options)
    kernels = metadata.get("vendor_kernels") if compiled_with.vendor_kernels else "off"
    facts(
        {
            "file": f"{path}, {size_text(path.stat().st_size)}",
            "takes": f"{len(signature.arguments)} arguments"
            + (", and a seed" if signature.seeded else ""),
            "gives": f"{len(signature.results)} results" + (f", of them {which}" if which else ""),
            "platform": compiled_with.platform,
            "vendor kernels": kernels,
            "XLA flags": flags or None,
            "made with": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "machine": f"{metadata.get('machine')}{here}",
            "machine code": "fits here, used where the file is trusted"
            if rebuilt is None
            else f"not used here: {rebuilt}",
            "source": metadata.get("source"),
        }
    )
    sections = [
        (name, f"{len(data):,}", size_text(len(data))) for name, data in file.sections.items()
    ]
    table("Sections", ["section", Column("bytes", right=True), Column("", right=True)], sections)
    _arguments(signature, file)
    rows = [
        (index, item.kind, _source(item), _layout(item))
        for index, item in enumerate(signature.results)
    ]
    table("Results", [Column("#", right=True), "kind", "from", "layout"], rows)
    checks = [(item.error.__name__, item.message) for item in signature.checks]
    table("Checks at run time", [Column("raises", whole=True), "message"], checks)


def _arguments(signature: Signature, file: NeffFile) -> None:
    from ..runtime import contents

    rows: list[tuple[Any, ...]] = []
    for index, item in enumerate(signature.arguments):
        notes = ["parameter"] if item.static else []
        notes += [f"dimensions {list(item.permutation)}"] if item.permutation else []
        notes += [] if item.dense else ["copied: not dense"]
        dtype = str(item.dtype).removeprefix("torch.")
        rows.append((index, item.name, dtype, list(item.shape), ", ".join(notes)))
    for index, tensor in enumerate(contents(file)[2]):
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(("", f"constant {index}", dtype, list(tensor.shape), "in the file"))
    columns: list[Column | str] = [
        Column("#", right=True),
        "argument",
        Column("dtype", whole=True),
        "shape",
        "note",
    ]
    table("Arguments", columns, rows)


def _source(item: ResultSpec) -> str:
    """Where a result comes from."""
    if item.kind == "constant":
        return str(item.value)
    if item.kind == "none":
        return ""
    return f"{'argument' if item.kind == 'input' else 'output'} {item.index}"


def _layout(item: ResultSpec) -> str:
    """What is done to a result so that it has eager's strides."""
    parts = [
        f"dimensions {list(item.permutation)}" if item.permutation else "",
        f"expanded to {list(item.expand)}" if item.expand else "",
        f"strides {list(item.stride)}" if item.stride else "",
        f"a view {list(item.view.shape)}, strides {list(item.view.stride)}" if item.view else "",
        str(item.dtype).removeprefix("torch.") if item.dtype else "",
    ]
    return ", ".join(filter(None, parts))


def _analysis_page(neff: Neff) -> None:
    cost, memory = neff.cost_analysis(), neff.memory_analysis()
    wanted = ("flops", "transcendentals", "bytes accessed")
    rows = [(name, f"{cost[name]:,.0f}" if name in cost else "unknown") for name in wanted]
    table("Cost of one run, by XLA's estimate", ["", Column("count", right=True)], rows)
    if neff.vendor_kernels:
        say(f"The work of vendor kernels ({neff.vendor_kernels}) is not in these figures.")
    taken = [
        (text, f"{memory[name]:,}", size_text(memory[name]))
        for name, text in _MEMORY.items()
        if memory.get(name)
    ]
    table("Memory of one run", ["", Column("bytes", right=True), Column("", right=True)], taken)
