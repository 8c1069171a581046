"""Operators on which a compiler ends its process, and a worker's XLA that does.

A worker of ``isolate_compiler`` imports this module to have the lowerings.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import neuron_compile
from neuron_compile.runtime import pjrt

#: Set in workers alone: XLA dies of a module that contains this.
XLA_DIES_OF = "NEURON_TESTS_XLA_DIES_OF"


@torch.library.custom_op("tests_crashing::abort", mutates_args=())
def abort(x: torch.Tensor) -> torch.Tensor:
    """Doubles; its lowering ends the process."""
    return x * 2


@torch.library.custom_op("tests_crashing::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    """Triples; its lowering is as it should be."""
    return x * 3


for _op in (abort, plain):
    _op.register_fake(torch.empty_like)


@neuron_compile.register_lowering(abort)
def _abort(ctx: Any, x: Any) -> Any:
    os.abort()


@neuron_compile.register_lowering(plain)
def _plain(ctx: Any, x: Any) -> Any:
    return x * 3


if XLA_DIES_OF in os.environ:
    _compile_module = pjrt.compile_module

    def _dying(module: Any, *args: Any) -> Any:
        if os.environ[XLA_DIES_OF] in str(module):
            os.abort()
        return _compile_module(module, *args)

    pjrt.compile_module = _dying
