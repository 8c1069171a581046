"""Plain data of the runtime: signatures, options, errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


class RuntimeCompileError(Exception):
    """XLA refused a module."""


class PlatformError(Exception):
    """The PJRT platform is not installed here."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of a PJRT platform; ``None`` is what the platform does not say.

    ``process`` is the one that it belongs to, of several that compute together. Memory is in
    bytes: what this process may take, what it has taken, and the most that it had.
    """

    platform: str
    id: int
    kind: str
    process: int
    cores: int | None
    memory_limit: int | None
    memory_used: int | None
    memory_peak: int | None


@dataclasses.dataclass(frozen=True)
class ArgumentSpec:
    """One argument of an executable.

    ``permutation`` makes a dense argument contiguous (``None``: it is already). ``static``
    arguments (parameters and buffers) keep their storage between calls, so their PJRT buffers are
    kept too. ``dense`` is false for a layout with gaps or overlaps, which is copied at each call.
    ``carrier`` is the dtype of the same width that the program takes in the place of ``dtype``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    permutation: tuple[int, ...] | None = None
    static: bool = False
    dense: bool = True
    carrier: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class View:
    """Sizes, strides and offset (from the base's own) of a view of a tensor.

    They mean what they say only if the base has the strides ``base``. ``dtype`` is that of the
    view, in whose elements the others count, if it is not the base's.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    base: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class ResultSpec:
    """Where one result of a graph comes from.

    ``kind`` is ``tensor`` (result ``index`` of the executable), ``input`` (argument ``index``,
    returned as it came), ``none`` or ``constant`` (``value``). A tensor is brought to the strides
    that eager promised: by ``permutation`` of a dense one, or by a copy into a strided allocation
    (``stride``) and ``expand`` to the sizes of a broadcast one. ``view`` makes the result share
    the memory of that tensor or argument instead. ``dtype`` is that of the result where the
    program has another of the same width.
    """

    kind: str
    index: int = -1
    value: Any = None
    permutation: tuple[int, ...] | None = None
    expand: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    view: View | None = None
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """What is raised where a run-time check of a graph fails."""

    error: type[Exception]
    message: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """Arguments and results of one graph, in the caller's order.

    If there are ``checks``, the executable has one more result, an int32: the position, counted
    from 1, of the first check that failed, or 0.
    """

    arguments: tuple[ArgumentSpec, ...]
    results: tuple[ResultSpec, ...]
    seeded: bool = False
    checks: tuple[Check, ...] = ()


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """What changes the code that XLA makes.

    ``xla_options`` are ``(flag, value)`` pairs; ``vendor_kernels`` lets a target replace
    composites with kernels of its own, and ``pack_weights`` lets these keep weights in a layout
    of their own.
    """

    platform: str = "cpu"
    xla_options: tuple[tuple[str, Any], ...] = ()
    vendor_kernels: bool = True
    pack_weights: bool = True
