"""Entry points of a package as functions of JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from . import package_trees as trees
from .errors import InputError, PackageError
from .package_file import TensorInput, Weight
from .package_run import LeafKey, Runner, Selector, value_key
from .runtime import ResultSpec, Signature, View, strict
from .runtime.exported_jax import as_jax


def _flatten(record: trees.Record) -> tuple[list[Any], tuple[str, ...]]:
    return list(record.values()), tuple(record)


jax.tree_util.register_pytree_node(
    trees.Record,
    _flatten,
    lambda names, items: trees.Record(zip(names, items, strict=True)),
)


class JaxFunction:
    """A pure function ``f(weights, *args, **kwargs)`` of JAX arrays, for ``jax.jit`` and others.

    ``weights`` maps names to arrays; :attr:`weights` are those of the package. Arguments have the
    structure, shapes and dtypes that were exported; without ``jax_enable_x64``, int32 stands for
    int64. Results have eager's structure, with :class:`neuron_compile.package_trees.Record` for
    dataclasses; a function that changes buffers or arguments returns ``(results, changes)``, where
    ``changes`` maps names of weights and paths of arguments to their new values.

    What draws random numbers takes ``seed=``, an integer or a scalar array. Checks at run time are
    not made, since a pure function cannot raise: indices out of range are clamped (gathers) or
    dropped (scatters). XLA compiles it as JAX wants, so denormal numbers and NaN in ``min`` and
    ``max`` may differ from those of the package itself. It has no gradient.
    """

    def __init__(
        self,
        name: str,
        positional: Sequence[str],
        runners: Sequence[Runner],
        weights: Sequence[Weight],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self.name = name
        self._runners = list(runners)
        self._all_weights = list(weights)
        self._tensors = tensors
        self._select = Selector(name, positional, runners, _spec_key, _leaf_key)
        self._programs: dict[int, _Program] = {}

    @functools.cached_property
    def weights(self) -> dict[str, jax.Array]:
        """The weights that the function takes, as they are now."""
        used = {
            index
            for runner in self._runners
            for kind, index in runner.program.arguments
            if kind == "weight"
        }
        return {
            self._all_weights[index].names[0]: to_array(self._tensors[index])
            for index in sorted(used)
        }

    def __call__(
        self, weights: Mapping[str, Any], /, *args: Any, seed: Any = None, **kwargs: Any
    ) -> Any:
        """Call it.

        Raises:
            InputError: for arguments that it was not exported for, or a weight that is missing.
            RuntimeCompileError: for a program with float64 without ``jax_enable_x64``.
        """
        runner, arrays = self._select(args, kwargs)
        index = self._runners.index(runner)
        if index not in self._programs:
            self._programs[index] = _Program(self.name, runner, self._all_weights)
        return self._programs[index](weights, arrays, seed)


class _Program:
    """One program as a function of weights, arrays by their positions, and a seed."""

    def __init__(self, name: str, runner: Runner, weights: Sequence[Weight]) -> None:
        stablehlo, self._signature, constants = runner.source()
        self._name = name
        self._program = runner.program
        self._weights = weights
        self._call = None if stablehlo is None else as_jax(stablehlo, name)
        self._constants = [to_array(tensor) for tensor in constants]
        self._build = trees.builder(runner.program.outputs, imported=False)
        self._paths = {
            leaf.index: path
            for argument, tree in runner.program.inputs.items()
            for path, leaf in trees.leaves(tree, argument)
            if leaf.kind == "tensor"
        }

    def __call__(self, weights: Mapping[str, Any], arrays: Mapping[int, Any], seed: Any) -> Any:
        signature, program = self._signature, self._program
        args = [
            jnp.asarray(arrays[index] if kind == "input" else self._weight(weights, index))
            for kind, index in program.arguments
        ]
        made = self._computed(args, signature, seed)
        count = len(program.mutations)
        results = [_result(spec, args, made) for spec in signature.results[:count]]
        for position, value in zip(program.mutations, results, strict=True):
            args[position] = value
        built = self._build([_result(spec, args, made) for spec in signature.results[count:]])
        if not count:
            return built
        names = [self._argument(position) for position in program.mutations]
        return built, dict(zip(names, results, strict=True))

    def _computed(self, args: Sequence[Any], signature: Signature, seed: Any) -> Sequence[Any]:
        if signature.seeded and seed is None:
            raise InputError(f"{self._name} draws random numbers: give it seed=")
        if self._call is None:
            return ()
        entered = [
            _entered(arg, spec.permutation, spec.carrier or spec.dtype)
            for arg, spec in zip(args, signature.arguments, strict=True)
        ]
        entered += self._constants
        if signature.seeded:
            number = jnp.asarray(seed).astype(_dtype(torch.int64))
            entered.append(jnp.stack([number, jnp.zeros_like(number)]))
        return self._call(*entered)

    def _weight(self, weights: Mapping[str, Any], index: int) -> Any:
        item = self._weights[index]
        found = next((weights[name] for name in item.names if name in weights), None)
        wanted = _dtype(item.dtype)
        if found is None:
            raise InputError(f"{self._name}: weights have no {item.names[0]!r}")
        if tuple(found.shape) != item.shape or found.dtype != wanted:
            raise InputError(
                f"{self._name}: {item.names[0]!r} is {found.dtype}{list(found.shape)}, not "
                f"{wanted}{list(item.shape)}"
            )
        return found

    def _argument(self, position: int) -> str:
        kind, index = self._program.arguments[position]
        return self._weights[index].names[0] if kind == "weight" else self._paths[index]


def to_array(tensor: torch.Tensor) -> jax.Array:
    """A copy of a tensor as an array of JAX; without ``jax_enable_x64`` int64 becomes int32."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dtype = jnp.dtype(_jax_name(plain.dtype))
    data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    values = np.frombuffer(data.tobytes(), dtype).reshape(plain.shape)
    return jnp.asarray(values.astype(jax.dtypes.canonicalize_dtype(dtype)))


