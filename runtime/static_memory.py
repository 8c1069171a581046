"""What kernels keep of the values of parameters: weights packed into a layout of the vendor's.

A kernel sees addresses. That of a parameter means the same tensor for as long as an executor
holds its :class:`StaticMemory`, so what was made of its values can be kept beside it until they
change. PyTorch counts changes in a tensor's version; writes that it does not count (``.data``,
NumPy, another process) are found by comparing a sample of the values, which no update of a whole
tensor passes unseen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

#: Elements that are compared at each use.
_SAMPLES = 64

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_lock = threading.Lock()
_made: list[int] = [0]
_live: weakref.WeakValueDictionary[int, StaticMemory] = weakref.WeakValueDictionary()


class StaticMemory:
    """A parameter's memory, and what kernels made of its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # They share their parameters' counts of changes, and hold the memory.
        self._tensors = [tensor]
        bits = _flat(tensor).view(_BITS[tensor.element_size()])
        self._watched = bits[:: max(1, bits.numel() // _SAMPLES)]
        self._sample = self._watched.clone()
        self._version = -1
        self._kept: dict[Hashable, Any] = {}

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether another tensor at the same address has the same elements."""
        mine = self._tensors[0]
        return mine.numel() == tensor.numel() and mine.dtype is tensor.dtype

    def watch(self, tensor: torch.Tensor) -> None:
        """Count the changes of another tensor over the same elements, too.

        It may be another parameter (``nn.Parameter(other.data)``), which counts by itself.
        """
        self._tensors.append(tensor)
        if self._version >= 0:
            self._version += tensor._version

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any | None:
        """What ``make`` made of the values as they are; ``None`` if they were others last time.

        Values that change from call to call (in training) are so never worth the making.
        """
        version = sum(tensor._version for tensor in self._tensors)
        if version != self._version or not torch.equal(self._watched, self._sample):
            self._kept = {}
            self._sample = self._watched.clone()
            self._version = version
            return None
        found = self._kept.get(key)
        if found is None:
            _made[0] += 1
            found = self._kept[key] = make()
        return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def hold(tensor: torch.Tensor) -> StaticMemory | None:
    """The memory of a dense tensor, to be held for as long as its address is used.

    ``None`` where changes are not counted (tensors made in ``torch.inference_mode``).
    """
    if tensor.is_inference():
        return None
    address = tensor.data_ptr()
    with _lock:
        found = _live.get(address)
        if found is None or not found.covers(tensor):
            found = _live[address] = StaticMemory(tensor)
        else:
            found.watch(tensor)
        return found


def made() -> int:
    """How often kernels have made something of a parameter's values in this process."""
    return _made[0]


def at(address: int) -> StaticMemory | None:
    """The memory that an executor holds at an address, if any does."""
    return _live.get(address)
