"""Writes packages: ``torch.export``, then one NEFF for each combination of shapes.

A package is read by ``package`` in a process that has neither Torch-MLIR nor Dynamo.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from . import exported_program as exported
from . import package_file, package_tensors
from .backend import open_device
from .errors import PackageError
from .export_inputs import distinct, named_dims
from .exported_program import Static
from .graph_compiler import compile_whole
from .package_file import CONSTANTS, WEIGHTS, EntryPoint, Program, TensorInput, Weight
from .package_trees import Tree
from .runtime import NeffError
from .runtime.neff import to_file, versions
from .runtime.neff_file import pack
from .settings import Settings, resolve

Arguments = tuple[Any, ...]
#: ``(model, args)``, ``(model, args, kwargs)``, ``(model, args, kwargs, dynamic_shapes)`` or
#: ``(model, args, kwargs, dynamic_shapes, sizes)``, as :func:`export` takes them.
Entry = tuple[Any, ...]
Sizes = Mapping[str, Sequence[int]]


def export(
    model: Callable[..., Any] | None = None,
    args: Arguments | Sequence[Arguments] = (),
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    dynamic_shapes: Any = None,
    *,
    path: str | os.PathLike[str],
    sizes: Sizes | None = None,
    entry_points: Mapping[str, Entry] | None = None,
    weights: bool = True,
    options: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Path:
    """Compile a model ahead of time into one file, which :func:`neuron_compile.load` runs.

    The whole model must run on the device: a package has no eager PyTorch to fall back to. It is
    for inference: results have no gradient.

    Args:
        model: a module in the mode (``eval`` or ``train``) that is wanted, a method of one, or a
            function of tensors.
        args: example arguments, as one tuple; or a list of tuples, one for each combination of
            shapes that the package shall have a program for.
        kwargs: example keyword arguments; a list of dicts for a list of ``args``.
        dynamic_shapes: as in :func:`torch.export.export`. The model is then exported once with
            symbolic sizes, and the package gets a program for each example and each of ``sizes``.
        sizes: for names of ``torch.export.Dim`` in ``dynamic_shapes`` the sizes that the package
            shall have programs for, in all combinations: ``{"batch": [1, 8]}``.
        path: the file to write; by custom ``*.neffpkg``.
        entry_points: several functions in one package, by name, instead of ``model``; each a tuple
            of what stands before ``path`` and then ``sizes``, for example ``{"prefill":
            (model.prefill, args), "decode": (model.decode, args)}``. Weights that they share are
            stored once.
        weights: whether the package holds parameters and buffers. If not, ``load`` is given them.
        options: as in ``torch.compile(..., options=...)``.
        strict: let Dynamo capture the model (``torch.export``'s ``strict``).

    Returns:
        The path.

    Raises:
        UnsupportedError: listing all operators that cannot run on the device.
        SettingsError: for an unknown option or a wrong value.
        PackageError: for arguments, results or weights that a package cannot hold.
        OSError: where the folder is not there or cannot be written to.
        torch._dynamo.exc.UserError: where ``torch.export`` finds fault with ``dynamic_shapes``.
    """
    settings = resolve(options)
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder; make it first")
    open_device(settings)
    entries = _entries(model, (model, args, kwargs, dynamic_shapes, sizes), entry_points)
    store = _Store()
    compiled = {
        name: _entry_point(name, entry, store, settings, strict) for name, entry in entries.items()
    }
    held = [item.weight(store.written) for item in store.items]
    parts = dict(store.programs)
    for part in (WEIGHTS, CONSTANTS):
        tensors = {
            weight.names[0]: package_tensors.stored(item.tensor)
            for weight, item in zip(held, store.items, strict=True)
            if weight.part == part
        }
        if tensors and (weights or part == CONSTANTS):
            parts[part] = safetensors.torch.save(tensors)
    package_file.write(target, dict(versions()), held, compiled, parts)
    return target


def _entries(
    model: Any, entry: Entry, entry_points: Mapping[str, Entry] | None
) -> dict[str, Entry]:
    if (model is None) == (entry_points is None):
        raise PackageError("export needs either a model or entry_points")
    if entry_points is None:
        return {"forward": entry}
    if not entry_points:
        raise PackageError("entry_points is empty")
    for name, item in entry_points.items():
        if not isinstance(item, tuple) or not 1 <= len(item) <= 5 or not callable(item[0]):
            raise PackageError(
                f"entry_points[{name!r}] must be (model, args, kwargs, dynamic_shapes, sizes), "
                "of which all but the first may be left out"
            )
    return {
        name: (*item, *((), None, None, None)[len(item) - 1 :])
        for name, item in entry_points.items()
    }


def _examples(args: Any, kwargs: Any) -> list[tuple[Arguments, dict[str, Any]]]:
    """Pairs of arguments and keyword arguments."""
    several = isinstance(args, list)
    listed = args if several else [args]
    if not listed or not all(isinstance(item, tuple) for item in listed):
        raise PackageError("args must be a tuple of arguments, or a list of such tuples")
    named = kwargs if isinstance(kwargs, list) else [kwargs] * len(listed)
    if len(named) != len(listed):
        raise PackageError(f"{len(listed)} args and {len(named)} kwargs")
    return [(item, dict(words or {})) for item, words in zip(listed, named, strict=True)]


def _entry_point(
    name: str, entry: Entry, store: _Store, settings: Settings, strict: bool
) -> EntryPoint:
    model, args, kwargs, dynamic_shapes, sizes = entry
    examples = [distinct(model, *example) for example in _examples(args, kwargs)]
    positional = _positional(name, model, examples)
    programs: list[Program] = []
    for static in _statics(model, examples, dynamic_shapes, sizes, strict):
        program = _program(static, positional, store, settings)
        if not any(program.inputs == p.inputs and program.tensors == p.tensors for p in programs):
            programs.append(program)
    return EntryPoint(positional, tuple(programs))


def _positional(
    name: str, model: Any, examples: Sequence[tuple[Arguments, dict[str, Any]]]
) -> tuple[str, ...]:
    """The names of the arguments given by position."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    most = max(len(args) for args, _ in examples)
    names: list[str] = []
    for item in inspect.signature(function).parameters.values():
        if item.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{item.name}[{index}]" for index in range(max(0, most - len(names)))]
        elif item.kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(item.name)
    if len(names) < most:
        raise PackageError(f"{name} takes {len(names)} arguments by position, not {most}")
    return tuple(names)


def _statics(
    model: Any,
    examples: Sequence[tuple[Arguments, dict[str, Any]]],
    dynamic_shapes: Any,
    sizes: Sizes | None,
    strict: bool,
) -> list[Static]:
    """The graphs of static sizes to compile."""
    if dynamic_shapes is None:
        if sizes:
            raise PackageError("sizes are for the names of Dims, so dynamic_shapes is needed")
        captured = [exported.capture(model, *example, None, strict) for example in examples]
        return [item.static(item.inputs) for item in captured]
    if len(examples) == 1 and not sizes:
        raise PackageError(
            "dynamic_shapes: a package holds a program for each of the sizes that are asked for; "
            "give sizes={'name of a Dim': [1, 8, ...]}, or several examples as a list of args"
        )
    captured_once = exported.capture(model, *examples[0], dynamic_shapes, strict)
    calls = [captured_once.flat(*example) for example in examples]
    if sizes:
        names = list(sizes)
        dims = named_dims(captured_once.inputs, model, examples[0], dynamic_shapes)
        calls = [
            captured_once.resized(dict(zip(names, chosen, strict=True)), dims)
            for chosen in itertools.product(*sizes.values())
        ] + (calls if len(examples) > 1 else [])
    return [captured_once.static(inputs) for inputs in calls]


def _program(
    static: Static, positional: Sequence[str], store: _Store, settings: Settings
) -> Program:
    """Compile one graph and keep its NEFF and its weights in ``store``."""
    captured, module = static.captured, static.module
    whole = compile_whole(module, frozenset(static.static_positions()), settings)
    results = tuple(
        static.shared.get(index, spec) for index, spec in enumerate(whole.signature.results)
    )
    signature = dataclasses.replace(whole.signature, results=results)
    changed = {static.sources[position] for position in static.mutations}
    arguments = [
        (kind, store.add(captured.weights[index], (kind, index) in changed))
        if kind == "weight"
        else (kind, index)
        for kind, index in static.sources
    ]
    part = None
    if whole.neff is not None:
        part = store.keep(_packed(whole.neff, signature, whole.constants))
    return Program(
        inputs=_named_inputs(static, positional),
        tensors=tuple(
            TensorInput(tuple(x.shape), x.dtype, tuple(x.stride())) for x in static.tensors
        ),
        arguments=tuple(arguments),
        mutations=tuple(static.mutations),
        outputs=static.outputs,
        results=len(results),
        part=part,
        signature=None if part is not None else signature,
    )


def _packed(neff: Any, signature: Any, constants: Sequence[torch.Tensor]) -> bytes:
    try:
        return pack(to_file(neff, signature, constants))
    except NeffError as error:
        raise PackageError(f"the program cannot be kept in a file: {error}") from error


def _named_inputs(static: Static, positional: Sequence[str]) -> dict[str, Tree]:
    """The structure of a call's arguments by name, out of that of ``(args, kwargs)``."""
    args, kwargs = static.inputs.items
    named = dict(zip(positional, args.items, strict=False))
    return {**named, **dict(zip(kwargs.keys, kwargs.items, strict=True))}


class _Item:
    """A tensor that programs take."""

    def __init__(self, tensor: torch.Tensor, part: str) -> None:
        self.tensor = tensor
        self.part = part
        self.names: list[str] = []
        self.mutable = False

    def weight(self, written: Mapping[Any, int]) -> Weight:
        """What the manifest says of it.

        Raises:
            PackageError: where a program writes to memory that another weight shares in part.
        """
        tensor = self.tensor
        if self.mutable and written[_storage(tensor)] > 1:
            raise PackageError(
                f"{self.names[0]} is written to and shares memory with another parameter or buffer "
                "that is not the same tensor; make them one tensor, or clone one"
            )
        return Weight(
            tuple(self.names),
            tuple(tensor.shape),
            tensor.dtype,
            tuple(tensor.stride()),
            self.part,
            self.mutable,
        )


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().data_ptr() or id(tensor)


class _Store:
    """Weights and programs of all entry points, each once."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.programs: dict[str, bytes] = {}
        self.written: dict[Any, int] = {}
        self._positions: dict[Any, int] = {}
        self._names: set[str] = set()

    def keep(self, data: bytes) -> str:
        """The member of the package that holds a program."""
        name = f"programs/{hashlib.sha256(data).hexdigest()[:16]}.neff"
        self.programs[name] = data
        return name

    def add(self, weight: exported.CapturedWeight, mutable: bool) -> int:
        """The position of a tensor among the weights."""
        tensor = weight.tensor
        _check(weight.name, tensor)
        part = WEIGHTS if weight.in_state else CONSTANTS
        key = self._key(tensor, part, mutable)
        if key not in self._positions:
            self._positions[key] = len(self.items)
            self.items.append(_Item(tensor, part))
            place = _storage(tensor)
            self.written[place] = self.written.get(place, 0) + 1
        item = self.items[self._positions[key]]
        item.mutable |= mutable
        if part == WEIGHTS:
            item.names += [name for name in weight.names if name not in self._names]
            self._names.update(weight.names)
        if not item.names:
            item.names.append(self._fresh(weight.name))
        return self._positions[key]

    def _fresh(self, name: str) -> str:
        """A name that no other weight has: of two models, or of tensors that code held."""
        chosen = next(
            candidate
            for candidate in itertools.chain((name,), (f"{name}.{n}" for n in itertools.count(1)))
            if candidate not in self._names
        )
        self._names.add(chosen)
        return chosen

    def _key(self, tensor: torch.Tensor, part: str, mutable: bool) -> Any:
        layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        place = (_storage(tensor), tensor.storage_offset(), *layout, part)
        if part == WEIGHTS or mutable or place in self._positions:
            return place
        # Each export makes tensors of its own from what the code holds.
        data = package_tensors.stored(tensor).reshape(-1).view(torch.uint8).numpy().data
        return (hashlib.sha256(data).digest(), *layout)


def _check(name: str, tensor: torch.Tensor) -> None:
    problem = None
    if tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"has the layout {tensor.layout} and dtype {tensor.dtype}"
    elif tensor.device.type != "cpu":
        problem = f"is on {tensor.device}"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        problem = f"is a {type(tensor).__name__}"
    if problem is not None:
        raise PackageError(f"{name} {problem}; a package holds dense CPU tensors")
