"""The road from FX to StableHLO below the backend: registry, passes, splicing, boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import neuron_compile
from neuron_compile.classify import bound, dense_permutation, inverse
from neuron_compile.lowering import (
    LoweringError,
    TensorSpec,
    lower,
    lowers,
    registry,
    seed_random_operators,
    signature,
    why_unsupported,
)
from neuron_compile.lowering.passes import absorb_transposes, clamp_slices, gemm

from .support import check, equal

aten = torch.ops.aten


@torch.library.custom_op("neuron_tests::unlowered", mutates_args=())
def unlowered(x: torch.Tensor) -> torch.Tensor:
    """An operator that no compiler knows."""
    return x + 1


@unlowered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def traced(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The ATen graph of a function, as AOT Autograd would hand it over."""
    module = make_fx(function, tracing_mode="fake")(*args)
    output = module.graph.output_node()
    if isinstance(output.args[0], fx.Node):
        output.args = ((output.args[0],),)
    return module


def only(module: fx.GraphModule, target: Any) -> fx.Node:
    """The one node of ``target``."""
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


# ------------------------------------------------------------------------------------- registry


@pytest.fixture
def own_operator() -> Iterator[Any]:
    """An operator of a test's own, forgotten afterwards."""
    with torch.library._scoped_library("neuron_tests_lowering", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        op = torch.ops.neuron_tests_lowering.double.default
        yield op
        registry._REGISTRY.pop(op, None)


def test_a_lowering_of_the_users_own(own_operator: Any) -> None:
    @lowers(own_operator)
    def double(ctx: Any, x: Any) -> Any:
        return x + x

    check(lambda x: own_operator(x.sin()) + 1, torch.randn(3))
    assert neuron_compile.report().operators_in_fallback == 0
    assert neuron_compile.report().compilations == 1


def test_two_lowerings_of_one_operator_are_an_error(own_operator: Any) -> None:
    lowers(own_operator)(lambda ctx, x: x + x)
    with pytest.raises(ValueError, match="registered twice"):
        lowers(own_operator)(lambda ctx, x: 2 * x)


def test_a_registration_changes_the_version(own_operator: Any) -> None:
    before = registry.version()
    lowers(own_operator)(lambda ctx, x: x + x)
    assert registry.version() > before


def test_a_lowering_may_refuse_signatures(own_operator: Any) -> None:
    @lowers(own_operator, refuse=lambda node: "too large" if node.meta["val"].numel() > 4 else None)
    def double(ctx: Any, x: Any) -> Any:
        return x + x

    check(lambda x: own_operator(x) + 1, torch.randn(3))
    assert neuron_compile.report().operators_in_fallback == 0
    with pytest.warns(neuron_compile.FallbackWarning, match="too large"):
        check(lambda x: own_operator(x) + 1, torch.randn(5))


def test_signatures_and_reasons() -> None:
    module = traced(lambda x, y: x @ y, torch.randn(2, 3), torch.randn(3, 4))
    node = only(module, aten.mm.default)
    assert signature(node) == "aten.mm.default(float32[2, 3], float32[3, 4])"
    assert why_unsupported(node) is None
    unknown = only(traced(torch.erfinv, torch.randn(2)), aten.erfinv.default)
    if registry.lookup(aten.erfinv.default) is None:
        assert "no lowering is registered for aten.erfinv.default" in why_unsupported(unknown)


def test_an_unsupported_operator_is_a_lowering_error() -> None:
    module = traced(unlowered, torch.randn(3, 3))
    with pytest.raises(LoweringError, match=r"unlowered.*float32\[3, 3\].*no lowering") as caught:
        lower(module)
    assert caught.value.node_name in {node.name for node in module.graph.nodes}


# --------------------------------------------------------------------------------------- lower


def test_a_lowered_module() -> None:
    module = traced(lambda x, y: (F.gelu(x @ y), x.sum(0)), torch.randn(2, 3), torch.randn(3, 4))
    lowered = lower(module, capture_torch=True)
    f32 = torch.float32
    assert lowered.inputs == (TensorSpec((2, 3), f32), TensorSpec((3, 4), f32))
    assert lowered.outputs == (TensorSpec((2, 4), f32), TensorSpec((3,), f32))
    assert "stablehlo." in lowered.stablehlo and "torch." not in lowered.stablehlo
    assert "torch_c." not in lowered.stablehlo
    assert "torch.aten" in lowered.torch_dialect
    assert {"import", "splice", "torch_mlir", "trace"} <= set(lowered.phases)


def test_the_torch_dialect_is_printed_on_demand_alone() -> None:
    assert lower(traced(torch.sin, torch.randn(2))).torch_dialect == ""


def test_lowering_is_deterministic() -> None:
    def text() -> str:
        module = traced(lambda x: F.layer_norm(x, (4,)).cumsum(0).cumsum(0), torch.randn(3, 4))
        return lower(module).stablehlo

    assert text() == text()


def test_equal_signatures_share_one_function() -> None:
    module = traced(lambda x: (x.cumsum(0) + 1).cumsum(0) * x.cumsum(1), torch.randn(3, 3))
    lowered = lower(module)
    assert lowered.spliced >= 3
    assert lowered.stablehlo.count("@main(") == 1


# --------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize(
    "index",
    [slice(1, None), slice(-2, None), slice(0, 100), slice(2, -1), slice(3, 1), slice(0, 4, 2)],
)
def test_slices_are_clamped(index: slice) -> None:
    x = torch.randn(5, 3)
    module = traced(lambda x: x[index] * 2, x)
    clamp_slices(module.graph)
    module.recompile()
    equal(module(x)[0], x[index] * 2)
    for node in module.graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        assert 0 <= node.args[2] <= node.args[3] <= 5


