"""The command line: what each command says, and its exit status."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compile import operators as operators_module
from neuron_compile.cli import cache as cache_command
from neuron_compile.cli import console, doctor, environment, main, selftest
from neuron_compile.cli import operators as operators_command
from neuron_compile.cli.package import package_page

from .command import Run, run
from .support import in_fresh_interpreter, neuron

__all__ = ["run"]  # a fixture


@pytest.fixture(scope="module")
def neff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NEFF file of a product and a gather."""
    folder = tmp_path_factory.mktemp("neff")

    def function(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> Any:
        return torch.nn.functional.conv2d(x, weight).tanh()[index].mT, x.sum()

    args = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.tensor([1, 0])
    neuron(function, options={"dump_dir": folder})(*args)
    (path,) = folder.glob("*.neff")
    return path


# ------------------------------------------------------------------------------------- start


def test_help_and_version_are_quick() -> None:
    done = in_fresh_interpreter("""
        import sys
        from neuron_compile.cli import main
        for arguments in (["--help"], ["compile", "--help"], ["--version"]):
            try:
                main(arguments)
            except SystemExit as error:
                assert error.code == 0
        heavy = {"torch", "jax", "torch_mlir", "numpy", "rich"} & set(sys.modules)
        assert not heavy, heavy
    """)
    for said in ("inspect", "compile", "operators", "doctor", "ls", "cache", "exit status"):
        assert said in done.stdout
    assert re.search(r"neuron-compile \d.*torch 2\.\d+.*jaxlib \d", done.stdout)


def test_ls_and_cache_import_no_compiler() -> None:
    in_fresh_interpreter("""
        import sys
        from neuron_compile.cli import main
        assert main(["ls"]) == 0
        assert main(["cache", "info"]) == 0
        heavy = {"torch._dynamo", "torch_mlir"} & set(sys.modules)
        assert not heavy, heavy
    """)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "none.neff"], "none.neff"),
        (["inspect", "none.neffpkg"], "no such file"),
        (["operators", "no_such_operator"], "no operator 'no_such_operator'"),
        (["compile", "none.py"], "no such script"),
        (["compile", "none.py:factory"], "no such file"),
        (["compile", "no_such_module:factory"], "no module 'no_such_module'"),
        (["compile", "json:nothing"], "json has no 'nothing'; it has .*dumps"),
        (["compile", "json:dumps", "--option", "nonsense=1"], "unknown option 'nonsense'"),
        (["compile", "json:dumps", "--option", "nonsense"], "KEY=VALUE"),
        (["compile", "json:dumps", "--mode", "turbo"], "unknown mode"),
        (["compile", "json:dumps", "--repeat", "0"], "at least 1"),
        (["compile", "json:dumps", "--", "x"], "for a script"),
        (["compile", __file__, "--training"], "MODULE:FACTORY"),
        (["cache", "ls", "--dir", "none"], "no such folder"),
        (["cache", "ls", "--dir", __file__], "no such folder"),
        (["cache", "prune", "--max-size", "much"], "--max-size"),
        (["cache", "prune", "--older-than", "7x"], "7d"),
    ],
    ids=lambda value: " ".join(value)[:60].replace("/", "_") if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments: list[str], said: str, run: Run) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.search(said, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["operators", "--where", "x"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: neuron-compile" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = """
        import sys
        from neuron_compile.cli import doctor, main
        doctor.cache_findings = list
        sys.exit(main(["doctor", "--no-self-test"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    assert started.wait(120) == 0
    assert "Error" not in started.stderr.read()
    started.stderr.close()


# ------------------------------------------------------------------------------------ console

WORDS = [f"word{index}" for index in range(40)]
LONG = "neuron::an_operator_with_a_name_that_is_longer_than_a_terminal_is_wide." * 2


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_terminal_gets_everything(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console.table("Title", ["one", console.Column("n", right=True), "two"], [(LONG, 12, "[3, 4]")])
    console.facts({"words": " ".join(WORDS), "nothing": None})
    printed = capsys.readouterr().out
    assert "\x1b[" in printed
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert max(map(len, plain.splitlines())) <= columns
    dense = re.sub(r"[\s─]", "", plain)
    assert all(word in dense for word in WORDS)
    assert "nothing" not in dense
    cells = [line[: line.index("  ")] if "  " in line else line for line in plain.splitlines()]
    assert LONG in re.sub(r"\s", "", "".join(cell.strip() for cell in cells)) or columns == 160
    assert "12" in plain
    assert "…" not in plain


def test_a_pipe_gets_one_plain_line_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    rows = [(LONG, 12, "[3, 4]", ""), ("short", 1234, "[bold]", "")]
    console.table("", ["one", console.Column("n", right=True), "two", "note"], rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split("  ") == [LONG, "  12", "[3, 4]"] or LONG in lines[1]
    assert lines[2].split() == ["short", "1234", "[bold]"]
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress("long work", 2) as step:
        step()
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with console.progress("long work", 2) as step:
        step()
        step()
    assert "long work" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_figures() -> None:
    sizes = [console.size_text(x) for x in (0, 1023, 1536, 3 << 20, 5 << 40, None)]
    assert sizes == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 TiB", "-"]
    times = [console.seconds_text(x) for x in (2, 0.0121, 85e-6, None)]
    assert times == ["2.00 s", "12.10 ms", "85.0 µs", "-"]
    ages = [cache_command.age_text(x) for x in (-1, 5, 60, 7200, 86400 * 3)]
    assert ages == ["0s ago", "5s ago", "1m ago", "2h ago", "3d ago"]
    assert cache_command.age_in_seconds("1.5h") == 5400


# ------------------------------------------------------------------------- inspect, operators, ls


def test_inspect(neff: Path, run: Run) -> None:
    status, page, _ = run("inspect", neff)
    assert status == 0
    for said in ("3 arguments", "2 results", "float32  [4, 3, 3, 3]", "dimensions [0, 1, 3, 2]"):
        assert said in page
    assert "index out of range" in page
    assert "(this one)" in page
    assert "flops" not in page


def test_inspect_for_programs(neff: Path, run: Run) -> None:
    status, out, _ = run("inspect", neff, "--json", "--cost", "--trust")
    data = json.loads(out)
    assert status == 0
    assert data["size"] == neff.stat().st_size
    assert data["why_rebuild"] is None
    assert data["signature"]["arguments"][1]["shape"] == [4, 3, 3, 3]
    # 2·3·9·9 + 4·3·3·3 floats, and two indices.
    assert data["memory"]["argument"] == (486 + 108) * 4 + 16
    assert data["memory"]["peak"] >= data["memory"]["argument"]
    assert data["cost"]["flops"] > 0
    assert "func.func" in json.loads(run("inspect", neff, "--json", "--stablehlo")[1])["stablehlo"]


def test_inspect_says_what_analysis_leaves_out(neff: Path, run: Run) -> None:
    status, page, _ = run("inspect", neff, "--cost")
    assert status == 0
    assert "work of vendor kernels (1) is not in these figures" in page
    assert re.search(r"arguments\s+2,392", page)


def test_inspect_of_a_damaged_file(neff: Path, run: Run, tmp_path: Path) -> None:
    damaged = bytearray(neff.read_bytes())
    damaged[-10] ^= 1
    path = tmp_path / "damaged.neff"
    path.write_bytes(damaged)
    status, out, err = run("inspect", path)
    assert (status, out) == (2, "")
    assert "section 'executable' is damaged" in err


PACKAGE = {
    "path": "x.neffpkg",
    "size": 4096,
    "versions": {"torch": "2.13.0"},
    "has_weights": False,
    "weights": [{"names": ["w"], "nbytes": 2048}],
    "entry_points": {
        "forward": [
            {
                "inputs": {"args[0]": "float32[2, 8]"},
                "outputs": {"": "tensor"},
                "mutations": ["running_mean"],
                "platform": "cpu",
                "stablehlo_bytes": 1024,
                "executable_bytes": 1024,
            }
        ]
    },
}


def test_a_package_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    package_page(PACKAGE, ["part 0.neff is damaged"])
    page = capsys.readouterr().out
    for said in ("left out", "2.0 KiB", "Entry point forward", "args[0]: float32[2, 8]"):
        assert said in page
    assert "  tensor  running_mean  cpu" in page
    assert "problem: part 0.neff is damaged" in page


def test_where_is_as_the_library_has_it() -> None:
    found = (operators_module.DEVICE, operators_module.DECOMPOSED, operators_module.EAGER)
    assert found == operators_command.WHERE


def test_operators_of_a_name(run: Run) -> None:
    status, page, _ = run("operators", "gelu", "aten.linear", "--where", "device")
    assert status == 0
    assert re.search(r"^aten\.gelu\.default +device +spliced$", page, re.M)
    assert "linear" not in page
    assert page.splitlines()[-1] == "1 device"


def test_ls(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "3")
    status, out, _ = run("ls", "--json")
    data = json.loads(out)
    assert status == 0
    device = data["devices"][0]
    assert (device["platform"], device["id"], device["cores"]) == ("cpu", 0, 3)
    assert device["memory_limit"] == data["host"]["memory_total"]
    assert data["host"]["threads_torch"] == torch.get_num_threads()
    assert data["host"]["cores_usable"] <= os.cpu_count()
    status, page, _ = run("ls")
    assert re.search(r"^cpu +0 +cpu +0 +3 ", page, re.M)


# ------------------------------------------------------------------------------------- doctor


def found(variables: dict[str, str]) -> dict[str, environment.Finding]:
    return {item.check: item for item in environment.findings(variables)}


def test_this_environment_is_sound() -> None:
    items = environment.findings({})
    assert [item for item in items if item.status == environment.PROBLEM] == []
    assert all(item.advice for item in items if item.status == environment.NOTE)
    assert {"torch", "jax", "jaxlib", "torch-mlir", "backend"} <= {item.check for item in items}


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("TORCH_LOGS", "+dynamo,neuron", "problem"),
        ("TORCH_LOGS", "-neuron_hlo", "problem"),
        ("TORCH_LOGS", "+neuron_compile", None),
        ("TORCHDYNAMO_DISABLE", "1", "problem"),
        ("TORCHDYNAMO_DISABLE", "0", None),
        ("NEURON_COMPILE_BUCKETS", "a,b", "problem"),
        ("NEURON_COMPILE_BUCKET", "16", "problem"),
        ("NEURON_COMPILE_BUCKETS", "16,32", "note"),
        ("NEURON_COMPILE_LOGS", "neuron_hlo", None),
        ("XLA_FLAGS", "--xla_dump_to=/tmp", "note"),
        ("JAX_PLATFORMS", "cuda", "note"),
        ("OMP_NUM_THREADS", "4096", "note"),
        ("OMP_NUM_THREADS", "1", "ok"),
        ("OMP_WAIT_POLICY", "active", "note"),
        ("LD_PRELOAD", "/no/such/library.so", "note"),
    ],
)
def test_variables(name: str, value: str, status: str | None) -> None:
    item = found({name: value}).get(name)
    assert (item.status if item else None) == status
    if item is not None and status in ("problem", "note"):
        assert value in item.detail
        assert item.advice or name.startswith(("NEURON", "JAX"))


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [("torch", "2.12.1", "2.12.1; this package"), ("jaxlib", None, "not installed")],
)
def test_versions_out_of_range(
    name: str, version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda x: version if x == name else real(x))
    item = found({})[name]
    assert item.status == environment.PROBLEM
    assert said in item.detail
    assert f"pip install '{name}" in item.advice


def test_a_missing_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.metadata, "entry_points", lambda **_: [])
    assert found({})["backend"].status == environment.PROBLEM


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", signal.SIGABRT.name),
        ("raise ValueError('two\\nlines')", "ValueError: two"),
        ("print('nonsense')", "nonsense"),
        ("import time; time.sleep(60)", "not done after"),
    ],
    ids=["abort", "error", "nonsense", "hang"],
)
def test_a_self_test_that_fails_is_a_finding(code: str, said: str) -> None:
    timeout = 1.0 if "sleep" in code else 60.0
    (item,) = doctor.self_test(timeout, [sys.executable, "-c", code])
    assert item.status == environment.PROBLEM
    assert said in item.detail
    assert item.advice


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"difference": 0.1}, "problem"),
        ({"difference": float("nan")}, "problem"),
        ({"compilations": 0}, "problem"),
        ({"in_fallback": 1, "fallback_reasons": {"aten.x": "why"}}, "problem"),
    ],
)
def test_a_self_test_is_judged(change: dict[str, Any], status: str) -> None:
    result = {"difference": 1e-7, "compilations": 2, "in_fallback": 0, "seconds": 1.0}
    result |= {"platforms": ["cpu"], "platform_errors": {"cuda": "no driver"}, **change}
    code = f"print({json.dumps(json.dumps(result))})"
    platforms, cuda, judged = doctor.self_test(60, [sys.executable, "-c", code])
    assert (platforms.detail, cuda.status, judged.status) == ("cpu", "note", status)


