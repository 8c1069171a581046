"""XLA's typed FFI in ctypes: one C handler that dispatches to Python kernels.

The structures are those of ``xla/ffi/api/c_api.h`` (API 0.3), which the jaxlib wheel ships. Each
call site carries one string attribute, ``spec``, from which its kernel is built once; so nothing
that belongs to this process alone is compiled into an executable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ..pjrt import register_ffi_handler

TARGET_NAME = "neuron_compile.kernel"

#: Runs one call, given the addresses of its operands and of its results.
Kernel = Callable[[Sequence[int], Sequence[int]], None]

_WORD = ctypes.c_uint64
_API_MAJOR, _API_MINOR = 0, 3
_METADATA_EXTENSION = 1
_EXECUTE = 3
_INTERNAL = 13

# Offsets, in 8-byte words, of the fields of XLA_FFI_CallFrame that are read here.
_EXTENSION, _API, _CONTEXT, _STAGE = 1, 2, 3, 4
_ARG_COUNT, _ARGS = 7, 9
_RET_COUNT, _RETS = 12, 14
_ATTRS = 20
_FRAME_WORDS = 22
# Words within XLA_FFI_Buffer and XLA_FFI_Api.
_BUFFER_DATA = 3
_API_ERROR_CREATE, _API_SCHEDULE, _API_POOL_SIZE = 6, 17, 18


class _ErrorArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    ]


class _PoolSizeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("count", ctypes.POINTER(ctypes.c_int64)),
    ]


class _ScheduleArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    ]


#: A call as XLA describes it, in words.
Frame = ctypes.Array[ctypes.c_uint64]

_Frame = _WORD * _FRAME_WORDS
_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ApiFunction = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_ErrorCreate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArgs))

_kernels: dict[bytes, Kernel] = {}
_handlers: list[object] = []  # ctypes callbacks live as long as XLA may call them


def register(build: Callable[[str], Kernel], platform: str) -> None:
    """Register the handler of ``platform``; ``build`` makes a kernel from a call's ``spec``."""
    register_function(TARGET_NAME, lambda frame: _run(build, frame), platform)


def register_function(name: str, function: Callable[[Frame], None], platform: str) -> None:
    """Register ``function``, called with the frame of each call of target ``name``."""
    handler = _Handler(lambda address: _call(function, address))
    _handlers.append(handler)
    address = ctypes.cast(handler, ctypes.c_void_p).value
    assert address is not None
    register_ffi_handler(name, address, platform)


def _run(build: Callable[[str], Kernel], frame: Frame) -> None:
    spec = _spec(frame[_ATTRS])
    kernel = _kernels.get(spec)
    if kernel is None:
        kernel = _kernels[spec] = build(spec.decode())
    kernel(_addresses(frame, _ARG_COUNT, _ARGS), _addresses(frame, _RET_COUNT, _RETS))


def pool_size(frame: Frame) -> int:
    """How many threads the pool of a call's execution has."""
    count = ctypes.c_int64(0)
    arguments = _PoolSizeArgs(
        ctypes.sizeof(_PoolSizeArgs), None, frame[_CONTEXT], ctypes.pointer(count)
    )
    _api(frame, _API_POOL_SIZE)(ctypes.addressof(arguments))
    return count.value


def schedule(frame: Frame, task: Callable[[Any], None], count: int) -> None:
    """Hand ``task`` to the pool ``count`` times."""
    function = _Task(task)
    _handlers.append(function)
    address = ctypes.cast(function, ctypes.c_void_p).value
    for _ in range(count):
        arguments = _ScheduleArgs(
            ctypes.sizeof(_ScheduleArgs), None, frame[_CONTEXT], address, None
        )
        _api(frame, _API_SCHEDULE)(ctypes.addressof(arguments))


def _api(frame: Frame, field: int) -> Callable[[int], int | None]:
    return _ApiFunction(_WORD.from_address(frame[_API] + 8 * field).value)


def _call(function: Callable[[Frame], None], address: int) -> int | None:
    frame = _Frame.from_address(address)
    try:
        if frame[_EXTENSION] and _answer_metadata(frame[_EXTENSION]):
            return None
        if frame[_STAGE] & 0xFFFFFFFF == _EXECUTE:
            function(frame)
    except BaseException as error:  # noqa: BLE001 - it crosses C; XLA raises it as a status
        return _error(frame[_API], f"{type(error).__name__}: {error}")
    return None


def _addresses(frame: ctypes.Array[ctypes.c_uint64], count: int, pointers: int) -> list[int]:
    number = frame[count]
    if not number:
        return []
    buffers = (_WORD * number).from_address(frame[pointers])
    return [_WORD.from_address(buffer + 8 * _BUFFER_DATA).value for buffer in buffers]


def _spec(attributes: int) -> bytes:
    (first,) = (_WORD * 1).from_address(attributes)
    text, length = (_WORD * 2).from_address(first)
    return ctypes.string_at(text, length)


def _answer_metadata(extension: int) -> bool:
    """Tell XLA, which asks once, the API version this handler was written for."""
    _, kind, _, metadata = (_WORD * 4).from_address(extension)
    if kind & 0xFFFFFFFF != _METADATA_EXTENSION:
        return False
    version = (ctypes.c_int * 2).from_address(metadata + 24)
    version[0], version[1] = _API_MAJOR, _API_MINOR
    return True


def _error(api: int, message: str) -> int | None:
    create = _ErrorCreate(_WORD.from_address(api + 8 * _API_ERROR_CREATE).value)
    arguments = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message.encode(), _INTERNAL)
    return create(ctypes.byref(arguments))
