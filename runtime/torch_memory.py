"""The boundary to torch's private API below the compiler: tensors over memory of others.

No other module of the runtime uses ``torch._C``. Tested with torch 2.13.0.
"""

from __future__ import annotations

import torch

#: Exports a tensor's memory as a DLPack capsule, and makes a tensor of one.
to_dlpack = torch._C._to_dlpack  # type: ignore[attr-defined]
from_dlpack = torch._C._from_dlpack  # type: ignore[attr-defined]

#: ``reinterpret(tensor, sizes, strides, offset)`` makes a tensor over another's storage, as
#: Inductor's results are made: not a view to autograd.
reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's memory as another dtype of the same width: not a view to autograd."""
    return torch.empty(0, dtype=dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def retyped(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """A tensor of another dtype over another's storage, ``offset`` of its own elements further."""
    begin = tensor.storage_offset() * tensor.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), begin + offset, shape, stride)


def tensor_at(
    address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, size: int
) -> torch.Tensor:
    """A CPU tensor over ``size`` bytes at ``address``, which it does not own."""
    # An inference tensor could not be written to outside of inference mode later.
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), size)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)
