"""Random operators that draw from a seed in the graph, so that a recomputation draws the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

#: Key of a node's kwargs: the seed that its operator draws from.
SEED_ARGUMENT = "__seed"

torch.library.define("neuron_compile::seed", "() -> Tensor")
#: A new seed as ``int64[2]``, drawn from torch's default CPU generator.
new_seed = torch.ops.neuron_compile.seed.default


@torch.library.register_fake("neuron_compile::seed")
def _seed_like() -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64)


@dataclasses.dataclass(frozen=True)
class Seeded:
    """The target of a node that calls ``op`` with its arguments and ``__seed``, a tensor.

    Two nodes with equal arguments and one seed give equal results.
    """

    op: torch._ops.OpOverload

    @property
    def __name__(self) -> str:  # torch.fx prints a call by the name of its target
        return f"seeded_{self.op.name()}"

    def __str__(self) -> str:
        return str(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in eager PyTorch, whose default generator is left as it was."""
        seed = kwargs.pop(SEED_ARGUMENT)
        if type(seed) is not torch.Tensor:  # a FakeTensor, which holds no numbers
            return self.op(*args, **kwargs)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(int(seed[0]) + int(seed[1]))
            return self.op(*args, **kwargs)
