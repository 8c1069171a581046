"""The fused encoder layer and multi-head attention of inference: masks, order, activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .compare import assert_same, check, check_on_device

CAUSAL = torch.ones(5, 5).triu(1).bool()
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
MASKS: list[dict[str, Any]] = [
    {},
    {"src_mask": CAUSAL},
    {"src_key_padding_mask": PADDING},
    {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_first, activation", [(False, "relu"), (True, "gelu")])
@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: "+".join(masks) or "none")
@torch.no_grad()
def test_encoder_layer(
    masks: dict[str, Any], norm_first: bool, activation: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, norm_first=norm_first, activation=activation, dtype=dtype
    ).eval()
    x = torch.randn(2, 5, 8, dtype=dtype)
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    actual = check_on_device(lambda x: layer(x, **masks), x)
    assert_same(actual, layer(x, **masks), "result", scale=2)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("mask, kind", [(None, None), (CAUSAL, 0), (PADDING, 1)])
def test_native_multi_head_attention(mask: Any, kind: int | None, average: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)]
    x = torch.randn(2, 5, 8)
    check(
        lambda x, *weights: torch._native_multi_head_attention(
            x, x, x, 8, 2, *weights, mask, True, average, kind
        ),
        x,
        *weights,
    )
