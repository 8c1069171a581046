"""Edge cases of gathers, scatters, slices, concatenation and other movements of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``0, 1, 2, ...`` in a shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_embedding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 3, requires_grad=True)
    index = torch.tensor([[1, 1, 6], [0, 2, 1]])
    for settings in (
        {},
        {"padding_idx": 1},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"scale_grad_by_freq": True, "padding_idx": 2},
    ):
        check(
            lambda i, w, settings=settings: F.embedding(i, w, **settings), index, weight, grad=True
        )
    check(F.embedding, index.int(), weight, grad=True)
    check(F.embedding, torch.tensor(3), weight, grad=True)
    check(F.embedding, torch.zeros(0, 2, dtype=torch.int64), weight, grad=True)
    half = weight.detach().bfloat16().requires_grad_()
    check(F.embedding, index, half, grad=True)


INDEXINGS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "one": lambda x, i, j: x[i],
    "second": lambda x, i, j: x[:, i],
    "last": lambda x, i, j: x[..., i],
    "two": lambda x, i, j: x[i, j],
    "two later": lambda x, i, j: x[:, i, j],
    "separated": lambda x, i, j: x[i, :, j],
    "separated by a number": lambda x, i, j: x[i, 1, j],
    "separated later": lambda x, i, j: x[:, i, :, j],
    "number first": lambda x, i, j: x[1, :, i],
    "broadcast": lambda x, i, j: x[i[:, None], j[None, :]],
    "new axis": lambda x, i, j: x[None, i, None, j],
    "slice and index": lambda x, i, j: x[1:, i, ::2],
    "three": lambda x, i, j: x[i, j, i],
    "four": lambda x, i, j: x[i, j, i, j],
    "0-d": lambda x, i, j: torch.ops.aten.index(x, [i[0]]),
    "0-d and 1-d": lambda x, i, j: torch.ops.aten.index(x, [i[0], j]),
    "list": lambda x, i, j: x[[0, -1, 0]],
    "int32": lambda x, i, j: x[i.int()],
    "matrix": lambda x, i, j: x[torch.stack([i, j])],
    "empty": lambda x, i, j: x[i[:0]],
}


@pytest.mark.parametrize("name", INDEXINGS)
def test_advanced_indexing(name: str) -> None:
    i, j = torch.tensor([0, -1, 2, 0]), torch.tensor([1, 1, -3, 0])
    x = numbers(3, 4, 3, 4).requires_grad_()
    check(INDEXINGS[name], x, i, j, grad=True)


ASSIGNMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "one": lambda x, i, j: x.__setitem__(i, -1.0),
    "two": lambda x, i, j: x.__setitem__((i, j), 5.0),
    "separated": lambda x, i, j: x.__setitem__((i, slice(None), j), x[0, 0, 0].clone()),
    "rows": lambda x, i, j: x.__setitem__((slice(None), i), x[:, :1]),
    "accumulate": lambda x, i, j: x.index_put_((i, j), x[0, 0] * 1, accumulate=True),
    "accumulate numbers": lambda x, i, j: x.index_put_(
        (i, j, i, j), torch.ones(4).to(x.dtype), accumulate=True
    ),
    "index_add": lambda x, i, j: x.index_add_(1, i % 4, x[:, :4] * 2, alpha=3),
    "index_copy": lambda x, i, j: x.index_copy_(1, torch.tensor([3, 0]), x[:, 1:3] * 2),
    "index_fill": lambda x, i, j: x.index_fill_(2, torch.tensor([0, 2]), 9),
    "slice": lambda x, i, j: x[1:].add_(1),
    "negative slice": lambda x, i, j: x[:-1].mul_(2),
    "step": lambda x, i, j: x.__setitem__(slice(None, None, 2), x[:2] * 3),
    "step of last": lambda x, i, j: x[..., ::3].add_(1),
    "step from one": lambda x, i, j: x[:, 1::2].zero_(),
    "inner": lambda x, i, j: x[:, 1:3, 1:, :-1].add_(10),
    "empty slice": lambda x, i, j: x[2:1].add_(1),
    "beyond the end": lambda x, i, j: x[1:100].add_(1),
    "before the start": lambda x, i, j: x[-100:2].add_(1),
    "number": lambda x, i, j: x[1].fill_(7),
    "negative number": lambda x, i, j: x[-1, -2].fill_(7),
    "broadcast": lambda x, i, j: x.__setitem__((Ellipsis, slice(1, 3)), torch.ones(2)),
    "mask": lambda x, i, j: x.__setitem__(x > 50, 0.0),
    "diagonal": lambda x, i, j: x[0, 0].diagonal().fill_(-5),
    "transposed": lambda x, i, j: x.transpose(0, 2)[1:].add_(100),
    "put": lambda x, i, j: x.put_(i, torch.arange(4.0).to(x.dtype), accumulate=True),
    "masked_scatter": lambda x, i, j: x.masked_scatter_(x > 50, -x.flatten()),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_assignment(name: str, dtype: torch.dtype) -> None:
    def assign(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        ASSIGNMENTS[name](x, i, j)
        return x * 1

    i, j = torch.tensor([0, -1, 2, -1]), torch.tensor([1, 2, -3, 2])
    # Duplicates without accumulation have no specified order: those here write equal values.
    check(assign, numbers(3, 4, 3, 4, dtype=dtype), i, j)


def test_gather_and_scatter() -> None:
    x = numbers(3, 5).requires_grad_()
    index = torch.tensor([[0, 1, 1], [2, 0, 1]])
    check(lambda x, i: (x.gather(0, i), x.gather(1, i)), x, index, grad=True)
    check(lambda x, i: x.gather(-1, i[:, :0]), x, index)
    source = torch.randn(3, 5, requires_grad=True)
    check(
        lambda x, i, s: (
            x.scatter_add(0, i, s),
            x.scatter_add(1, i, s),
            x.scatter(1, torch.tensor([[0, 4, 2]]), s),
            x.scatter(0, torch.tensor([[2], [0]]), s),
            x.scatter(1, i, 7.5),
            x.index_select(1, torch.tensor([4, 0, 0])),
            x.index_select(-2, torch.tensor([2])),
            x.take(i),
        ),
        x,
        index,
        source.detach(),
        grad=True,
    )
    check(lambda x, i, s: x.scatter_add(0, i, s[:2, :3]), x, index, source, grad=True)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [False, True])
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 1, 0], [2, 0, 1, 2], [1, 1, 1, 1]])

    def scatter(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.scatter_reduce(0, i, s, reduce, include_self=include_self),
            x.scatter_reduce(1, i, s, reduce, include_self=include_self),
        )

    check(scatter, torch.randn(3, 5), index, torch.randn(3, 4))
    check(scatter, torch.arange(15).reshape(3, 5), index, torch.randint(-9, 9, (3, 4)))


SLICES: list[Any] = [
    slice(1, None),
    slice(None, -1),
    slice(-2, None),
    slice(None, None, 2),
    slice(1, None, 3),
    slice(5, 2),
    slice(-100, 100),
    slice(2, 2),
    slice(-3, -1, 2),
]


@pytest.mark.parametrize("part", SLICES, ids=str)
def test_slices(part: slice) -> None:
    x = numbers(6, 7)
    check(lambda x: (x[part] + 0, x[:, part] * 2, x[..., part].clone()), x)
    check(lambda x: (x[part] * 2).sum() + x[:, part].sum(), x.requires_grad_(), grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.bfloat16], ids=str)
def test_movements(dtype: torch.dtype) -> None:
    x = (numbers(2, 3, 4) % 5).to(dtype)
    check(
        lambda x: (
            x.permute(-1, 0, 1).contiguous(),
            x.transpose(-1, -3).clone(),
            x.reshape(-1, 2),
            x.flatten(1),
            x.unsqueeze(-1).squeeze(0),
            x[:1].squeeze(),
            x[:1].expand(3, -1, 4).clone(),
            x.repeat(2, 1, 3, 1),
            x.flip(0, -1),
            x.roll(1),
            x.roll((1, -2), (0, 2)),
            x.tril(-1),
            x.triu(1),
            x.diagonal(1, 1, 2).clone(),
            *x.split(2, 2),
            *x.split([1, 2], -2),
            *x.chunk(3, 2),
            *x.unbind(1),
            torch.stack([x, x], -1),
            torch.cat([x, x[:, :1]], -2),
            x.movedim(0, 2).contiguous(),
            x.unfold(2, 2, 1).clone(),
            x.select(-1, -1).clone(),
            torch.rot90(x, 1, (1, 2)),
            x.repeat_interleave(2, 1),
        ),
        x,
    )


def test_padding() -> None:
    x = numbers(1, 2, 3, 4).requires_grad_()
    check(
        lambda x: (
            F.pad(x, (1, 2)),
            F.pad(x, (1, 0, 0, 2), value=3.5),
            F.pad(x, (-1, -1)),
            F.pad(x, (-1, 2, 1, -1)),
            F.pad(x, (1, 2, 1, 1), mode="reflect"),
            F.pad(x, (1, 2, 1, 1), mode="replicate"),
            F.pad(x, (1, 2, 1, 1), mode="circular"),
        ),
        x,
        grad=True,
    )
    check(lambda x: F.pad(x, (1, 1), value=1), torch.tensor([[True, False]]))
    check(lambda x: F.pad(x, (1, 1), value=7), torch.tensor([1, 2], dtype=torch.uint8))


def test_concatenation() -> None:
    x = numbers(2, 3)
    check(
        lambda x: (
            torch.cat([x, torch.zeros(0)], 0),
            torch.cat([torch.zeros(0), x, x], 1),
            torch.cat([x, x[:0]], 0),
            torch.cat([x, x.long()], -1),
            torch.cat([x.half(), x.bfloat16()]),
            torch.cat([x > 2, x.to(torch.uint8)]),
            torch.cat([torch.zeros(0), torch.zeros(0)]),
            torch.stack([x[0], x[1]]),
            torch.hstack([x, x]),
            torch.vstack([x, x[0]]),
        ),
        x,
    )


def test_strides_of_views() -> None:
    x = numbers(4, 6)
    check(
        lambda x: (
            torch.as_strided(x, (2, 3), (6, 2), 1) + 0,
            torch.as_strided(x, (3, 4, 2), (1, 2, 0)) * 1,
            (x + 1).t(),
            (x + 1)[:, ::2],
            (x + 1).expand(2, 4, 6),
        ),
        x,
    )


def test_creation() -> None:
    check(
        lambda x: (
            torch.arange(0, 1, 0.1),
            torch.arange(5, -5, -3),
            torch.arange(2.5, 7),
            torch.arange(3, dtype=torch.bfloat16),
            torch.linspace(0, 1, 11),
            torch.linspace(-3, 7, 5, dtype=torch.int64),
            torch.linspace(50, 50, 50, dtype=torch.int64),
            torch.linspace(1, 2, 1),
            torch.full((2, 3), 7),
            torch.full((2,), True),
            torch.full((2,), 1.5, dtype=torch.int32),
            torch.full((), -3, dtype=torch.uint8),
            torch.zeros(0, 2),
            torch.ones(2, dtype=torch.uint8),
            torch.eye(3, 4),
            torch.zeros_like(x, dtype=torch.bool),
            torch.full_like(x, float("nan")),
            torch.tril_indices(3, 4, 1),
            torch.triu_indices(3, 3),
            torch.tensor([1, 2, 3]),
            x.new_full((2,), 3),
        ),
        torch.ones(2),
    )


def test_search() -> None:
    borders = torch.tensor([1.0, 3.0, 3.0, 7.0])
    values = torch.tensor([[0.0, 1.0, 2.0], [3.0, 7.0, 9.0]])
    check(
        lambda b, v: (
            torch.bucketize(v, b),
            torch.bucketize(v, b, right=True, out_int32=True),
            torch.searchsorted(b, v),
            torch.searchsorted(b, v, side="right"),
            torch.searchsorted(torch.stack([b, b + 1]), v),
        ),
        borders,
        values,
    )


def test_one_hot_and_masks() -> None:
    index = torch.tensor([0, 2, 1])
    check(
        lambda i: (
            (i[:, None] == torch.arange(4)).float(),
            torch.zeros(3, 4).scatter_(1, i[:, None], 1.0),
            torch.isin(i, torch.tensor([2, 5])),
        ),
        index,
    )


def test_other_dtypes_of_the_same_memory() -> None:
    x = torch.tensor([[1.0, -2.5, 3e10, float("nan")]])
    check(
        lambda x: (
            x.view(torch.int32),
            x.view(torch.uint8),
            x.view(torch.int16),
            x.view(torch.int64),
            x.view(torch.int32).view(torch.float32),
            (x > 0).view(torch.uint8),
            (x > 0).view(torch.uint8).view(torch.bool),
        ),
        x,
    )
