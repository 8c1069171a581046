"""``dynamic_shapes="bucket"``: padded programs give eager's values, or are not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import neuron_compile

from .support import equal, neuron

BUCKET = {"dynamic_shapes": "bucket"}
#: Larger than every size that does not change.
SIZES = (11, 13, 17, 16, 30, 33, 10)
#: Those pad to 16, 32 and 64; one more program before it is known which sizes change.
PROGRAMS = 4

W = torch.randn(8, 24)
NORM = torch.nn.LayerNorm(8)


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
            theirs.append(tensor.clone())
        equal(compiled(*mine), function(*theirs))
        equal(mine, theirs)
    report = neuron_compile.report()
    assert report.specializations <= PROGRAMS
    assert report.operators_in_fallback == 0


def test_gradients() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ weight).mean(1).sum()

    compiled = neuron(function, fullgraph=True, options=BUCKET)
    for size in SIZES:
        grads = []
        for run in (compiled, function):
            x = torch.ones(2, size, 8, requires_grad=True)
            x.data.copy_(torch.linspace(-1, 1, x.numel()).reshape(x.shape))
            run(x).backward()
            grads.append((x.grad, weight.grad))
            weight.grad = None
        equal(*grads, rtol=1e-4, atol=1e-6)


# What must not be padded: order statistics, random numbers, divisions that may raise, widths
# that a scale depends on, a table whose size is checked.
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[int], list[torch.Tensor]]]] = {
    "sort": (lambda x: x.sort(0)[0], table),
    "median": (lambda x: x.median(0)[0], table),
    "variance": (lambda x: x.var(0), table),
    "integer_division": (lambda x: (x * 9).long() // (x.shape[0] + x.long() * 0), table),
    "width": (lambda x: attend(x, x, x), lambda s: [torch.randn(2, 2, 3, s)]),
    "table": (lambda x: F.embedding(torch.tensor([0, 3]), x), table),
    "the_rest": (lambda x: x.sum() + torch.arange(20 - x.shape[0]), table),
    "roll": (lambda x: x.roll(1, 0), table),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_bear_padding_is_specialized(name: str) -> None:
    function, make = REFUSED[name]
    compiled = neuron(function, options=BUCKET, dynamic=True)
    for size in (5, 9, 12):
        args = make(size)
        equal(compiled(*args), function(*args))
    assert neuron_compile.report().specializations == 3


def test_an_index_out_of_the_real_range_raises() -> None:
    compiled = neuron(lambda x, i: x.index_select(0, i), options=BUCKET, dynamic=True)
    for size in (5, 9):
        x = torch.randn(size, 7)
        equal(compiled(x, torch.tensor([size - 1])), x[-1:])
        with pytest.raises(IndexError):
            compiled(x, torch.tensor([size]))


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
