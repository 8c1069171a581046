"""The named suites of architectures."""

from __future__ import annotations

import dataclasses

from benchmarks import kernels, models
from benchmarks.architecture import Architecture

AUTOCAST = ("bert", "gpt2")
# Of transformers, which another environment may not have.
NEED_TRANSFORMERS = frozenset(
    (
        *("bert", "gpt2", "llama", "vit", "t5"),
        "llama_decode",
        *(f"{name}_bf16" for name in AUTOCAST),
    )
)
SUITES = ("models", "dispatch", "pointwise", "reduction", "attention", "autocast")


def _autocast(members: dict[str, Architecture]) -> list[Architecture]:
    return [
        dataclasses.replace(
            members[name], name=f"{name}_bf16", modes=("inference", "training"), autocast=True
        )
        for name in AUTOCAST
    ]


def suites(small: bool = False) -> dict[str, dict[str, Architecture]]:
    """The architectures by suite and name, in the order in which they are reported."""
    eight = models.architectures(small)
    members = (
        list(eight.values()),
        kernels.dispatch(small),
        kernels.pointwise(small),
        kernels.reduction(small),
        kernels.attention(small),
        _autocast(eight),
    )
    return {
        suite: {each.name: each for each in listed}
        for suite, listed in zip(SUITES, members, strict=True)
    }
