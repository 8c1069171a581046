"""``_foreach_*`` operators, made of one ordinary operator a tensor while AOT Autograd traces.

That is what ATen's CPU kernels do: they loop over the lists. XLA fuses across what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

# Those whose arguments are, tensor by tensor, the arguments of the operator of that name.
_NAMESAKES = (
    *("abs", "acos", "add", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "copy"),
    *("cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma"),
    *("log", "log10", "log1p", "log2", "max", "mm", "mul", "neg", "pow", "reciprocal", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "trunc", "zero"),
)


def _norm(self: Any, order: Any = 2, dtype: Any = None) -> Any:
    return torch.linalg.vector_norm(self, order, dtype=dtype)


def _sum_of_powers(self: Any, order: Any = 2, dtype: Any = None) -> Any:
    return torch.sum(self.abs().pow(order), dtype=dtype)


def _scaled(base: Any) -> Callable[..., Any]:
    """``addcmul`` or ``addcdiv``, whose value may be a tensor here.

    ATen multiplies the first operand by the value, and rounds once in the end.
    """

    def run(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
        if not isinstance(value, torch.Tensor):
            return base(self, tensor1, tensor2, value=value)
        half = self.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else self.dtype
        self_, tensor1, tensor2, value = (x.to(dtype) for x in (self, tensor1, tensor2, value))
        return base(self_, tensor1 * value, tensor2).to(self.dtype)

    return run


# ATen has no kernels for lists of maxima: it takes those that clamp.
_OTHERS: dict[str, Callable[..., Any]] = {
    "addcdiv": _scaled(torch.addcdiv),
    "addcmul": _scaled(torch.addcmul),
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": _norm,
    "powsum": _sum_of_powers,
}


def _tensor_by_tensor(op: Any, base: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` by calls of ``base``, each with one element of every list."""
    # ``scalars`` is a list, or a tensor that holds one.
    listed = [
        isinstance(argument.type, torch.ListType) or argument.name == "scalars"
        for argument in op._schema.arguments
    ]

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        count = next(len(arg) for arg, many in zip(args, listed, strict=False) if many)
        return [
            base(
                *(arg[index] if many else arg for arg, many in zip(args, listed, strict=False)),
                **kwargs,
            )
            for index in range(count)
        ]

    return run


def _decompositions() -> dict[Any, Callable[..., Any]]:
    # torch's functions tell a tensor of no dimensions from a number; the packets in aten do not.
    bases = {name: getattr(torch, name, None) or getattr(aten, name) for name in _NAMESAKES}
    bases.update(_OTHERS)
    table: dict[Any, Callable[..., Any]] = {}
    for name, base in bases.items():
        packet = getattr(aten, f"_foreach_{name}")
        for overload in packet.overloads():
            if not overload.endswith("out"):
                op = getattr(packet, overload)
                table[op] = _tensor_by_tensor(op, base)
    return table


#: By overload, for the table of AOT Autograd.
DECOMPOSITIONS = _decompositions()