def test_the_self_test() -> None:
    result = selftest.run()
    assert result["difference"] <= selftest.TOLERANCE
    assert (result["compilations"], result["in_fallback"]) == (2, 0)


@pytest.mark.slow
def test_doctor(run: Run) -> None:
    status, out, _ = run("doctor", "--json")
    data = json.loads(out)
    found = {item["check"]: item for item in data["findings"]}
    assert (status, data["problems"]) == (0, 0), data
    assert "2 compilations" in found["self-test"]["detail"]
    assert found["cache"]["detail"].startswith("off")


def test_the_doctor_works_where_torch_cannot_be_imported() -> None:
    done = in_fresh_interpreter(
        """
        import sys
        from neuron_compile.cli import doctor, main
        doctor.cache_findings = list
        assert main(["doctor", "--no-self-test"]) == 1
        assert "torch" not in sys.modules
        """,
        {"TORCH_LOGS": "+neuron"},
    )
    assert "What to do" in done.stdout
    assert "TORCH_LOGS=+neuron_compile" in done.stdout
    assert done.stdout.endswith("\n1 problem\n")


@pytest.mark.parametrize(
    ("info", "status", "said"),
    [
        ({}, "ok", "2 entries, 2.0 KiB of 4.0 KiB"),
        ({"enabled": False}, "note", "off"),
        ({"writable": False}, "problem", "cannot be written"),
        ({"damaged": 1}, "note", "1 damaged"),
    ],
)
def test_the_doctor_looks_at_the_cache(info: dict[str, Any], status: str, said: str) -> None:
    sound = {"directory": "/x", "source": "default", "enabled": True, "writable": True}
    sound |= {"entries": 2, "size": 2048, "limit": 4096, "damaged": 0}
    (item,) = cache_command.judged({**sound, **info})
    assert item.status == status
    assert said in item.detail
    assert item.advice or status == "ok"
