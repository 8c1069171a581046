"""What a package holds, and whether it is whole: for people and for the command line."""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import torch

from . import package_trees as trees
from .errors import PackageError
from .package_file import WEIGHTS, PackageFile, Program, Weight
from .package_run import check_signature
from .runtime import NeffError, contents, strict
from .runtime.checked import check_program
from .runtime.neff import EXECUTABLE, STABLEHLO, stablehlo_text
from .runtime.neff_file import NeffFile, unpack


@dataclasses.dataclass(frozen=True)
class ProgramDescription:
    """One program. ``inputs`` and ``outputs`` map paths to what stands there; ``mutations`` are
    paths of inputs and names of buffers that a call writes to; sizes are in bytes."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    mutations: list[str]
    part: str | None
    platform: str | None
    machine: str | None
    vendor_kernels: int
    seeded: bool
    checks: list[str]
    stablehlo_bytes: int
    executable_bytes: int


@dataclasses.dataclass(frozen=True)
class WeightDescription:
    """One weight; ``names`` after the first are tied to it."""

    names: list[str]
    dtype: str
    shape: list[int]
    nbytes: int
    constant: bool
    mutable: bool


@dataclasses.dataclass(frozen=True)
class PackageDescription:
    """A package. ``has_weights`` is false where they were left out; sizes are in bytes."""

    path: str
    size: int
    versions: dict[str, str]
    has_weights: bool
    weights: list[WeightDescription]
    entry_points: dict[str, list[ProgramDescription]]

    def data(self) -> dict[str, Any]:
        """The same as JSON's data."""
        return dataclasses.asdict(self)


def describe(path: str | os.PathLike[str]) -> PackageDescription:
    """What a package holds; reads its programs, but not its weights.

    Raises:
        PackageError: for a file that is no package, or damaged.
        OSError: where it cannot be read.
    """
    with PackageFile(path) as file:
        manifest = file.manifest
        return PackageDescription(
            str(file.path),
            file.path.stat().st_size,
            dict(manifest.versions),
            WEIGHTS in manifest.parts or not any(x.part == WEIGHTS for x in manifest.weights),
            [_weight(item) for item in manifest.weights],
            {
                name: [_program(file, program) for program in entry.programs]
                for name, entry in manifest.entry_points.items()
            },
        )


def _weight(item: Weight) -> WeightDescription:
    return WeightDescription(
        list(item.names),
        strict.dtype_name(item.dtype),
        list(item.shape),
        item.nbytes,
        item.part != WEIGHTS,
        item.mutable,
    )


def _program(file: PackageFile, program: Program) -> ProgramDescription:
    neff = None if program.part is None else _neff(file, program.part)
    signature = program.signature
    sections = {} if neff is None else {name: len(data) for name, data in neff.sections.items()}
    metadata = {} if neff is None else neff.metadata
    platform = None
    if neff is not None:
        signature, options, _ = contents(neff)
        platform = options.platform
    count = metadata.get("vendor_kernels")
    return ProgramDescription(
        inputs={
            path: _described(leaf, program)
            for name, tree in program.inputs.items()
            for path, leaf in trees.leaves(tree, name)
        },
        outputs={path: _described(leaf, None) for path, leaf in trees.leaves(program.outputs)},
        mutations=[_argument(file, program, position) for position in program.mutations],
        part=program.part,
        platform=platform,
        machine=str(metadata.get("machine")) if neff is not None else None,
        vendor_kernels=count if isinstance(count, int) else 0,
        seeded=signature is not None and signature.seeded,
        checks=[check.message for check in signature.checks] if signature is not None else [],
        stablehlo_bytes=sections.get(STABLEHLO, 0),
        executable_bytes=sections.get(EXECUTABLE, 0),
    )


def _neff(file: PackageFile, part: str) -> NeffFile:
    data = file.part(part)
    try:
        neff = unpack(io.BytesIO(data), len(data))
        contents(neff)
    except NeffError as error:
        raise PackageError(f"{file.path}: {part}: {error}") from error
    return neff


def _described(leaf: trees.Tree, program: Program | None) -> str:
    if leaf.kind == "value":
        return repr(leaf.value)
    if program is None:
        return "tensor"
    spec = program.tensors[leaf.index]
    return f"{strict.dtype_name(spec.dtype)}{list(spec.shape)}"


def _argument(file: PackageFile, program: Program, position: int) -> str:
    kind, index = program.arguments[position]
    if kind == "weight":
        return file.manifest.weights[index].names[0]
    paths = [
        path
        for name, tree in program.inputs.items()
        for path, leaf in trees.leaves(tree, name)
        if leaf.kind == "tensor" and leaf.index == index
    ]
    return paths[0] if paths else f"input {index}"


def verify(path: str | os.PathLike[str]) -> list[str]:
    """All that is wrong with a package; empty where nothing is.

    Checksums of all parts are compared, and each program with what the manifest says of it; no
    program is compiled or run.

    Raises:
        OSError: where the file cannot be read.
    """
    try:
        file = PackageFile(path)
    except PackageError as error:
        return [str(error)]
    problems = []
    with file:
        for name in file.manifest.parts:
            try:
                file.check(name)
            except PackageError as error:
                problems.append(str(error))
        weights = [
            torch.empty(item.shape, dtype=item.dtype, device="meta")
            for item in file.manifest.weights
        ]
        for entry, found in file.manifest.entry_points.items():
            for index, program in enumerate(found.programs):
                if program.part is None:
                    continue
                try:
                    neff = _neff(file, program.part)
                    signature, _, constants = contents(neff)
                    check_signature(program, signature, weights)
                    check_program(stablehlo_text(neff), signature, constants)
                except (PackageError, NeffError) as error:
                    problems.append(f"{entry}, program {index}: {error}")
    return list(dict.fromkeys(problems))
