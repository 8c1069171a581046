"""NEFF files: named sections behind a header of plain JSON.

Layout, all integers little-endian::

    8 bytes   magic
    uint32    version of the format
    uint32    length of the header
    32 bytes  SHA-256 of the header
    header    JSON: {"metadata": {...}, "sections": [{"name", "size", "sha256"}, ...]}
    sections  one after the other, in that order, to the end of the file

A file is data to distrust: every size is compared with what the file has before anything is
allocated, every part with its checksum before it is used, and nothing is unpickled or executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"\x89NEFF\r\n\x1a"
VERSION = 1
#: How the name of a file ends while it is written.
UNFINISHED = ".unfinished"
_PREFIX = struct.Struct("<8sII32s")
_LONGEST_HEADER = 1 << 24
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MOST_SECTIONS = 16


class NeffError(Exception):
    """A file is no NEFF, is damaged, or is of another version of the format."""


@dataclasses.dataclass(frozen=True)
class NeffFile:
    """What a file holds. ``metadata`` is JSON's data; ``sections`` are bytes by name."""

    metadata: Mapping[str, Any]
    sections: Mapping[str, bytes]


def write(path: str | os.PathLike[str], file: NeffFile, *, durable: bool = True) -> None:
    """Write ``file`` so that ``path`` has all of it or is as it was.

    ``durable``: it is on the disk when this returns, whatever the machine does after it.

    Raises:
        NeffError: for metadata that JSON cannot hold, or a section's name that is none.
        OSError: where the folder cannot be written to.
    """
    data = pack(file)
    target = Path(path)
    descriptor, name = tempfile.mkstemp(UNFINISHED, f".{target.stem}.", target.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def pack(file: NeffFile) -> bytes:
    """The bytes of a file."""
    for name in file.sections:
        if not _NAME.fullmatch(name):
            raise NeffError(f"{name!r} is not a section's name")
    entries = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in file.sections.items()
    ]
    contents = {"metadata": file.metadata, "sections": entries}
    try:
        header = json.dumps(contents, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise NeffError(f"the metadata is not JSON: {error}") from error
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), hashlib.sha256(header).digest())
    return b"".join((prefix, header, *file.sections.values()))


def read(path: str | os.PathLike[str]) -> NeffFile:
    """Read a file.

    Raises:
        NeffError: saying what is wrong with it.
        OSError: where it cannot be read.
    """
    with open(path, "rb") as stream:
        return unpack(stream, os.fstat(stream.fileno()).st_size)


def read_metadata(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What a file says about itself; its sections are not read.

    Raises:
        NeffError: saying what is wrong with its header.
        OSError: where it cannot be read.
    """
    with open(path, "rb") as stream:
        return _header(stream, os.fstat(stream.fileno()).st_size)[0]


def unpack(stream: BinaryIO, size: int) -> NeffFile:
    """Read a file of ``size`` bytes from a stream at its beginning.

    Raises:
        NeffError: saying what is wrong with it.
    """
    metadata, entries = _header(stream, size)
    sections = {}
    for name, count, digest in entries:
        data = _take(stream, count)
        if hashlib.sha256(data).hexdigest() != digest:
            raise NeffError(f"section {name!r} is damaged: its checksum differs")
        sections[name] = data
    return NeffFile(metadata, sections)


def _header(stream: BinaryIO, size: int) -> tuple[Mapping[str, Any], list[tuple[str, int, str]]]:
    """Metadata, and name, size and checksum of each section, of which the file has every byte."""
    if size < _PREFIX.size:
        raise NeffError(f"{size} bytes are too few for a NEFF file")
    magic, version, length, checksum = _PREFIX.unpack(_take(stream, _PREFIX.size))
    if magic != MAGIC:
        raise NeffError("this is no NEFF file: it begins otherwise")
    if version != VERSION:
        raise NeffError(f"version {version} of the format; this package reads version {VERSION}")
    if length > min(size - _PREFIX.size, _LONGEST_HEADER):
        raise NeffError(f"a header of {length} bytes in a file of {size}")
    header = _take(stream, length)
    if hashlib.sha256(header).digest() != checksum:
        raise NeffError("the header is damaged: its checksum differs")
    metadata, entries = _contents(header)
    if sum(entry[1] for entry in entries) != size - _PREFIX.size - length:
        raise NeffError("the sections are not as long as the header says: the file was cut")
    return metadata, entries


def _take(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise NeffError("the file ends too early")
    return data


def _contents(header: bytes) -> tuple[Mapping[str, Any], list[tuple[str, int, str]]]:
    try:
        found = json.loads(header, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NeffError(f"the header is not JSON: {error}") from error
    if not isinstance(found, dict) or set(found) != {"metadata", "sections"}:
        raise NeffError("the header has other fields than 'metadata' and 'sections'")
    metadata, listed = found["metadata"], found["sections"]
    if not isinstance(metadata, dict) or not isinstance(listed, list):
        raise NeffError("'metadata' must be an object and 'sections' an array")
    if len(listed) > _MOST_SECTIONS:
        raise NeffError(f"{len(listed)} sections; at most {_MOST_SECTIONS} are read")
    entries = [_entry(item) for item in listed]
    if len({name for name, _, _ in entries}) < len(entries):
        raise NeffError("two sections have one name")
    return metadata, entries


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON's")


def _entry(item: Any) -> tuple[str, int, str]:
    if not isinstance(item, dict) or set(item) != {"name", "size", "sha256"}:
        raise NeffError("a section must have 'name', 'size' and 'sha256'")
    name, size, digest = item["name"], item["size"], item["sha256"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise NeffError(f"{str(name)[:40]!r} is not a section's name")
    if type(size) is not int or size < 0:
        raise NeffError(f"section {name!r} has no size")
    if not isinstance(digest, str):
        raise NeffError(f"section {name!r} has no checksum")
    return name, size, digest
