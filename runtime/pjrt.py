"""The boundary to jaxlib's private API: clients, compilation, buffers.

No other module of the runtime imports jax, nor jaxlib but for its MLIR. Tested with jaxlib 0.10.2.

jax, whose import takes half a second, is imported where StableHLO is read or another platform than
the CPU is opened, and by jaxlib itself where it makes the first buffer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as jax does: jaxlib reads it when imported

from jaxlib import _jax, cpu_feature_guard, xla_client
from jaxlib.mlir import ir

from .torch_memory import from_dlpack, reinterpret, to_dlpack
from .types import Device, PlatformError, RuntimeCompileError

#: XLA shares host memory at addresses that are multiples of this many bytes.
_ALIGNMENT = 64

_JAX_MLIR = "jax._src.interpreters.mlir"

# As jax does for jaxlib when it is imported: a check of the processor, and an end for objects that
# XLA's threads let go.
cpu_feature_guard.check_cpu_features()
gc.callbacks.append(lambda *_: _jax.collect_garbage())

_lock = threading.Lock()
_to_buffer = _jax.dlpack_managed_tensor_to_buffer
_to_capsule = _jax.buffer_to_dlpack_managed_tensor


def _xla_bridge() -> Any:
    """The part of jax that opens platforms."""
    return importlib.import_module("jax._src.xla_bridge")


def _context() -> Any:
    """A context of jaxlib's MLIR with the dialects that jax uses."""
    return importlib.import_module(_JAX_MLIR).make_ir_context()


def _stablehlo_dialect() -> Any:
    return importlib.import_module("jaxlib.mlir.dialects.stablehlo")


def platforms() -> list[str]:
    """The PJRT platforms that could be opened here."""
    others = [name for name in _xla_bridge().backends() if name != "cpu"]
    return ["cpu", *others]


#: This process, if it was forked after a client was opened.
_forked: list[int] = []
_clients: list[Any] = []


def forked() -> bool:
    """Whether this process was forked after a client was opened.

    XLA's threads, some of them global, do not survive a fork: whatever needs them would hang.
    """
    return bool(_forked)


def check_process() -> None:
    """Refuse to go on in a process that was forked after XLA was started: it would hang.

    Raises:
        PlatformError: with what to do instead.
    """
    if _forked:
        raise PlatformError(
            "this process was forked after something had been compiled, and XLA's threads stayed "
            "in the parent. Start it by the 'spawn' or 'forkserver' method, or leave compiled "
            "code to the parent (torch.compiler.set_stance('force_eager') in the child)."
        )


def _note_fork() -> None:
    """In the child: note it, and let nothing be destroyed that would wait for its threads."""
    _forked.append(os.getpid())
    pool = getattr(sys.modules.get(_JAX_MLIR), "global_thread_pool", None)
    for held in (pool, *_clients):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


@functools.cache
def client(platform: str) -> Any:
    """The PJRT client of ``platform``.

    The CPU's is our own and synchronous: a result is ready when the call returns, with no hop to
    another thread, and the user's own JAX keeps its settings.

    Raises:
        PlatformError: if the platform is not installed, with the list of those that are.
    """
    if platform != "cpu" and platform not in _xla_bridge().backends():
        raise PlatformError(
            f"PJRT platform {platform!r} is not installed; available: {', '.join(platforms())}. "
            f"Install its PJRT plugin, or choose another with options={{'platform': ...}}."
        )
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_note_fork)
    opened = (
        xla_client.make_cpu_client(asynchronous=False)
        if platform == "cpu"
        else _xla_bridge().get_backend(platform)
    )
    _clients.append(opened)
    return opened


def open_platform(platform: str) -> Any:
    """Open ``platform`` now, so that a missing one is an error before anything is compiled.

    Returns:
        The first device of our CPU client, for JAX to trace on.

    Raises:
        PlatformError: if it is not installed, or in a process forked after it was opened.
    """
    check_process()
    client(platform)
    return device("cpu")


def device(platform: str) -> Any:
    """The first device of ``platform``."""
    return client(platform).local_devices()[0]


def devices() -> list[Device]:
    """Every device of every platform that opens here; one that does not is left out."""
    return [_described(platform, one) for platform in platforms() for one in _devices(platform)]


def platform_errors() -> dict[str, str]:
    """Why platforms whose plugins are installed do not open, by their names.

    JAX itself brings some, such as TPU's, that may be missing quietly.
    """
    platforms()
    bridge = _xla_bridge()
    return {
        name: str(error)
        for name, error in bridge._backend_errors.items()
        if not bridge._backend_factories[name].fail_quietly
    }


def _devices(platform: str) -> list[Any]:
    return list(client(platform).devices())


