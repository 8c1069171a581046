"""The benchmarks, small: what is compared, counted, kept and written; never how long it took."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks import depth, harness, peak_memory, plot, report, study, tables, warm_start
from benchmarks.architecture import ADAMW, INFERENCE, TRAINING, Architecture
from benchmarks.machine import machine
from benchmarks.programs import BACKENDS, EAGER, FREEZING, INDUCTOR, JAX, NEURON, program, supports
from benchmarks.record import Cell, Results, Settings, geometric_mean
from benchmarks.suites import NEED_TRANSFORMERS, SUITES, suites

from .support import IGNORE_TORCH

ROOT = Path(__file__).parents[1]
MEMBERS = {
    name: (suite, member)
    for suite, members in suites(True).items()
    for name, member in members.items()
}
JITTED = ("mlp", "mlp64", "gpt2", "pointwise_chain")
# The eight models have tests of their own, in test_models.py.
OTHERS = [
    (name, mode)
    for name, (suite, member) in MEMBERS.items()
    for mode in (INFERENCE, TRAINING)
    if suite != "models" and mode in member.modes
]


def measured(
    name: str, mode: str, backends: list[str], samples: int = 4, notes: list[str] | None = None
) -> list[Cell]:
    suite, architecture = MEMBERS[name]
    said = notes if notes is not None else []
    cells = harness.measure(suite, architecture, mode, backends, samples, said.append)
    assert [cell.error for cell in cells] == [None] * len(cells)
    return cells


def observed(backend: str, architecture: Architecture, mode: str) -> harness.Observation:
    made = program(backend, architecture, mode, architecture.build(0), architecture.inputs(0))
    return made.observe(made.run(1))


# ------------------------------------------------------------------------------------- suites


def test_both_sizes_have_the_same_members() -> None:
    small, full = suites(True), suites(False)
    assert tuple(small) == tuple(full) == SUITES
    for suite, members in small.items():
        assert {name: each.modes for name, each in members.items()} == {
            name: each.modes for name, each in full[suite].items()
        }
    assert set(MEMBERS) >= NEED_TRANSFORMERS
    assert len(MEMBERS) == sum(map(len, small.values()))  # a name says which suite it is of


@IGNORE_TORCH
@pytest.mark.parametrize(("name", "mode"), OTHERS)
def test_results_are_eagers_and_nothing_falls_back(name: str, mode: str) -> None:
    cell = measured(name, mode, [EAGER, NEURON], samples=2)[1]
    assert not cell.suspicious, cell.errors
    assert cell.operators_on_device and cell.operators_in_fallback == 0
    assert cell.graphs and cell.graph_breaks == 0 and cell.recompilations == 0


@IGNORE_TORCH
@pytest.mark.parametrize("name", ["mlp", "policy_update"])
def test_adamw_is_compiled_too(name: str) -> None:
    eager, cell = measured(name, ADAMW, [EAGER, NEURON], samples=2)
    # Forward and backward are one graph of Dynamo's; the optimizer's step is another, compiled
    # again once there is a state. Nothing is compiled later.
    assert eager.graphs == 0 and cell.graphs is not None and cell.graphs >= 2
    assert cell.recompilations == 0 and cell.operators_in_fallback == 0
    assert set(cell.errors) == {"output", "gradients", "optimizer"} and not cell.suspicious


@pytest.mark.parametrize("name", JITTED)
def test_hand_written_jax(name: str) -> None:
    _, architecture = MEMBERS[name]
    modes = [mode for mode in architecture.modes if supports(JAX, architecture, mode)]
    assert INFERENCE in modes and (TRAINING in modes) == (name == "mlp")
    for mode in modes:
        wanted = observed(EAGER, architecture, mode)
        found = observed(JAX, architecture, mode)
        assert max(harness.relative_errors(found, wanted).values()) < 1e-5


def test_a_jitted_training_step_trains() -> None:
    _, architecture = MEMBERS["mlp"]
    pair = [
        program(each, architecture, TRAINING, architecture.build(0), architecture.inputs(0))
        for each in (EAGER, JAX)
    ]
    eager, jitted = (each.observe(each.run(40)).tensors["output"]["output"] for each in pair)
    first = observed(EAGER, architecture, TRAINING).tensors["output"]["output"]
    assert not torch.equal(first, eager)
    torch.testing.assert_close(jitted, eager, rtol=1e-5, atol=1e-6)


def test_who_takes_part() -> None:
    _, mlp = MEMBERS["mlp"]
    _, chain = MEMBERS["pointwise_chain"]
    takes_part = {mode: [b for b in BACKENDS if supports(b, mlp, mode)] for mode in mlp.modes}
    assert takes_part == {
        INFERENCE: list(BACKENDS),
        TRAINING: [EAGER, INDUCTOR, NEURON, JAX],
        ADAMW: [EAGER, INDUCTOR, NEURON],
    }
    assert not supports(EAGER, chain, TRAINING)


@pytest.mark.slow  # compiles C++
@IGNORE_TORCH
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # as wanted
def test_freezing_compiles_by_itself() -> None:
    plain, frozen = measured("mlp", INFERENCE, [EAGER, INDUCTOR, FREEZING], samples=2)[1:]
    assert plain.graphs == frozen.graphs == 1
    assert plain.recompilations == frozen.recompilations == 0


# ------------------------------------------------------------------------------------- harness


def test_short_calls_are_timed_in_loops() -> None:
    notes: list[str] = []
    cells = measured("linear64", INFERENCE, [EAGER, NEURON], samples=5, notes=notes)
    assert [len(cell.samples_ms) for cell in cells] == [5, 5]
    assert all(cell.calls_per_sample > 1 for cell in cells)
    assert cells[0].speedup == 1.0 and cells[1].finished
    # Backends take turns, and each turn begins with the other one.
    turns = [note.split(" · ")[2] for note in notes if note.endswith("samples")]
    assert turns == [EAGER, NEURON, NEURON, EAGER]


def test_a_failure_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no such peer")

    monkeypatch.setitem(harness.program.__globals__["FACTORIES"], "broken", fails)
    suite, architecture = MEMBERS["linear64"]
    cells = harness.measure(suite, architecture, INFERENCE, [EAGER, "broken"], 2, lambda _: None)
    assert cells[0].finished and cells[1].error == "RuntimeError: no such peer"
    assert cells[1].suspicious and "failed" in tables.row(cells[1])


def test_wrong_values_are_seen() -> None:
    right = harness.Observation({"output": {"output": torch.tensor([1.0, 2.0])}})
    wrong = harness.Observation({"output": {"output": torch.tensor([1.0, 2.5])}})
    assert harness.relative_errors(wrong, right) == {"output": 0.25}
    lacking = harness.Observation({"output": {"other": torch.ones(2)}})
    with pytest.raises(ValueError, match="differ in name"):
        harness.relative_errors(lacking, right)


# -------------------------------------------------------------------------------------- record


def made_up(model: str, backend: str, milliseconds: float, suite: str = "models") -> Cell:
    cell = Cell(model, INFERENCE, backend, suite, first_call_s=1.0, calls_per_sample=1)
    cell.samples_ms = [milliseconds * factor for factor in (0.9, 1.0, 1.0, 1.1)]
    cell.summarise()
    cell.errors = {"output": 1e-6}
    return cell


def results() -> Results:
    found = Results(Settings(4, True), machine())
    for suite, model, factor in (
        ("models", "a", 1.0),
        ("models", "b", 0.01),
        ("dispatch", "c", 0.01),
    ):
        for backend, milliseconds in ((EAGER, 8.0), (INDUCTOR, 4.0), (NEURON, 2.0)):
            cell = made_up(model, backend, milliseconds * factor, suite)
            cell.speedup = 8.0 / milliseconds
            found.cells.append(cell)
    return found


def test_geometric_means() -> None:
    over_eager = geometric_mean(results().pairs("models", INFERENCE, NEURON))
    over_inductor = geometric_mean(results().pairs("models", INFERENCE, NEURON, base=INDUCTOR))
    assert over_eager is not None and over_inductor is not None
    assert over_eager.speedup == pytest.approx(4.0) and over_eager.models == 2
    assert over_inductor.speedup == pytest.approx(2.0)
    low, high = over_eager.interval
    assert low < 4.0 < high
    assert geometric_mean(results().pairs("models", TRAINING, NEURON)) is None


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    wanted = results()
    wanted.save(tmp_path / "results.json")
    found = Results.load(tmp_path / "results.json")
    assert found == wanted
    replaced = made_up("a", EAGER, 1.0)
    found.replace([replaced])
    assert found.group("models", "a", INFERENCE) == [replaced] and len(found.cells) == 7
    # An empty file and the one in the repository are readable, too.
    Results(Settings(2, True), machine()).save(tmp_path / "empty.json")
    assert Results.load(tmp_path / "empty.json").cells == []
    assert Results.load(ROOT / "benchmarks/results/results.json").cells


# ------------------------------------------------------------------------------------- studies


def test_a_study_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study.json"
    keys = [{"model": name} for name in ("a", "b", "c")]
    calls: list[str] = []

    def measure(key: Mapping[str, Any]) -> study.Row:
        calls.append(key["model"])
        if key["model"] == "b":
            raise subprocess.CalledProcessError(1, "python")
        return {"seconds": 1.0}

    study.Study(path, {"small": True}, resume=False).run(keys[1:], measure)
    study.Study(path, {"small": True}, resume=True).run(keys, measure)
    assert calls == ["b", "c", "a"]
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows] == ["a", "b", "c"]
    assert "error" in rows[1] and rows[2]["seconds"] == 1.0
    assert re.search(r"\[1/1, \d+ s\] model a, seconds 1", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="start over"):
        study.Study(path, {"small": False}, resume=True)


def test_lines_of_depth() -> None:
    line = depth.fit([2, 4, 8], [1.2, 1.4, 1.8])
    assert (line.slope, line.intercept) == pytest.approx((0.1, 1.0))
    assert line.r_squared == pytest.approx(1.0) and line.deviation == pytest.approx(0.0, abs=1e-9)
    keys = depth.keys([2, 48], ["inference"], ["neuron", "inductor"], inductor_up_to=8)
    assert [(key["backend"], key["layers"]) for key in keys] == [
        ("neuron", 2),
        ("inductor", 2),
        ("neuron", 48),
    ]


def test_cases_of_warm_starts() -> None:
    keys = warm_start.cases(None, warm_start.MODES, warm_start.BACKENDS, rounds=1)
    assert len(keys) == 3 * (8 + 4)
    assert set(warm_start.MODELS) == set(suites()["models"])
    rows = [
        {"round": number, "model": "mlp", "mode": "training", "backend": backend, "cold_s": seconds}
        for number, backend, seconds in (
            (1, "neuron", 1.0),
            (2, "neuron", 3.0),
            (1, "inductor", 8.0),
        )
    ]
    assert [row["rounds"] for row in warm_start.summary(rows)] == [2, 1]
    assert warm_start.ratios(rows, "training", "cold_s") == [0.25]


def test_memory_of_this_process() -> None:
    before = peak_memory.status_mib("VmRSS")
    block = torch.ones(16 * 2**20)  # 64 MiB
    del block
    peak_memory.trim()
    peak_memory.reset_peak()
    assert peak_memory.status_mib("VmHWM") < before + 48
    block = torch.ones(16 * 2**20)
    del block
    peak_memory.trim()
    assert peak_memory.status_mib("VmHWM") > peak_memory.status_mib("VmRSS") + 48


@pytest.mark.slow  # processes of their own
@pytest.mark.parametrize(
    ("module", "case"),
    [
        ("depth", ["2", "training", "neuron", "small"]),
        ("peak_memory", ["mlp", "training", "neuron", "small"]),
    ],
)
def test_one_case_of_a_study(module: str, case: list[str]) -> None:
    row = study.in_fresh_process(f"benchmarks.{module}", case)
    assert all(value >= 0 for value in row.values() if isinstance(value, float | int))
    assert row.get("operators_in_fallback", 0) == 0
    assert ("peak_mib" in row) == (module == "peak_memory")


@pytest.mark.slow
def test_warm_processes_compile_nothing() -> None:
    row = warm_start.measure({"model": "mlp", "mode": "training", "backend": "neuron"}, small=True)
    assert row["compilations"] == 0 and row["warm_s"] > 0


# ------------------------------------------------------------------------------------- reports


def test_a_page_of_everything(tmp_path: Path) -> None:
    results().save(tmp_path / "results.json")
    plain = {"settings": {"small": True}, "machine": machine()}
    rows = {
        "depth.json": [
            {"mode": "inference", "backend": "neuron", "layers": n, "first_call_s": 1.0 + n}
            for n in (2, 4, 8)
        ],
        "peak_memory.json": [
            {"model": "bert", "mode": "training", "backend": backend, "parameters_mib": 1.0}
            | {"imported_mib": 2.0, "steady_mib": 3.0, "peak_mib": 4.0, "above_steady_mib": 1.0}
            for backend in (EAGER, NEURON)
        ],
        "warm_start.json": [
            {"round": 1, "model": "bert", "mode": "inference", "backend": backend, "cold_s": 4.0}
            | {"warm_s": 2.0, "call_s": 1.0, "steady_s": 0.1, "load_s": 0.1, "compilations": 0}
            for backend in (EAGER, NEURON, INDUCTOR)
        ],
    }
    for name, listed in rows.items():
        (tmp_path / name).write_text(json.dumps({**plain, "rows": listed}))
    results().save(tmp_path / "peers-other.json")
    report.write(tmp_path, tmp_path / "performance.md")
    page = (tmp_path / "performance.md").read_text()
    assert "**4.00** (" in page and "**2.00** (" in page and "small" in page
    assert "| inference | neuron | 3.00 | 5.00 | 9.00 | 1.000 | +1.00 | 1.0000 | 0 % |" in page
    assert "Not measured" not in page and "peers-other" in page
    for name in re.findall(r"\]\(([\w-]+\.(?:png|json))\)", page):
        assert (tmp_path / name).stat().st_size > 0, name
    assert len(re.findall(r"!\[", page)) == 5


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    report.write(tmp_path, tmp_path / "performance.md")
    assert (tmp_path / "performance.md").read_text().count("Not measured yet") == 4
    assert plot.save(Results(Settings(2, True), machine()), tmp_path) == []


def test_links_of_the_page() -> None:
    page = ROOT / "docs" / "performance.md"
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / name).exists(), name


@pytest.mark.slow  # a process of its own
def test_the_command_line_resumes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--small", "--samples", "2", "--output"]
    chosen = ["--models", "linear64,policy", "--backends", "neuron", "--resume"]
    for models in (["--suites", "dispatch", "--models", "linear64"], chosen):
        subprocess.run([*command, tmp_path, *models, *chosen[2:]], cwd=ROOT, check=True)
    found = Results.load(tmp_path / "results.json")
    assert found.models() == ["linear64", "policy"] and all(c.finished for c in found.cells)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("results.json", "results.md", "kernels.png"),
    }


@pytest.mark.slow  # a process of its own
def test_the_peers_script_prints_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "neuron", "--small", "--samples", "2"]
    command += ["--models", "linear64,policy_update", "--output", tmp_path / "peers-neuron.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {(line["model"], line["mode"], line["backend"]) for line in lines} == {
        (name, mode, backend)
        for name, modes in (
            ("linear64", [INFERENCE]),
            ("policy_update", [INFERENCE, TRAINING, ADAMW]),
        )
        for mode in modes
        for backend in (EAGER, NEURON)
    }
    assert all(line["error"] is None for line in lines) and "| dispatch | linear64 |" in done.stdout
    assert len(Results.load(tmp_path / "peers-neuron.json").cells) == len(lines)
