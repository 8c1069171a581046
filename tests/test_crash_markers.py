"""Markers of graphs on which a process died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_compile.crash_markers import CrashMarkers

DYING = """
import os, sys
from neuron_compile.crash_markers import CrashMarkers
with CrashMarkers(sys.argv[1]).compiling("graph"):
    os.abort()
"""


def one_marker(folder: Path) -> Path:
    (marker,) = folder.iterdir()
    return marker


def test_no_marker_is_left_by_a_compilation_that_ends(tmp_path: Path) -> None:
    markers = CrashMarkers(tmp_path / "crashes")
    assert not markers.crashed("graph")
    with markers.compiling("graph"), markers.compiling("graph"):
        assert len(list((tmp_path / "crashes").iterdir())) == 2
        assert not markers.crashed("graph"), "this process is alive"
        markers.forget("graph")
        assert len(list((tmp_path / "crashes").iterdir())) == 2
    with pytest.raises(KeyboardInterrupt), markers.compiling("graph"):
        raise KeyboardInterrupt
    assert not list((tmp_path / "crashes").iterdir())


def test_the_next_process_finds_what_an_aborted_one_left(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=False)
    assert finished.returncode == -signal.SIGABRT
    markers = CrashMarkers(tmp_path)
    assert markers.crashed("graph")
    assert not markers.crashed("grap")
    assert not markers.crashed("graph_2")
    with markers.compiling("graph"):
        assert markers.crashed("graph")
        markers.forget("graph")
        assert not markers.crashed("graph")
        one_marker(tmp_path)  # the own one is kept
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "crashed"),
    [
        ({}, False),
        ({"started": "1"}, True),  # another process has the number by now
        ({"boot": "before"}, True),
        ({"host": "elsewhere", "boot": "before"}, False),
        ({"pid": 2**22 + 1}, True),  # above Linux's largest number
        ({"pid": "1"}, False),
        ({"pid": 2**80}, False),
    ],
)
def test_whose_process_is_dead(tmp_path: Path, change: dict[str, object], crashed: bool) -> None:
    markers = CrashMarkers(tmp_path)
    with markers.compiling("graph"):
        marker = one_marker(tmp_path)
        marker.write_text(json.dumps({**json.loads(marker.read_text()), **change}))
        assert markers.crashed("graph") is crashed


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "7"])
def test_a_damaged_marker_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "graph-1-0.json").write_text(text)
    assert not CrashMarkers(tmp_path).crashed("graph")


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    markers = CrashMarkers(tmp_path / "file" / "crashes")
    with caplog.at_level("INFO", "neuron_compile"), markers.compiling("graph"):
        assert not markers.crashed("graph")
    assert "no crash marker" in caplog.text


@pytest.mark.parametrize("key", ["", "../graph", "a-b", "*", "a" * 129, "graph\n"])
def test_a_key_that_is_none(tmp_path: Path, key: str) -> None:
    markers = CrashMarkers(tmp_path)
    with pytest.raises(ValueError, match="no key"):
        markers.crashed(key)
    with pytest.raises(ValueError, match="no key"), markers.compiling(key):
        pass
    assert os.listdir(tmp_path) == []
