"""Takes compiled graphs from the NEFF cache on disk, and puts new ones in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from . import artifacts
from .classify import Boundary
from .crash_markers import CrashMarkers
from .keys import Key, environment, graph_key, positions
from .lowering import LoweredModule
from .lowering import types as lowering
from .lowering.registry import foreign, lasting_refusals, refusals, restore_refusals
from .records import count
from .runtime import (
    CacheError,
    Check,
    Neff,
    NeffCache,
    NeffError,
    NeffFile,
    RuntimeCompileError,
    contents,
    loaded,
    pack,
    to_file,
    unpack,
    warn_once,
)
from .settings import Settings, default_directory

log = logging.getLogger("neuron_compile.cache")

#: How many of the entries last used are compared with a key that is missing, for the log.
_COMPARED = 200


@dataclasses.dataclass(frozen=True)
class Compiled:
    """An executable for a graph, and the checks in it with the names of the graph's nodes.

    ``torch_dialect`` is empty where nobody asked for it. ``seconds`` maps phases to their time.
    """

    neff: Neff
    checks: tuple[lowering.Check, ...]
    torch_dialect: str
    seconds: Mapping[str, float]


def open_cache(settings: Settings) -> NeffCache | None:
    """The cache on disk, or ``None`` where it is off or cannot be used (which is logged)."""
    if not settings.cache or torch.compiler.config.force_disable_caches:
        return None
    return _opened(settings.cache_dir or str(default_directory()), settings.cache_limit)


@functools.cache
def _opened(directory: str, limit: int) -> NeffCache | None:
    try:
        return NeffCache(directory, limit)
    except CacheError as error:
        warn_once(f"compiling without a cache: {error}")
        return None


Maker = Callable[[Settings], tuple[LoweredModule, Neff]]


def compiled(boundary: Boundary, settings: Settings, make: Maker) -> Compiled:
    """What the cache has for a graph, or else what ``make`` makes of it.

    ``make`` may change the graph. Of several processes that want one graph, one makes it. If one
    died of it, the next makes it in a worker process.
    """
    cache = open_cache(settings)
    custom = [node for node in boundary.module.graph.nodes if foreign(node)]
    if custom:
        log.info("not cached: a lowering of yours is used for %s", custom[0].target)
    if cache is None or custom:
        return _made(make, settings)
    started = time.perf_counter()
    key = graph_key(boundary, settings)
    spent = {"key": time.perf_counter() - started}
    names = list(positions(boundary.module))
    if (found := _taken(cache, key, names, settings)) is not None:
        return dataclasses.replace(found, seconds={**spent, **found.seconds})
    with cache.lock(key.digest):
        # Another process may have made it meanwhile.
        if (found := _taken(cache, key, names, settings)) is not None:
            return dataclasses.replace(found, seconds={**spent, **found.seconds})
        _log_miss(cache, key)
        count("cache_misses")
        found = _made_marked(cache, key, make, settings)
        _put(cache, key, names, boundary, found)
    return dataclasses.replace(found, seconds={**spent, **found.seconds})


def _made_marked(cache: NeffCache, key: Key, make: Maker, settings: Settings) -> Compiled:
    """Make a graph while a file says so, which is left if a native compiler ends this process."""
    markers = CrashMarkers(cache.directory / "crashes")
    if settings.isolate_compiler:
        return _made(make, settings)
    if not markers.crashed(key.digest):
        with markers.compiling(key.digest):
            return _made(make, settings)
    log.warning(
        "a process died while it compiled this graph (%s); it is compiled in a worker process now",
        key.digest,
    )
    found = _made(make, dataclasses.replace(settings, isolate_compiler=True))
    markers.forget(key.digest)
    return found


def _made(make: Maker, settings: Settings) -> Compiled:
    lowered, neff = make(settings)
    count("compilations")
    seconds = {**lowered.phases, **neff.seconds}
    return Compiled(neff, lowered.checks, lowered.torch_dialect, seconds)


def _taken(cache: NeffCache, key: Key, names: list[str], settings: Settings) -> Compiled | None:
    started = time.perf_counter()
    file = cache.get(key.digest) or _carried(cache, key)
    if file is None:
        return None
    options = settings.compiler_options
    try:
        if file.metadata.get("key") != dict(key.components):
            raise NeffError("it is of another key than its name")
        checks = _checks(file, names)
        neff = loaded(file, options)
    except (NeffError, RuntimeCompileError) as error:
        log.warning("the cache entry %s is made anew: %s", cache.path(key.digest), error)
        return None
    log.info("hit: %s", key.digest)
    count("cache_hits")
    artifacts.record(key.digest, pack(file))
    seconds = {"read": time.perf_counter() - started - neff.seconds["load"], **neff.seconds}
    return Compiled(neff, checks, "", seconds)


def _carried(cache: NeffCache, key: Key) -> NeffFile | None:
    """The entry of a key from a bundle that ``torch.compiler.load_cache_artifacts`` loaded."""
    data = artifacts.carried(key.digest)
    if data is None:
        return None
    try:
        file = unpack(io.BytesIO(data), len(data))
    except NeffError as error:
        log.warning("a loaded artifact, %s, is damaged and not used: %s", key.digest, error)
        return None
    cache.put(key.digest, file)
    return file


def _checks(file: NeffFile, names: list[str]) -> tuple[lowering.Check, ...]:
    places = file.metadata.get("check_nodes")
    if not isinstance(places, list) or not all(
        type(place) is int and -1 <= place < len(names) for place in places
    ):
        raise NeffError("it does not say which operators its checks belong to")
    checks = contents(file)[0].checks
    if len(checks) != len(places):
        raise NeffError("it has another number of checks than of their operators")
    return tuple(
        lowering.Check(check.error, check.message, names[place] if place >= 0 else "")
        for check, place in zip(checks, places, strict=True)
    )


def _put(cache: NeffCache, key: Key, names: list[str], boundary: Boundary, made: Compiled) -> None:
    places = {name: index for index, name in enumerate(names)}
    checks = tuple(Check(check.error, check.message) for check in made.checks)
    more = {
        "key": dict(key.components),
        "check_nodes": [places.get(check.node_name, -1) for check in made.checks],
        "created": time.time(),
        "operators": sum(node.op == "call_function" for node in boundary.module.graph.nodes),
    }
    try:
        file = to_file(made.neff, dataclasses.replace(boundary.signature, checks=checks), more=more)
    except (NeffError, RuntimeCompileError) as error:
        log.info("not cached: %s", error)
        return
    cache.put(key.digest, file)
    artifacts.record(key.digest, pack(file))


def _log_miss(cache: NeffCache, key: Key) -> None:
    """Say which components of the key the nearest entry has otherwise."""
    if not log.isEnabledFor(logging.INFO):
        return
    for name, value in key.components.items():
        log.debug("key of %s: %s %s", key.digest, name, value)
    others = [entry for entry in cache.entries()[:_COMPARED] if entry.components]
    nearest = min((key.differences(entry.components) for entry in others), key=len, default=None)
    if nearest is None:
        log.info("miss: %s; the cache is empty", key.digest)
    else:
        log.info("miss: %s; the nearest entry has other %s", key.digest, ", ".join(nearest))


# ------------------------------------------------------------------ refusals by Torch-MLIR

_recalled: set[str] = set()


def recall_refusals(settings: Settings) -> None:
    """Take up, once a process, what Torch-MLIR refused in others, so that it is not tried again."""
    cache = open_cache(settings)
    if cache is None or str(cache.directory) in _recalled:
        return
    _recalled.add(str(cache.directory))
    try:
        known = json.loads(_refusals_path(cache).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        log.warning("the refusals in %s cannot be read: %s", cache.directory, error)
        return
    if isinstance(known, dict) and all(isinstance(reason, str) for reason in known.values()):
        restore_refusals(known)


def keep_refusals(settings: Settings) -> None:
    """Let other processes know what Torch-MLIR refused in this one."""
    cache = open_cache(settings)
    if cache is None or not refusals():
        return
    path = _refusals_path(cache)
    with cache.lock("refusals"):
        known: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            known = dict(json.loads(path.read_text()))
        with contextlib.suppress(OSError):  # the cache itself warns of a disk that is full
            descriptor, name = tempfile.mkstemp(dir=cache.directory, prefix=".refusals")
            with os.fdopen(descriptor, "w") as stream:
                json.dump({**known, **lasting_refusals()}, stream)
            os.replace(name, path)


def _refusals_path(cache: NeffCache) -> Path:
    """Refusals hold for these versions of Torch-MLIR and of our lowerings alone."""
    name = Key({name: "\n".join(part) for name, part in environment().items()}).digest[:16]
    return cache.directory / f"refusals-{name}.json"
