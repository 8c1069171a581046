"""Files that tell the next process that a compiler ended this one, and on which graph.

A marker is written before a graph is compiled in this process and removed when that has ended,
well or not. One that is left belongs to a process that died meanwhile: by a native abort, or
because somebody killed it. Whoever finds it compiles that graph in a worker process
(:mod:`isolation`), and forgets the marker once that has gone well.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("neuron_compile")

_KEY = re.compile(r"[A-Za-z0-9_]{1,128}")
_numbers = itertools.count()


class CrashMarkers:
    """The markers in one folder, which is made when it is needed.

    A folder that cannot be written to means no markers, and a word in the log.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    @contextlib.contextmanager
    def compiling(self, key: str) -> Iterator[None]:
        """Mark the graph of ``key`` (letters, digits and underscores) while it is compiled here.

        Raises:
            ValueError: for another key.
        """
        marker = self._write(key)
        try:
            yield
        finally:
            if marker is not None:
                with contextlib.suppress(OSError):
                    marker.unlink()

    def crashed(self, key: str) -> bool:
        """Whether a process of this machine died while it compiled the graph of ``key``.

        Raises:
            ValueError: for what is no key.
        """
        return any(_is_dead(marker) for marker in self._markers(key))

    def forget(self, key: str) -> None:
        """Remove the markers of dead processes.

        Raises:
            ValueError: for what is no key.
        """
        for marker in self._markers(key):
            if _is_dead(marker):
                with contextlib.suppress(OSError):
                    marker.unlink()

    def _write(self, key: str) -> Path | None:
        marker = self._folder / f"{_checked(key)}-{os.getpid()}-{next(_numbers)}.json"
        process = {"host": _host(), "boot": _boot(), "pid": os.getpid()}
        process["started"] = _started(os.getpid())
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            marker.write_text(json.dumps(process))
        except OSError as error:
            log.info("no crash marker for graph %s: %s", key, error)
            return None
        return marker

    def _markers(self, key: str) -> list[Path]:
        return list(self._folder.glob(f"{_checked(key)}-*.json"))


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key: letters, digits and underscores, at most 128")
    return key


def _is_dead(marker: Path) -> bool:
    """Whether the process of a marker is known to be gone.

    A process of another machine, which shares the folder, may be alive: nobody here can tell. Nor
    does a marker tell that is gone by now, or that was cut short.
    """
    try:
        process: Any = json.loads(marker.read_text())
        host, boot, pid, started = (process[name] for name in ("host", "boot", "pid", "started"))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != _host() or not isinstance(pid, int) or pid <= 0:
        return False
    if boot != _boot():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    # Another process may have the number by now.
    return bool(started) and _started(pid) != started


def _host() -> str:
    return socket.gethostname()


def _boot() -> str:
    """What identifies the machine's last start, where the system tells."""
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip()


def _started(pid: int) -> str:
    """When a process was started, in ticks of the clock, where the system tells."""
    # The second field, a name, may hold spaces and parentheses.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
