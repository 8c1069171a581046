"""``flex_attention`` against eager, which makes the whole matrix of scores."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

import neuron_compile

from ..support import IGNORE_TORCH, equal, neuron

pytestmark = [
    IGNORE_TORCH,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 300, 16
BIAS, RELATIVE = torch.randn(HEADS), torch.randn(2 * LENGTH)
DOCUMENT = torch.arange(LENGTH) // 70


def inputs(heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [HEADS, heads, heads]
    return [torch.randn(BATCH, size, LENGTH, WIDTH).to(dtype) for size in shapes]


def agree(function: Callable[..., Any], *args: Any, tolerance: float = 2e-5) -> None:
    equal(neuron(function, fullgraph=True)(*args), function(*args), tolerance, tolerance)
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0, report.fallback_reasons


SCORES: dict[str, Callable[..., Any]] = {
    "by_head": lambda s, b, h, m, n: s * BIAS[h],
    "relative": lambda s, b, h, m, n: s + RELATIVE[m - n + LENGTH],
    "capped": lambda s, b, h, m, n: 3 * torch.tanh(s / 3),
    "blocked": lambda s, b, h, m, n: torch.where((m - n).abs() < 40, s, -float("inf")),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name: str) -> None:
    agree(lambda q, k, v: flex_attention(q, k, v, score_mod=SCORES[name]), *inputs())


MASKS: dict[str, tuple[Callable[..., Any], int | None, int | None]] = {
    "causal": (lambda b, h, m, n: m >= n, None, None),
    "window": (lambda b, h, m, n: (m >= n) & (m - n < 64), None, None),
    "documents": (lambda b, h, m, n: DOCUMENT[m] == DOCUMENT[n], None, None),
    "by_head": (lambda b, h, m, n: (m >= n) | (h % 2 == 1), None, HEADS),
    "by_batch": (lambda b, h, m, n: (m - n).abs() < 50 + 100 * b, BATCH, None),
    "rows_without_a_key": (lambda b, h, m, n: (m >= n) & (m > 100), None, None),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [128, (32, 64)], ids=str)
def test_block_mask(name: str, block: Any) -> None:
    mask, batch, heads = MASKS[name]
    made = create_block_mask(mask, batch, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        score = SCORES["by_head"]
        return flex_attention(q, k, v, score_mod=score, block_mask=made, return_lse=True)

    agree(function, *inputs())


def test_grouped_queries() -> None:
    made = create_block_mask(MASKS["by_head"][0], None, HEADS, LENGTH, LENGTH, device="cpu")
    agree(lambda q, k, v: flex_attention(q, k, v, block_mask=made, enable_gqa=True), *inputs(2))
    agree(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, scale=0.3), *inputs(2))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 2e-2)], ids=str
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    made = create_block_mask(MASKS["causal"][0], None, None, LENGTH, LENGTH, device="cpu")
    function = lambda q, k, v: flex_attention(q, k, v, block_mask=made)  # noqa: E731
    agree(function, *inputs(dtype=dtype), tolerance=tolerance)


def test_queries_of_another_length() -> None:
    q = torch.randn(1, HEADS, 5, WIDTH)
    k, v = torch.randn(2, 1, HEADS, 200, WIDTH)
    made = create_block_mask(lambda b, h, m, n: n <= m + 100, None, None, 5, 200, device="cpu")
    agree(lambda q, k, v: flex_attention(q, k, v, block_mask=made), q, k, v)


def test_tensors_of_the_caller_in_a_modification() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + bias[h, m % 7])

    compiled = neuron(function, fullgraph=True)
    for _ in range(3):
        args = [*inputs(), torch.randn(HEADS, 7)]
        equal(compiled(*args), function(*args))


def test_blocks_that_are_not_listed_are_not_met() -> None:
    """As on an accelerator: eager looks at ``mask_mod`` alone, which here allows everything."""
    count = torch.ones(1, 1, 4, dtype=torch.int32)
    index = torch.arange(4, dtype=torch.int32).reshape(1, 1, 4, 1).repeat(1, 1, 1, 4)
    only = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=64, mask_mod=noop_mask)
    q, k, v = torch.randn(3, 1, 2, 256, WIDTH)
    made = neuron(lambda q, k, v: flex_attention(q, k, v, block_mask=only))(q, k, v)
    for part in range(4):
        rows = slice(64 * part, 64 * part + 64)
        alone = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, rows], v[:, :, rows]
        )
        equal(made[:, :, rows].contiguous(), alone)


def test_no_matrix_of_scores_is_made(tmp_path: Path) -> None:
    length = 1024
    q, k, v = torch.randn(3, 1, 1, length, WIDTH)
    made = create_block_mask(MASKS["causal"][0], None, None, length, length, device="cpu")
    options = {"dump_dir": str(tmp_path)}
    neuron(lambda q, k, v: flex_attention(q, k, v, block_mask=made), options=options)(q, k, v)
    (program,) = tmp_path.rglob("*stablehlo*")
    shapes = re.findall(r"tensor<((?:\d+x)+)", program.read_text())
    sizes = [torch.Size(map(int, shape.rstrip("x").split("x"))).numel() for shape in shapes]
    assert sizes and max(sizes) <= length * 128