@pytest.mark.parametrize(
    ("function", "flags"),
    [
        (lambda a, b: a @ b, (False, False)),
        (lambda a, b: a.t() @ b, (True, False)),
        (lambda a, b: a @ b.t(), (False, True)),
        (lambda a, b: a.t() @ b.t(), (True, True)),
    ],
)
def test_transposes_are_absorbed(function: Callable[..., Any], flags: tuple[bool, bool]) -> None:
    module = traced(function, torch.randn(3, 3), torch.randn(3, 3))
    absorb_transposes(module.graph)
    assert tuple(only(module, gemm).args[2:]) == flags


def test_other_permutations_are_not_absorbed() -> None:
    module = traced(lambda a, b: a.permute(1, 0, 2) @ b, torch.randn(4, 4, 4), torch.randn(4, 4, 4))
    absorb_transposes(module.graph)
    node = only(module, gemm)
    assert tuple(node.args[2:]) == (False, False)


def test_integer_products_stay() -> None:
    module = traced(torch.mm, torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2).long())
    absorb_transposes(module.graph)
    assert only(module, aten.mm.default)


def test_random_operators_get_streams_of_one_seed() -> None:
    module = traced(lambda x: torch.rand_like(x) + torch.randn_like(x), torch.randn(3))
    assert seed_random_operators(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    assert placeholders[-1].name == "rng_seed"
    streams = [node.kwargs["__stream"] for node in module.graph.nodes if "__seed" in node.kwargs]
    assert streams == [0, 1]
    assert not seed_random_operators(traced(torch.sin, torch.randn(3)))


# ------------------------------------------------------------------------------------ boundaries


def test_constants_follow_the_arguments_and_the_seed_is_last() -> None:
    table = torch.randn(3)
    module = traced(lambda x, held: torch.rand_like(x) * held + x, torch.randn(3), table)
    module.register_buffer("table", table)
    _, argument = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_before(argument):
        held = module.graph.get_attr("table")
    held.meta["val"] = argument.meta["val"]
    argument.replace_all_uses_with(held)
    module.graph.erase_node(argument)
    boundary = bound(module, frozenset())
    names = [node.name for node in boundary.module.graph.find_nodes(op="placeholder")]
    assert len(names) == 3
    assert names[1].startswith("constant") and names[2] == "rng_seed"
    assert boundary.signature.seeded
    assert [spec.shape for spec in boundary.signature.arguments] == [(3,)]
    equal(boundary.constants, (table,))


def test_every_operand_at_the_boundary_is_contiguous() -> None:
    x = torch.randn(3, 4).t()
    module = traced(lambda x: (x + 1, x.t() * 2, (x * 3)[:, ::2]), x)
    boundary = bound(module, frozenset({0}))
    graph = boundary.module.graph
    for node in (*graph.find_nodes(op="placeholder"), *graph.output_node().args[0]):
        assert node.meta["val"].is_contiguous() or node.target is aten.slice.Tensor
    (spec,) = boundary.signature.arguments
    assert spec.static and spec.dense and spec.permutation == (1, 0)


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A dense tensor of rank 0 to 4 whose dimensions are in any order in memory."""
    shape = draw(st.lists(st.integers(1, 3), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order)


@given(dense_tensors())
@settings(deadline=None)
def test_a_dense_permutation_makes_contiguous(tensor: torch.Tensor) -> None:
    permutation = dense_permutation(tensor)
    assert permutation is not None
    moved = tensor.permute(permutation)
    assert moved.is_contiguous()
    assert torch.equal(moved.permute(inverse(permutation)), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 4)[::2],
        torch.randn(4, 4)[:, 1:],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(10).unfold(0, 4, 2),
    ],
    ids=["gaps", "columns", "expanded", "overlapping"],
)
def test_what_is_not_dense(tensor: torch.Tensor) -> None:
    assert dense_permutation(tensor) is None


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "double": lambda x: x * 2,
    "transpose": lambda x: x.transpose(0, -1),
    "every_second": lambda x: x[..., ::2],
    "tail": lambda x: x[1:] if x.shape[0] > 1 else x,
    "narrow": lambda x: x.narrow(-1, 0, 1),
    "expand": lambda x: x[..., :1].expand(*x.shape[:-1], 3),
    "new": lambda x: x[None].squeeze(0),
    "flatten": lambda x: x.reshape(-1, x.shape[-1]),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "sum": lambda x: x.sum(0, keepdim=True),
}


@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.sampled_from(["contiguous", "transposed", "offset"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_chains_of_views(names: list[str], layout: str, grad: bool) -> None:
    torch._dynamo.reset()
    x = {
        "contiguous": lambda: torch.randn(3, 4),
        "transposed": lambda: torch.randn(4, 3).t(),
        "offset": lambda: torch.randn(14)[2:].view(3, 4),
    }[layout]()
    x.requires_grad_(grad and layout == "contiguous")

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name in names:
            x = STEPS[name](x)
            results.append(x)
        return results

    check(function, x, calls=2)


def test_a_chain_across_the_boundary_of_a_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.t()[1:].sin() * x.t()[1:]).expand(2, 2, 3).transpose(0, 2)

    check(function, torch.randn(3, 3, requires_grad=True), backward=True)
