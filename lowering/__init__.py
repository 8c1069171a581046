"""FX graph to StableHLO: registry, decompositions, Torch-MLIR, spliced lowerings."""

from . import ops
from .lower import lower
from .passes import seed_random_operators
from .registry import lowers, signature, why_unsupported
from .types import LoweredModule, LoweringError, TensorSpec

__all__ = [
    "LoweredModule",
    "LoweringError",
    "TensorSpec",
    "lower",
    "lowers",
    "ops",
    "seed_random_operators",
    "signature",
    "why_unsupported",
]
