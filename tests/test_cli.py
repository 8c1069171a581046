"""The command line: what each command says, and its exit status."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compile import operators as operators_module
from neuron_compile.cli import cache as cache_command
from neuron_compile.cli import console, doctor, environment, main, measure, selftest
from neuron_compile.cli import operators as operators_command
from neuron_compile.cli.package import package_page
from neuron_compile.explainer import Seen
from neuron_compile.runtime import NeffCache

from .support import IGNORE_TORCH, in_fresh_interpreter, neuron

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command: its status, standard output and standard error."""

    def run_it(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(item) for item in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_it


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


# ------------------------------------------------------------------------------------- compile

SCRIPT = """
import sys, torch

def main():
    function = torch.compile(lambda x: torch.relu(x) @ x{arguments})
    torch.testing.assert_close(function(torch.ones(3, 3)), torch.full((3, 3), 3.0))
    print("said", sys.argv[1:])
    {last}

if __name__ == "__main__":
    main()
"""


def script(folder: Path, last: str = "", arguments: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(last=last, arguments=arguments))
    return path


def test_a_script_runs_with_our_backend(run: Run, tmp_path: Path) -> None:
    before = sys.argv, sys.path[:], torch.compiler.get_default_backend()
    path = script(tmp_path)
    option = f"dump_dir={tmp_path}/dump"
    status, out, _ = run("compile", path, "--option", option, "--", "--epochs", "1")
    assert status == 0
    assert "said ['--epochs', '1']" in out
    assert re.search(r"^compilations +1$", out, re.M)
    assert re.search(r"^inference +1 +2 +0 +1 ", out, re.M)
    assert list((tmp_path / "dump").glob("*.neff"))
    assert before == (sys.argv, sys.path[:], torch.compiler.get_default_backend())


def test_a_script_for_programs(run: Run, tmp_path: Path) -> None:
    status, out, err = run("compile", script(tmp_path), "--json")
    data = json.loads(out)
    assert "said []" in err
    assert (status, data["status"], data["report"]["compilations"]) == (0, 0, 1)
    assert data["report"]["graphs"][0]["operators"][0]["user_line"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("last", "wanted", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no good')", 1, "no good\n"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
    ],
)
def test_the_status_of_a_script_is_ours(
    last: str, wanted: int, said: str, run: Run, tmp_path: Path
) -> None:
    status, out, err = run("compile", script(tmp_path, last))
    assert status == wanted
    assert said in err
    assert "compilations" in out
    # The traceback begins in the script, as Python's own would.
    assert "runpy" not in err
    assert ("script.py" in err) == ("raise" in last)


def test_a_script_that_compiles_nothing_is_told(run: Run, tmp_path: Path) -> None:
    status, _, err = run("compile", script(tmp_path, arguments=", backend='eager'"))
    assert status == 1
    assert "compiled nothing" in err


def test_flags_of_xla_are_options() -> None:
    given = ["xla_cpu_enable_fast_math=True", "xla_a=2", "xla_b=text", "buckets=16,32"]
    flags = {"xla_cpu_enable_fast_math": True, "xla_a": 2, "xla_b": "text"}
    assert cache_free_options(given) == {"buckets": "16,32", "xla_options": flags}


def cache_free_options(given: list[str]) -> dict[str, Any]:
    from neuron_compile.cli.compile import backend_options

    return backend_options(given)


FACTORIES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, scale=1.0):
        return self.norm(self.linear(x)).relu() * scale

