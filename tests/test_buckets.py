"""``dynamic_shapes="bucket"``: padded programs give eager's values, or are not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import neuron_compile

from .support import equal, neuron, sharing

BUCKET = {"dynamic_shapes": "bucket"}
#: Larger than every size that does not change.
SIZES = (11, 13, 17, 10)
#: Those pad to 16 and 32; one more program before it is known which sizes change.
PROGRAMS = 3

W = torch.randn(8, 24)
NORM = torch.nn.LayerNorm(8)
TABLE = torch.randn(40, 8)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def heads(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (F.linear(x, W.t()).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)).unbind(0)
    return attend(q, k, v, is_causal=True).transpose(1, 2).reshape(2, -1, 8)


def seq(size: int) -> list[torch.Tensor]:
    return [torch.randn(2, size, 8)]


def table(size: int) -> list[torch.Tensor]:
    return [torch.randn(size, 7)]


# Each: a function, and its inputs of a size.
CASES: dict[str, tuple[Callable[..., Any], Callable[[int], list[torch.Tensor]]]] = {
    "pointwise": (lambda x: (x.relu() + 1, x.sin(), x > 0), table),
    "sums": (lambda x: (x.sum(0), x.sum(), x.mean(0), x.mean(), (x > 9).any(0)), table),
    "extremes": (lambda x: (x.amax(0), x.amin(), (x * 3).int().amax(0)), table),
    "product_of_all": (lambda x: (x.prod(0), (x > 0).all(0)), table),
    "softmax": (lambda x: (x.softmax(0), x.log_softmax(0)), table),
    "not_finite": (lambda x: (1 / x).exp().mean(0) + x.log().sum(0), lambda s: [table(s)[0].abs()]),
    "cumulative": (lambda x: x.cumsum(0), table),
    "linear": (lambda x: F.linear(x, W.t()).relu(), seq),
    "addmm": (lambda x: torch.addmm(torch.ones(24), x, W), lambda s: [torch.randn(s, 8)]),
    "norm": (lambda x: NORM(x).mean(1), seq),
    "gram": (lambda x: x.t() @ x, table),
    "rows_and_columns": (lambda x, y: x @ y, lambda s: [torch.randn(s, 7), torch.randn(7, s)]),
    "batched": (lambda x: x @ x.transpose(1, 2), seq),
    "appended": (lambda x, y: torch.cat([x, y], 1), lambda s: [*seq(s), torch.randn(2, 1, 8)]),
    "joined": (lambda x, y: torch.cat([x, y, x], 1).sum(1), lambda s: [*seq(s), *seq(s + 1)]),
    "prepended": (lambda x: torch.cat([torch.zeros(2, 3, 8), x], 1).mean(1), seq),
    "ends": (lambda x: (x[:, -1], x[:, -2:] * 2, x[:, :-1].sum(1), x[:, 1:] + 1, x[:, 2]), seq),
    "decode": (
        lambda q, k: attend(q, k, k),
        lambda s: [torch.randn(2, 2, 1, 4), torch.randn(2, 2, s, 4)],
    ),
    "masked": (
        lambda q, k, m: attend(q, k, k, attn_mask=m),
        lambda s: [torch.randn(2, 2, 1, 4), torch.randn(2, 2, s, 4), torch.randn(1, 1, 1, s)],
    ),
    "causal": (heads, seq),
    "embedding": (lambda i: F.embedding(i, W).sum(1), lambda s: [torch.randint(0, 8, (2, s))]),
    "merged": (lambda x: F.gelu(x.reshape(-1, 8) @ W).reshape(2, -1, 24), seq),
    "positions": (lambda x: x + torch.arange(x.shape[1])[None, :, None], seq),
    "of_the_size": (lambda x: x.sum(0) / x.shape[0] + x.shape[0] * 2, table),
    "images": (
        lambda x: F.avg_pool2d(F.conv2d(x, torch.ones(4, 3, 2, 2)).relu(), 2).mean((2, 3)),
        lambda s: [torch.randn(s, 3, 7, 7)],
    ),
    "constant": (lambda x: x * torch.tensor([[2.0]]) + torch.tensor(1.0), table),
    "in_place": (lambda x: x.add_(1).mul_(2), table),
    "variances": (lambda x: (x.var(0), x.std(), x.var((0, 1), correction=0, keepdim=True)), table),
    "places": (lambda x: (x.argmax(0), *x.max(0), *x.min(1), x.argmin()), table),
    "gathered": (lambda x: x.gather(0, (x * 9).long() % x.shape[0]), table),
    "looked_up": (
        lambda x, i, j: (x[i], x[:, j], x[i, j], x.index_select(0, i)),
        lambda s: [*table(s), torch.tensor([0, s - 1, 3]), torch.tensor([0, 6, 2])],
    ),
    "by_padded_indices": (
        lambda x, i: (x.gather(1, i), torch.ones(9, 2)[i[:, 0]]),
        lambda s: [torch.randn(s, 3), torch.randint(0, 3, (s, 2))],
    ),
    "triangles": (lambda x: (x.tril(), x.triu(1).sum(0)), table),
    "stacked": (lambda x: (torch.stack([x, x * 2], 1).sum(0), x.repeat(1, 2), x.flip(1)), table),
    "surrounded": (lambda x: (F.pad(x, (1, 2, 2, 1), value=3.0), F.pad(x, (0, -1))), table),
    "expanded": (lambda x: 1 - x[:, None].expand(-1, 3, -1), table),
    "products": (lambda x: x.reshape(-1, 8) * 2, seq),
    "integer_division": (lambda x: x.long() // (x.shape[0] + x.long() * 0 - 3), table),
    "buffer": (lambda x: x + TABLE[: x.shape[1]] + TABLE[3 : x.shape[1] + 3], seq),
    "views": (lambda x: (x.split(2, 1)[-1], x.t()[1:, 2:], x), table),
    "views_in_training": (
        lambda x: (x.split(2, 1)[-1], x, x.sin()),
        lambda s: [torch.randn(s, 7, requires_grad=True)],
    ),
    "transposed": (lambda x: (x * 2, x.t()), lambda s: [torch.randn(7, s).t()]),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    function, make = CASES[name]
    compiled = neuron(function, fullgraph=True, options=BUCKET)
    for size in SIZES:
        mine, theirs = make(size), []
        for tensor in mine:
            torch._dynamo.mark_dynamic(tensor, [d for d, s in enumerate(tensor.shape) if s >= 10])
            theirs.append(tensor.clone().requires_grad_(tensor.requires_grad))
        actual, wanted = compiled(*mine), function(*theirs)
        equal(actual, wanted)
        equal(mine, theirs)
        assert sharing((actual, mine)) == sharing((wanted, theirs))
    report = neuron_compile.report()
    assert report.specializations <= PROGRAMS
    assert report.operators_in_fallback == 0


LAYERS = torch.nn.ModuleDict(
    {
        "linear": torch.nn.Linear(8, 8),
        "norm": torch.nn.LayerNorm(8),
        "embedding": torch.nn.Embedding(9, 8, padding_idx=2),
        "conv": torch.nn.Conv2d(2, 3, 3),
    }
)


def tokens(x: torch.Tensor) -> torch.Tensor:
    """Integers from 0 to 8 of the leading sizes of ``x``."""
    return (x.detach()[..., 0] * 100).long() % 9


def attended(x: torch.Tensor) -> torch.Tensor:
    split = x.view(2, -1, 2, 4).transpose(1, 2)
    return attend(split, split, split * 2, is_causal=True).transpose(1, 2).reshape(2, -1, 8)


# Each: a loss of a tensor whose dimension 1 is padded, or dimension 0 with a batch.
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.gelu(LAYERS["linear"](x)).mean(1).sum(),
    "norm": lambda x: LAYERS["norm"](x).sin().sum(),
    "embedding": lambda x: (LAYERS["embedding"](tokens(x)) * x).sum(),
    "classes": lambda x: F.cross_entropy(LAYERS["linear"](x).view(-1, 8), tokens(x).view(-1) % 8),
    "each_class": lambda x: (
        F.cross_entropy(x.view(-1, 8), tokens(x).view(-1) % 8, reduction="none").square().mean()
    ),
    "shifted": lambda x: F.cross_entropy(
        x[:, :-1].reshape(-1, 8), tokens(x)[:, 1:].reshape(-1) % 8
    ),
    "softmax": lambda x: (x.softmax(1) * x.log_softmax(2)).sum(),
    "attention": lambda x: attended(x).square().sum(),
    "parts": lambda x: x[:, 1:].sin().sum() + x[:, -1].cos().sum() + x[:, -3:].exp().sum(),
    "images": lambda x: (
        F.avg_pool2d(
            LAYERS["conv"](x.transpose(0, 1).reshape(-1, 2, 4, 2).repeat(1, 1, 1, 2)), 2, 1
        )
        .square()
        .mean()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    function = LOSSES[name]
    compiled = neuron(function, fullgraph=True, options=BUCKET)
    for size in SIZES:
        grads = []
        for run in (compiled, function):
            torch.manual_seed(size)
            x = torch.randn(2, size, 8, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 1)
            LAYERS.zero_grad()
            run(x).backward()
            grads.append((x.grad, *(p.grad for p in LAYERS.parameters() if p.grad is not None)))
        equal(*grads, rtol=1e-4, atol=1e-5)
    report = neuron_compile.report()
    assert report.specializations <= 2 * PROGRAMS
    assert not report.unpadded_reasons


def test_dropout_is_drawn_in_padded_programs() -> None:
    compiled = neuron(lambda x: F.dropout(x, 0.5), fullgraph=True, options=BUCKET)
    for size in (300, 500, 400):
        x = torch.ones(size, 7, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(x.grad, y)
        assert 0.4 < (y == 2).float().mean() < 0.6
        assert (y == 0).sum() + (y == 2).sum() == y.numel()
    assert neuron_compile.report().padded == neuron_compile.report().specializations


def test_checkpointed_dropout_has_one_mask_though_sizes_change() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)

    compiled = neuron(function, options=BUCKET)
    for size in (50, 90, 70):
        x = torch.ones(size, 7, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)


def test_sizes_are_padded_by_default_once_there_are_many() -> None:
    compiled = neuron(lambda x: x.softmax(0), fullgraph=True)
    for size in (10, *range(40, 60)):
        x = torch.randn(size, 7)
        torch._dynamo.mark_dynamic(x, 0)
        equal(compiled(x), x.softmax(0))
    report = neuron_compile.report()
    # Four sizes of their own, and 64.
    assert (report.specializations, report.padded) == (5, 1)
    equal(compiled(x), x.softmax(0))
    assert neuron_compile.report().specializations == 5


# What must not be padded: order statistics, random numbers, divisions that may raise, widths
# that a scale depends on, a table whose size is checked.
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[int], list[torch.Tensor]]]] = {
    "sort": (lambda x: x.sort(0)[0], table),
    "median": (lambda x: x.median(0)[0], table),
    "half_variance": (lambda x: x.half().var(0), table),
    "width": (lambda x: attend(x, x, x), lambda s: [torch.randn(2, 2, 3, s)]),
    "table": (lambda x: F.embedding(torch.tensor([0, 3]), x), table),
    "the_rest": (lambda x: x.sum() + torch.arange(20 - x.shape[0]), table),
    "shared_memory": (lambda x: ((y := x * 2), y.t()), table),
    "roll": (lambda x: x.roll(1, 0), table),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_bear_padding_is_specialized(name: str) -> None:
    function, make = REFUSED[name]
    compiled = neuron(function, options=BUCKET, dynamic=True)
    for size in (5, 9, 12):
        args = make(size)
        equal(compiled(*args), function(*args))
    report = neuron_compile.report()
    assert (report.specializations, report.padded) == (3, 0)
    assert report.unpadded_reasons


def test_an_index_out_of_the_real_range_raises() -> None:
    functions = {
        "select": lambda x, i: x.index_select(0, i),
        "index": lambda x, i: x[i],
        "gather": lambda x, i: x.gather(0, i[:, None]),
    }
    for function in functions.values():
        compiled = neuron(function, options=BUCKET, dynamic=True)
        for size in (5, 9):
            x = torch.randn(size, 7)
            equal(compiled(x, torch.tensor([size - 1])), function(x, torch.tensor([size - 1])))
            for wrong in (size, -size - 1):
                with pytest.raises((IndexError, RuntimeError), match="out of"):
                    compiled(x, torch.tensor([wrong]))
    assert neuron_compile.report().padded == neuron_compile.report().specializations


@pytest.mark.parametrize("buckets", [(8, 40), [40, 8], "8,40"], ids=str)
def test_buckets_of_the_user(buckets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = dict(BUCKET)
    if isinstance(buckets, str):
        monkeypatch.setenv("NEURON_COMPILE_BUCKETS", buckets)
    else:
        options["buckets"] = buckets
    compiled = neuron(lambda x: x.softmax(0), options=options)
    for size in (3, 7, 12, 40, 33, 8, 41, 42):
        x = torch.randn(size, 2)
        torch._dynamo.mark_dynamic(x, 0)
        equal(compiled(x), x.softmax(0))
    # Two buckets, and two sizes beyond them; in the first call every size is padded.
    assert neuron_compile.report().specializations == 4


def test_a_growing_cache_does_not_recompile_at_every_step() -> None:
    def step(k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Any:
        k, v = torch.cat([k, x], 2), torch.cat([v, x * 2], 2)
        return k, v, attend(x, k, v)

    compiled = neuron(step, fullgraph=True, options=BUCKET)
    mine = theirs = (torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    for _ in range(40):
        x = torch.randn(1, 2, 1, 4)
        *mine, found = compiled(*mine, x)
        *theirs, wanted = step(*theirs, x)
        equal([*mine, found], [*theirs, wanted])
    # 16, 32 and 64, and the first call, which Dynamo takes to be static.
    assert neuron_compile.report().compilations <= 4
