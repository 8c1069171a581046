"""Options, modes and environment variables: what is taken, and what is refused and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compile import Settings, SettingsError
from neuron_compile.settings import MODES, resolve

from .support import equal, neuron

WRONG: list[tuple[str, Any]] = [
    ("platform", ""),
    ("platform", 3),
    ("platform", None),
    ("fullgraph_on_device", "maybe"),
    ("fullgraph_on_device", 1),
    ("fullgraph_on_device", None),
    ("check_indices", "perhaps"),
    ("check_indices", 1),
    ("vendor_kernels", 0.5),
    ("vendor_kernels", []),
    ("dump_dir", ""),
    ("dump_dir", 3),
    ("max_specializations", 0),
    ("max_specializations", -4),
    ("max_specializations", True),
    ("max_specializations", 2.0),
    ("max_specializations", "many"),
    ("max_specializations", None),
    ("xla_options", ["xla_flag"]),
    ("xla_options", {"flag": True}),
    ("xla_options", {3: True}),
    ("xla_options", {"xla_flag": None}),
    ("xla_options", {"xla_flag": [1]}),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        resolve({name: value}, environment={})


RIGHT: list[tuple[str, Any, Any]] = [
    ("platform", "CPU", "cpu"),
    ("fullgraph_on_device", True, True),
    ("fullgraph_on_device", "off", False),
    ("vendor_kernels", "Yes", True),
    ("check_indices", "no", False),
    ("dump_dir", Path("folder"), "folder"),
    ("dump_dir", None, None),
    ("max_specializations", 1, 1),
    ("max_specializations", "7", 7),
    ("xla_options", {}, ()),
    ("xla_options", {"xla_b": 1, "xla_a": "x"}, (("xla_a", "x"), ("xla_b", 1))),
]


@pytest.mark.parametrize(("name", "given", "wanted"), RIGHT)
def test_right_values_are_taken(name: str, given: Any, wanted: Any) -> None:
    settings = resolve({name: given}, environment={})
    assert settings == dataclasses.replace(Settings(), **{name: wanted})


def test_every_field_is_an_option() -> None:
    assert resolve(dataclasses.asdict(Settings()) | {"xla_options": {}}, environment={}) == (
        Settings()
    )


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().platform = "tpu"  # type: ignore[misc]


def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve({"fast": True}, environment={})
    assert "'fast'" in str(caught.value)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Settings))


def test_an_unknown_mode_lists_the_valid_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(mode="turbo", environment={})
    assert "'turbo'" in str(caught.value)
    assert all(mode in str(caught.value) for mode in MODES)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    assert resolve(mode=mode, environment={}).fullgraph_on_device is (mode == "strict")


ENVIRONMENT: list[tuple[str, str, Any]] = [
    ("PLATFORM", "CPU", "cpu"),
    ("FULLGRAPH_ON_DEVICE", "1", True),
    ("FULLGRAPH_ON_DEVICE", "", False),
    ("VENDOR_KERNELS", "no", False),
    ("DUMP_DIR", "/tmp/x", "/tmp/x"),
    ("MAX_SPECIALIZATIONS", "3", 3),
]


@pytest.mark.parametrize(("name", "text", "wanted"), ENVIRONMENT)
def test_environment_variables(name: str, text: str, wanted: Any) -> None:
    settings = resolve(environment={f"NEURON_COMPILE_{name}": text})
    assert getattr(settings, name.lower()) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [("FULLGRAPH_ON_DEVICE", "maybe"), ("MAX_SPECIALIZATIONS", "0"), ("PLATFORM", "")],
)
def test_a_wrong_environment_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"NEURON_COMPILE_{name}"):
        resolve(environment={f"NEURON_COMPILE_{name}": text})


def test_options_win_over_the_mode_and_the_environment() -> None:
    environment = {"NEURON_COMPILE_FULLGRAPH_ON_DEVICE": "0"}
    assert resolve(mode="strict", environment=environment).fullgraph_on_device
    options = {"fullgraph_on_device": False}
    assert not resolve(options, "strict", environment).fullgraph_on_device


# ------------------------------------------------------------------------ through torch.compile


@pytest.mark.parametrize("mode", MODES)
def test_modes_reach_the_backend(mode: str) -> None:
    equal(neuron(lambda x: x + 1, mode=mode)(torch.ones(3)), torch.full((3,), 2.0))


def test_errors_come_out_of_the_first_call() -> None:
    for wrong in ({"options": {"fast": True}}, {"mode": "turbo"}):
        with pytest.raises(Exception, match="unknown") as caught:
            neuron(lambda x: x + 1, **wrong)(torch.ones(3))
        assert isinstance(caught.value.__cause__ or caught.value, Exception)
        assert "SettingsError" in f"{type(caught.value).__name__}: {caught.value}"


def test_the_environment_reaches_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_COMPILE_MAX_SPECIALIZATIONS", "none")
    with pytest.raises(Exception, match="NEURON_COMPILE_MAX_SPECIALIZATIONS"):
        neuron(lambda x: x + 1)(torch.ones(3))


@pytest.mark.parametrize("platform", ["tpu", "nothing"])
def test_a_missing_platform_lists_those_installed(platform: str) -> None:
    with pytest.raises(Exception, match=f"'{platform}' is not installed; available: cpu"):
        neuron(lambda x: x + 1, options={"platform": platform})(torch.ones(3))
    equal(neuron(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))


def test_xla_options_reach_xla() -> None:
    options = {"xla_options": {"xla_cpu_enable_fast_math": True}}
    equal(neuron(lambda x: x * 2, options=options)(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "flags", [{"xla_no_such_flag": True}, {"xla_cpu_enable_fast_math": "perhaps"}]
)
def test_wrong_xla_options_are_an_error_that_names_them(flags: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(flags))):
        neuron(lambda x: x * 2, options={"xla_options": flags})(torch.ones(3))


def test_vendor_kernels_can_be_switched_off() -> None:
    model = torch.nn.Linear(64, 64)
    x = torch.randn(64, 64)
    for vendor in (True, False):
        torch._dynamo.reset()
        actual = neuron(model, options={"vendor_kernels": vendor})(x)
        torch.testing.assert_close(actual, model(x), rtol=1e-4, atol=1e-5)
