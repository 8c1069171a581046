"""Writes the printed IR of one small graph into docs/architecture.md, between its markers.

Run ``python tools/document_road.py`` after a change of the road or of a version; with
``--check`` it only says whether the page is up to date (exit status 1 if not).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
LANGUAGES = {"fx": "python", "torch": "mlir", "stablehlo": "mlir", "hlo": "text"}


def example(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The graph that the page walks through: Torch-MLIR lowers a part of it, we splice the rest."""
    hidden = torch.nn.functional.linear(x, weight, bias)
    return torch.remainder(hidden, 2.0).sum(dim=1)


def printed() -> dict[str, str]:
    """Each phase's text for :func:`example`."""
    with tempfile.TemporaryDirectory() as folder:
        torch._dynamo.reset()
        compiled = torch.compile(example, backend="neuron", options={"dump_dir": folder})
        compiled(torch.randn(2, 8), torch.randn(4, 8), torch.randn(4))
        files = sorted(Path(folder).glob("*_*"))
        return {file.stem.split("_", 1)[1]: _tidy(file.read_text()) for file in files}


def _tidy(text: str) -> str:
    """Drop what differs between machines and runs: comments with paths, metadata, colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"^ *# (File:|No stacktrace).*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r", (metadata|frontend_attributes|backend_config)=\{[^\n]*", "", text)
    text = re.sub(r"^HloModule [^\n]*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def rewritten(page: str, *, hlo: bool) -> str:
    """The page with every marked block made anew; the HLO, which processors differ in, if asked."""
    for name, text in printed().items():
        if name == "hlo" and not hlo:
            continue
        block = f"<!-- {name} -->\n```{LANGUAGES[name]}\n{text}\n```\n<!-- /{name} -->"
        pattern = rf"<!-- {name} -->\n.*?<!-- /{name} -->"
        # Escaped, since a replacement reads backslashes.
        page = re.sub(pattern, block.replace("\\", r"\\"), page, flags=re.DOTALL)
    return page


def main() -> int:
    """Rewrite or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args().check
    old = PAGE.read_text()
    new = rewritten(old, hlo=not check)
    if check:
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
