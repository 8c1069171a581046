"""``neuron-compile cache``: what is in a folder, and what goes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from neuron_compile.cli import cache as cache_command
from neuron_compile.runtime import NeffCache

from .command import Run, run
from .support import neuron

__all__ = ["run"]  # a fixture


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with three graphs."""
    folder = tmp_path_factory.mktemp("cache") / "neff"
    for size in (2, 3, 4):
        torch._dynamo.reset()
        options = {"cache": True, "cache_dir": folder}
        neuron(lambda x: x.sin() @ x, options=options)(torch.randn(size, size))
    return folder


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A copy of it to change: the graph of size 4 was used last, that of size 2 a week before."""
    folder = tmp_path / "neff"
    shutil.copytree(filled, folder)
    folder.chmod(0o700)
    for entry in NeffCache(folder).entries():
        age = 4 - entry.metadata["signature"]["arguments"][0]["shape"][0]
        used = entry.created - age * 302400
        os.utime(entry.path, (used, used))
    return folder


def test_cache_ls(cache: Path, run: Run) -> None:
    status, out, _ = run("cache", "ls", "--dir", cache)
    assert status == 0
    lines = out.splitlines()
    assert [re.search(r"\[\d, \d\]", line)[0] for line in lines[1:4]] == [  # type: ignore[index]
        "[4, 4]",
        "[3, 3]",
        "[2, 2]",
    ]
    assert re.search(r"^[0-9a-f]{12} +7d ago .* KiB +2 +here +float32\[2, 2\]$", lines[3])
    assert lines[4].startswith("3 entries, ")
    status, out, _ = run("cache", "ls", "--dir", cache, "--json")
    entries = json.loads(out)
    assert {item["state"] for item in entries} == {"here"}
    assert all(Path(item["path"]).stat().st_size == item["size"] for item in entries)
    assert "operators" in entries[0]["components"]


def test_cache_info(cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(cache))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_LIMIT", "2G")
    status, out, _ = run("cache", "info", "--json")
    data = json.loads(out)
    assert status == 0
    assert (data["directory"], data["entries"], data["limit"]) == (str(cache), 3, 2 << 30)
    assert data["source"] == "TORCH_NEURONX_NEFF_CACHE_DIR"
    assert data["size"] == sum(path.stat().st_size for path in cache.glob("*.neff"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_DIR", str(cache / "not_made"))
    status, out, _ = run("cache", "info")
    assert status == 0
    assert "not made yet" in out
    assert "NEURON_COMPILE_CACHE_DIR" in out
    assert not (cache / "not_made").exists()


def test_cache_of_a_default_place(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEURON_COMPILE_CACHE_DIR", "TORCH_NEURONX_NEFF_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/no/such/place")
    data = json.loads(run("cache", "info", "--json")[1])
    assert (data["source"], data["exists"], data["entries"]) == ("default", False, 0)


def test_a_folder_that_others_write_to_is_refused(cache: Path, run: Run) -> None:
    cache.chmod(0o777)
    status, _, err = run("cache", "ls", "--dir", cache)
    assert status == 2
    assert "may be written by other users" in err


def test_cache_verify(cache: Path, run: Run) -> None:
    assert run("cache", "verify", "--dir", cache)[:2] == (0, "3 entries read, 0 damaged\n")
    first, second, _ = sorted(cache.glob("*.neff"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.write_bytes(b"nonsense")
    listed = json.loads(run("cache", "ls", "--dir", cache, "--json")[1])
    assert {item["key"] for item in listed if item["state"] == "damaged"} == {second.stem}
    assert re.search(r" damaged$", run("cache", "ls", "--dir", cache)[1], re.M)
    status, out, _ = run("cache", "verify", "--dir", cache, "--json")
    removed = json.loads(out)["removed"]
    assert (status, len(removed)) == (1, 2)
    assert first.name in removed[0]
    assert not first.exists()
    assert len(list(cache.glob("*.neff"))) == 1


def test_cache_prune(cache: Path, run: Run) -> None:
    newest, middle, oldest = (entry.path for entry in NeffCache(cache).entries())
    assert run("cache", "prune", "--dir", cache)[1].startswith("0 entries removed")
    assert run("cache", "prune", "--dir", cache, "--older-than", "6d")[0] == 0
    assert [newest.exists(), middle.exists(), oldest.exists()] == [True, True, False]
    status, out, _ = run(
        "cache", "prune", "--dir", cache, "--max-size", newest.stat().st_size, "--json"
    )
    assert (status, json.loads(out)["removed"]) == (0, [middle.stem])
    assert newest.exists()


def test_cache_clear(cache: Path, run: Run) -> None:
    assert run("cache", "clear", "--dir", cache)[1].startswith("3 entries removed")
    assert not list(cache.glob("*.neff"))
    assert run("cache", "ls", "--dir", cache)[1] == "the cache is empty\n"


def test_an_entry_of_another_machine(
    cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuron_compile.runtime.machine", lambda: "another")
    assert " others " in run("cache", "ls", "--dir", cache)[1]
    assert "3 (made by other versions or machines)" in run("cache", "info", "--dir", cache)[1]


def test_headers_may_say_anything() -> None:
    for metadata in ({}, {"signature": 3}, {"signature": {"arguments": [3, {"static": 1}]}}):
        assert isinstance(cache_command._arguments(metadata), str)
