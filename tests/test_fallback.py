"""What the device cannot run: where it runs instead, what is reported, what strict mode says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import neuron_compile
from neuron_compile import FallbackWarning, UnsupportedError, graph_compiler
from neuron_compile.lowering import LoweringError, lower, registry
from neuron_compile.runtime import RuntimeCompileError

from .support import check, equal, neuron

aten = torch.ops.aten


@torch.library.custom_op("neuron_tests::scaled_add", mutates_args=())
def scaled_add(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """An operator that no compiler knows."""
    return x + y * scale


@scaled_add.register_fake
def _(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return grad, grad * ctx.scale, None


scaled_add.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("neuron_tests::split_in_two", mutates_args=())
def split_in_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator with two results."""
    return x[0].clone(), x[1].clone()


@split_in_two.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x[0]), torch.empty_like(x[1])


@torch.library.custom_op("neuron_tests::increment", mutates_args=("x",))
def increment(x: torch.Tensor) -> None:
    """An operator that changes its argument."""
    x.add_(1)


@torch.library.custom_op("neuron_tests::surprising", mutates_args=())
def surprising(x: torch.Tensor) -> torch.Tensor:
    """An operator whose result has other strides than its fake version promises."""
    return (x * 2).t().contiguous().t()


@surprising.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


@pytest.fixture(autouse=True)
def forgotten_refusals() -> Iterator[None]:
    """No test sees what a compiler refused in another."""
    registry.forget_refusals()
    yield
    registry.forget_refusals()