def _described(platform: str, device: Any) -> Device:
    used = device.memory_stats() if device.process_index == client(platform).process_index() else {}
    known = used or {}
    return Device(
        platform=platform,
        id=device.id,
        kind=device.device_kind,
        process=device.process_index,
        # PJRT plugins name what they know: streaming multiprocessors of a GPU, for example.
        cores=host_threads() if platform == "cpu" else getattr(device, "core_count", None),
        memory_limit=known.get("bytes_limit"),
        memory_used=known.get("bytes_in_use"),
        memory_peak=known.get("peak_bytes_in_use"),
    )


def host_threads() -> int:
    """Threads that XLA computes with on the CPU: ``NPROC``, or the cores of this process."""
    given = os.environ.get("NPROC", "")
    if given.isdigit():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_module(stablehlo: str) -> Any:
    """An ``ir.Module`` in jaxlib's MLIR, in a context of its own."""
    with _context():
        return ir.Module.parse(stablehlo)


def compile_module(module: Any, platform: str, xla_options: Sequence[tuple[str, Any]]) -> Any:
    """Compile a StableHLO module and load it on the platform's first device.

    Raises:
        RuntimeCompileError: with XLA's message.
    """
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    build = options.executable_build_options
    build.num_replicas = build.num_partitions = 1
    target = device(platform)
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[target.id]]))
    options.env_option_overrides = list(xla_options)
    try:
        with module.context:
            return client(platform).compile_and_load(module, _jax.DeviceList((target,)), options)
    except (_jax.JaxRuntimeError, ir.MLIRError, TypeError) as error:
        raise RuntimeCompileError(f"XLA ({platform}) refused the module: {error}") from error


def portable(stablehlo: str) -> bytes:
    """A module in the form that jaxlibs of the next and of the last months read."""
    dialect = _stablehlo_dialect()
    requirement = dialect.StablehloCompatibilityRequirement.WEEK_12
    version = dialect.get_version_from_compatibility_requirement(requirement)
    module = parse_module(stablehlo)
    with module.context:
        # Mixed: operations of CHLO, such as ``erf``, stay what they are.
        return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))


def from_portable(data: bytes) -> str:
    """The text of a module in portable form.

    Raises:
        RuntimeCompileError: if it is none, or of a version that this jaxlib does not read.
    """
    with _context() as context:
        try:
            return str(_stablehlo_dialect().deserialize_portable_artifact(context, data))
        except (ir.MLIRError, ValueError, TypeError, RuntimeError) as error:
            raise RuntimeCompileError(f"no portable StableHLO: {error}") from error


@dataclasses.dataclass(frozen=True)
class ProgramTypes:
    """Shapes and MLIR's element types of a program's arguments and results, and the names of the
    functions outside of the program that it calls."""

    arguments: tuple[tuple[tuple[int, ...], str], ...]
    results: tuple[tuple[tuple[int, ...], str], ...]
    custom_calls: tuple[str, ...]


def program_types(stablehlo: str) -> ProgramTypes:
    """What the function ``main`` of a module takes and gives.

    Raises:
        RuntimeCompileError: where there is none, or with other than tensors of static sizes.
    """
    module = parse_module(stablehlo)
    with module.context:
        mains = [item for item in module.body if is_main(item)]
        if len(mains) != 1:
            raise RuntimeCompileError("the module has no function 'main'")
        function = ir.FunctionType(mains[0].type)  # type: ignore[attr-defined]
        calls = {
            ir.StringAttr(operation.attributes["call_target_name"]).value
            for operation in _operations(module.operation)
            if operation.name == "stablehlo.custom_call"
        }
        return ProgramTypes(
            tuple(map(_tensor_type, function.inputs)),
            tuple(map(_tensor_type, function.results)),
            tuple(sorted(calls)),
        )


def is_main(operation: Any) -> bool:
    """Whether an operation is the function ``main``."""
    if operation.operation.name != "func.func":
        return False
    return ir.StringAttr(operation.attributes["sym_name"]).value == "main"


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _tensor_type(value: Any) -> tuple[tuple[int, ...], str]:
    if not isinstance(value, ir.RankedTensorType) or not value.has_static_shape:
        raise RuntimeCompileError(f"the program has a {value}, not a tensor of static sizes")
    return tuple(value.shape), str(value.element_type)


def serialize(executable: Any) -> bytes | None:
    """An executable as bytes; ``None`` where the platform cannot."""
    try:
        return bytes(executable.serialize())
    except _jax.JaxRuntimeError:
        return None


def deserialize(data: bytes, platform: str) -> Any:
    """Load an executable, which is machine code, on the platform's first device.

    Raises:
        RuntimeCompileError: with XLA's message.
    """
    try:
        return client(platform).deserialize_executable(
            data, _jax.DeviceList((device(platform),)), xla_client.CompileOptions()
        )
    except (_jax.JaxRuntimeError, TypeError) as error:
        raise RuntimeCompileError(f"XLA ({platform}) refused the executable: {error}") from error


