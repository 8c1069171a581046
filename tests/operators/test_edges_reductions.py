"""Edge cases of reductions, scans, sorting, softmax and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check

INF, NAN = math.inf, math.nan


def ties(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A small tensor with many equal elements."""
    return torch.tensor([[3, 1, 3, 2], [1, 1, 1, 1], [0, 5, 5, 0]]).to(dtype)


def with_nan() -> torch.Tensor:
    return torch.tensor([[1.0, NAN, 3.0, NAN], [-INF, INF, 0.0, -0.0], [NAN, 1.0, 2.0, 3.0]])


@pytest.mark.parametrize("dims", [None, (), 0, -1, (0, 2), (-1, 0), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_dims(dims: Any, keepdim: bool) -> None:
    def reduce(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.sum(x, dim=dims, keepdim=keepdim),
            torch.mean(x, dim=dims, keepdim=keepdim),
            torch.var(x, dim=dims, keepdim=keepdim),
            torch.std(x, dim=dims, keepdim=keepdim, correction=0),
            torch.amax(x, dim=() if dims is None else dims, keepdim=keepdim),
            torch.amin(x, dim=() if dims is None else dims, keepdim=keepdim),
            torch.logsumexp(x, dim=(0, 1, 2) if dims in (None, ()) else dims, keepdim=keepdim),
            torch.any(x > 0, dim=dims, keepdim=keepdim),
            torch.all(x > 0, dim=dims, keepdim=keepdim),
            *torch.var_mean(x, dim=dims, keepdim=keepdim, correction=2),
            torch.linalg.vector_norm(x, dim=None if dims == () else dims, keepdim=keepdim),
        )

    torch.manual_seed(0)
    check(reduce, torch.randn(3, 4, 5))


def test_scalars_of_rank_zero() -> None:
    def reduce(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.sum(),
            x.sum(0),
            x.sum(-1, keepdim=True),
            x.mean(0),
            x.prod(),
            x.prod(0),
            x.amax(),
            x.max(),
            *x.max(0),
            *x.min(-1),
            x.argmax(),
            x.argmax(0),
            x.cumsum(0),
            x.cumprod(0),
            x.any(),
            x.all(0),
            *x.sort(0),
            *x.sort(descending=True),
            *x.topk(1),
            F.softmax(x, 0),
            F.log_softmax(x, 0),
            x.logsumexp(0),
            x.flip(0),
        )

    check(reduce, torch.tensor(2.5))
    check(lambda x: (F.softmax(x, 0), F.log_softmax(x, 0)), torch.tensor(INF))
    check(lambda x: (F.softmax(x, 0), F.log_softmax(x, 0)), torch.tensor(1.0, requires_grad=True))
    leaf = torch.tensor(1.5, requires_grad=True)
    check(lambda x: (F.softmax(x, 0), F.log_softmax(x, 0), x.sum(0)), leaf, grad=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    x = torch.tensor([[200, 100, 255], [1, 0, 7]], dtype=torch.uint8).to(dtype)

    def reduce(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.sum(),
            x.sum(1),
            x.sum(0, dtype=torch.float32),
            x.sum(0, dtype=torch.int32),
            x.prod(),
            x.prod(1),
            x.cumsum(1),
            x.cumprod(0),
            x.any(),
            x.any(1),
            x.all(),
            x.all(0),
            x.amax(1),
            x.amin(0),
            x.max(),
            x.min(),
            x.mean(dtype=torch.float32),
            x.float().mean(1),
        )

    check(reduce, x)
    if dtype is not torch.bool:
        check(lambda x: (*x.max(1), *x.min(0), x.argmax(), x.argmin(1)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).to(dtype)
    check(
        lambda x: (
            x.sum(),
            x.sum(1),
            x.sum(0, dtype=torch.float32),
            x.mean(1),
            x.var(1),
            x.amax(0),
            x.logsumexp(1),
            F.softmax(x, 1),
            F.log_softmax(x, 0),
            F.softmax(x, 1, dtype=torch.float32),
            x.argmax(1),
            (x * 0.01).cumsum(0),
            x.norm(),
        ),
        x,
    )
    ones = torch.ones(4096, dtype=dtype)
    check(lambda x: (x.sum(), x.mean(), x.cumsum(0)[-1]), ones)


EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1), x.sum((0, 1)), x.sum(1, keepdim=True)),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean(1)),
    "prod": lambda x: (x.prod(), x.prod(0), x.prod(1)),
    "var": lambda x: (x.var(0), x.var(1)),
    "any": lambda x: (x.any(), x.all(), x.any(0), x.all(1)),
    "amax": lambda x: (x.amax(1), x.amin(1)),
    "max": lambda x: (*x.max(1), *x.min(1), x.argmax(1)),
    "logsumexp": lambda x: (x.logsumexp(0), x.logsumexp(1)),
    "cumsum": lambda x: (x.cumsum(0), x.cumsum(1)),
    "softmax": lambda x: (F.softmax(x, 0), F.log_softmax(x, 1)),
    "sort": lambda x: (*x.sort(0), *x.sort(1), *x.topk(0, 0), *x.topk(2, 1)),
    "norm": lambda x: (x.norm(), torch.linalg.vector_norm(x, dim=0)),
}


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("name", EMPTY)
def test_empty(name: str) -> None:
    check(EMPTY[name], torch.zeros(0, 3))
    if name in ("sum", "prod", "any", "cumsum"):
        check(EMPTY[name], torch.zeros(0, 3, dtype=torch.int64))


