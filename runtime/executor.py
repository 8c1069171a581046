"""Runs a loaded NEFF on torch tensors: import, execute, adopt the results."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import pjrt, static_memory
from .neff import Neff
from .torch_memory import as_dtype, reinterpret, retyped
from .types import ArgumentSpec, ResultSpec, Signature, View

#: A function from an argument to its PJRT buffer.
Loader = Callable[[torch.Tensor], Any]

#: Bytes of an argument up to which a copy costs less than an import (17 us between other work).
_STAGED = 1 << 14


class Executor:
    """A callable from a list of arguments to the list of a graph's results.

    Nothing is copied where memory is dense and aligned: arguments are shared with PJRT by DLPack
    and results are adopted the same way. Buffers of static arguments (parameters) are kept while
    their storage stays at its address; a kept buffer holds that storage alive, so the address
    cannot come to mean another tensor.

    Several threads may call one executor at once.
    """

    def __init__(
        self, neff: Neff, signature: Signature, constants: Sequence[torch.Tensor] = ()
    ) -> None:
        platform = neff.options.platform
        self.neff = neff
        self.signature = signature
        self.copies = 0
        self._packs = neff.vendor_kernels > 0 and neff.options.pack_weights
        self._import = pjrt.importer(platform)
        self._exports: list[Callable[[Any], torch.Tensor]] = []
        self._shared = pjrt.shared_memory(platform)
        self._loaders = [self._loader(spec) for spec in signature.arguments]
        staged = (self._staged(spec) for spec in signature.arguments)
        self._staged_loaders = [
            first or other for first, other in zip(staged, self._loaders, strict=True)
        ]
        self._staging = threading.Lock()
        self._constants = [self._import(_aligned(tensor)) for tensor in constants]
        self._results = results_plan(signature.results)
        self._checks = signature.checks
        self._read_code = pjrt.scalar_reader(platform)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run once. ``args`` are the tensors of ``signature.arguments``.

        Raises:
            PlatformError: in a process that was forked after something had been compiled.
            Exception: that of the first of ``signature.checks`` that failed. No result has been
                handed out by then, and AOT Autograd writes mutations back after this call.
        """
        pjrt.check_process()
        # The memory that small arguments are copied to serves one call at a time.
        if self._staging.acquire(blocking=False):
            try:
                results = self._run(self._staged_loaders, args)
            finally:
                self._staging.release()
        else:
            results = self._run(self._loaders, args)
        if self._checks and (code := self._read_code(results.pop())):
            check = self._checks[code - 1]
            raise check.error(check.message)
        if not self._exports:
            platform = self.neff.options.platform
            self._exports = [pjrt.exporter(platform, result) for result in results]
        outputs = [export(result) for export, result in zip(self._exports, results, strict=True)]
        return self._results(args, outputs)

    def _run(self, loaders: list[Loader], args: list[Any]) -> list[Any]:
        buffers = [load(arg) for load, arg in zip(loaders, args, strict=True)]
        buffers += self._constants
        if self.signature.seeded:
            buffers.append(self._import(draw_seed()))
        return pjrt.execute(self.neff.executable, buffers)

    def _staged(self, spec: ArgumentSpec) -> Loader | None:
        """A loader that copies a small argument to memory whose buffer stays."""
        plain = spec.carrier is None and not spec.dtype.is_complex and spec.dense
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if spec.static or not (self._shared and plain and 0 < size <= _STAGED):
            return None
        shape = (
            spec.shape if spec.permutation is None else [spec.shape[d] for d in spec.permutation]
        )
        memory = torch.zeros(shape, dtype=spec.dtype)
        buffer, address = self._import(memory), memory.data_ptr()
        if pjrt.pointer(buffer) != address:
            return None
        permutation = spec.permutation

        def load(tensor: torch.Tensor) -> Any:
            given = tensor if permutation is None else tensor.permute(permutation)
            if not given.is_contiguous() or given.is_neg():
                return self._load(tensor, permutation)
            ctypes.memmove(address, given.data_ptr(), size)
            return buffer

        return load

    def _loader(self, spec: ArgumentSpec) -> Loader:
        # A lazy conjugate has the address of its tensor, so a complex buffer is never kept.
        plain = spec.carrier is None and not spec.dtype.is_complex
        if spec.static and self._shared and spec.dense and plain:
            return self._static_loader(spec)
        if (carrier := spec.carrier) is not None:
            return lambda tensor: self._load(as_dtype(tensor, carrier), spec.permutation)
        if self._shared and spec.dense and plain:
            return self._returning_loader(spec)
        return lambda tensor: self._load(tensor, spec.permutation)

    def _load(self, tensor: torch.Tensor, permutation: tuple[int, ...] | None) -> Any:
        if tensor.is_conj() or tensor.is_neg():
            # Their memory holds the values before a conjugation or negation still to be done.
            tensor = tensor.resolve_conj().resolve_neg()
        if permutation is not None:
            tensor = tensor.permute(permutation)
        if not pjrt.importable(tensor):
            self.copies += 1
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return self._import(tensor)

    def _returning_loader(self, spec: ArgumentSpec) -> Loader:
        """A loader that keeps the buffer of a tensor that comes again, while the tensor lives."""
        last = (0, 0)  # identity and address, which cost nothing to keep
        kept: tuple[Any, int, Any] = (lambda: None, -1, None)

        def forget(reference: Any) -> None:
            nonlocal kept
            if kept[0] is reference:
                kept = (lambda: None, -1, None)

        def load(tensor: torch.Tensor) -> Any:
            nonlocal kept, last
            known, address, buffer = kept
            if tensor.data_ptr() == address and known() is tensor and not tensor.is_neg():
                return buffer
            buffer = self._load(tensor, spec.permutation)
            seen, last = last, (id(tensor), tensor.data_ptr())
            if seen == last and pjrt.pointer(buffer) == last[1] and last[1]:
                kept = (weakref.ref(tensor, forget), last[1], buffer)
            return buffer

        return load

    def _static_loader(self, spec: ArgumentSpec) -> Loader:
        # An empty tensor's address is 0.
        kept: tuple[int, Any, static_memory.StaticMemory | None] = (-1, None, None)

        def load(tensor: torch.Tensor) -> Any:
            nonlocal kept
            address, buffer, _ = kept
            if tensor.data_ptr() == address:
                return buffer
            # The buffer holds what it is made of: the storage, not the parameter and its gradient.
            detached = tensor.detach()
            buffer = self._load(detached, spec.permutation)
            address = tensor.data_ptr()
            # A copy (unaligned storage) would not see an optimizer's updates: do not keep it.
            if address and pjrt.pointer(buffer) == address:
                kept = (address, buffer, static_memory.hold(detached) if self._packs else None)
            return buffer

        return load


