"""Random numbers of whole programs: eager's very bits on request, one mask for a recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import neuron_compile

from .support import IGNORE_TORCH, in_fresh_interpreter, neuron


def drawn_in_place(x: torch.Tensor) -> Any:
    """Every operator that fills a tensor."""
    return (
        torch.empty_like(x).uniform_(-1, 2),
        torch.empty(5, 7).normal_(1, 2),
        torch.zeros(9).bernoulli_(0.3),
        torch.empty_like(x.t()).bernoulli_(0.3),
        torch.empty(11).exponential_(2.0),
        torch.empty(4, 4).geometric_(0.3),
        torch.empty(40).cauchy_(),
        torch.empty(40).log_normal_(),
    )


def drawn_from_results(x: torch.Tensor) -> Any:
    """Draws that need a result of the graph, between others: the order is part of the numbers."""
    before = torch.rand(5)
    categories = torch.multinomial(x.softmax(-1), 2)
    between = torch.randn(20)
    coins = torch.bernoulli(x.sigmoid())
    events = torch.poisson(x.exp())
    after = torch.randint(0, 10, (7,)), torch.randperm(6)
    return F.dropout(x, 0.3), before * 2, categories, between, coins, events, *after


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    """Two masks that the backward draws again."""
    return checkpoint(
        lambda x: F.dropout(F.dropout(x.sin(), 0.5).cos(), 0.2), x, use_reentrant=False
    )


def branched(x: torch.Tensor) -> torch.Tensor:
    """Draws in a graph within the graph."""
    return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x.sin(), (x,))


torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True)
LSTM = nn.LSTM(8, 8, 2, dropout=0.5)

PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.1), (6, 8)),
    "dropout of a transposed tensor": (lambda x: F.dropout(x.t(), 0.1), (33, 8)),
    "two dropouts": (lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.25), (3,)),
    "dropout of all": (lambda x: F.dropout(x, 1.0), (3, 4)),
    "dropout2d": (lambda x: F.dropout2d(x, 0.5), (2, 8, 3, 3)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), (6, 8)),
    "feature_alpha": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), (6, 8, 3)),
    "rrelu": (lambda x: F.rrelu(x, training=True), (6, 8)),
    "gumbel_softmax": (F.gumbel_softmax, (6, 8)),
    "like": (lambda x: x * torch.randn_like(x) + torch.rand_like(x.t()).t(), (6, 8)),
    "normal": (lambda x: torch.normal(x, x.abs() + 1) + torch.normal(0.0, 1.0, (6, 8)), (6, 8)),
    "in place": (drawn_in_place, (6, 8)),
    "from results": (drawn_from_results, (6, 8)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), (2, 2, 5, 8)),
    "multi-head attention": (lambda x: ATTENTION(x, x, x)[0], (2, 5, 16)),
    "lstm": (lambda x: LSTM(x)[0], (4, 2, 8)),
    "checkpoint": (checkpointed, (6, 8)),
    "cond": (branched, (6, 8)),
}


def run(function: Callable[..., Any], shape: tuple[int, ...], call: int) -> tuple[Any, ...]:
    """Results, gradient and the generator's state after one call of many."""
    torch.manual_seed(7)
    torch.rand(call)
    x = (torch.arange(torch.Size(shape).numel()).reshape(shape) / 10).sin().requires_grad_()
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((y.sum() for y in results if y.requires_grad), x.sum())
    return results, torch.autograd.grad(total, x), torch.get_rng_state()


#: Of graphs with dynamic sizes these are enough: each way to draw, and the order among them.
DYNAMIC = ("dropout", "in place", "from results", "checkpoint", "cond")


@IGNORE_TORCH
@pytest.mark.parametrize(
    "name, dynamic",
    [(name, False) for name in PROGRAMS] + [(name, True) for name in DYNAMIC],
)
def test_eager_rng_draws_the_numbers_of_eager(name: str, dynamic: bool) -> None:
    function, shape = PROGRAMS[name]
    # With a graph that draws in a graph of its own, ATen runs all of that.
    strict = name != "cond"
    options = {"eager_rng": True, "fullgraph_on_device": strict}
    compiled = neuron(function, dynamic=dynamic, options=options)
    for call in range(3):
        wanted, actual = run(function, shape, call), run(compiled, shape, call)
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_eager_rng_is_reported_and_no_fallback() -> None:
    neuron(lambda x: F.dropout(x, 0.5), options={"eager_rng": True})(torch.ones(8))
    (record,) = (
        record
        for record in neuron_compile.report().graphs[-1].operators
        if record.operator == "aten.bernoulli.p"
    )
    assert record.where == "host"
    assert "eager_rng" in record.reason
    assert neuron_compile.report().graphs[-1].in_fallback == 0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_checkpoint_recomputes_the_same_masks(dynamic: bool) -> None:
    """On the device, since every draw of the backward starts from the forward's seed."""
    options = {"fullgraph_on_device": True}
    compiled = neuron(checkpointed, dynamic=dynamic, options=options)
    seen = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        x = torch.full((400,), 0.5, requires_grad=True)
        result = compiled(x)
        # A call in between must not change what the backward draws.
        compiled(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        inner = (x.detach().sin() * 2).cos() * 1.25  # where both masks keep it
        kept = torch.isclose(result, inner)
        assert torch.equal(gradient != 0, kept)
        assert 100 < kept.sum() < 230
        seen.append(result.detach())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


STREAM = """
import torch
import torch.nn.functional as F

compiled = torch.compile(lambda x: F.dropout(x, 0.5) + torch.randn(64), backend="neuron")
torch.manual_seed(11)
print([compiled(torch.ones(64)).sum().item() for _ in range(3)])
"""


@pytest.mark.slow
def test_a_seed_gives_one_stream_in_every_process() -> None:
    assert in_fresh_interpreter(STREAM).stdout == in_fresh_interpreter(STREAM).stdout