def between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A custom operator between two parts that the device can run."""
    return scaled_add(x.sin(), y.cos(), 0.5).exp() + x


# ----------------------------------------------------------------------- an operator of the user


def test_a_custom_operator_runs_between_partitions() -> None:
    with pytest.warns(FallbackWarning, match="neuron_tests.scaled_add.default"):
        check(between, torch.randn(3), torch.randn(3))
    report = neuron_compile.report()
    (graph,) = report.graphs
    assert graph.partitions == report.compilations == 2
    assert report.operators_in_fallback == graph.in_fallback == 1
    (record,) = [record for record in graph.operators if record.where == "eager"]
    assert record.operator == "neuron_tests.scaled_add.default"
    assert record.signature == "neuron_tests.scaled_add.default(float32[3], float32[3])"
    assert "no lowering is registered" in record.reason
    assert "test_fallback.py" in record.user_line and "in between" in record.user_line
    assert list(report.fallback_reasons) == ["neuron_tests.scaled_add.default"]
    assert "neuron_tests.scaled_add.default" in str(report)


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_a_custom_operator_with_gradients() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    check(between, x, y, backward=True)
    kinds = [graph.kind for graph in neuron_compile.report().graphs]
    assert kinds == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_custom_operators_of_several_results_and_mutations() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = split_in_two(x * 2)
        third = first + second
        increment(third)
        return third * 2, second.t() if second.dim() > 1 else second, third

    check(function, torch.randn(2, 3))


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_only_fallback_operators() -> None:
    check(lambda x, y: scaled_add(x, y, 2.0), torch.randn(3), torch.randn(3))
    assert neuron_compile.report().compilations == 0


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_views_mutations_and_dropout_around_a_fallback() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = scaled_add(x.t(), x.t(), 1.0)
        x.add_(1)
        z = nn.functional.dropout(y * torch.tensor(2.0), 0.0)
        return z, y, y.t(), z[0], x

    check(function, torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_noncontiguous_tensors_across_a_partition() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = scaled_add(x[:, ::2] * 2, x[:, 1::2], 1.0)
        return (y.t() @ y).relu()

    check(function, torch.randn(3, 8))


@pytest.mark.filterwarnings("ignore::neuron_compile.FallbackWarning")
def test_strides_that_an_operator_did_not_promise() -> None:
    compiled = neuron(lambda x: ((y := surprising(x)).t(), y[1:], y.sin(), y.t()[1:] + 1))
    for _ in range(2):
        x = torch.randn(3, 4)
        first, second, third, fourth = compiled(x)
        equal(first.contiguous(), (x * 2).t().contiguous())
        equal(second.contiguous(), (x * 2)[1:])
        equal(third.contiguous(), (x * 2).sin())
        equal(fourth.contiguous(), (x * 2).t()[1:].contiguous() + 1)


def test_one_warning_for_an_operator_a_process() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 3, 4):
            torch._dynamo.reset()
            neuron(between)(torch.randn(size), torch.randn(size))
            neuron(lambda x: scaled_add(x, x, 1.0) + scaled_add(x, x, 2.0))(torch.randn(size))
    ours = [item for item in caught if issubclass(item.category, FallbackWarning)]
    assert len(ours) == 1
    message = str(ours[0].message)
    assert "float32[2]" in message and "test_fallback.py" in message
    assert "explain" in message and "fullgraph_on_device" in message


def test_a_warning_made_an_error_leaves_a_working_state() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(Exception, match="scaled_add"):
            neuron(between)(torch.randn(3), torch.randn(3))
    x, y = torch.randn(3), torch.randn(3)
    equal(neuron(between)(x, y), between(x, y))


# ---------------------------------------------------------------------------------- strict mode


@pytest.mark.parametrize("how", [{"options": {"fullgraph_on_device": True}}, {"mode": "strict"}])
def test_strict_mode_names_everything(how: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="fullgraph_on_device is set") as caught:
        neuron(between, **how)(torch.randn(3, 2), torch.randn(3, 2))
    message = str(caught.value)
    assert UnsupportedError.__name__ in message or isinstance(caught.value, UnsupportedError)
    assert "neuron_tests.scaled_add.default(float32[3, 2], float32[3, 2])" in message
    assert "no lowering is registered" in message
    assert f"{__file__}:" in message and "in between" in message
    assert "neuron_compile.register_lowering" in message


def test_strict_mode_lists_every_operator() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = split_in_two(x)
        return scaled_add(first, second, 1.0)

    with pytest.raises(Exception, match="split_in_two") as caught:
        neuron(function, mode="strict")(torch.randn(2, 3))
    assert "scaled_add" in str(caught.value)
    assert "getitem" not in str(caught.value)


def test_strict_mode_accepts_what_the_device_runs() -> None:
    compiled = neuron(nn.Linear(3, 2), mode="strict")
    compiled(torch.randn(4, 3)).sum().backward()
    assert neuron_compile.report().operators_in_fallback == 0


def test_after_a_strict_failure_the_next_call_works() -> None:
    x, y = torch.randn(3), torch.randn(3)
    with pytest.raises(Exception, match="scaled_add"):
        neuron(between, mode="strict")(x, y)
    equal(neuron(lambda x: x * 2, mode="strict")(x), x * 2)
    with pytest.warns(FallbackWarning):
        equal(neuron(between)(x, y), between(x, y))


def test_strict_mode_covers_what_a_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, aten.sin.default, located=True)
    with pytest.raises(Exception, match=r"aten\.sin\.default") as caught:
        neuron(lambda x: x.sin() + 1, mode="strict")(torch.randn(3))
    assert "refused in a test" in str(caught.value)


# -------------------------------------------------------------------- what a compiler refuses


def refuse(
    monkeypatch: pytest.MonkeyPatch, *targets: Any, located: bool, alone: bool = True
) -> list[int]:
    """Let lowering refuse graphs with one of the operators; returns how often it did.

    ``located``: the diagnostic names the node. ``alone``: the operator is refused by itself too,
    else only in a graph with others.
    """
    refusals: list[int] = []

    def refusing(module: fx.GraphModule, **options: Any) -> Any:
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        found = [node for node in calls if node.target in targets]
        if found and (alone or len(calls) > 1):
            refusals.append(1)
            name = found[0].name if located else None
            raise LoweringError("refused in a test", name)
        return lower(module, **options)

    monkeypatch.setattr(graph_compiler, "lower", refusing)
    return refusals


@pytest.mark.parametrize("located", [True, False], ids=["located", "unlocated"])
def test_a_refused_operator_goes_to_eager(monkeypatch: pytest.MonkeyPatch, located: bool) -> None:
    refusals = refuse(monkeypatch, aten.sin.default, located=located)
    with pytest.warns(FallbackWarning, match="refused in a test"):
        check(lambda x: (x * 2).sin().exp() + 1, torch.randn(3))
    report = neuron_compile.report()
    assert report.refusals == 1
    assert report.operators_in_fallback == 1
    assert report.compilations == 2
    # Known by now for Torch-MLIR's own lowering; next for the spliced one; then never tried.
    tries = []
    for factor in (3, 4, 5):
        neuron(lambda x, factor=factor: x.sin() * factor)(torch.randn(3))
        tries.append(len(refusals))
    assert tries[1] == tries[2]


@pytest.mark.parametrize("located", [True, False], ids=["located", "unlocated"])
def test_several_refused_operators(monkeypatch: pytest.MonkeyPatch, located: bool) -> None:
    refuse(monkeypatch, aten.sin.default, aten.cos.default, located=located)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = scaled_add((x * 2).sin(), x, 1.0)
        return (y + 1).cos().exp() + x.sin() + y.sin()

    with pytest.warns(FallbackWarning):
        check(function, torch.randn(3))
    eager = {name for graph in neuron_compile.report().graphs for name in eager_names(graph)}
    assert eager == {"neuron_tests.scaled_add.default", "aten.sin.default", "aten.cos.default"}


def eager_names(graph: neuron_compile.records.GraphRecord) -> list[str]:
    """The operators of a graph that run in eager PyTorch."""
    return [record.operator for record in graph.operators if record.where == "eager"]


def test_a_partition_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, aten.sin.default, located=False, alone=False)
    with pytest.warns(FallbackWarning, match="a partition with this operator was refused"):
        check(lambda x: (x * 2).sin().exp(), torch.randn(3))
    # Alone, each operator compiles: nothing is held against it in another graph.
    neuron_compile.reset_report()
    equal(neuron(lambda x: x.sin())(torch.ones(3)), torch.ones(3).sin())
    assert neuron_compile.report().operators_in_fallback == 0


@pytest.mark.parametrize("error", [RuntimeCompileError("no"), LoweringError("no")])
def test_a_refusal_by_either_compiler_in_a_backward(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refusing(module: fx.GraphModule, **options: Any) -> Any:
        if module.graph.find_nodes(op="call_function", target=aten.cos.default):
            raise error
        return lower(module, **options)

    monkeypatch.setattr(graph_compiler, "lower", refusing)
    with pytest.warns(FallbackWarning, match="aten.cos.default"):
        check(lambda x: x.sin() * 2, torch.randn(3, requires_grad=True), backward=True)


def test_xlas_refusal_is_not_held_against_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = graph_compiler.compile_stablehlo

    def refusing(text: str, options: Any) -> Any:
        if not options.vendor_kernels:
            raise RuntimeCompileError("refused in a test")
        return real(text, options)

    monkeypatch.setattr(graph_compiler, "compile_stablehlo", refusing)
    x = torch.randn(3)
    with pytest.warns(FallbackWarning, match="refused in a test"):
        equal(neuron(lambda x: x * 2 + 1, options={"vendor_kernels": False})(x), x * 2 + 1)
    neuron_compile.reset_report()
    equal(neuron(lambda x: x * 2 + 1)(x), x * 2 + 1)
    assert neuron_compile.report().operators_in_fallback == 0


def test_an_operator_that_the_stock_pipeline_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch-MLIR has no lowering of this one to StableHLO; trust it nevertheless.
    op = aten.cholesky.default
    entry = registry.Lowering(op, stock=lambda node: True)
    monkeypatch.setitem(registry._REGISTRY, op, entry)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cholesky(x @ x.t() + 3 * torch.eye(3)) * 2

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.cholesky is deprecated")
        with pytest.warns(FallbackWarning, match="aten.cholesky.default"):
            check(function, torch.randn(3, 3), rtol=1e-4, atol=1e-4)
    assert neuron_compile.report().refusals >= 1


@pytest.mark.parametrize("located", [True, False], ids=["located", "unlocated"])
def test_the_spliced_lowering_takes_over_from_the_stock_one(
    monkeypatch: pytest.MonkeyPatch, located: bool
) -> None:
    from neuron_compile.lowering import torch_mlir as module

    real = module.lower_to_stablehlo

    def refusing(graph: fx.Graph, splicer: Any, capture: bool) -> Any:
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            if registry.takes_stock(node):
                name = registry.origin(node) if located else None
                raise LoweringError("the stock pipeline refused in a test", name)
        return real(graph, splicer, capture)

    monkeypatch.setattr(module, "lower_to_stablehlo", refusing)
    for _ in range(2):
        torch._dynamo.reset()
        check(lambda x: (x + 1).sin() * 2, torch.randn(2, 3, 4))
    assert neuron_compile.report().operators_in_fallback == 0


def test_a_failing_lowering_goes_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ctx: Any, *args: Any) -> Any:
        raise ValueError("broken in a test")

    entry = registry.Lowering(aten.sin.default, function=broken)
    monkeypatch.setitem(registry._REGISTRY, aten.sin.default, entry)
    with pytest.warns(FallbackWarning, match="broken in a test"):
        check(lambda x: (x + 41).sin() * 2, torch.randn(7, 41))


def test_a_lowering_of_a_wrong_shape_goes_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Lowering(aten.sin.default, function=lambda ctx, x: x[:1])
    monkeypatch.setitem(registry._REGISTRY, aten.sin.default, entry)
    with pytest.warns(FallbackWarning, match=r"gave shape \(1, 43\), not \(5, 43\)"):
        check(lambda x: (x + 1).sin() * 2, torch.randn(5, 43))


# ------------------------------------------------------- dtypes and layouts outside the device's


def test_sparse_inputs() -> None:
    def function(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(a, x).relu() + 1

    a = torch.eye(3).to_sparse()
    x = torch.randn(3, 2)
    compiled = neuron(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            equal(compiled(a, x), function(a, x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_unsupported_dtype() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = (x * 2).to(torch.complex32)
        return narrow.to(torch.complex64) + 1, narrow

    x = torch.tensor([0.5, 1.0, 2.0])
    compiled = neuron(function)
    for _ in range(2):
        actual, wanted = compiled(x), function(x)
        equal(actual[0], wanted[0])
        assert actual[1].dtype is torch.complex32
        equal(actual[1].to(torch.complex64), wanted[1].to(torch.complex64))
    reasons = neuron_compile.report().fallback_reasons.values()
    assert any("dtype torch.complex32 is not supported" in reason for reason in reasons)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_complex_half() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex32)
    compiled = neuron(lambda x: (x.to(torch.complex64) * 2, x))
    for _ in range(2):
        result, same = compiled(x)
        equal(result, x.to(torch.complex64) * 2)
        assert same is x


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lazily_conjugated_inputs() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    compiled = neuron(lambda x: (x * 2, x.conj() * 3))
    for value in (x, x.conj(), x):
        actual, wanted = compiled(value), (value * 2, value.conj() * 3)
        equal([item.resolve_conj() for item in actual], [item.resolve_conj() for item in wanted])


@pytest.mark.filterwarnings("ignore")
def test_quantized_inputs_run_or_say_why() -> None:
    x = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 0, torch.qint8)
    compiled = neuron(lambda x: x.dequantize() * 2)
    try:
        result = compiled(x)
    except Exception as error:  # noqa: BLE001 - whichever layer of torch refuses
        assert "quant" in str(error).lower()
    else:
        equal(result, x.dequantize() * 2)


@pytest.mark.filterwarnings("ignore")
def test_nested_inputs_run_or_say_why() -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    compiled = neuron(lambda x: x * 2)
    for _ in range(2):
        equal(compiled(x).values(), x.values() * 2)


def test_meta_tensors_are_not_ours() -> None:
    compiled = neuron(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert compiled(torch.ones(3, device="meta")).is_meta


# ---------------------------------------------------------------------------------- other errors


def test_an_error_of_the_user_is_the_users() -> None:
    compiled = neuron(lambda x, y: x @ y)
    with pytest.raises(Exception, match="same reduction dim"):
        compiled(torch.ones(2, 3), torch.ones(2, 3))
    equal(compiled(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 3.0))


def test_an_internal_error_leaves_a_working_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: fx.GraphModule, **options: Any) -> Any:
        raise RuntimeError("broken in a test")

    compiled = neuron(lambda x: x * 2)
    with monkeypatch.context() as patch:
        patch.setattr(graph_compiler, "lower", broken)
        with pytest.raises(Exception, match="broken in a test"):
            compiled(torch.ones(3))
    equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_higher_order_operators_run_somewhere() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) * 2

    compiled = neuron(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for value in (1.0, -1.0, 2.0):
            x = torch.full((3,), value)
            equal(compiled(x), function(x))
