"""The CPU target's linear algebra: ATen's own operators (LAPACK) for composites of their names.

The decompositions are loops over rows and columns; LAPACK is faster at any size that is worth a
matrix, and its choices (signs, order of eigenvalues) are then eager's very own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .ffi import Kernel
from .kernels import _DTYPES, KernelSpec, _View, kernel

aten = torch.ops.aten

#: Composites ``neuron.<name>``, each the operator ``aten.<name>.default``. Operands are its tensor
#: arguments that are there, in order; attributes are its other arguments, flags as integers.
_OPERATORS = """
cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig
linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu
linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack
ormqr triangular_solve _linalg_eigh _linalg_eigvals _linalg_solve_ex _linalg_svd
"""


_INTEGERS = (torch.int32, torch.int64)


def _wants(spec: KernelSpec) -> bool:
    known = all(dtype in _DTYPES for dtype, _ in (*spec.operands, *spec.results))
    # JAX makes constants that a decomposition captured operands; those would not be the tensors.
    return known and len(spec.operands) == len(_tensors(getattr(aten, spec.kernel).default))


def _tensors(op: Any) -> list[str]:
    """The names of an operator's tensor arguments."""
    arguments = op._schema.arguments
    return [item.name for item in arguments if isinstance(item.type, torch.TensorType)]


def _buffer(described: tuple[str, tuple[int, ...]]) -> Callable[[int], torch.Tensor]:
    """A view of a buffer; one without elements may have no address."""
    name, shape = described
    if math.prod(shape):
        return _View(described)
    empty = torch.empty(shape, dtype=_DTYPES[name])
    return lambda address: empty


def _settings(op: Any, spec: KernelSpec) -> dict[str, Any]:
    """The arguments that are no tensors, as the schema types them."""
    given = dict(spec.attributes)
    return {
        argument.name: bool(given[argument.name])
        if isinstance(argument.type, torch.BoolType)
        else given[argument.name]
        for argument in op._schema.arguments
        if argument.name in given
    }


def _operator(op: Any) -> Callable[[KernelSpec], Kernel]:
    tensors = _tensors(op)

    def builder(spec: KernelSpec) -> Kernel:
        settings = _settings(op, spec)
        operands = [_buffer(item) for item in spec.operands]
        results = [_buffer(item) for item in spec.results]

        def call(inputs: Sequence[int], outputs: Sequence[int]) -> None:
            given = (view(address) for view, address in zip(operands, inputs, strict=True))
            taken = [view(address) for view, address in zip(results, outputs, strict=True)]
            try:
                found = op(**dict(zip(tensors, given, strict=True)), **settings)
            except RuntimeError:  # torch.linalg.LinAlgError is one
                # The graph looks for NaN and raises what eager raises, once the call is over.
                for output in taken:
                    output.fill_(0 if output.dtype in _INTEGERS else math.nan)
                return
            for output, result in zip(
                taken, found if isinstance(found, tuple | list) else (found,), strict=True
            ):
                output.copy_(result)

        return call

    return builder


for _name in _OPERATORS.split():
    kernel(_name, when=_wants)(_operator(getattr(aten, _name).default))
