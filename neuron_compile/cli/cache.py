"""``neuron-compile cache``: the compiled graphs on disk."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import (
    Column,
    UsageError,
    add_command,
    counted,
    facts,
    print_json,
    progress,
    say,
    size_text,
    table,
)
from .environment import NOTE, OK, PROBLEM, Finding

if TYPE_CHECKING:
    from ..runtime import Entry, NeffCache
    from ..settings import Settings

_MORE = """\
exit status: 0; 1 where 'verify' found damaged entries; 2 where the folder cannot be used."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Characters of a key that people need to tell entries apart, and arguments of an entry shown.
_KEY, _SHOWN = 12, 3
HERE, OTHER, DAMAGED = "here", "others", "damaged"


def add(commands: Any) -> None:
    """Add the command and its own commands."""
    parser = commands.add_parser(
        "cache",
        help="the compiled graphs on disk",
        description="The compiled graphs that are kept on disk (options: cache, cache_dir).",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("ls", _ls, "what is kept, the last used first"),
        ("info", _info, "where the cache is, and what it takes"),
        ("verify", _verify, "read every entry, and remove the damaged ones"),
        ("prune", _prune, "remove what was unused for longest"),
        ("clear", _clear, "remove everything"),
    ):
        action = add_command(actions, name, run, text, _MORE)
        action.add_argument("--dir", type=Path, help="another folder than the settings name")
        if name == "prune":
            action.add_argument(
                "--max-size", metavar="SIZE", help="bytes to keep, such as 1G (default: the limit)"
            )
            action.add_argument(
                "--older-than", metavar="AGE", help="remove all unused for so long, such as 7d"
            )


def _settings() -> Settings:
    from ..errors import SettingsError
    from ..settings import resolve

    try:
        return resolve()
    except SettingsError as error:
        raise UsageError(str(error)) from error


def _place(options: argparse.Namespace, settings: Settings) -> tuple[Path, str]:
    """The folder, and what says so."""
    from ..settings import OTHER_NAMES, default_directory

    if options.dir is not None:
        if not options.dir.is_dir():
            raise UsageError(f"{options.dir}: there is no such folder")
        return options.dir, "--dir"
    if settings.cache_dir is None:
        return default_directory(), "default"
    names = ("NEURON_COMPILE_CACHE_DIR", OTHER_NAMES["cache_dir"])
    return Path(settings.cache_dir), next(name for name in names if name in os.environ)


def _cache(options: argparse.Namespace) -> NeffCache:
    from ..runtime import CacheError, NeffCache

    try:
        return NeffCache(_place(options, _settings())[0])
    except CacheError as error:
        raise UsageError(str(error)) from error


def _ls(options: argparse.Namespace) -> int:
    entries = [_described(entry) for entry in _cache(options).entries()]
    if options.json:
        print_json(entries)
        return 0
    columns: list[Column | str] = [
        Column("key", whole=True),
        Column("used", right=True),
        Column("size", right=True),
        Column("operators", right=True),
        Column("for", whole=True),
        "arguments",
    ]
    now = time.time()
    rows = [
        (
            entry["key"][:_KEY],
            age_text(now - entry["used"]),
            size_text(entry["size"]),
            "-" if entry["operators"] is None else entry["operators"],
            entry["state"],
            entry["arguments"],
        )
        for entry in entries
    ]
    table("", columns, rows)
    total = size_text(sum(entry["size"] for entry in entries))
    say(f"{_entries(len(entries))}, {total}" if entries else "the cache is empty")
    return 0


