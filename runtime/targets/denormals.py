"""Keeps denormal numbers on XLA:CPU, as ATen does.

XLA sets the processor's flags that flush them to zero: in the calling thread for the length of
each execution, and in the threads of its pool for their life. No option of XLA's changes that,
but a call inside of a program does: each program starts with one that clears the flags of its
thread, and the first one does so in the pool's threads, too. The rest of the program stands in a
function that reads the call's result, so XLA can run none of it earlier.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
from jaxlib.mlir import ir

from . import ffi

_TARGET_NAME = "neuron_compile.keep_denormals"
_BODY = "neuron_body"

#: Seconds that the pool's threads have to meet; they may be at work for another program.
_PATIENCE = 10.0

_lock = threading.Lock()
_cleared_pools: list[int] = []  # the sizes of those done: one, since our client is one


def keep(module: Any) -> None:
    """Let ``main`` of a StableHLO module, changed in place, clear the flags before all else."""
    register()
    with module.context, ir.Location.unknown():
        body = next(
            operation
            for operation in module.body.operations
            if ir.StringAttr(operation.attributes["sym_name"]).value == "main"
        )
        types = ir.FunctionType(ir.TypeAttr(body.attributes["function_type"]).value)
        token = ir.RankedTensorType.get([], ir.IntegerType.get_signless(8))
        _add_argument(body, types, token)
        _add_main(module, types, token)


def _add_argument(body: Any, types: Any, token: Any) -> None:
    """Make ``main`` a private function whose last argument nobody reads."""
    body.attributes["sym_name"] = ir.StringAttr.get(_BODY)
    body.attributes["sym_visibility"] = ir.StringAttr.get("private")
    wider = ir.FunctionType.get([*types.inputs, token], types.results)
    body.attributes["function_type"] = ir.TypeAttr.get(wider)
    body.regions[0].blocks[0].add_argument(token, ir.Location.unknown())


def _add_main(module: Any, types: Any, token: Any) -> None:
    with ir.InsertionPoint(module.body):
        main = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get("main"),
                "function_type": ir.TypeAttr.get(types),
            },
            regions=1,
        )
    block = main.regions[0].blocks.append(*types.inputs)
    with ir.InsertionPoint(block):
        cleared = ir.Operation.create(
            "stablehlo.custom_call",
            results=[token],
            attributes={
                "call_target_name": ir.StringAttr.get(_TARGET_NAME),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
                "has_side_effect": ir.BoolAttr.get(True),
            },
        ).result
        call = ir.Operation.create(
            "func.call",
            results=list(types.results),
            operands=[*block.arguments, cleared],
            attributes={
                "callee": ir.FlatSymbolRefAttr.get(_BODY),
                # Inlined, the body would not wait for the call.
                "mhlo.frontend_attributes": ir.DictAttr.get(
                    {"inlineable": ir.StringAttr.get("false")}
                ),
            },
        )
        ir.Operation.create("func.return", operands=list(call.results))


@functools.cache
def register() -> None:
    ffi.register_function(_TARGET_NAME, _clear, "cpu")


def _clear(frame: ffi.Frame) -> None:
    torch.set_flush_denormal(False)
    if not _cleared_pools:
        _clear_pool(frame)


def _clear_pool(frame: ffi.Frame) -> None:
    """Clear the flags in each thread of XLA's pool, by tasks that wait for each other."""
    with _lock:
        if _cleared_pools:
            return
        count = ffi.pool_size(frame)
        meeting = threading.Barrier(count + 1)
        caller = threading.get_ident()

        def task(_: Any) -> None:
            torch.set_flush_denormal(False)
            if threading.get_ident() == caller:
                meeting.abort()  # a full pool runs tasks in the thread that hands them in
            _meet(meeting)

        ffi.schedule(frame, task, count)
        _meet(meeting)
        _cleared_pools.append(count)


def _meet(meeting: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        meeting.wait(_PATIENCE)
