"""Loads packages that :func:`neuron_compile.export` wrote; see ``package_file``.

Nothing here needs Torch-MLIR, Dynamo or the lowerings: a program is a NEFF, which the runtime loads
or has XLA compile again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import package_trees as trees
from .errors import PackageError
from .package_file import CONSTANTS, WEIGHTS, PackageFile, Weight
from .package_inspect import describe, verify
from .package_run import LoadedEntryPoint
from .runtime import strict

if TYPE_CHECKING:
    from .package_jax import JaxFunction

__all__ = ["Package", "describe", "load", "verify"]

StateDict = Mapping[str, torch.Tensor]


def load(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    weights: StateDict | str | os.PathLike[str] | None = None,
) -> Package:
    """Load a package.

    The whole file is read and checked now; each program is compiled, or its executable loaded, when
    it is first called (:meth:`Package.prepare` does it for all).

    Args:
        path: a ``.neffpkg`` file.
        trust: run the machine code in the package where it was made on such a machine with such
            versions. Without it, XLA compiles the StableHLO in the package again, and the author of
            the file can do no more than have it run such a program.
        weights: for a package without weights, or instead of its own: a state dict of CPU tensors
            or the path of a safetensors file, by the names that the exported model had. Tensors
            are used as they are and not copied, but those that a program writes to.

    Raises:
        PackageError: for a file that is no package, or is damaged, or lacks weights; naming all
            weights that are missing or have another shape or dtype.
        OSError: where the file cannot be read.
    """
    with PackageFile(path) as file:
        manifest = file.manifest
        held = file.tensors(CONSTANTS) if CONSTANTS in manifest.parts else {}
        if weights is not None:
            state = _read_state(weights)
            listed = [item for item in manifest.weights if item.part == WEIGHTS]
            held |= _taken_from(state, listed)
        elif WEIGHTS in manifest.parts:
            held |= file.tensors(WEIGHTS)
        elif any(item.part == WEIGHTS for item in manifest.weights):
            raise PackageError(
                f"{file.path} was exported without its weights: give load(..., weights=...) a "
                "state dict or the path of a safetensors file"
            )
        tensors = [held[item.names[0]] for item in manifest.weights]
        parts = {
            program.part: file.part(program.part)
            for entry in manifest.entry_points.values()
            for program in entry.programs
            if program.part is not None
        }
    entries = {
        name: LoadedEntryPoint(name, entry, tensors, parts, trust)
        for name, entry in manifest.entry_points.items()
    }
    return Package(entries, manifest.weights, tensors)


def _read_state(weights: StateDict | str | os.PathLike[str]) -> StateDict:
    if isinstance(weights, Mapping):
        return weights
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(os.fspath(weights))
    except safetensors.SafetensorError as error:
        raise PackageError(f"{os.fspath(weights)} is no safetensors file: {error}") from error


def _taken_from(state: StateDict, wanted: Sequence[Weight]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict that a package needs."""
    found, problems = {}, []
    for item in wanted:
        given = [state[name] for name in item.names if name in state]
        if not given:
            problems.append(f"{item.names[0]} is missing")
            continue
        tensor = given[0].detach()
        if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype:
            described = f"{strict.dtype_name(item.dtype)}{list(item.shape)}"
            problems.append(f"{item.names[0]} is {trees.described(tensor)}, not {described}")
        elif tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            problems.append(f"{item.names[0]} is no dense CPU tensor")
        elif not all(torch.equal(tensor, other) for other in given[1:]):
            problems.append(f"{' and '.join(item.names)} were one tensor, and differ here")
        found[item.names[0]] = _placed(tensor, item)
    if problems:
        raise PackageError("the weights do not fit the package: " + "; ".join(problems))
    return found


def _placed(tensor: torch.Tensor, item: Weight) -> torch.Tensor:
    """A weight, copied if it is written to or if PJRT would have to copy it at every call."""
    laid_out = tensor.stride() == item.stride and not tensor.data_ptr() % 64
    if laid_out and not item.mutable:
        return tensor
    copy = torch.empty_strided(item.shape, item.stride, dtype=item.dtype)
    return copy.copy_(tensor)


class Package:
    """Entry points that are called like the functions they were exported from.

    ``package(...)`` calls the only entry point, or the one named ``forward``;
    ``package["decode"](...)`` one by its name. Arguments may be given by position or by name.
    Results are those of eager PyTorch under ``torch.no_grad()``, and so are changes to arguments
    and to buffers, which all entry points share; torch's default generator seeds random operators.

    A call with arguments that the package has no program for (structure, shape, dtype, strides,
    values of numbers and strings) raises :class:`neuron_compile.InputError`.
    """

    def __init__(
        self,
        entry_points: Mapping[str, LoadedEntryPoint],
        weights: Sequence[Weight],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._entry_points = dict(entry_points)
        self._weights = tuple(weights)
        self._tensors = list(tensors)

    @property
    def entry_points(self) -> tuple[str, ...]:
        """The names of the entry points."""
        return tuple(self._entry_points)

    def __getitem__(self, entry_point: str) -> Callable[..., Any]:
        return self._entry(entry_point)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the only entry point, or ``forward``."""
        return self._entry(None)(*args, **kwargs)

    def prepare(self, entry_point: str | None = None) -> Package:
        """Load or compile the programs of one entry point, or of all, now.

        Raises:
            PackageError: where a program is not what the package says.
            RuntimeCompileError, PlatformError: where XLA refuses it, or is not there.
        """
        for name in self.entry_points if entry_point is None else (entry_point,):
            self._entry(name).prepare()
        return self

    def rebuilt(self) -> dict[str, tuple[str | None, ...]]:
        """Of each entry point's programs that were called or prepared: why XLA compiled them
        again; ``None`` where their machine code was used."""
        return {name: entry.rebuilt() for name, entry in self._entry_points.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the names they had in the exported model; no copies."""
        return {
            name: tensor
            for item, tensor in zip(self._weights, self._tensors, strict=True)
            if item.part == WEIGHTS
            for name in item.names
        }

    def to_jax(self, entry_point: str | None = None) -> JaxFunction:
        """An entry point as a pure JAX function; see :class:`neuron_compile.package_jax`."""
        from .package_jax import JaxFunction

        entry = self._entry(entry_point)
        return JaxFunction(
            entry.name, entry.positional, entry.runners, self._weights, self._tensors
        )

    def _entry(self, name: str | None) -> LoadedEntryPoint:
        if name is None and len(self._entry_points) == 1:
            return next(iter(self._entry_points.values()))
        found = self._entry_points.get("forward" if name is None else name)
        if found is None:
            wanted = "an entry point's name is needed" if name is None else f"no {name!r}"
            raise PackageError(f"{wanted}: the package has {', '.join(self._entry_points)}")
        return found
