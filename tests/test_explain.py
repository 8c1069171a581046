"""``explain``, ``report``, logging and the files of ``dump_dir``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuron_compile
from neuron_compile import explain

from .support import IGNORE_TORCH, equal, in_fresh_interpreter, neuron


@torch.library.custom_op("neuron_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator that no compiler knows."""
    return x + 1


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    """One graph break, one operator in fallback in the second graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        torch._dynamo.graph_break()
        return opaque(y.detach()) * y


def line_of(text: str) -> int:
    """The number of the first line of this file that contains ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@IGNORE_TORCH
def test_an_explanation() -> None:
    found = explain(Model(), torch.randn(2, 3))
    assert found.dynamo_graphs == 2
    (broken,) = found.breaks
    assert "graph_break" in broken.reason
    assert broken.user_line.startswith(f"{__file__}:{line_of('graph_break()')} in forward")
    assert [graph.kind for graph in found.graphs] == ["forward", "forward", "backward", "backward"]
    assert found.operators_in_fallback == 1
    (record,) = [r for graph in found.graphs for r in graph.operators if r.where == "eager"]
    assert record.operator == "neuron_tests.opaque.default"
    assert "no lowering is registered" in record.reason
    assert f"{__file__}:{line_of('opaque(y.detach())')} in " in record.user_line
    on_device = {r.operator for graph in found.graphs for r in graph.operators} - {record.operator}
    assert "aten.addmm.default" in on_device
    assert found.operators_on_device == sum(len(g.operators) for g in found.graphs) - 1


@IGNORE_TORCH
def test_an_explanation_as_text_and_as_data() -> None:
    found = explain(Model(), torch.randn(2, 3))
    text = str(found)
    for part in (
        "2 Dynamo graphs, 1 graph breaks",
        "1 in eager fallback",
        "eager   neuron_tests.opaque.default(float32[2, 3]): no lowering",
        f"{__file__}:{line_of('opaque(y.detach())')}",
        f"{__file__}:{line_of('graph_break()')}",
        "aten.addmm.default",
        "(backward)",
        "seconds:",
    ):
        assert part in text, text
    data = json.loads(json.dumps(found.data()))
    assert data["operators_in_fallback"] == 1
    assert data["operators_on_device"] == found.operators_on_device
    assert data["dynamo_graphs"] == 2
    assert data["breaks"][0]["user_line"] == found.breaks[0].user_line
    assert len(data["graphs"]) == 4
    operators = [item for graph in data["graphs"] for item in graph["operators"]]
    assert {item["where"] for item in operators} == {"device", "eager"}
    assert set(operators[0]) == {"operator", "signature", "where", "reason", "user_line"}


def test_the_seconds_of_an_explanation() -> None:
    found = explain(lambda x: x.sin() + 1, torch.randn(3))
    assert {"dynamo", "import", "torch_mlir", "trace", "xla"} <= set(found.seconds)
    assert all(value >= 0 for value in found.seconds.values())
    assert found.seconds["xla"] > 0


def test_the_users_lines_of_operators_on_the_device() -> None:
    found = explain(lambda x: x.sin().cos(), torch.randn(3))
    here = line_of("x.sin().cos(), torch.randn")
    for record in found.graphs[0].operators:
        assert record.user_line.startswith(f"{__file__}:{here}")