def test_nan_and_infinity() -> None:
    check(
        lambda x: (
            x.max(),
            x.min(),
            *x.max(1),
            *x.min(1),
            *x.max(0),
            x.amax(1),
            x.amin(0),
            x.argmax(1),
            x.argmin(1),
            x.argmax(),
            x.argmin(),
            x.sum(1),
            x.mean(0),
            x.logsumexp(1),
            x.nansum(1),
            x.cumsum(1),
            x.any(1),
            torch.aminmax(x, dim=1),
        ),
        with_nan(),
    )
    check(lambda x: (x.logsumexp(0), x.amax(0)), torch.full((3, 2), -INF))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8], ids=str)
def test_first_of_equal_extremes(dtype: torch.dtype) -> None:
    check(
        lambda x: (x.argmax(), x.argmin(), x.argmax(1), x.argmin(1), *x.max(0), *x.min(1)),
        ties(dtype),
    )


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_stable_sort(dtype: torch.dtype, descending: bool) -> None:
    check(
        lambda x: (
            *x.sort(dim=1, descending=descending, stable=True),
            *torch.sort(x, dim=0, descending=descending, stable=True),
            torch.argsort(x, dim=-1, descending=descending, stable=True),
        ),
        ties(dtype),
    )


@pytest.mark.parametrize("descending", [False, True])
def test_sort_puts_nan_last(descending: bool) -> None:
    x = with_nan()
    check(lambda x: x.sort(dim=1, descending=descending, stable=True), x)
    zeros = torch.tensor([0.0, -0.0, 1.0, -0.0, 0.0, -1.0])
    check(lambda x: x.sort(descending=descending, stable=True)[1], zeros)


@pytest.mark.parametrize("largest", [False, True])
def test_topk(largest: bool) -> None:
    torch.manual_seed(0)
    check(lambda x: x.topk(3, dim=1, largest=largest), torch.randn(4, 7))
    check(lambda x: x.topk(2, dim=0, largest=largest), torch.randn(4, 7))
    check(lambda x: x.topk(4, largest=largest), torch.randperm(10))
    # Which of equal elements comes first is not specified: only values are compared.
    check(lambda x: x.topk(3, dim=1, largest=largest)[0], with_nan())
    check(lambda x: x.topk(3, dim=1, largest=largest)[0], ties(torch.uint8))
    check(lambda x: x.topk(3, largest=largest)[0], torch.randn(4, 7, requires_grad=True), grad=True)


def test_order_statistics() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 7)
    check(lambda x: (x.median(), *x.median(1), *x.median(0), *x.kthvalue(3, 1)), x)
    check(lambda x: (x.nanmedian(), x.nanmedian(1).values, x.median(1).values), with_nan())
    check(lambda x: (x.median(), x.median(0).values), torch.randint(0, 99, (5, 4)))


