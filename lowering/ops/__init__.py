"""The lowerings, one module a family of operators. Importing this package registers them all."""

from . import (
    activations,
    assertions,
    attention,
    convolution,
    creation,
    fourier,
    indexing,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    random,
    reductions,
    views,
)

__all__ = [
    "activations",
    "assertions",
    "attention",
    "convolution",
    "creation",
    "fourier",
    "indexing",
    "losses",
    "matmul",
    "normalization",
    "pointwise",
    "pooling",
    "random",
    "reductions",
    "views",
]
