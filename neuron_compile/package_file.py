"""The file of a package: an uncompressed zip of a JSON manifest, NEFF files and safetensors.

``unzip -l`` lists it and ``unzip -p FILE manifest.json`` prints what it says; members::

    manifest.json            format, versions, parts, weights, entry points
    programs/<digest>.neff   one NEFF file for each program (see runtime/neff_file.py)
    weights.safetensors      parameters and buffers of the models' state_dict
    constants.safetensors    other buffers, and tensors that the code held

A package is data to distrust. Names, numbers and sizes of members are compared with the file's
before anything is allocated, each part has a SHA-256 in the manifest, nothing is unpickled, and no
member is written to disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import package_trees as trees
from .errors import PackageError
from .package_tensors import read_header, read_tensors, refuse
from .package_trees import Tree
from .runtime import NeffError, Signature, strict
from .runtime.plain import signature_from_plain, signature_to_plain

FORMAT = 1
MANIFEST, WEIGHTS, CONSTANTS = "manifest.json", "weights.safetensors", "constants.safetensors"
_PART = re.compile(r"programs/[0-9a-f]{16}\.neff|(weights|constants)\.safetensors")
_LONGEST_MANIFEST = 1 << 26
_MOST_MEMBERS = 4096
_LARGEST = 1 << 48
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor that programs take beside a call's arguments.

    ``names`` are those in the models' state dicts, or one made up for a constant; ``part`` the
    member that holds it, ``weights.safetensors`` even where that was left out. ``stride`` is that
    of the model's tensor. ``mutable``: a program writes to it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    part: str
    mutable: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class TensorInput:
    """A tensor among the arguments of a call, with the strides it was exported with."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs for one combination of shapes.

    Attributes:
        inputs: the structure of a call's arguments by their names.
        tensors: the tensors in it.
        arguments: what the program takes: ``("input", n)``, a tensor of the call, or
            ``("weight", n)``.
        mutations: positions of the arguments that take the values of the first results.
        outputs: the structure of the results after those.
        part: the member that holds the NEFF; ``None`` where there is nothing to compute, and
            ``signature`` says what is returned.
    """

    inputs: Mapping[str, Tree]
    tensors: tuple[TensorInput, ...]
    arguments: tuple[tuple[str, int], ...]
    mutations: tuple[int, ...]
    outputs: Tree
    results: int
    part: str | None
    signature: Signature | None


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """Programs for the shapes of one function. ``positional`` are the names of the arguments that
    may be given by position."""

    positional: tuple[str, ...]
    programs: tuple[Program, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A member of the file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a package holds."""

    versions: Mapping[str, str]
    parts: Mapping[str, Part]
    weights: tuple[Weight, ...]
    entry_points: Mapping[str, EntryPoint]


# ----------------------------------------------------------------------------------- writing


