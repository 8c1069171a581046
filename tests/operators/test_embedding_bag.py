"""``embedding_bag``: modes, offsets, empty bags, padding, weights, and its backward."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .compare import check, check_on_device

INDICES = torch.tensor([1, 2, 4, 4, 3, 0, 2, 9, 2, 2])
OFFSETS = torch.tensor([0, 3, 3, 6, 9])


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10, 3, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "mode, padding, last",
    [*itertools.product(["sum", "mean", "max"], [None, 2, -1], [False, True])],
)
def test_values_and_gradients(
    mode: str, padding: int | None, last: bool, dtype: torch.dtype
) -> None:
    offsets = torch.cat([OFFSETS, torch.tensor([len(INDICES)])]) if last else OFFSETS
    function = functools.partial(
        F.embedding_bag, mode=mode, padding_idx=padding, include_last_offset=last
    )
    check(
        lambda weight, offsets: function(INDICES, weight, offsets),
        table(dtype),
        offsets,
        grad=True,
        scale=2,
    )


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_rows_of_indices(integer: torch.dtype) -> None:
    rows = INDICES.reshape(2, 5).to(integer)
    for arguments in ({"mode": "mean"}, {"mode": "sum", "scale_grad_by_freq": True}):
        check(lambda weight, a=arguments: F.embedding_bag(rows, weight, **a), table(), grad=True)


@pytest.mark.parametrize("padding", [None, 2])
def test_weights_of_samples(padding: int | None) -> None:
    weights = torch.randn(len(INDICES), requires_grad=True)
    check(
        lambda weight, weights: F.embedding_bag(
            INDICES, weight, OFFSETS, per_sample_weights=weights, mode="sum", padding_idx=padding
        ),
        table(),
        weights,
        grad=True,
    )


def test_maximum_of_what_is_no_number() -> None:
    weight = table().detach()
    weight[4, 0], weight[1, 1], weight[3] = math.nan, math.nan, -math.inf
    check(lambda weight: F.embedding_bag(INDICES, weight, OFFSETS, mode="max"), weight)


def test_nothing_in_any_bag() -> None:
    for mode in ("sum", "mean", "max"):
        check(
            lambda weight, mode=mode: F.embedding_bag(
                INDICES[:0], weight, torch.zeros(2, dtype=torch.int64), mode=mode
            ),
            table(),
            grad=True,
        )


def test_an_index_out_of_range_raises() -> None:
    def function(indices: Any, weight: Any) -> Any:
        return F.embedding_bag(indices, weight, OFFSETS)

    with pytest.raises(RuntimeError, match="out of range"):
        check_on_device(function, INDICES + 1, table().detach())
