"""Traces a lowering over ``jax.numpy`` once per signature into StableHLO text to splice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from . import float8
from .lazy_jax import jax, jnp
from .region import Region, region
from .registry import Lowering, result_tensors
from .seeded import SEED_ARGUMENT
from .types import CARRIERS, Check, LoweringError, TensorSpec

#: torch dtype -> name of its ``jax.numpy`` dtype.
JAX_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool_",
    **{
        getattr(torch, name): name
        for name in (
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint16",
            "uint32",
            "uint64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "complex64",
            "complex128",
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
}


def to_jax(dtype: torch.dtype) -> Any:
    """The ``jax.numpy`` dtype of a torch dtype."""
    return getattr(jnp, JAX_DTYPES[dtype])


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype of a ``jax.numpy`` dtype."""
    return _torch_dtypes()[jnp.dtype(dtype)]


@functools.cache
def _torch_dtypes() -> dict[Any, torch.dtype]:
    return {jnp.dtype(to_jax(dtype)): dtype for dtype in JAX_DTYPES}


@dataclasses.dataclass(frozen=True)
class Context:
    """What a lowering may know besides its arguments: the results that FakeTensor promised.

    ``seed`` is an ``int64[2]`` array for random operators (a stream and the position in it).
    ``checked`` is whether tensors' values are checked; ``flags`` collects what is. ``region``
    holds the graphs of a higher-order operator.
    """

    outputs: tuple[TensorSpec, ...]
    seed: Any = None
    checked: bool = True
    flags: list[tuple[Check, Any]] = dataclasses.field(default_factory=list)
    region: Region | None = None

    @property
    def output(self) -> TensorSpec:
        """The first result."""
        return self.outputs[0]

    @property
    def dtype(self) -> Any:
        """The ``jax.numpy`` dtype of the first result."""
        return to_jax(self.outputs[0].dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.outputs[0].shape

    def check(
        self, failed: Any, error: type[Exception], message: str, *, always: bool = False
    ) -> None:
        """Raise ``error`` after the call if any element of ``failed`` (bool) is true.

        The results of a call that failed are not seen by anyone, but it does run to its end.
        Operator, shapes and the user's line are added to ``message``. To be called where the
        lowering itself is traced, not inside of a ``vmap``, a loop or a kernel's decomposition.
        ``check_indices=False`` removes the check, unless it is to be made ``always`` (assertions
        and failures of an algorithm, which cost no pass over data).
        """
        if self.checked or always:
            self.flags.append((Check(error, message), jnp.any(failed)))

    def kernel(
        self,
        name: str,
        decomposition: Callable[..., Any],
        operands: Sequence[Any],
        **attributes: Any,
    ) -> Any:
        """Emit ``stablehlo.composite "neuron.<name>"`` with its plain StableHLO decomposition.

        A target may replace it with a kernel of its own; every other target compiles the
        decomposition. ``attributes`` are integers, floats or strings.
        """
        return jax.lax.composite(
            lambda *arrays, **_: decomposition(*arrays), f"neuron.{name}", version=1
        )(*operands, **attributes)


@dataclasses.dataclass(frozen=True)
class Splice:
    """The StableHLO functions of one operator signature; ``entry`` is the one to call.

    If there are ``checks``, it has one more result, an int32: the position, counted from 1, of
    the first one that failed, or 0.
    """

    text: str
    entry: str
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    checks: tuple[Check, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Stands for the n-th distinct tensor operand in a node's arguments."""

    index: int


_cache: dict[str, Splice] = {}
_lock = threading.Lock()
_SYMBOL = re.compile(r"@([\w.$-]+)")
_RESULT_INFO = re.compile(r' \{jax\.result_info = "[^"]*"\}')


def clear_cache() -> None:
    """Drop every traced signature."""
    _cache.clear()


def splice(entry: Lowering, node: fx.Node, checked: bool = True) -> tuple[Splice, list[fx.Node]]:
    """The traced lowering of ``node`` and its operands, in the order of the splice's parameters.

    ``checked`` is whether the values of tensors (indices, divisors) are checked at run time.

    Raises:
        LoweringError: if the lowering's results differ from what FakeTensor promised.
    """
    operands = list(node.all_input_nodes)
    index = {operand: _Operand(i) for i, operand in enumerate(operands)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), index.__getitem__)  # type: ignore[arg-type]
    specs = tuple(TensorSpec.of(result_tensors(operand)[0]) for operand in operands)
    outputs = tuple(TensorSpec.of(tensor) for tensor in result_tensors(node))
    held = region(node)
    name = node.target if held is None else held.key
    key = f"{name}|{args!r}|{kwargs!r}|{specs}|{outputs}|{output_mask(node)}|{checked}"
    found = _cache.get(key)
    if found is None:
        with _lock:
            found = _cache.get(key)
            if found is None:
                found = _trace(entry, node, args, kwargs, specs, outputs, checked, key)
                _cache[key] = found
    return found, operands


def output_mask(node: fx.Node) -> tuple[bool, ...]:
    """Which of a node's results are tensors."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return tuple(isinstance(item, torch.Tensor) for item in values)


def _trace(
    entry: Lowering,
    node: fx.Node,
    args: Any,
    kwargs: Any,
    specs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    checked: bool,
    key: str,
) -> Splice:
    assert entry.function is not None
    function = entry.function
    mask = output_mask(node)
    checks: list[Check] = []

    def run(*arrays: Any) -> tuple[Any, ...]:
        arrays = tuple(_read(array, spec.dtype) for array, spec in zip(arrays, specs, strict=True))
        actual_args, actual_kwargs = _substitute((args, kwargs), arrays)
        seed, stream = actual_kwargs.pop(SEED_ARGUMENT, None), actual_kwargs.pop("__stream", 0)
        if seed is not None:
            seed = seed + jnp.array([0, stream], jnp.int64)
        ctx = Context(outputs, seed, checked, region=region(node))
        results = conform(function(ctx, *actual_args, **actual_kwargs), mask, outputs, node)
        carried = [
            _unfolded(_carried(array, spec.dtype))
            for array, spec in zip(results, outputs, strict=True)
        ]
        checks[:] = [check for check, _ in ctx.flags]
        return (*carried, *code([flag for _, flag in ctx.flags]))

    shapes = [
        jax.ShapeDtypeStruct(spec.shape, to_jax(CARRIERS.get(spec.dtype, spec.dtype)))
        for spec in specs
    ]
    with tracing():
        traced = jax.jit(run, keep_unused=True).trace(*shapes)
        text = traced.lower(lowering_platforms=("cpu",)).as_text(dialect="stablehlo")
    prefix = "neuron_" + hashlib.sha256(key.encode()).hexdigest()[:16]
    text = _RESULT_INFO.sub("", _SYMBOL.sub(lambda match: f"@{prefix}_{match[1]}", text))
    return Splice(text, f"{prefix}_main", specs, outputs, tuple(checks))


def code(flags: list[Any]) -> list[Any]:
    """The position from 1 of the first flag that is set, or 0; nothing if there are no flags."""
    first: Any = jnp.int32(0)
    for position in range(len(flags), 0, -1):
        first = jnp.where(flags[position - 1], jnp.int32(position), first)
    return [first] if flags else []


#: The device that JAX lowers for, if one was given.
_devices: list[Any] = []


def trace_on(device: Any) -> None:
    """Let JAX lower for this (CPU) device from now on.

    Without one, it opens a client of its own for no more than the name of the platform: threads
    that stay, a start-up of every plugin, and a warning by JAX at each later fork.
    """
    _devices[:] = [device]


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """JAX's 64-bit types and plain settings, for this thread and the tracing alone."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
        jax.disable_jit(False),
        jax.default_matmul_precision("highest"),
        jax.default_device(_devices[0]) if _devices else contextlib.nullcontext(),
    ):
        yield