def test_gradients_are_left_alone() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    found = explain(model, x)
    assert [graph.kind for graph in found.graphs] == ["forward", "backward"]
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    model.weight.grad = torch.ones(2, 3)
    explain(model, x)
    equal(model.weight.grad, torch.ones(2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_explaining_inference(mode: type[torch.no_grad]) -> None:
    with mode():
        found = explain(nn.Linear(3, 2), torch.randn(4, 3))
    assert [graph.kind for graph in found.graphs] == ["inference"]


def test_keyword_arguments_and_structures() -> None:
    def function(x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"value": x * scale, "index": x.argmax()}

    found = explain(function, torch.randn(3), scale=torch.randn(3, requires_grad=True))
    assert [graph.kind for graph in found.graphs] == ["forward", "backward"]


def test_explaining_again_and_again() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for _ in range(12):
        found = explain(function, torch.randn(3))
        assert found.dynamo_graphs == 1
        assert found.operators_on_device == 1


def test_explaining_what_is_compiled_already() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    compiled = neuron(model)
    x = torch.randn(4, 3)
    compiled(x)
    for subject in (compiled, model):
        found = explain(subject, x)
        assert found.dynamo_graphs == 1
        assert found.operators_on_device > 1
    equal(compiled(x), model(x))


@pytest.mark.filterwarnings("error::neuron_compile.FallbackWarning")
def test_explaining_gives_no_warning_and_uses_none_up() -> None:
    explain(opaque, torch.randn(3))
    with pytest.warns(neuron_compile.FallbackWarning):
        neuron(lambda x: opaque(x) * 2)(torch.randn(3))


def test_explaining_in_strict_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_FULLGRAPH_ON_DEVICE", "1")
    assert explain(lambda x: opaque(x) * 2, torch.randn(3)).operators_in_fallback == 1


def test_a_dynamic_shape_is_explained() -> None:
    x = torch.randn(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    found = explain(lambda x: F.softmax(x, -1), x)
    assert found.operators_on_device >= 1


# -------------------------------------------------------------------------------------- report


def test_the_report_counts_and_resets() -> None:
    model = nn.Linear(3, 2)
    compiled = neuron(model)
    compiled(torch.randn(4, 3)).sum().backward()
    report = neuron_compile.report()
    assert report.compilations == 2
    assert [graph.kind for graph in report.graphs] == ["forward", "backward"]
    assert report.operators_on_device == sum(graph.on_device for graph in report.graphs) > 0
    assert report.operators_in_fallback == report.refusals == report.specializations == 0
    assert "2 compilations" in str(report) and "0 in eager fallback" in str(report)
    neuron_compile.reset_report()
    empty = neuron_compile.report()
    assert empty.compilations == empty.operators_on_device == 0 and empty.graphs == ()
    compiled(torch.randn(4, 3))
    assert neuron_compile.report().compilations == 0


def test_the_report_as_data() -> None:
    neuron(lambda x: x + 1)(torch.ones(3))
    data = json.loads(json.dumps(neuron_compile.records.as_data(neuron_compile.report())))
    assert data["compilations"] == 1
    assert data["graphs"][0]["operators"][0]["operator"] == "aten.add.Tensor"


# ------------------------------------------------------------------------------------ logging

SCRIPT = """
    import torch
    print(torch.compile(lambda x: x.sin() + 1, backend="neuron")(torch.ones(3)).sum().item())
"""


def test_torch_logs_take_the_package() -> None:
    result = in_fresh_interpreter(SCRIPT, {"TORCH_LOGS": "+neuron_compile"})
    assert "partition 0: ready in" in result.stderr
    assert "stablehlo." not in result.stderr


def test_nothing_is_logged_unasked() -> None:
    assert in_fresh_interpreter(SCRIPT).stderr == ""


def test_artifacts() -> None:
    texts = {
        "neuron_stablehlo": "stablehlo.add",
        "neuron_torch": "torch.aten.add",
        "neuron_fx": "torch.ops.aten",
        "neuron_hlo": "HloModule",
    }
    result = in_fresh_interpreter(SCRIPT, {"NEURON_COMPILE_LOGS": ",".join(texts)})
    for name, text in texts.items():
        assert f"[__{name}]" in result.stderr
        assert text in result.stderr


def test_both_variables_and_the_short_name() -> None:
    result = in_fresh_interpreter(
        SCRIPT, {"TORCH_LOGS": "graph_code", "NEURON_COMPILE_LOGS": "+neuron,neuron_stablehlo"}
    )
    assert "ready in" in result.stderr
    assert "stablehlo." in result.stderr
    assert "TRACED GRAPH" in result.stderr


def test_dump_dir(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    x = torch.randn(3, requires_grad=True)
    neuron(lambda x: x.sin() + 1, options={"dump_dir": folder})(x).sum().backward()
    files = sorted(path.name[4:] for path in folder.iterdir())
    assert files == sorted(2 * ["_fx.py", "_hlo.txt", "_stablehlo.mlir", "_torch.mlir", ".neff"])
    numbers = {path.name[:4] for path in folder.iterdir()}
    assert len(numbers) == 2
    texts = {path.name.split("_", 1)[1]: path.read_text() for path in sorted(folder.glob("*_*"))}
    assert "torch.ops.aten" in texts["fx.py"]
    assert "stablehlo." in texts["stablehlo.mlir"]
    assert "torch.aten" in texts["torch.mlir"]
    assert "HloModule" in texts["hlo.txt"]


def test_dump_dir_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_DUMP_DIR", str(tmp_path))
    neuron(lambda x: x + 1)(torch.ones(3))
    assert len(list(tmp_path.iterdir())) == 5