def write(
    path: Path,
    versions: Mapping[str, str],
    weights: Sequence[Weight],
    entry_points: Mapping[str, EntryPoint],
    parts: Mapping[str, bytes],
) -> None:
    """Write a package, so that ``path`` has all of it or is as it was.

    Raises:
        OSError: where the folder cannot be written to.
    """
    sums = {name: Part(len(data), hashlib.sha256(data).hexdigest()) for name, data in parts.items()}
    manifest = _manifest_to_plain(Manifest(versions, sums, tuple(weights), entry_points))
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                for member, data in ((MANIFEST, text), *parts.items()):
                    # A date of its own would make equal packages differ.
                    archive.writestr(zipfile.ZipInfo(member, (1980, 1, 1, 0, 0, 0)), data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """The permissions that new files do not get; a temporary file gets fewer still."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _manifest_to_plain(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "versions": dict(manifest.versions),
        "parts": {name: dataclasses.asdict(part) for name, part in manifest.parts.items()},
        "weights": [
            {**dataclasses.asdict(item), "dtype": strict.dtype_name(item.dtype)}
            for item in manifest.weights
        ],
        "entry_points": {
            name: {
                "positional": item.positional,
                "programs": [_program_to_plain(program) for program in item.programs],
            }
            for name, item in manifest.entry_points.items()
        },
    }


def _program_to_plain(program: Program) -> dict[str, Any]:
    signature = program.signature
    return {
        "inputs": [[name, trees.to_plain(tree)] for name, tree in program.inputs.items()],
        "tensors": [
            {"shape": item.shape, "dtype": strict.dtype_name(item.dtype), "stride": item.stride}
            for item in program.tensors
        ],
        "arguments": program.arguments,
        "mutations": program.mutations,
        "outputs": trees.to_plain(program.outputs),
        "results": program.results,
        "part": program.part,
        "signature": signature and signature_to_plain(signature),
    }


# ----------------------------------------------------------------------------------- reading


class PackageFile:
    """A package that is open for reading. Close it, or use it in a ``with`` statement.

    Raises:
        PackageError: saying what is wrong with the file.
        OSError: where it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stream = self.path.open("rb")
        try:
            with self._judged():
                self._archive = zipfile.ZipFile(self._stream)
                self._members = _members(self._archive, os.fstat(self._stream.fileno()).st_size)
                self.manifest = self._read_manifest()
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> PackageFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Turn what reading a damaged file raises into an error that says so."""
        try:
            yield
        except (NeffError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise PackageError(f"{self.path} is no package, or is damaged: {error}") from error
        except (ValueError, KeyError, IndexError, struct.error, RuntimeError) as error:
            # What zipfile raises for fields that make no sense.
            raise PackageError(
                f"{self.path} is no package, or is damaged: {type(error).__name__}: {error}"
            ) from error

    def _read_manifest(self) -> Manifest:
        info = self._members.get(MANIFEST)
        if info is None:
            raise NeffError(f"it has no {MANIFEST}")
        if info.file_size > _LONGEST_MANIFEST:
            raise NeffError(f"a manifest of {info.file_size} bytes")
        try:
            data = json.loads(self._archive.read(info), parse_constant=refuse)
        except RecursionError as error:
            raise NeffError("the manifest is nested too deeply") from error
        manifest = _manifest_from_plain(data)
        if set(manifest.parts) != set(self._members) - {MANIFEST}:
            raise NeffError("the members are others than the manifest lists")
        for name, part in manifest.parts.items():
            if self._members[name].file_size != part.size:
                raise NeffError(f"{name} has {self._members[name].file_size} bytes: it was cut")
        return manifest

    def part(self, name: str) -> bytes:
        """A member, once its checksum was compared."""
        with self._judged():
            data = self._archive.read(self._members[name])
            self._compare(name, hashlib.sha256(data).hexdigest())
        return data

    def check(self, name: str) -> None:
        """Compare a member's checksum, and the header of tensors with the manifest."""
        digest, size = hashlib.sha256(), self.manifest.parts[name].size
        with self._judged(), self._archive.open(self._members[name]) as stream:
            if name in (WEIGHTS, CONSTANTS):
                read_header(stream, size, self._wanted(name), digest)
            while data := stream.read(_CHUNK):
                digest.update(data)
            self._compare(name, digest.hexdigest())

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors member, by the first of their names."""
        digest, size = hashlib.sha256(), self.manifest.parts[name].size
        with self._judged(), self._archive.open(self._members[name]) as stream:
            found = read_tensors(stream, size, self._wanted(name), digest)
            self._compare(name, digest.hexdigest())
        return found

    def _wanted(self, name: str) -> dict[str, Weight]:
        return {item.names[0]: item for item in self.manifest.weights if item.part == name}

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.manifest.parts[name].sha256:
            raise NeffError(f"{name} is damaged: its checksum differs")


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    listed = archive.infolist()
    if len(listed) > _MOST_MEMBERS:
        raise NeffError(f"{len(listed)} members; at most {_MOST_MEMBERS} are read")
    for info in listed:
        if info.filename != MANIFEST and not _PART.fullmatch(info.filename):
            raise NeffError(f"a member is named {info.filename[:80]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise NeffError(f"{info.filename} is compressed")
        if info.flag_bits & 1:
            raise NeffError(f"{info.filename} is encrypted")
    members = {info.filename: info for info in listed}
    if len(members) < len(listed):
        raise NeffError("two members have one name")
    if not all(0 <= info.header_offset < size for info in listed):
        raise NeffError("a member begins outside of the file")
    if sum(info.file_size for info in listed) > size:
        raise NeffError("the members are larger than the file")
    return members


def _manifest_from_plain(data: Any) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise NeffError(f"format {str(found)[:40]}; this package reads format {FORMAT}")
    names = ("format", "versions", "parts", "weights", "entry_points")
    fields = strict.fields_of(data, "manifest", names)
    versions, parts, entries = fields["versions"], fields["parts"], fields["entry_points"]
    for name, item in (("versions", versions), ("parts", parts), ("entry_points", entries)):
        if not isinstance(item, dict):
            raise NeffError(f"{name} is no object")
    weights = strict.array(fields["weights"], "weights", _weight)
    firsts = [item.names[0] for item in weights]
    if len(set(firsts)) < len(firsts):
        raise NeffError("two weights have one name")
    manifest = Manifest(
        {name: strict.text(item, f"versions.{name}") for name, item in versions.items()},
        {name: _part(item, f"parts.{name}") for name, item in parts.items()},
        weights,
        {name: _entry_point(item, name, weights) for name, item in entries.items()},
    )
    if not entries:
        raise NeffError("there is no entry point")
    for entry in manifest.entry_points.values():
        for program in entry.programs:
            if program.part is not None and program.part not in parts:
                raise NeffError(f"{program.part} is missing")
    if CONSTANTS not in parts and any(item.part == CONSTANTS for item in weights):
        raise NeffError(f"{CONSTANTS} is missing")
    return manifest


def _part(data: Any, where: str) -> Part:
    fields = strict.fields_of(data, where, ("size", "sha256"))
    size = strict.integer(fields["size"], f"{where}.size")
    return Part(size, strict.text(fields["sha256"], f"{where}.sha256"))


def _weight(data: Any, where: str) -> Weight:
    fields = strict.fields_of(data, where, ("names", "shape", "dtype", "stride", "part", "mutable"))
    names = strict.array(fields["names"], f"{where}.names", strict.text)
    tensor = _tensor({key: fields[key] for key in ("shape", "dtype", "stride")}, where)
    part = strict.text(fields["part"], f"{where}.part")
    if not names or part not in (WEIGHTS, CONSTANTS):
        raise NeffError(f"{where} has no name, or stands in no part")
    mutable = strict.boolean(fields["mutable"], f"{where}.mutable")
    return Weight(names, tensor.shape, tensor.dtype, tensor.stride, part, mutable)


def _tensor(data: Any, where: str) -> TensorInput:
    fields = strict.fields_of(data, where, ("shape", "dtype", "stride"))
    shape = strict.sizes(fields["shape"], f"{where}.shape")
    stride = strict.sizes(fields["stride"], f"{where}.stride")
    dtype = strict.dtype(fields["dtype"], f"{where}.dtype")
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=False) if size)
    if len(shape) != len(stride) or max(reach, math.prod(shape)) * dtype.itemsize > _LARGEST:
        raise NeffError(f"{where} has strides that do not fit its shape")
    return TensorInput(shape, dtype, stride)


def _entry_point(data: Any, name: str, weights: Sequence[Weight]) -> EntryPoint:
    where = f"entry_points.{name}"
    fields = strict.fields_of(data, where, ("positional", "programs"))

    def program(item: Any, place: str) -> Program:
        return _program(item, place, weights)

    programs = strict.array(fields["programs"], f"{where}.programs", program)
    if not programs:
        raise NeffError(f"{where} has no program")
    return EntryPoint(strict.array(fields["positional"], where, strict.text), programs)


def _program(data: Any, where: str, weights: Sequence[Weight]) -> Program:
    names = ("inputs", "tensors", "arguments", "mutations", "outputs", "results")
    fields = strict.fields_of(data, where, (*names, "part", "signature"))
    tensors = strict.array(fields["tensors"], f"{where}.tensors", _tensor)
    results = strict.integer(fields["results"], f"{where}.results")

    def argument(item: Any, place: str) -> tuple[str, int]:
        pair = strict.array(item, place, lambda value, _: value)
        limits = {"input": len(tensors), "weight": len(weights)}
        if len(pair) != 2 or not isinstance(pair[0], str) or pair[0] not in limits:
            raise NeffError(f"{place} is neither an input nor a weight")
        if not 0 <= strict.integer(pair[1], place) < limits[pair[0]]:
            raise NeffError(f"{place} is {pair[0]} {pair[1]} of {limits[pair[0]]}")
        return pair[0], pair[1]

    def named(item: Any, place: str) -> tuple[str, Tree]:
        pair = strict.array(item, place, lambda value, _: value)
        if len(pair) != 2:
            raise NeffError(f"{place} is no argument")
        return strict.text(pair[0], place), trees.from_plain(pair[1], place, len(tensors))

    arguments = strict.array(fields["arguments"], f"{where}.arguments", argument)
    mutations = strict.array(fields["mutations"], f"{where}.mutations", strict.integer)
    if not all(0 <= position < len(arguments) for position in mutations):
        raise NeffError(f"{where}.mutations names an argument that is not there")
    inputs = strict.array(fields["inputs"], f"{where}.inputs", named)
    if not len(mutations) <= results:
        raise NeffError(f"{where} has {results} results, of which {len(mutations)} are mutations")
    return Program(
        dict(inputs),
        tensors,
        arguments,
        mutations,
        trees.from_plain(fields["outputs"], f"{where}.outputs", results - len(mutations)),
        results,
        strict.optional(fields["part"], f"{where}.part", strict.text),
        strict.optional(
            fields["signature"], f"{where}.signature", lambda item, _: signature_from_plain(item)
        ),
    )
