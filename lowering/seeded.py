"""Random operators that draw from a seed in the graph, so that a recomputation draws the same."""

from __future__ import annotations

import dataclasses
import functools
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


_PREFIX = "seeded__"


@functools.cache
def seeded(op: torch._ops.OpOverload) -> Seeded:
    """The seeded form of an operator."""
    return Seeded(op)


def __getattr__(name: str) -> Seeded:
    parts = name.removeprefix(_PREFIX).split("__")
    if not name.startswith(_PREFIX) or len(parts) != 3:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    namespace, packet, overload = parts
    return seeded(getattr(getattr(getattr(torch.ops, namespace), packet), overload))


@dataclasses.dataclass(frozen=True)
class Seeded:
    """The target of a node that calls ``op`` with its arguments and ``__seed``, a tensor.

    Two nodes with equal arguments and one seed give equal results. There is one of these for an
    operator, from :func:`seeded`: PyTorch keeps graphs by the names of what they call, under which
    this module has them.
    """

    op: torch._ops.OpOverload

    @property
    def __name__(self) -> str:
        namespace, name = self.op.name().split("::")
        return "__".join((_PREFIX + namespace, name.split(".")[0], self.op._overloadname))

    def __reduce__(self) -> str:
        return self.__name__

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
