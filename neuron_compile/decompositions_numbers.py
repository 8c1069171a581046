"""Operators with a number that changes from call to call (a learning rate), made of others.

Dynamo makes such a float a tensor, and AOT Autograd takes the number for the tensor again where
it is an operand of a sum, product or quotient; anywhere else it compiles each value anew. Here
the number is brought to such a place, while AOT Autograd traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .torch_internals import fma

aten = torch.ops.aten
Tensor = torch.Tensor
_HALVES = (torch.float16, torch.bfloat16)


def _changing(number: Any) -> bool:
    return isinstance(number, torch.SymFloat)


def _in_full(function: Callable[..., Any], *tensors: Any) -> Any:
    """``function(*tensors)``, of half types computed in float32 and rounded once, as in ATen."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= {*_HALVES}:
        return function(*tensors)
    return function(*(tensor.float() for tensor in tensors)).to(*dtypes)


def _with_alpha(op: Any) -> Callable[..., Any]:
    """``add`` or ``sub``, of which the second operand is scaled."""

    def run(self: Tensor, other: Any, *, alpha: Any = 1) -> Any:
        if not _changing(alpha):
            return NotImplemented
        if self.dtype not in _HALVES:
            return op(self, other * alpha)
        # ATen rounds this number to a half type.
        rounded = _tensor(alpha, self)
        return _in_full(lambda x, y, factor: op(x, y * factor), self, other, rounded)

    return run


def _with_value(op: Any) -> Callable[..., Any]:
    """``addcmul`` or ``addcdiv``: ATen, too, scales the first factor."""

    def run(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Any:
        if not _changing(value):
            return NotImplemented
        return _in_full(lambda x, y, z: op(x, y * value, z), self, tensor1, tensor2)

    return run


def _with_tensors(op: Any) -> Callable[..., Any]:
    """An operator that has an overload ``op`` with tensors for numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_changing, args)):
            return NotImplemented
        places = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]

        def apply(*tensors: Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            like = tensors[0]
            return op(*(given.get(i, _tensor(arg, like)) for i, arg in enumerate(args)), **kwargs)

        return _in_full(apply, *(args[index] for index in places))

    return run


def _tensor(value: Any, like: Tensor) -> Any:
    """A number as a tensor of no dimensions, in the dtype it is computed in beside ``like``."""
    if isinstance(value, Tensor) or value is None:
        return value
    dtype = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
    return torch.ones((), dtype=dtype) * value


def _product(op: Any) -> Callable[..., Any]:
    """``addmm`` and its kin: ``beta * self + alpha * product``."""

    def run(self: Tensor, *factors: Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
        if not _changing(beta) and not _changing(alpha):
            return NotImplemented
        return _in_full(lambda x, y, *z: op(x * beta, y * alpha, *z), self, *factors)

    return run


def _full(ones: Any) -> Callable[..., Any]:
    """``full`` or ``full_like``, by their counterpart for ones."""

    def run(shape: Any, value: Any, **kwargs: Any) -> Any:
        return ones(shape, **kwargs) * value if _changing(value) else NotImplemented

    return run


def _fma(first: Any, second: Any, third: Any) -> Any:
    changing = any(map(_changing, (first, second, third)))
    return first * second + third if changing else NotImplemented


#: By overload; where no number changes, they return ``NotImplemented`` and the operator stays.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _with_alpha(torch.add),
    aten.sub.Tensor: _with_alpha(torch.sub),
    aten.addcmul.default: _with_value(torch.addcmul),
    aten.addcdiv.default: _with_value(torch.addcdiv),
    aten.clamp.default: _with_tensors(torch.clamp),
    aten.clamp_max.default: _with_tensors(torch.clamp_max),
    aten.clamp_min.default: _with_tensors(torch.clamp_min),
    aten.full.default: _full(torch.ones),
    aten.full_like.default: _full(torch.ones_like),
    fma: _fma,
    aten.lerp.Scalar: _with_tensors(torch.lerp),
    aten.pow.Scalar: _with_tensors(torch.pow),
    aten.pow.Tensor_Scalar: _with_tensors(torch.pow),
    aten.addmm.default: _product(torch.addmm),
    aten.addmv.default: _product(torch.addmv),
    aten.baddbmm.default: _product(torch.baddbmm),
}
