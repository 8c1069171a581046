"""Kills writers of a NEFF cache at random points, damages its files and prunes it meanwhile.

``python -m tests.cache_trials FOLDER --trials N --seed S`` exits with 1 and a line for each time
that a read gave something that was never written, or that an entry was lost which had been written
whole and which nobody had pruned or damaged.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from neuron_compile.runtime import NeffCache, NeffFile, neff_file, pack

_KEYS = 6


@functools.cache
def contents(key: int, version: int) -> NeffFile:
    """The file that a key may have; its size differs with both, up to some hundred kilobytes."""
    data = random.Random(f"{key} {version}").randbytes(1000 * (key + 1) ** 3 + version)
    return NeffFile({"key": {"name": f"{key}"}, "version": version}, {"stablehlo": data})


def _child(work: Callable[[], None]) -> int:
    """Do ``work`` in a child, which never returns here."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def _write_for_ever(folder: Path, seed: int) -> None:
    generator, store = random.Random(seed), NeffCache(folder)
    while True:
        key = generator.randrange(_KEYS)
        with store.lock(str(key)):
            store.put(str(key), contents(key, generator.randrange(3)))


def _prune_for_ever(folder: Path, kept: int) -> None:
    while True:
        NeffCache(folder).prune(kept)


def _damage(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if generator.random() < 0.5:
        data = data[: generator.randrange(len(data))]
    else:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def trial(folder: Path, generator: random.Random) -> list[str]:
    """One round: two writers, one of them with a pruner, killed after some milliseconds."""
    store, problems = NeffCache(folder), []
    whole = {str(key) for key in range(_KEYS) if store.get(str(key)) is not None}
    pruning = generator.random() < 0.3
    seeds = [generator.randrange(1 << 30) for _ in range(2)]
    children = [_child(functools.partial(_write_for_ever, folder, seed)) for seed in seeds]
    if pruning:
        children.append(_child(functools.partial(_prune_for_ever, folder, 100_000)))
    time.sleep(generator.uniform(0.0005, 0.03))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for key in range(_KEYS):
        found = store.get(str(key))
        if found is None and str(key) in whole and not pruning:
            problems.append(f"entry {key} was lost")
        if found is not None and found not in [contents(key, version) for version in range(3)]:
            problems.append(f"entry {key} has what nobody wrote")
    return problems + _damaged(store, generator)


def _damaged(store: NeffCache, generator: random.Random) -> list[str]:
    """Damage one entry: it is not read, the others are, and it can be written again."""
    entries = store.entries()
    if not entries:
        return []
    chosen = generator.choice(entries)
    before = chosen.path.read_bytes()
    _damage(chosen.path, generator)
    problems = []
    found = store.get(chosen.key)
    if found is not None and pack(found) != before:
        problems.append(f"the damaged entry {chosen.key} was read")
    if generator.random() < 0.5:
        store.verify()
        if {entry.key for entry in store.entries()} < {entry.key for entry in entries} - {
            chosen.key
        }:
            problems.append("verify removed an entry that was whole")
    store.put(chosen.key, contents(int(chosen.key), 0))
    if store.get(chosen.key) != contents(int(chosen.key), 0):
        problems.append(f"entry {chosen.key} could not be written again")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    for key in range(_KEYS):  # made once, for all children
        for version in range(3):
            contents(key, version)
    problems = 0
    for number in range(options.trials):
        for problem in trial(options.folder, generator):
            print(f"trial {number}: {problem}")
            problems += 1
    cut = len(list(options.folder.glob(f"*{neff_file.UNFINISHED}")))
    print(f"{options.trials} trials, {problems} problems; {cut} writers were killed in a write")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