def test_cumulative() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5)
    check(lambda x: (x.cumsum(0), x.cumsum(-1), x.cumprod(1), x.logcumsumexp(1)), x)
    check(lambda x: (*x.cummax(1), *x.cummin(0)), x)
    check(lambda x: (*x.cummax(1), *x.cummin(1)), ties())
    check(lambda x: (*x.cummax(1), *x.cummin(1)), with_nan())
    check(lambda x: (*x.cummax(1), x.cumsum(0), x.cumprod(1)), ties(torch.int64))
    check(lambda x: (x.cumsum(1), x.cumprod(1)), x.clone().requires_grad_(), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_over_extremes(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [
            [1e4, -1e4, 0.0, 1.0],
            [-INF, 0.0, 1.0, -INF],
            [88.0, 89.0, 90.0, -90.0],
            [-INF, -INF, -INF, -INF],
            [INF, 0.0, 1.0, 2.0],
            [NAN, 0.0, 1.0, 2.0],
        ]
    ).to(dtype)
    check(lambda x: (F.softmax(x, 1), F.log_softmax(x, 1), F.softmin(x, 1)), x)
    finite = x[:3].clone().requires_grad_()
    check(lambda x: (F.softmax(x, 1), F.log_softmax(x, 1)), finite, grad=True)
    check(lambda x: (F.softmax(x, -2), F.log_softmax(x, 0)), finite, grad=True)


def accurate(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    torch._dynamo.reset()
    actual = torch.compile(function, backend="neuron", fullgraph=True)(x).double()
    torch.testing.assert_close(actual, function(x.double()), rtol=1e-5, atol=1e-30)


def test_large_reductions_are_accurate() -> None:
    torch.manual_seed(0)
    x = torch.rand(1_000_000)
    accurate(torch.sum, x)
    accurate(torch.mean, x)
    accurate(torch.var, x + 100)
    accurate(torch.linalg.vector_norm, x)
    accurate(lambda x: x.sum(0), x.reshape(1000, 1000))
    accurate(lambda x: x.sum(0), x.reshape(500_000, 2))
    accurate(lambda x: x.sum(1), x.reshape(2, 500_000))
    accurate(lambda x: x.cumsum(0)[-1], x)
    accurate(lambda x: x.sum((0, 2)), x.reshape(100, 10, 1000))
    accurate(lambda x: x.logsumexp(0), x)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "weights": lambda x, y: F.cross_entropy(x, y, torch.arange(1.0, x.shape[1] + 1)),
    "weights none": lambda x, y: F.cross_entropy(
        x, y, torch.arange(1.0, x.shape[1] + 1), reduction="none"
    ),
    "smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "smoothing weights": lambda x, y: F.cross_entropy(
        x, y, torch.arange(1.0, x.shape[1] + 1), label_smoothing=0.1
    ),
    "ignore 1": lambda x, y: F.cross_entropy(x, y.clamp(min=0), ignore_index=1),
    "ignore 1 none": lambda x, y: F.cross_entropy(
        x, y.clamp(min=0), ignore_index=1, reduction="none"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, requires_grad=True)
    check(LOSSES[name], x, torch.tensor([0, 4, -100, 1, 1, 2]), grad=True)
    image = torch.randn(2, 5, 3, 2, requires_grad=True)
    target = torch.randint(0, 5, (2, 3, 2))
    target[0, 0, 0] = -100
    check(LOSSES[name], image, target, grad=True)


def test_cross_entropy_with_probabilities() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, requires_grad=True)
    probabilities = torch.softmax(torch.randn(4, 5), 1)
    check(F.cross_entropy, x, probabilities, grad=True)
    check(lambda x, p: F.cross_entropy(x, p, label_smoothing=0.2), x, probabilities, grad=True)


def test_cross_entropy_ignoring_all() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = torch.full((3,), -100)
    check(F.cross_entropy, x, y, grad=True)
    check(lambda x, y: F.cross_entropy(x, y, reduction="sum"), x, y, grad=True)


def test_losses() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, requires_grad=True), torch.rand(4, 5)
    check(
        lambda x, y: (
            F.mse_loss(x, y),
            F.l1_loss(x, y, reduction="sum"),
            F.smooth_l1_loss(x, y, beta=0.5),
            F.huber_loss(x, y, delta=0.3),
            F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0]),
            F.binary_cross_entropy(x.sigmoid(), y),
            F.kl_div(x.log_softmax(1), y, reduction="batchmean"),
            F.nll_loss(x.log_softmax(1), torch.tensor([0, 1, 2, -100])),
            F.nll_loss(x[0].log_softmax(0), torch.tensor(2)),
            F.cosine_similarity(x, y),
        ),
        x,
        y,
        grad=True,
    )
