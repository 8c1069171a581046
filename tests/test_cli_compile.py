"""``neuron-compile compile``: scripts, factories, and the comparison with eager."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compile.cli import measure
from neuron_compile.explainer import Seen

from .command import Run, run
from .support import IGNORE_TORCH

__all__ = ["run"]  # a fixture

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
