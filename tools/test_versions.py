"""Run the tests on each supported Python found, with the newest jax, jaxlib and torch-mlir.

For each Python this makes (or reuses) a virtual environment `.venv-3.x` with torch as pinned
in constraints.txt and the newest release of the rest, runs `pytest -m "not slow" tests`, and
prints a table of what was combined and how it went. The exit code is 1 if anything failed.

torch is installed without its dependencies, as the wheel for most Pythons is a CUDA build
which would pull gigabytes of libraries. Such a build does not import without them; where
wheels of these libraries lie on disk, name their folders with `--cuda-libraries`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
NEWEST = ("jax", "jaxlib", "torch-mlir")
TORCH_REQUIREMENTS = (
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "sympy",
    "typing_extensions",
    "setuptools",
)
# What libtorch_cuda.so and libtorch_python.so of a CUDA 13 build are linked against.
CUDA_LIBRARIES = (
    "nvidia-cublas",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
    "nvidia-cufft",
    "nvidia-cufile",
    "nvidia-curand",
    "nvidia-cusparse",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvjitlink",
    "nvidia-nvshmem-cu13",
)
SHOWN = ("torch", *NEWEST)
VERSIONS_PROGRAM = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print("-")
"""


class StepFailedError(Exception):
    """A step of the set-up or the tests failed; the message is for the table."""


@dataclass
class Outcome:
    """One row of the table."""

    python: str
    versions: list[str] = field(default_factory=lambda: ["-"] * len(SHOWN))
    result: str = "no such interpreter found"
    failed: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the row's cells."""
        return [self.python, *self.versions, self.result, f"{self.seconds:.0f} s"]


class Environment:
    """The virtual environment of one Python."""

    def __init__(self, interpreter: Path, version: str) -> None:
        """Make `.venv-<version>`, unless it is there from an earlier run."""
        folder = ROOT / f".venv-{version}"
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            run([interpreter, "-m", "venv", folder], "venv failed")

    def pip(self, *arguments: str | Path) -> None:
        """Install something."""
        run([self.python, "-m", "pip", "install", "--quiet", *arguments], "install failed")

    def install(self, cuda_libraries: Sequence[Path]) -> None:
        """Install torch, the newest of the rest, and this project."""
        self.pip("--no-deps", "-c", ROOT / "constraints.txt", "torch")
        self.pip(*TORCH_REQUIREMENTS)
        if cuda_libraries and self.import_error("torch"):
            links = [argument for folder in cuda_libraries for argument in ("--find-links", folder)]
            self.pip("--no-deps", "--no-index", *links, *CUDA_LIBRARIES)
        self.pip("--upgrade", *NEWEST)
        for module in ("torch", "jaxlib", "torch_mlir.ir"):
            if error := self.import_error(module):
                raise StepFailedError(f"{module} does not import: {error}")
        self.pip(*test_requirements())
        self.pip("--no-deps", "-e", ROOT)

    def import_error(self, module: str) -> str | None:
        """Return why `module` does not import, or None if it does."""
        done = self._python("-c", f"import {module}")
        return None if done.returncode == 0 else last_line(done.stderr)

    def versions(self) -> list[str]:
        """Return the installed versions of the packages in the table."""
        return self._python("-c", VERSIONS_PROGRAM, *SHOWN).stdout.split()

    def outside_ranges(self) -> list[str]:
        """Return what is installed outside the ranges that pyproject.toml declares."""
        lines = self._python("-m", "pip", "check").stdout.splitlines()
        return [line for line in lines if line.startswith("neuron-compile ")]

    def test(self) -> str:
        """Run the tests, showing their output; return pytest's closing line."""
        command: list[str | Path] = [self.python, "-m", "pytest", "-m", "not slow", "tests"]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip("= \n") or last
        if process.returncode != 0:
            raise StepFailedError(f"pytest exit code {process.returncode}: {last}")
        return last

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each Python and print the table; return the exit code."""
    options = parse(arguments)
    outcomes = []
    for version in options.python or PYTHONS:
        print(f"--- Python {version}", flush=True)
        outcomes.append(attempt(version, options.cuda_libraries, options.install_only))
    print_table(outcomes)
    tried = any(outcome.seconds for outcome in outcomes)
    return 0 if tried and not any(outcome.failed for outcome in outcomes) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", action="append", metavar="3.x", help=f"default: {', '.join(PYTHONS)}"
    )
    parser.add_argument(
        "--cuda-libraries",
        action="append",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="wheels of the CUDA libraries, used if torch does not import without them",
    )
    parser.add_argument("--install-only", action="store_true", help="run no tests")
    return parser.parse_args(arguments)


def attempt(version: str, cuda_libraries: Sequence[Path], install_only: bool) -> Outcome:
    """Set up one Python and run the tests on it."""
    outcome = Outcome(version)
    interpreter = next(interpreters(version), None)
    if interpreter is None:
        return outcome
    start = time.monotonic()
    environment = None
    try:
        environment = Environment(interpreter, version)
        environment.install(cuda_libraries)
        outcome.result = "installed and imported" if install_only else environment.test()
    except StepFailedError as error:
        outcome.result, outcome.failed = str(error), True
    if environment is not None:
        outcome.versions = environment.versions()
        outcome.notes = environment.outside_ranges()
    outcome.seconds = time.monotonic() - start
    return outcome


def interpreters(version: str) -> Iterator[Path]:
    """Yield the interpreters of `version` that run, from PATH and then from pyenv."""
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in candidates:
        # pyenv puts a shim on PATH for versions that are not enabled; that one only fails.
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run(
            [candidate, "-c", program], capture_output=True, text=True, check=False
        )
        if done.stdout.strip() == version:
            yield candidate


def test_requirements() -> list[str]:
    """Return what the extra `test` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements: list[str] = project["optional-dependencies"]["test"]
    return requirements


def run(command: Sequence[str | Path], failure: str) -> None:
    """Run `command`, or raise with the last line it wrote."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise StepFailedError(f"{failure}: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """Return the last line of `text` that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the table, and what lies outside the declared ranges."""
    rows = [["Python", *SHOWN, "result", "time"], *(outcome.cells() for outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    for note in sorted({note for outcome in outcomes for note in outcome.notes}):
        print(f"note: {note}")


if __name__ == "__main__":
    sys.exit(main())
