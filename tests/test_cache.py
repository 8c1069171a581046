"""The NEFF cache on disk: what is kept, what a key holds, and what a bad disk may do."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compile
from neuron_compile import caching, crash_markers, keys, register_lowering
from neuron_compile.lowering import LoweringError, registry
from neuron_compile.runtime import (
    CacheError,
    NeffCache,
    NeffError,
    NeffFile,
    cache,
    neff_file,
    pack,
)

from .cached import X, base, compiled, fresh_process, key_of, made
from .support import equal, neuron

__all__ = ["fresh_process", "made"]  # fixtures

aten = torch.ops.aten


def file(text: str = "", size: int = 100) -> NeffFile:
    return NeffFile({"key": {"name": text}}, {"stablehlo": os.urandom(size)})


# ------------------------------------------------------------------------------------ folder


def test_what_is_put_in_comes_out(tmp_path: Path) -> None:
    store = NeffCache(tmp_path / "new" / "folder")
    assert store.get("a") is None
    assert store.entries() == []
    kept = file("a")
    assert store.put("a", kept)
    assert store.get("a") == kept
    assert store.directory.stat().st_mode & 0o777 == 0o700
    [entry] = store.entries()
    assert (entry.key, entry.components) == ("a", {"name": "a"})
    assert entry.size == len(pack(kept))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(CacheError, match=r"may be written by other users.*chmod go-w"):
        NeffCache(tmp_path)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        NeffCache(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="is no folder"):
        NeffCache(tmp_path / "file")


def test_a_refused_folder_is_a_warning_and_everything_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    x = torch.randn(3)
    for _ in range(2):
        equal(compiled(torch.sin, tmp_path)(x), x.sin())
    assert neuron_compile.report().compilations == 2
    assert neuron_compile.report().cache_misses == 0
    assert [r.levelname for r in caplog.records if "without a cache" in r.message] == ["WARNING"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_is_a_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(neff_file, "write", fail)
    x = torch.randn(3)
    for function in (torch.sin, torch.cos):
        equal(compiled(function, tmp_path)(x), function(x))
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert os.strerror(code) in warnings[0]
    assert "cache_dir" in warnings[0]


def test_no_locks_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(cache.filelock.FileLock, "acquire", fail)
    x = torch.randn(3)
    equal(compiled(torch.sin, tmp_path)(x), x.sin())
    assert NeffCache(tmp_path).entries()


def test_one_thread_at_a_time_makes_an_entry(tmp_path: Path) -> None:
    store, made = NeffCache(tmp_path), []

    def make() -> None:
        with NeffCache(tmp_path).lock("k"):
            if store.get("k") is None:
                time.sleep(0.01)
                made.append(1)
                store.put("k", file())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PATIENCE", 0.05)
    with NeffCache(tmp_path).lock("k"), NeffCache(tmp_path).lock("k"):
        pass


def test_the_entries_unused_for_longest_go_first(tmp_path: Path) -> None:
    store = NeffCache(tmp_path)
    for age, key in enumerate("abcd"):
        store.put(key, file())
        os.utime(store.path(key), (1000 - age, 1000 - age))
    size = store.entries()[0].size
    store.get("d")  # used now
    removed = store.prune(2 * size)
    assert [entry.key for entry in removed] == ["c", "b"]
    assert {entry.key for entry in store.entries()} == {"a", "d"}
    assert [entry.key for entry in store.prune(10**9, older_than=100)] == ["a"]


def test_a_limit_is_kept_and_the_newest_entry_stays(tmp_path: Path) -> None:
    store = NeffCache(tmp_path, limit=1)
    for key in "abc":
        store.put(key, file())
        assert [entry.key for entry in store.entries()] == [key]


def test_an_entry_that_is_being_made_is_not_pruned(tmp_path: Path) -> None:
    store = NeffCache(tmp_path)
    store.put("abc", file())
    with store.lock("abc"):
        assert store.prune(0) == []
    assert len(store.prune(0)) == 1


def test_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    store = NeffCache(tmp_path)
    store.put("a", file())
    old, new = (tmp_path / f".x.{name}{neff_file.UNFINISHED}" for name in ("old", "new"))
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    new.write_bytes(b"half")
    store.prune(10**9)
    assert not old.exists()
    assert new.exists()
    assert len(store.entries()) == 1


def test_verify_removes_the_damaged_entries_alone(tmp_path: Path) -> None:
    store = NeffCache(tmp_path)
    for key in "ab":
        store.put(key, file())
    store.path("a").write_bytes(store.path("a").read_bytes()[:-1])
    [problem] = store.verify()
    assert "a.neff" in problem
    assert [entry.key for entry in store.entries()] == ["b"]
    assert store.verify() == []


def test_clear_leaves_nothing(tmp_path: Path) -> None:
    compiled(torch.sin, tmp_path)(torch.randn(3))
    store = NeffCache(tmp_path)
    assert len(store.clear()) == 1
    assert store.entries() == []


# --------------------------------------------------------------------------- compiled graphs


def train(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((x @ w).relu(), 0.0).sum()


def test_a_second_compilation_takes_everything_from_the_cache(tmp_path: Path) -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)
    train(x, w).backward()
    wanted, w.grad = w.grad, None
    for hits in (0, 2):
        neuron_compile.reset_report()
        compiled(train, tmp_path)(x, w).backward()
        report = neuron_compile.report()
        assert (report.compilations, report.cache_hits) == (2 - hits, hits)
        equal(w.grad, wanted)
        w.grad = None
    assert {record.kind for record in report.graphs} == {"forward", "backward"}


def test_checks_of_a_cached_graph_name_the_line(tmp_path: Path) -> None:
    x = torch.randn(3)
    for _ in range(2):
        run = compiled(lambda x, i: x[i] * 2, tmp_path)
        equal(run(x, torch.tensor([2])), x[[2]] * 2)
        with pytest.raises(IndexError, match=r"out of range.*test_cache.py:\d+"):
            run(x, torch.tensor([3]))
    assert neuron_compile.report().cache_hits == 1


def test_values_of_tensors_in_a_graph_are_no_part_of_an_entry(tmp_path: Path) -> None:
    x = torch.randn(2)
    for values in ([1.0, 2.0], [3.0, 4.0]):
        held = torch.tensor(values)

        def function(x: torch.Tensor, held: Any = held, first: float = values[0]) -> Any:
            return x * held + torch.tensor([5.0, first])

        equal(compiled(function, tmp_path)(x), function(x))


def test_random_numbers_of_a_cached_graph_follow_the_generator(tmp_path: Path) -> None:
    x, found = torch.randn(64), []
    for _ in range(2):
        run = compiled(lambda x: torch.nn.functional.dropout(x, 0.5), tmp_path)
        torch.manual_seed(3)
        found += [run(x), run(x)]
    assert neuron_compile.report().cache_hits == 1
    equal(found[0], found[2])
    equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("variable", ["NEURON_COMPILE_CACHE_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR"])
def test_the_folder_comes_from_the_environment(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "not asked for"))
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    neuron(torch.sin, options={"cache": True})(torch.randn(3))
    assert len(NeffCache(tmp_path / "here").entries()) == 1


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_caches_can_be_turned_off(tmp_path: Path) -> None:
    compiled(torch.sin, tmp_path, cache=False)(torch.randn(3))
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        compiled(torch.sin, tmp_path)(torch.randn(3))
    assert list(tmp_path.iterdir()) == []


def test_lowerings_of_the_user_are_not_kept(tmp_path: Path) -> None:
    @torch.library.custom_op("test_cache::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    register_lowering(twice)(lambda ctx, x: x * 2)
    x = torch.randn(3)
    equal(compiled(lambda x: twice(x) + 1, tmp_path)(x), x * 2 + 1)
    assert neuron_compile.report().operators_in_fallback == 0
    assert NeffCache(tmp_path).entries() == []


def test_refusals_of_torch_mlir_are_known_to_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    lower = neuron_compile.graph_compiler.lower

    def refusing(module: Any, **options: Any) -> Any:
        found = module.graph.find_nodes(op="call_function", target=aten.sinh.default)
        if found:
            tries.append(found[0].name)
            raise LoweringError("no sinh today", found[0].name)
        return lower(module, **options)

    monkeypatch.setattr(neuron_compile.graph_compiler, "lower", refusing)
    x = torch.randn(3)
    for _ in range(2):
        with pytest.warns(neuron_compile.FallbackWarning, match="no sinh today"):
            equal(compiled(lambda x: (x + 1).sinh(), tmp_path)(x), (x + 1).sinh())
        # What another process starts with.
        registry.forget_refusals()
        neuron_compile.reset_report()
        caching._recalled.clear()
    assert len(tries) == 1


def test_a_graph_that_ended_a_process_is_compiled_in_a_worker(
    made: list[keys.Key],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    isolated: list[Any] = []
    compiler = neuron_compile.graph_compiler
    monkeypatch.setattr(compiler, "lower_and_compile_isolated", lambda *a, **k: isolated.append(a))
    key_of(made, tmp_path)
    folder = tmp_path / "crashes"
    assert list(folder.iterdir()) == []
    assert not isolated
    NeffCache(tmp_path).clear()
    dead = subprocess.Popen(["true"])
    dead.wait()
    markers = crash_markers.CrashMarkers(folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: dead.pid)
        assert markers._write(made[-1].digest)
    key_of(made, tmp_path)
    assert len(isolated) == 1
    assert "in a worker process now" in caplog.text
    assert list(folder.iterdir()) == []
    key_of(made, tmp_path)
    assert neuron_compile.report().cache_hits == 1


# ------------------------------------------------------------------------------------ logs


def test_the_log_says_what_differs_from_the_nearest_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "neuron_compile.cache")
    compiled(base, tmp_path)(X)
    compiled(torch.sin, tmp_path)(X)
    compiled(base, tmp_path, check_indices=False)(X)
    compiled(base, tmp_path)(X)
    messages = [r.message for r in caplog.records if r.name == "neuron_compile.cache"]
    assert "the cache is empty" in messages[0]
    assert messages[2].endswith("the nearest entry has other options")
    assert messages[3].startswith("hit")


# --------------------------------------------------------------------------- damaged entries


def damage(data: bytes, generator: random.Random) -> bytes:
    kind = generator.randrange(4)
    if kind == 0:
        return data[: generator.randrange(len(data))]
    if kind == 1:
        return data + generator.randbytes(generator.randrange(1, 50))
    place = generator.randrange(len(data))
    if kind == 2:
        return (
            data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]
        )
    length = generator.randrange(1, 200)
    return data[:place] + generator.randbytes(length) + data[place + length :]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_entry_is_made_anew(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials = 8 if seed == 0 else 300
    generator, x = random.Random(seed), torch.randn(4, 3)
    compiled(base, tmp_path)(x)
    [entry] = NeffCache(tmp_path).entries()
    for _ in range(trials):
        entry.path.write_bytes(damage(entry.path.read_bytes(), generator))
        neuron_compile.reset_report()
        equal(compiled(base, tmp_path)(x), base(x))
        report = neuron_compile.report()
        assert (report.compilations, report.cache_hits) == (1, 0)
        neff_file.read(entry.path)  # whole again
        caplog.clear()
    equal(compiled(base, tmp_path)(x), base(x))
    assert neuron_compile.report().cache_hits == 1


def test_an_entry_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    compiled(base, tmp_path)(X)
    compiled(lambda x: base(x) + 1, tmp_path)(X)
    first, second = NeffCache(tmp_path).entries()
    data = first.path.read_bytes()
    second.path.write_bytes(data)
    first.path.unlink()
    for function in (base, lambda x: base(x) + 1):
        equal(compiled(function, tmp_path)(X), function(X))


@pytest.mark.parametrize("field", ["key", "check_nodes"])
@pytest.mark.parametrize("value", [None, [], [-2]])
def test_an_entry_with_wrong_metadata_is_made_anew(field: str, value: Any, tmp_path: Path) -> None:
    x, i = torch.randn(3), torch.tensor([2])
    function = lambda x, i: x[i] * 2  # noqa: E731
    compiled(function, tmp_path)(x, i)
    store = NeffCache(tmp_path)
    [entry] = store.entries()
    before = neff_file.read(entry.path)
    neff_file.write(entry.path, NeffFile({**before.metadata, field: value}, before.sections))
    equal(compiled(function, tmp_path)(x, i), x[i] * 2)
    assert neuron_compile.report().compilations == 2


def test_an_entry_without_machine_code_is_made_anew(tmp_path: Path) -> None:
    compiled(base, tmp_path)(X)
    [entry] = NeffCache(tmp_path).entries()
    before = neff_file.read(entry.path)
    for sections in ({"stablehlo": b""}, {**before.sections, "executable": b"nonsense"}):
        neff_file.write(entry.path, NeffFile(before.metadata, sections))
        neuron_compile.reset_report()
        equal(compiled(base, tmp_path)(X), base(X))
        assert neuron_compile.report().compilations == 1


def test_constants_that_a_file_cannot_hold_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(NeffError, match="not JSON"):
        pack(NeffFile({"x": float("nan")}, {}))
    x = torch.randn(3)
    found = compiled(lambda x: (x.sin(), float("inf")), tmp_path)(x)
    equal(found[0], x.sin())
    assert found[1] == float("inf")