def optimized_hlo(executable: Any) -> str:
    """The HLO after XLA's passes."""
    return "\n".join(module.to_string() for module in executable.hlo_modules())


def cost_analysis(executable: Any) -> dict[str, float]:
    """XLA's estimate of one run by its names: ``flops``, ``bytes accessed``, ``transcendentals``.

    Only what XLA's own code does is counted: a custom call (a vendor kernel) counts as nothing.
    What XLA does not know is left out, as is everything on a platform that does not estimate.
    """
    try:
        found = executable.cost_analysis()
    except _jax.JaxRuntimeError:
        return {}
    return {name: value for name, value in (found or {}).items() if value >= 0}


def memory_analysis(executable: Any) -> dict[str, int]:
    """Bytes that one run takes: ``argument``, ``output``, ``alias`` (shared by an argument and a
    result), ``temp``, ``generated_code``, and ``peak``; empty where the platform does not say."""
    try:
        stats = executable.get_compiled_memory_stats()
    except _jax.JaxRuntimeError:
        return {}
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}
    return {**found, "peak": int(stats.peak_memory_in_bytes)}


def shared_memory(platform: str) -> bool:
    """Whether the platform computes in host memory, so that tensors are shared by DLPack."""
    return platform == "cpu"


def importable(tensor: torch.Tensor) -> bool:
    """Whether ``importer`` takes a CPU tensor as it is: contiguous, at an aligned address.

    At another address XLA would copy the values in a thread of its pool, which then waits for
    the GIL to let the tensor go, and everything that depends on the copy waits for it.
    """
    return tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNMENT


def importer(platform: str) -> Callable[[torch.Tensor], Any]:
    """A function from an ``importable`` tensor to a PJRT buffer, shared where memory allows."""
    target = device(platform)
    if shared_memory(platform):
        return lambda tensor: _to_buffer(to_dlpack(tensor), target, None)
    backend = client(platform)
    host = device("cpu")

    def copy_to_device(tensor: torch.Tensor) -> Any:
        return backend.buffer_from_pyval(
            np.asarray(_to_buffer(to_dlpack(tensor), host, None)), target
        )

    return copy_to_device


def exporter(platform: str, like: Any) -> Callable[[Any], torch.Tensor]:
    """A function from PJRT buffers of the type of ``like`` to CPU tensors that own them."""
    if shared_memory(platform):
        return _owner(from_dlpack(_to_capsule(like)))
    host = device("cpu")

    def copy_to_host(buffer: Any) -> torch.Tensor:
        values = np.array(buffer)
        return from_dlpack(_to_capsule(client("cpu").buffer_from_pyval(values, host)))

    return copy_to_host


def _owner(like: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Makes tensors whose memory holds the buffer that it belongs to.

    DLPack would do it, too; but PJRT gives memory that was lent that way back only later, so that
    each call would write to other, cold memory (adding 2^20 float32: 0.23 ms instead of 0.15).
    """
    size = like.nbytes
    if not size:
        return lambda buffer: from_dlpack(_to_capsule(buffer))
    memory_at = _memory_type(size).from_address
    dtype, shape, stride = like.dtype, tuple(like.shape), like.stride()

    def export(buffer: Any) -> torch.Tensor:
        memory = memory_at(pointer(buffer))
        memory.owner = buffer
        return reinterpret(torch.frombuffer(memory, dtype=dtype), shape, stride, 0)

    return export


@functools.cache
def _memory_type(size: int) -> Any:
    """A type of ``size`` bytes somewhere in memory, with an owner to hold."""
    return type("_Memory", (ctypes.c_char * size,), {"__slots__": ("owner",)})


def pointer(buffer: Any) -> int:
    """The address of a buffer in host memory, once its values are there."""
    buffer.block_until_ready()  # without the GIL, which the next call would hold while it waits
    return int(buffer.unsafe_buffer_pointer())


def scalar_reader(platform: str) -> Callable[[Any], int]:
    """A function from a buffer of one int32 to its value."""
    if shared_memory(platform):
        read = ctypes.c_int32.from_address
        return lambda buffer: read(pointer(buffer)).value
    return lambda buffer: int(np.asarray(buffer))


def execute(executable: Any, buffers: Sequence[Any]) -> list[Any]:
    """Run on the one device; a buffer for each result."""
    results = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [shards[0] for shards in results]


def register_ffi_handler(name: str, function_pointer: int, platform: str) -> None:
    """Register a C function of the typed FFI (``XLA_FFI_Error* (XLA_FFI_CallFrame*)``)."""
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new_capsule(function_pointer, b"xla._CUSTOM_CALL_TARGET", None)
    with _lock:
        xla_client.register_custom_call_target(name, capsule, platform, api_version=1)
