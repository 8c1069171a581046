"""What PyTorch itself makes of a compiled program: ATen, in the strides FakeTensor promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from ..support import layout


def promised(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """``backend="aot_eager"``, but results are laid out as FakeTensor says.

    A backend that compiles has nothing else to go by, and FakeTensor is wrong at times where a
    dimension of size 1 has a stride unlike eager's.
    """
    compiler: Callable[..., Any] = aot_autograd(fw_compiler=_compile, bw_compiler=_compile)
    return compiler(module, inputs)


def _compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    (results,) = module.graph.output_node().args
    promises = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in results]
    sources = set(module.graph.find_nodes(op="placeholder"))
    fixed = [isinstance(node, fx.Node) and node not in sources for node in results]

    def run(*args: Any) -> list[Any]:
        made = module(*args)
        return [
            _laid_out(tensor, promise) if free else tensor
            for tensor, promise, free in zip(made, promises, fixed, strict=True)
        ]

    return make_boxed_func(run)


def _laid_out(tensor: Any, promise: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or layout(tensor) == layout(promise):
        return tensor
    result = torch.empty_strided(promise.shape, promise.stride(), dtype=tensor.dtype)
    return result.copy_(tensor)
