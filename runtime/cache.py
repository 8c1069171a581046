"""The NEFF cache on disk: a folder of NEFF files, named by their keys.

The folder holds machine code that is run without question, so it must belong to this user, and
nobody else may write to it. A file is written beside its place and moved there, so a reader sees
all of it or nothing; what a crash or a bad disk did is found by the checksums in it, and the entry
is made anew. Nothing that goes wrong with the disk is an error of a compilation: it is logged, once
a process, and the compilation goes on without the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock

from . import neff_file
from .neff_file import NeffError, NeffFile

log = logging.getLogger("neuron_compile.cache")

SUFFIX = ".neff"
#: Processes that compile one graph wait for the first of them this long, in seconds.
PATIENCE = 900.0
#: What a writer that died left behind is removed after this many seconds.
_STALE = 3600.0
_LOCKS = "locks"
_PRIVATE = 0o700

_warned: set[str] = set()
_warned_lock = threading.Lock()


class CacheError(Exception):
    """A folder cannot be used as a cache: it is another user's, or others may write to it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of the cache. ``size`` is in bytes; ``used`` and ``created`` are seconds of the
    epoch. ``components`` are the digests of the key by name, and ``metadata`` all the file says
    about itself; both are empty where the header is damaged."""

    key: str
    path: Path
    size: int
    used: float
    created: float
    components: Mapping[str, str]
    metadata: Mapping[str, Any]


class NeffCache:
    """A folder of NEFF files.

    Args:
        directory: the folder; it is made, for this user alone, when something is first put in.
        limit: bytes that the files may have together; the ones unused for longest go first.
            ``None``: no limit.

    Raises:
        CacheError: if it belongs to another user, or others may write to it.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None = None) -> None:
        self.directory = Path(directory)
        self.limit = limit
        _check_private(self.directory)

    def path(self, key: str) -> Path:
        """Where the entry of a key is, or would be."""
        return self.directory / (key + SUFFIX)

    def get(self, key: str) -> NeffFile | None:
        """The entry of a key, or ``None`` if there is none, or a damaged one."""
        path = self.path(key)
        try:
            file = neff_file.read(path)
        except FileNotFoundError:
            return None
        except NeffError as error:
            log.warning("the cache entry %s is damaged and is made anew: %s", path, error)
            return None
        except OSError as error:
            warn_once(f"the NEFF cache {self.directory} cannot be read: {error}")
            return None
        with contextlib.suppress(OSError):  # a cache that is read only has no order of use
            os.utime(path)
        return file

    def put(self, key: str, file: NeffFile) -> bool:
        """Keep an entry; returns whether it could be written."""
        try:
            self._make()
            neff_file.write(self.path(key), file, durable=False)
        except OSError as error:
            warn_once(
                f"the NEFF cache {self.directory} cannot be written: {error}. Graphs are compiled "
                "in every process; set options={'cache_dir': ...} to a folder of yours."
            )
            return False
        if self.limit is not None:
            self.prune(self.limit, keep=key)
        return True

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process, and one thread, at a time make what belongs to a key.

        Where no lock is to be had (read-only or network disks), or after :data:`PATIENCE`, nobody
        is kept: to compile twice is not wrong.
        """
        lock = self._lock(key)
        held = False
        try:
            self._make()
            (self.directory / _LOCKS).mkdir(mode=_PRIVATE, exist_ok=True)
            lock.acquire(timeout=PATIENCE)
            held = True
        except filelock.Timeout:
            log.warning(
                "another process has held %s for %d s; compiling beside it",
                lock.lock_file,
                PATIENCE,
            )
        except (OSError, NotImplementedError) as error:
            log.info("no lock in %s: %s", self.directory, error)
        try:
            yield
        finally:
            if held:
                lock.release()

    def entries(self, *, contents: bool = True) -> list[Entry]:
        """All entries, the last used one first; ``contents``: with what their headers say."""
        found = []
        for path in self._files(SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                found.append(_entry(path, contents))
        return sorted(found, key=lambda entry: -entry.used)

    def verify(self) -> list[str]:
        """Read every entry whole and remove the damaged ones; returns what was wrong with each."""
        problems = []
        for path in self._files(SUFFIX):
            with self.lock(path.stem):  # a writer may just be mending it
                try:
                    neff_file.read(path)
                except FileNotFoundError:
                    continue
                except (NeffError, OSError) as error:
                    problems.append(f"{path.name}: {error}")
                    with contextlib.suppress(OSError):
                        path.unlink()
        return problems

    def prune(
        self, limit: int, *, older_than: float | None = None, keep: str | None = None
    ) -> list[Entry]:
        """Remove the entries unused for longest until the rest has at most ``limit`` bytes.

        Those unused for ``older_than`` seconds go in any case, and ``keep`` stays. Returns what was
        removed. An entry that is replaced or used meanwhile is left alone.
        """
        self._sweep()
        entries = self.entries(contents=False)
        total = sum(entry.size for entry in entries)
        now, removed = time.time(), []
        for entry in reversed(entries):
            old = older_than is not None and now - entry.used > older_than
            if (old or total > limit) and entry.key != keep and self._remove(entry):
                removed.append(entry)
                total -= entry.size
        return removed

    def clear(self) -> list[Entry]:
        """Remove every entry, and what is remembered beside them; returns the entries."""
        removed = self.prune(-1)
        for path in self._files(".json"):
            with contextlib.suppress(OSError):
                path.unlink()
        return removed

    def writable(self) -> bool:
        """Whether something could be put in."""
        try:
            self._make()
        except OSError:
            return False
        return os.access(self.directory, os.W_OK | os.X_OK)

    def _remove(self, entry: Entry) -> bool:
        lock = self._lock(entry.key)
        try:
            (self.directory / _LOCKS).mkdir(mode=_PRIVATE, exist_ok=True)
            with lock.acquire(timeout=0):
                now = entry.path.stat()
                if now.st_size != entry.size or now.st_mtime != entry.used:
                    return False
                entry.path.unlink()
                return True
        except (filelock.Timeout, FileNotFoundError):
            return False
        except (OSError, NotImplementedError) as error:
            warn_once(f"the NEFF cache {self.directory} cannot be pruned: {error}")
            return False

    def _sweep(self) -> None:
        """Remove the unfinished files of writers that died."""
        for path in self._files(neff_file.UNFINISHED):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()

    def _files(self, suffix: str) -> Sequence[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if path.name.endswith(suffix))
        except FileNotFoundError:
            return []
        except OSError as error:
            warn_once(f"the NEFF cache {self.directory} cannot be read: {error}")
            return []

    def _lock(self, key: str) -> filelock.BaseFileLock:
        # One of 4,096 files, which stay: to remove a lock's file is a race.
        return filelock.FileLock(
            str(self.directory / _LOCKS / (key[:3] + ".lock")), mode=0o600, thread_local=False
        )

    def _make(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        # Whoever was faster than us must have been this user.
        try:
            _check_private(self.directory)
        except CacheError as error:
            raise OSError(str(error)) from error


def warn_once(message: str) -> None:
    """Log a warning, once a process."""
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    log.warning("%s", message)


def _check_private(directory: Path) -> None:
    try:
        found = directory.stat()
    except OSError:
        return  # nothing there yet, or nothing to be reached
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"{directory} is no folder, so it cannot be the NEFF cache")
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.getuid():
        raise CacheError(
            f"{directory} belongs to user {found.st_uid}, not to you ({os.getuid()}). The NEFF "
            "cache holds machine code, so it must be your own: set options={'cache_dir': ...} or "
            "NEURON_COMPILE_CACHE_DIR to another folder."
        )
    if found.st_mode & 0o022:
        raise CacheError(
            f"{directory} may be written by other users (mode {stat.S_IMODE(found.st_mode):o}). "
            "The NEFF cache holds machine code, so only you may write to it: chmod go-w it, or "
            "set options={'cache_dir': ...} or NEURON_COMPILE_CACHE_DIR to another folder."
        )


def _entry(path: Path, contents: bool) -> Entry:
    found = path.stat()
    metadata: Mapping[str, Any] = {}
    if contents:
        with contextlib.suppress(NeffError, OSError):
            metadata = neff_file.read_metadata(path)
    components = metadata.get("key")
    known = components if isinstance(components, dict) else {}
    created = metadata.get("created")
    return Entry(
        path.stem,
        path,
        found.st_size,
        found.st_mtime,
        float(created) if isinstance(created, int | float) else found.st_ctime,
        {name: value for name, value in known.items() if isinstance(value, str)},
        metadata,
    )