def draw_seed() -> torch.Tensor:
    """``[seed, 0]`` as int64, drawn from torch's default CPU generator."""
    seed = torch.zeros(2, dtype=torch.int64)
    seed[:1].random_()
    return seed


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy, since a constant must not change with its source."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


Taker = Callable[[list[Any], list[torch.Tensor]], Any]


def results_plan(specs: Sequence[ResultSpec]) -> Taker:
    """A function from a graph's arguments and its executable's results to its own results.

    A tensor that is named twice is one object, as in ATen: by its references, autograd sees that
    it may not become the gradient of two leaves.
    """
    keys = [spec if spec.kind in ("tensor", "input") else index for index, spec in enumerate(specs)]
    takers = {key: _taker(spec) for key, spec in zip(keys, specs, strict=True)}
    distinct = list(takers.values())
    if len(distinct) == len(keys):
        return lambda args, outputs: [take(args, outputs) for take in distinct]
    positions = {key: position for position, key in enumerate(takers)}
    order = [positions[key] for key in keys]

    def run(args: list[Any], outputs: list[torch.Tensor]) -> list[Any]:
        taken = [take(args, outputs) for take in distinct]
        return [taken[position] for position in order]

    return run


def _taker(spec: ResultSpec) -> Taker:
    """A function from a graph's arguments and its executable's results to one of its results."""
    index, view = spec.index, spec.view
    if spec.kind == "tensor":
        restore, dtype = _restorer(spec), spec.dtype
        if dtype is not None:
            return lambda args, outputs: restore(as_dtype(outputs[index], dtype))
        return lambda args, outputs: restore(outputs[index])
    if spec.kind != "input":
        return lambda args, outputs: spec.value
    if view is not None:
        return lambda args, outputs: _view(args[index], view)
    return lambda args, outputs: args[index]


def _restorer(spec: ResultSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that brings a contiguous tensor to the strides that eager promised."""
    view, permutation, sizes, stride = spec.view, spec.permutation, spec.expand, spec.stride
    if view is not None and (dtype := view.dtype) is not None:
        return lambda tensor: retyped(tensor, dtype, view.shape, view.stride, view.offset)
    if view is not None:
        return lambda tensor: reinterpret(tensor, view.shape, view.stride, view.offset)
    if permutation is not None:
        return lambda tensor: _plain(tensor.permute(permutation))
    if sizes is not None and stride is not None:
        return lambda tensor: _plain(_restride(tensor, stride).expand(sizes))
    if sizes is not None:
        return lambda tensor: _plain(tensor.expand(sizes))
    if stride is not None:
        return lambda tensor: _restride(tensor, stride)
    return lambda tensor: tensor


def _plain(view: torch.Tensor) -> torch.Tensor:
    """The same tensor, which autograd does not know to be a view: it may be written in place."""
    return reinterpret(view, view.shape, view.stride(), 0)


def _view(base: torch.Tensor, view: View) -> torch.Tensor:
    """A view that autograd knows, so that it sees a write to ``base`` before a backward."""
    if base.stride() != view.base and _strides(base.shape, base.stride()) != _strides(
        base.shape, view.base
    ):
        base = _restride(base, view.base)
    if view.dtype is not None:
        return retyped(base, view.dtype, view.shape, view.stride, view.offset)
    return base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)


def _strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _restride(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    result = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    return result.copy_(tensor)