def _substitute(value: Any, arrays: Sequence[Any]) -> Any:
    if isinstance(value, _Operand):
        return arrays[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_substitute(item, arrays) for item in value)
    if isinstance(value, dict):
        return {name: _substitute(item, arrays) for name, item in value.items()}
    return value


def conform(
    results: Any, mask: tuple[bool, ...], outputs: tuple[TensorSpec, ...], node: fx.Node
) -> Iterator[Any]:
    """The tensors among an operator's results, in the dtypes that FakeTensor promised.

    Raises:
        LoweringError: if there are more or fewer, or one has another shape.
    """
    values = list(results) if isinstance(results, tuple | list) else [results]
    if len(values) != len(mask):
        raise LoweringError(
            f"the lowering of {node.target} gave {len(values)} results, not {len(mask)}", node.name
        )
    specs = iter(outputs)
    for value, wanted in zip(values, mask, strict=True):
        if not wanted:
            continue
        spec = next(specs)
        array = jnp.asarray(value)
        if array.shape != spec.shape:
            raise LoweringError(
                f"the lowering of {node.target} gave shape {array.shape}, not {spec.shape}",
                node.name,
            )
        yield float8.convert(array, to_jax(spec.dtype))


def _read(array: Any, dtype: torch.dtype) -> Any:
    """An operand as what it is, from what carries it."""
    if dtype not in CARRIERS:
        return array
    return jax.lax.bitcast_convert_type(array, to_jax(dtype))


def _carried(array: Any, dtype: torch.dtype) -> Any:
    """A result as what carries it."""
    if dtype not in CARRIERS:
        return array
    return jax.lax.bitcast_convert_type(array, to_jax(CARRIERS[dtype]))


def _unfolded(array: Any) -> Any:
    """Keep Torch-MLIR from folding an unsigned scalar constant into a literal it then refuses."""
    if array.dtype != jnp.uint8 or array.ndim:
        return array
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(array, jnp.int8), jnp.uint8)