def _jax_name(dtype: torch.dtype) -> str:
    name = strict.dtype_name(dtype)
    if not hasattr(jnp, name) and name != "bool":
        raise PackageError(f"JAX has no dtype {name}")
    return name


def _dtype(dtype: torch.dtype) -> Any:
    """JAX's dtype for one of torch's, as JAX is set up."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(_jax_name(dtype)))


def _spec_key(spec: TensorInput) -> LeafKey:
    return (True, str(_dtype(spec.dtype)), spec.shape, ())


def _leaf_key(path: str, value: Any) -> LeafKey:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return (True, str(dtype), tuple(value.shape), ())
    return value_key(path, value)


def _entered(array: Any, permutation: tuple[int, ...] | None, dtype: torch.dtype) -> Any:
    """An argument as the program takes it."""
    moved = array if permutation is None else jnp.transpose(array, permutation)
    return _as_bits(moved, _dtype(dtype))


def _as_bits(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _result(spec: ResultSpec, args: Sequence[Any], made: Sequence[Any]) -> Any:
    """One result of a graph; see :class:`neuron_compile.runtime.ResultSpec`."""
    if spec.kind == "none":
        return None
    if spec.kind == "constant":
        return spec.value
    if spec.kind == "input":
        array = args[spec.index]
        return array if spec.view is None else _viewed(_memory(array, spec.view.base), spec.view)
    array = made[spec.index]
    if spec.dtype is not None:
        array = _as_bits(array, _dtype(spec.dtype))
    if spec.view is not None:
        return _viewed(array.reshape(-1), spec.view)
    if spec.permutation is not None:
        return jnp.transpose(array, spec.permutation)
    return array if spec.expand is None else jnp.broadcast_to(array, spec.expand)


def _memory(array: Any, stride: Sequence[int]) -> Any:
    """The elements of an array in the order in which they lie in a dense tensor's memory."""
    order = sorted(range(array.ndim), key=lambda dim: (-stride[dim], array.shape[dim] == 1))
    expected = 1
    for dim in reversed(order):
        if array.shape[dim] > 1 and stride[dim] != expected:
            raise PackageError("a view of an argument with gaps in its memory is not for JAX")
        expected *= array.shape[dim]
    return jnp.transpose(array, order).reshape(-1)


def _viewed(memory: Any, view: View) -> Any:
    """A view, as new values."""
    if view.dtype is not None:
        memory = _retyped(memory, _dtype(view.dtype))
    shape, size = view.shape, math.prod(view.shape)
    dense = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    steps = zip(shape, view.stride, dense, strict=True)
    if all(length == 1 or step == wanted for length, step, wanted in steps):
        return lax.slice(memory, (view.offset,), (view.offset + size,)).reshape(shape)
    index = jnp.full(shape, view.offset, dtype=jnp.int32)
    for dim, step in enumerate(view.stride):
        index += step * lax.broadcasted_iota(jnp.int32, shape, dim)
    return memory[index]


def _retyped(memory: Any, dtype: Any) -> Any:
    """The same memory in elements of another dtype."""
    if jnp.iscomplexobj(memory):
        parts = jnp.stack([memory.real, memory.imag], axis=-1).reshape(-1)
        return _retyped(parts, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _retyped(memory, jnp.finfo(dtype).dtype).reshape(-1, 2)
        return lax.complex(parts[:, 0], parts[:, 1])
    narrower = memory.dtype.itemsize // dtype.itemsize
    if narrower >= 1:
        return lax.bitcast_convert_type(memory, dtype).reshape(-1)
    wider = dtype.itemsize // memory.dtype.itemsize
    return lax.bitcast_convert_type(memory.reshape(-1, wider), dtype)
