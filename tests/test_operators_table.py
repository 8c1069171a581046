"""``support`` and ``python -m neuron_compile operators``."""

from __future__ import annotations

import json

import pytest
import torch

import neuron_compile
from neuron_compile.__main__ import main
from neuron_compile.operators import support

aten = torch.ops.aten


def test_an_operator_is_answered_overload_by_overload() -> None:
    answers = {item.operator: item for item in support(aten.add)}
    assert answers["aten.add.Tensor"].where == "device"
    assert answers["aten.add.Tensor"].how == "Torch-MLIR, spliced"
    assert answers["aten.add.out"].where == "eager"


@pytest.mark.parametrize(
    ("name", "where"),
    [("aten.gelu.default", "device"), ("addmv", "decomposed"), ("aten.linear", "decomposed")],
)
def test_names_are_understood(name: str, where: str) -> None:
    assert support(name)[0].where == where


def test_the_answer_agrees_with_what_happens() -> None:
    (answer,) = support(aten.cummax.default)
    assert answer.where == "device"
    torch.compile(lambda x: torch.cummax(x, 0)[0], backend="neuron")(torch.randn(4))
    assert neuron_compile.report().operators_in_fallback == 0


def test_a_dtype_without_mlir_type_is_eager() -> None:
    (answer,) = support(aten.abs.default, dtypes=[torch.complex32])
    assert answer.where == "eager"
    assert "complex32" in answer.reason


@pytest.mark.parametrize("op", ["aten.no_such_operator", torch.add])
def test_what_is_no_operator_is_said(op: object) -> None:
    with pytest.raises(ValueError, match="operator"):
        neuron_compile.support(op)


def test_the_command_line_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operators", "--where", "device"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("aten.convolution.default ") for line in printed)
    assert printed[-1].endswith(" device")
    assert main(["operators", "--json", "gelu"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["where"] == "device"
    assert main(["operators", "no_such_operator"]) == 2
