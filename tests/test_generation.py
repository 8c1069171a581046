"""Text generation by ``transformers``, with caches of fixed and of growing size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import neuron_compile

from .support import neuron

transformers = pytest.importorskip("transformers")

PROMPT, TOKENS = 5, 30


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, batch: int, cache: str | None) -> torch.Tensor:
    index = torch.randint(3, 100, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    tokens: torch.Tensor = model.generate(
        index,
        attention_mask=torch.ones_like(index),
        max_new_tokens=TOKENS,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,  # transformers compiles by itself where it knows the backend
    )
    return tokens


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_static_cache(batch: int) -> None:
    model = llama()
    wanted = generate(model, batch, "static")
    model.forward = neuron(model.forward)
    assert torch.equal(generate(model, batch, "static"), wanted)
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0 and report.compilations <= 3


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_growing_cache(batch: int) -> None:
    model = llama()
    wanted = generate(model, batch, None)
    model.forward = neuron(model.forward, options={"dynamic_shapes": "bucket"})
    assert torch.equal(generate(model, batch, None), wanted)
    report = neuron_compile.report()
    assert report.operators_in_fallback == 0
    # 16, 32 and 64; besides them the prompt and the first token, which Dynamo takes to be static.
    assert report.specializations <= 3 and report.compilations <= 5
