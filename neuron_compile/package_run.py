"""Runs the programs of a package: which one a call takes, and what it changes."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import package_trees as trees
from .errors import InputError, PackageError
from .package_file import EntryPoint, Program, TensorInput
from .package_trees import Tree
from .runtime import (
    Executor,
    NeffError,
    Signature,
    contents,
    results_plan,
    stablehlo_text,
    strict,
)
from .runtime.checked import check_program
from .runtime.neff import from_file
from .runtime.neff_file import unpack

#: ``(True, dtype, shape, strides that matter)`` of a tensor, ``(False, type, text)`` of a value.
LeafKey = tuple[Any, ...]


class LoadedEntryPoint:
    """The programs of one function, and which of them a call takes."""

    def __init__(
        self,
        name: str,
        entry: EntryPoint,
        weights: Sequence[torch.Tensor],
        parts: Mapping[str, bytes],
        trust: bool,
    ) -> None:
        self.name = name
        self.positional = entry.positional
        self.runners = [Runner(program, weights, parts, trust) for program in entry.programs]
        self._select = Selector(name, entry.positional, self.runners, _spec_key, _leaf_key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, tensors = self._select(args, kwargs)
        return runner(tensors)

    def prepare(self) -> None:
        """Load or compile all programs."""
        for runner in self.runners:
            runner.prepare()

    def rebuilt(self) -> tuple[str | None, ...]:
        """Why programs that were prepared had to be compiled."""
        return tuple(runner.rebuilt for runner in self.runners if runner.ready)


class Selector:
    """Finds the program for a call.

    Args:
        name: of the entry point, for errors.
        positional: names of the arguments that may be given by position.
        spec_key: what a tensor must have in common with the one that was exported.
        leaf_key: the same of an argument of a call; see :data:`LeafKey`.
    """

    def __init__(
        self,
        name: str,
        positional: Sequence[str],
        runners: Sequence[Runner],
        spec_key: Callable[[TensorInput], LeafKey],
        leaf_key: Callable[[str, Any], LeafKey],
    ) -> None:
        self.name = name
        self._positional = positional
        self._structures: dict[Any, _Structure] = {}
        for runner in runners:
            inputs = runner.program.inputs
            group = self._structures.setdefault(_outline(inputs), _Structure(inputs, leaf_key))
            group.add(runner, spec_key)

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Runner, dict[int, Any]]:
        """The program for a call, and the call's tensors by their position in the program's list.

        Raises:
            InputError: naming what is wrong, and what the package has.
        """
        given = self._named(args, kwargs)
        failed: list[str] = []
        for structure in self._structures.values():
            try:
                return structure.select(given)
            except InputError as error:
                failed.append(str(error))
        raise InputError(f"{self.name}: " + " | ".join(dict.fromkeys(failed)))

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positional):
            raise InputError(
                f"{self.name} takes {len(self._positional)} arguments by position "
                f"({', '.join(self._positional)}), and {len(args)} were given"
            )
        given = dict(zip(self._positional, args, strict=False))
        if twice := set(given) & set(kwargs):
            raise InputError(f"{self.name}: {', '.join(sorted(twice))} is given twice")
        return {**given, **kwargs}


class _Structure:
    """Programs whose arguments have one structure, by what the leaves are."""

    def __init__(self, inputs: Mapping[str, Tree], leaf_key: Callable[[str, Any], LeafKey]) -> None:
        self._inputs = inputs
        self._leaf_key = leaf_key
        self._runners: dict[tuple[LeafKey, ...], Runner] = {}

    def add(self, runner: Runner, spec_key: Callable[[TensorInput], LeafKey]) -> None:
        """Add a program; the first of several that take the same arguments is kept."""
        program = runner.program
        key = tuple(
            value_key(path, leaf.value)
            if leaf.kind == "value"
            else spec_key(program.tensors[leaf.index])
            for name in self._inputs
            for path, leaf in trees.leaves(program.inputs[name], name)
        )
        self._runners.setdefault(key, runner)

    def select(self, given: Mapping[str, Any]) -> tuple[Runner, dict[int, Any]]:
        """The program for named arguments, and the tensors among them."""
        if set(given) != set(self._inputs):
            missing = sorted(set(self._inputs) - set(given))
            extra = sorted(set(given) - set(self._inputs))
            words = [
                f"{what} {', '.join(names)}"
                for what, names in (("missing:", missing), ("not exported:", extra))
                if names
            ]
            raise InputError(f"arguments {'; '.join(words)}")
        found: list[tuple[str, Tree, Any]] = []
        for name, tree in self._inputs.items():
            trees.flatten(tree, given[name], name, found)
        leaf_key = self._leaf_key
        key = tuple([leaf_key(path, value) for path, _, value in found])
        runner = self._runners.get(key)
        if runner is None:
            raise InputError(self._difference([path for path, _, _ in found], key))
        # Where programs differ in what is a tensor, ``found`` tells of the first one's leaves.
        order = runner.order
        tensors = [value for item, (_, _, value) in zip(key, found, strict=True) if item[0]]
        return runner, dict(zip(order, tensors, strict=True))

    def _difference(self, paths: Sequence[str], key: Sequence[Any]) -> str:
        """What a call has and what the package has, where these differ."""
        known = list(self._runners)
        differing = [
            index
            for index in range(len(key))
            if not any(other[index] == key[index] for other in known)
        ] or [index for index in range(len(key)) if len({other[index] for other in known}) > 1]
        have = ", ".join(f"{paths[i]}: {_leaf_text(key[i])}" for i in differing)
        listed = dict.fromkeys(
            ", ".join(f"{paths[i]}: {_leaf_text(other[i])}" for i in differing) for other in known
        )
        return f"no program for {have}; the package has " + " or ".join(listed)


def _outline(inputs: Mapping[str, Tree]) -> Any:
    """A structure without its leaves, to be compared."""

    def outline(tree: Tree) -> Any:
        if tree.kind in ("tensor", "value"):
            return "leaf"
        return (tree.kind, tree.type, tree.keys, tuple(map(outline, tree.items)))

    return tuple(sorted((name, outline(tree)) for name, tree in inputs.items()))


def _spec_key(spec: TensorInput) -> LeafKey:
    return tensor_key(spec.dtype, spec.shape, spec.stride)


def _leaf_key(path: str, value: Any) -> LeafKey:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise InputError(
                f"{path} is on {value.device}, {value.layout}; give a dense CPU tensor"
            )
        return tensor_key(value.dtype, tuple(value.shape), value.stride())
    return value_key(path, value)


def tensor_key(dtype: torch.dtype, shape: tuple[int, ...], stride: Sequence[int]) -> LeafKey:
    """What a tensor must have in common with the exported one."""
    name = strict.dtype_name(dtype)
    if 0 in shape:
        return (True, name, shape, ())
    steps = tuple([step for size, step in zip(shape, stride, strict=True) if size > 1])
    return (True, name, shape, steps)


def value_key(path: str, value: Any) -> LeafKey:
    """What a number or a string must have in common with the exported one: everything.

    Raises:
        InputError: for anything else.
    """
    if isinstance(value, bool | int | float | str | None):
        return (False, type(value).__name__, repr(value))
    raise InputError(f"{path} is a {type(value).__name__}, neither a tensor nor a number or string")


def _leaf_text(key: LeafKey) -> str:
    if not key[0]:
        return str(key[2])
    _, dtype, shape, steps = key
    dense = [1]
    for size in reversed([size for size in shape if size > 1][1:]):
        dense.insert(0, dense[0] * size)
    text = f"{dtype}{list(shape)}"
    plain = not steps or list(steps) == dense
    return text if plain else f"{text} with strides {list(steps)}"


class Runner:
    """One program: loaded when it is first called."""

    def __init__(
        self,
        program: Program,
        weights: Sequence[torch.Tensor],
        parts: Mapping[str, bytes],
        trust: bool,
    ) -> None:
        self.program = program
        self.weights = weights
        self.rebuilt: str | None = None
        self._data = None if program.part is None else parts[program.part]
        self._trust = trust
        self._run: Callable[[list[Any]], list[Any]] | None = None
        self._lock = threading.Lock()
        self._build = trees.builder(program.outputs)
        self._copied = frozenset[int]()
        #: Positions of the tensors in the order of the leaves.
        self.order = [
            leaf.index
            for tree in program.inputs.values()
            for _, leaf in trees.leaves(tree)
            if leaf.kind == "tensor"
        ]
        changed = [program.arguments[position] for position in program.mutations]
        self._exclusive = frozenset(index for kind, index in changed if kind == "input")
        self._changed_weights = [weights[index] for kind, index in changed if kind == "weight"]

    @property
    def ready(self) -> bool:
        """Whether it was loaded."""
        return self._run is not None

    def prepare(self) -> Callable[[list[Any]], list[Any]]:
        """Load it, or have XLA compile it.

        Raises:
            PackageError: where it is not what the package says.
            RuntimeCompileError, PlatformError: where XLA refuses it, or is not there.
        """
        with self._lock:
            if self._run is None:
                self._run = self._loaded()
            return self._run

    def source(self) -> tuple[str | None, Signature, tuple[torch.Tensor, ...]]:
        """StableHLO (``None`` where nothing is computed), signature and constants.

        Raises:
            PackageError: where they are not what the package says.
        """
        if self._data is None:
            return None, self._signature_alone(), ()
        with self._errors():
            file = unpack(io.BytesIO(self._data), len(self._data))
            signature, _, constants = contents(file)
            stablehlo = stablehlo_text(file)
            if not self._trust:
                check_program(stablehlo, signature, constants)
        check_signature(self.program, signature, self.weights)
        return stablehlo, signature, constants

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NeffError as error:
            raise PackageError(f"{self.program.part}: {error}") from error

    def _signature_alone(self) -> Signature:
        signature = self.program.signature
        if signature is None or any(spec.kind == "tensor" for spec in signature.results):
            raise PackageError("a program without a NEFF returns what it computes")
        check_signature(self.program, signature, self.weights)
        return signature

    def _loaded(self) -> Callable[[list[Any]], list[Any]]:
        if self._data is None:
            signature = self._signature_alone()
            plan = results_plan(signature.results)
            self._note_copies(signature)
            return lambda args: plan(args, [])
        with self._errors():
            data = self._data
            loaded = from_file(unpack(io.BytesIO(data), len(data)), trust=self._trust)
        check_signature(self.program, loaded.signature, self.weights)
        self.rebuilt = loaded.rebuilt
        self._note_copies(loaded.signature)
        return Executor(loaded.neff, loaded.signature, loaded.constants)

    def _note_copies(self, signature: Signature) -> None:
        """New values that are arguments, which may change before they are written."""
        count = len(self.program.mutations)
        kinds = enumerate(spec.kind for spec in signature.results[:count])
        self._copied = frozenset(index for index, kind in kinds if kind == "input")

    def __call__(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        """Run it on the tensors of a call, by their positions."""
        run = self._run or self.prepare()
        mutations = self.program.mutations
        if mutations:
            self._check_sharing(tensors)
        args = [
            tensors[index] if kind == "input" else self.weights[index]
            for kind, index in self.program.arguments
        ]
        with torch.no_grad():
            results = run(args)
            for index in self._copied:
                results[index] = results[index].clone()
            for position, value in zip(mutations, results, strict=False):
                args[position].copy_(value)
        return self._build(results[len(mutations) :])

    def _check_sharing(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """The program took its arguments for tensors with a memory of their own."""
        addresses = [x.untyped_storage().data_ptr() for x in self._changed_weights]
        addresses += [tensors[index].untyped_storage().data_ptr() for index in self._exclusive]
        addresses += [
            x.untyped_storage().data_ptr()
            for index, x in tensors.items()
            if index not in self._exclusive
        ]
        written = addresses[: len(self._changed_weights) + len(self._exclusive)]
        if any(address and addresses.count(address) > 1 for address in written):
            raise InputError(
                "arguments share memory, and the program writes to one of them: give it a clone"
            )


def check_signature(
    program: Program, signature: Signature, weights: Sequence[torch.Tensor]
) -> None:
    """Compare what a NEFF takes and gives with what the manifest says.

    Raises:
        PackageError: where they differ.
    """
    wanted = [
        (program.tensors[index].shape, program.tensors[index].dtype)
        if kind == "input"
        else (tuple(weights[index].shape), weights[index].dtype)
        for kind, index in program.arguments
    ]
    if [(spec.shape, spec.dtype) for spec in signature.arguments] != wanted:
        raise PackageError(f"{program.part} takes other tensors than the manifest says")
    if len(signature.results) != program.results:
        raise PackageError(f"{program.part} has other results than the manifest says")
    for position, spec in zip(program.mutations, signature.results, strict=False):
        if spec.kind not in ("tensor", "input"):
            raise PackageError(f"{program.part} changes argument {position} to no tensor")
    for spec in signature.results:
        if spec.kind == "input" and not 0 <= spec.index < len(wanted):
            raise PackageError(f"{program.part} returns an argument that it does not have")
