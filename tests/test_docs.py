"""The documentation's code runs, and its printed IR is what the compiler prints."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import neuron_compile

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    """The fenced Python blocks of a page, leaving out those between the markers of printed IR."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_readme_examples_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    blocks = python_blocks("README.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert "operators on the device" in capsys.readouterr().out
    compiled = torch.compile(torch.ops.mylib.double, backend="neuron", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert neuron_compile.report().operators_in_fallback == 0


def pinned_versions() -> bool:
    """Whether the installed packages are those that the printed IR was made with."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    return all(
        importlib.metadata.version(name).split("+")[0] == version for name, version in pins.items()
    )


@pytest.mark.skipif(not pinned_versions(), reason="other versions print other IR")
def test_architecture_page_shows_what_is_printed() -> None:
    command = [sys.executable, "tools/document_road.py", "--check"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr or "run python tools/document_road.py"
