"""The key of a NEFF in the cache: each change of a graph or of its environment is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compile
from neuron_compile import caching, keys

from .cached import X, base, compiled, fresh_process, key_of, made
from .support import equal

__all__ = ["fresh_process", "made"]  # fixtures

aten = torch.ops.aten


# Each: components that differ, and the change of function, argument or options that makes them.
CHANGES: dict[str, tuple[set[str], Callable[..., Any], torch.Tensor, dict[str, Any]]] = {
    "shape": ({"arguments", "values"}, base, torch.randn(5, 3), {}),
    "dtype": ({"arguments", "values"}, base, X.double(), {}),
    "stride": ({"arguments", "operators", "values"}, base, torch.randn(3, 4).t(), {}),
    "gaps": ({"arguments", "values"}, base, torch.randn(4, 4)[:, :3], {}),
    "argument": ({"operators", "values"}, lambda x: base(x).unsqueeze(0).squeeze(0), X, {}),
    "number": (
        {"operators"},
        lambda x: (x * 3 + torch.tensor([1.0, 2.0, 3.0])).sum(1),
        X,
        {},
    ),
    "constant": (
        {"constants", "values"},
        lambda x: (x * 2 + torch.tensor([1.0])).sum(1),
        X,
        {},
    ),
    "check_indices": ({"options"}, base, X, {"check_indices": False}),
    "vendor_kernels": ({"options"}, base, X, {"vendor_kernels": False}),
    "xla_options": ({"options"}, base, X, {"xla_options": {"xla_cpu_enable_fast_math": True}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_a_graph_changes_its_component(
    change: str, made: list[keys.Key], tmp_path: Path
) -> None:
    differ, function, x, options = CHANGES[change]
    before, after = key_of(made, tmp_path), key_of(made, tmp_path, function, x, **options)
    assert set(before.differences(after.components)) == differ
    assert before.digest != after.digest
    assert neuron_compile.report().cache_hits == 0
    equal(compiled(function, tmp_path, **options)(x), function(x))


@pytest.mark.parametrize(
    ("component", "name", "value"),
    [
        ("versions", "versions", lambda: (("jaxlib", "0.0"),)),
        ("machine", "machine", lambda: "another"),
        ("machine", "_processors", lambda: 4096),
        ("package", "sources", lambda: "edited"),
        ("format", "VERSION", 99),
    ],
)
def test_each_change_of_the_environment_changes_its_component(
    component: str,
    name: str,
    value: Any,
    made: list[keys.Key],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = key_of(made, tmp_path)
    monkeypatch.setattr(keys, name, value)
    assert before.differences(key_of(made, tmp_path).components) == (component,)


def test_flags_of_xla_in_the_environment_are_a_component(
    made: list[keys.Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    before = key_of(made, tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert before.differences(key_of(made, tmp_path).components) == ("xla_flags",)


def test_names_are_no_part_of_a_key(made: list[keys.Key], tmp_path: Path) -> None:
    def renamed(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        unused = torch.ones(3)
        del unused
        return (doubled + torch.tensor([1.0, 2.0, 3.0])).sum(1)

    assert key_of(made, tmp_path) == key_of(made, tmp_path, renamed)


# Graphs that differ in one argument of one operator.
VARIANTS: list[Callable[[torch.Tensor], Any]] = [
    *(lambda x, n=n: x * n for n in (1, 1.0, -1, 0, 0.0, -0.0, 1.0000001, 2, 1e30, 1e-45)),
    *(lambda x, n=n: x * n for n in (float("inf"), float("-inf"), float("nan"))),
    *(lambda x, n=n: x.add(x, alpha=n) for n in (3, 3.5, -3)),
    *(lambda x, d=d: x.sum(d) for d in (0, 1, (0, 1))),
    *(lambda x, k=k: x.sum(0, keepdim=k) for k in (True,)),
    *(lambda x, d=d: x.softmax(d) for d in (0, 1)),
    *(lambda x, n=n: x.view(n) for n in ((3, 4), (2, 6), (6, 2), (1, 12), (12, 1))),
    *(lambda x, n=n: x.roll(n, 0) for n in (1, 2, 3)),
    *(lambda x, n=n: x.roll(n, 1) for n in (1, 2)),
    *(lambda x, a=a: torch.nn.functional.gelu(x, approximate=a) for a in ("none", "tanh")),
    *(lambda x, r=r: torch.div(x, 2, rounding_mode=r) for r in ("trunc", "floor")),
    *(lambda x, n=n: torch.clamp(x, min=n) for n in (0.25, 0.5)),
    *(lambda x, n=n: torch.clamp(x, max=n) for n in (0.25, 0.5)),
    *(lambda x, n=n: x[n:] for n in (1, 2)),
    *(lambda x, n=n: x[:n] + 1 for n in (1, 2)),
    *(lambda x, n=n: x.cumsum(n) for n in (0, 1)),
    *(lambda x, n=n: torch.full_like(x, n) for n in (7, 8)),
    *(lambda x, n=n: x.topk(n).values for n in (1, 2)),
    *(lambda x, n=n: x.topk(2, largest=n).values for n in (False,)),
    *(lambda x, n=n: x.sort(descending=n).values for n in (True, False)),
    *(lambda x, n=n: torch.nn.functional.pad(x, n) for n in ((0, 1), (1, 0), (1, 1, 0, 0))),
    *(lambda x, n=n: x.to(n) for n in (torch.float64, torch.float16, torch.int64)),
    *(lambda x, n=n: torch.var(x, correction=n) for n in (0, 1, 2)),
    *(lambda x, n=n: x.pow(n) for n in (3, 3.5, -2)),
]


class _Enough(Exception):
    """The key was made, and nothing else is wanted."""


def test_graphs_that_differ_in_one_argument_have_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []

    def graph_key(*args: Any) -> None:
        digests.append(keys.graph_key(*args).digest)
        raise _Enough

    monkeypatch.setattr(caching, "graph_key", graph_key)
    for variant in VARIANTS:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="_Enough"):
            compiled(lambda x, variant=variant: variant(x + 1) * 2, tmp_path)(X)
    assert len(digests) == len(VARIANTS) > 60
    assert len(set(digests)) == len(digests)


def test_a_string_is_not_taken_for_a_value_of_the_graph() -> None:
    def graph(argument: Any) -> str:
        found = torch.fx.Graph()
        x = found.placeholder("x")
        value = found.call_function(aten.div.Tensor_mode, (x, x), {"rounding_mode": argument(x)})
        found.output((value,))
        return str(list(neuron_compile.lowering.region.lines(torch.fx.GraphModule({}, found))))

    assert graph(lambda x: x) != graph(lambda x: "%0")
