"""``python -m benchmarks.generation``: text generation with caches of fixed and of growing size.

A Llama of four layers with random weights generates 128 tokens greedily, eager and compiled in
turn; a line of the table has the medians of milliseconds a token, and what was compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import neuron_compile

RESULTS = Path(__file__).parent / "results" / "generation.json"
PROMPT = 8
COLUMNS = (
    *("cache", "dynamic_shapes", "batch", "same_tokens", "compilations", "padded"),
    *("first_run_s", "neuron_ms", "eager_ms"),
)
CASES = (("static", "auto"), ("dynamic", "bucket"), ("dynamic", "auto"))


def llama() -> Any:
    """A small model with grouped queries."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, batch: int, cache: str, tokens: int) -> tuple[torch.Tensor, float]:
    """The tokens, and milliseconds for each."""
    prompt = torch.randint(3, 1000, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    found: torch.Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static" if cache == "static" else None,
        disable_compile=True,  # transformers compiles by itself where it knows the backend
    )
    return found, (time.perf_counter() - started) / tokens * 1e3


def measured(cache: str, way: str, batch: int, tokens: int, runs: int) -> dict[str, Any]:
    """One line of the table."""
    torch._dynamo.reset()
    neuron_compile.reset_report()
    eager, model = llama(), llama()
    model.forward = torch.compile(model.forward, backend="neuron", options={"dynamic_shapes": way})
    wanted, _ = generate(eager, batch, cache, tokens)
    found, first = generate(model, batch, cache, tokens)
    report = neuron_compile.report()
    times: dict[str, list[float]] = {"eager": [], "neuron": []}
    for _ in range(runs):
        times["eager"].append(generate(eager, batch, cache, tokens)[1])
        times["neuron"].append(generate(model, batch, cache, tokens)[1])
    return {
        "cache": cache,
        "dynamic_shapes": way,
        "batch": batch,
        "same_tokens": torch.equal(wanted, found),
        "compilations": report.compilations,
        "padded": report.padded,
        "in_fallback": report.operators_in_fallback,
        "later_compilations": neuron_compile.report().compilations - report.compilations,
        "first_run_s": round(first * tokens / 1e3, 1),
        **{f"{name}_ms": round(statistics.median(each), 2) for name, each in times.items()},
        **{f"{name}_all_ms": [round(x, 2) for x in each] for name, each in times.items()},
    }


def main() -> None:
    """Measure, print a Markdown table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    print("|".join(("", *COLUMNS, "")) + "\n" + "|---" * len(COLUMNS) + "|", flush=True)
    lines = []
    for cache, way in CASES:
        for batch in (1, 4):
            line = measured(cache, way, batch, options.tokens, options.runs)
            print("|".join(("", *(str(line[name]) for name in COLUMNS), "")), flush=True)
            lines.append(line)
    options.results.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