def _info(options: argparse.Namespace) -> int:
    settings = _settings()
    directory, source = _place(options, settings)
    cache = _cache(options)
    entries = [_described(entry) for entry in cache.entries()]
    states = [entry["state"] for entry in entries]
    data = {
        "directory": str(directory),
        "source": source,
        "enabled": settings.cache,
        "exists": directory.is_dir(),
        # Asking must not make the folder.
        "writable": os.access(_nearest(directory), os.W_OK | os.X_OK),
        "limit": settings.cache_limit,
        "size": sum(entry["size"] for entry in entries),
        "entries": len(entries),
        "damaged": states.count(DAMAGED),
        "other_versions": states.count(OTHER),
    }
    if options.json:
        print_json(data)
        return 0
    exists = "" if data["exists"] else ", not made yet"
    facts(
        {
            "folder": f"{directory} ({source}{exists})",
            "in use": "yes" if settings.cache else "no: the option 'cache' is off",
            "writable": "yes" if data["writable"] else "no: nothing new is kept",
            "size": f"{size_text(data['size'])} of {size_text(settings.cache_limit)}",
            "entries": len(entries),
            "for others": f"{states.count(OTHER)} (made by other versions or machines)"
            if OTHER in states
            else None,
            "damaged": states.count(DAMAGED) or None,
        }
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    cache = _cache(options)
    count = len(cache.entries(contents=False))
    with progress(f"reading {_entries(count)}"):
        problems = cache.verify()
    if options.json:
        print_json({"checked": count, "removed": problems})
    else:
        for problem in problems:
            say(f"removed {problem}")
        say(f"{_entries(count)} read, {len(problems)} damaged")
    return 1 if problems else 0


def _prune(options: argparse.Namespace) -> int:
    limit, age = _settings().cache_limit, None
    if options.max_size is not None:
        limit = _size(options.max_size)
    if options.older_than is not None:
        age = age_in_seconds(options.older_than)
    with progress("removing"):
        removed = _cache(options).prune(limit, older_than=age)
    return _say_removed(removed, options)


def _clear(options: argparse.Namespace) -> int:
    with progress("removing"):
        removed = _cache(options).clear()
    return _say_removed(removed, options)


def _say_removed(removed: Sequence[Entry], options: argparse.Namespace) -> int:
    size = sum(entry.size for entry in removed)
    if options.json:
        print_json({"removed": [entry.key for entry in removed], "size": size})
    else:
        say(f"{_entries(len(removed))} removed, {size_text(size)}")
    return 0


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")


def _described(entry: Entry) -> dict[str, Any]:
    """An entry as plain data; its ``state`` says for whom it is."""
    operators = entry.metadata.get("operators")
    return {
        "key": entry.key,
        "path": str(entry.path),
        "size": entry.size,
        "used": entry.used,
        "created": entry.created,
        "state": _state(entry),
        "operators": operators if isinstance(operators, int) else None,
        "arguments": _arguments(entry.metadata),
        "components": dict(entry.components),
    }


def _state(entry: Entry) -> str:
    """An entry of other versions or of another machine is never taken here."""
    from ..runtime import machine, versions

    if not entry.metadata:
        return DAMAGED
    here = {"versions": dict(versions()), "machine": machine()}
    return HERE if all(entry.metadata.get(name) == x for name, x in here.items()) else OTHER


def _arguments(metadata: Mapping[str, Any]) -> str:
    """The first arguments by dtype and shape, and the number of parameters.

    A header may say anything; what it does not say as it should is left out.
    """
    signature = metadata.get("signature")
    listed = signature.get("arguments") if isinstance(signature, dict) else None
    items = [x for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
    given = [f"{x.get('dtype')}{x.get('shape')}" for x in items if not x.get("static")]
    parts = given[:_SHOWN]
    if len(given) > _SHOWN:
        parts.append(f"{len(given) - _SHOWN} more")
    if parameters := len(items) - len(given):
        parts.append(f"{parameters} parameters")
    return ", ".join(parts)


def _nearest(directory: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )


def _size(text: str) -> int:
    from ..errors import SettingsError
    from ..settings import size_in_bytes

    try:
        return size_in_bytes("--max-size", text)
    except SettingsError as error:
        raise UsageError(str(error)) from error


def age_in_seconds(text: str) -> float:
    """``90s``, ``30m``, ``12h``, ``7d``, ``2w``.

    Raises:
        UsageError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhdw])", text.strip().lower())
    if found is None:
        raise UsageError(f"--older-than {text}: must be a number and one of s, m, h, d, w: 7d")
    return float(found[1]) * _UNITS[found[2]]


def age_text(seconds: float) -> str:
    """How long ago, in the largest unit that gives a number of at least one."""
    seconds = max(seconds, 0.0)
    unit = next((x for x in ("d", "h", "m") if seconds >= _UNITS[x]), "s")
    return f"{seconds / _UNITS[unit]:.0f}{unit} ago"


def findings() -> list[Finding]:
    """What ``doctor`` says of the cache: in a process of its own, for its import may fail."""
    command = [sys.executable, "-m", "neuron_compile", "cache", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stderr.strip().removeprefix("neuron-compile: ")
    if done.returncode == 2:
        advice = "set NEURON_COMPILE_CACHE_DIR to a folder of yours, or NEURON_COMPILE_CACHE=0"
        return [Finding("cache", PROBLEM, said, advice)]
    if done.returncode:
        # The import of torch failed, most likely, which other findings and the self-test explain.
        return [Finding("cache", NOTE, "could not be looked at", "first mend the problems")]
    return judged(json.loads(done.stdout))


def judged(info: Mapping[str, Any]) -> list[Finding]:
    """What ``doctor`` makes of what ``cache info`` says."""
    where = f"{info['directory']} ({info['source']})"
    if not info["enabled"]:
        return [Finding("cache", NOTE, "off: every process compiles", "NEURON_COMPILE_CACHE=1")]
    if not info["writable"]:
        detail, advice = f"{where} cannot be written", "set NEURON_COMPILE_CACHE_DIR to another"
        return [Finding("cache", PROBLEM, detail, advice)]
    taken = f"{_entries(info['entries'])}, {size_text(info['size'])} of {size_text(info['limit'])}"
    if info["damaged"]:
        detail = f"{where}: {taken}; {info['damaged']} damaged"
        return [Finding("cache", NOTE, detail, "neuron-compile cache verify removes them")]
    return [Finding("cache", OK, f"{where}: {taken}")]