@torch.library.custom_op("cli_test::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@halve.register_fake
def _(x):
    return torch.empty_like(x)

def example():
    return Net(), (torch.randn(4, 8),), {"scale": 2.0}

def falls_back():
    return (lambda x: halve(x.sin()) + 1), torch.randn(4)

def breaks():
    def function(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1
    return function, (torch.randn(4),)

def draws():
    return torch.nn.Dropout(0.5), (torch.ones(64),)

def wrong():
    return 3

def raises():
    raise ValueError("mine")
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("factories") / "factories_of_cli.py"
    path.write_text(FACTORIES)
    return path


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of ``compile`` may keep the folder of a factory in ``sys.path``; this one not."""
    monkeypatch.setattr(sys, "path", sys.path[:])


def compiled(run: Run, factories: Path, name: str, *more: str) -> tuple[int, Any]:
    status, out, _ = run("compile", f"{factories}:{name}", "--json", "--repeat", "2", *more)
    return status, json.loads(out)


@IGNORE_TORCH
def test_inference_of_a_factory(run: Run, factories: Path) -> None:
    status, data = compiled(run, factories, "example")
    assert (status, data["good"], data["training"], data["calls"]) == (0, True, False, 2)
    assert [item["what"] for item in data["compared"]] == ["results"]
    assert [graph["kind"] for graph in data["graphs"]] == ["inference"]
    assert (data["operators_in_fallback"], data["breaks"]) == (0, [])
    assert data["totals"]["compilations"] == 1


@IGNORE_TORCH
def test_training_of_a_factory(run: Run, factories: Path) -> None:
    status, data = compiled(run, factories, "example", "--training")
    assert (status, data["good"]) == (0, True)
    found = {item["what"]: item["tensors"] for item in data["compared"]}
    # Weight and bias of both layers; mean, variance and number of batches.
    assert found == {"results": 1, "gradients": 4, "buffers": 3}
    assert [graph["kind"] for graph in data["graphs"]] == ["forward", "backward"]


def test_a_fallback_is_shown_with_the_users_line(run: Run, factories: Path) -> None:
    status, out, _ = run("compile", f"{factories}:falls_back", "--repeat", "1")
    assert status == 0
    assert "Not on the device" in out
    line = FACTORIES[: FACTORIES.index("halve(x.sin())")].count("\n") + 1
    assert re.search(rf"cli_test\.halve\.default.* eager .*{factories.name}:{line} ", out)


def test_strict_mode_is_taken(run: Run, factories: Path) -> None:
    status, out, err = run("compile", f"{factories}:falls_back", "--mode", "strict")
    assert (status, out) == (1, "")
    assert "cli_test.halve.default" in err
    assert "Traceback" not in err
    status, _, err = run("compile", f"{factories}:example", "--option", "platform=nowhere")
    assert status == 1
    assert "'nowhere' is not installed" in err


def test_graph_breaks_are_shown(run: Run, factories: Path) -> None:
    status, out, _ = run("compile", f"{factories}:breaks", "--repeat", "1")
    assert status == 0
    line = FACTORIES[: FACTORIES.index("torch._dynamo.graph_break")].count("\n") + 1
    assert re.search(rf"{factories.name}:{line} in function  Call to .*graph_break", out)


def test_random_numbers_are_compared_where_they_are_eagers(run: Run, factories: Path) -> None:
    status, data = compiled(run, factories, "draws", "--training")
    assert (status, data["random"], data["compared"]) == (0, True, [])
    status, data = compiled(run, factories, "draws", "--training", "--option", "eager_rng=true")
    assert (status, data["random"]) == (0, False)
    assert data["compared"][0]["difference"] == 0


def test_what_a_factory_returns_is_checked(run: Run, factories: Path) -> None:
    status, _, err = run("compile", f"{factories}:wrong")
    assert status == 2
    assert "(model, args)" in err
    status, _, err = run("compile", f"{factories}:raises")
    assert status == 1
    assert "ValueError: mine" in err
    assert "cli/compile.py" not in err


def test_a_wrong_result_is_a_problem(
    run: Run, factories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negating(settings: Any) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            return lambda *args: [-x for x in module(*args)]

        return backend, Seen(graphs=1)

    monkeypatch.setattr(measure, "watching", negating)
    status, out, _ = run("compile", f"{factories}:example", "--repeat", "1")
    assert status == 1
    assert re.search(r"^results +1 +2\.0e\+00 +problem$", out, re.M)


def apart(actual: Any, wanted: Any, what: str = "results") -> measure.Compared:
    return measure.compare({what: actual}, {what: wanted})[0]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "wanted", "good"),
    [
        (torch.tensor([1.0, 2.0001]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, 2.001]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, INF]), False),
        (torch.tensor([INF]), torch.tensor([-INF]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(0), torch.ones(0), True),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.full((2,), 1e-30), torch.zeros(2), False),
        ([torch.ones(1)], (torch.ones(1),), False),
        ([torch.ones(1), 3], [torch.ones(1), 3], True),
        ([torch.ones(1), 3], [torch.ones(1), 4], False),
        (None, torch.ones(1), False),
    ],
)
def test_comparison(actual: Any, wanted: Any, good: bool) -> None:
    assert apart(actual, wanted).good is good


def test_a_gradient_that_is_rounding_is_no_difference() -> None:
    wanted = [torch.tensor([100.0]), torch.tensor([1e-7])]
    noise = [torch.tensor([100.0]), torch.tensor([-1e-7])]
    assert apart(noise, wanted, measure.GRADIENTS).good
    assert not apart(noise, wanted).good
    wrong = [torch.tensor([100.0]), torch.tensor([1e-2])]
    assert not apart(wrong, wanted, measure.GRADIENTS).good


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
        ({"difference": NAN}, "problem"),
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


# -------------------------------------------------------------------------------------- cache


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
