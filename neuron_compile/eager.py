"""A graph of AOT Autograd, run by ATen: it is functional, so it gives eager's values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import fx

from .effects import plain_checks
from .mutating import functional_calls
from .torch_internals import has_symbols, outside_fake_mode


def eagerly(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A boxed callable that runs ``graph``, as it is now, in eager PyTorch."""
    module = plain_checks(graph)
    if not has_symbols(module):
        with outside_fake_mode():  # which addresses arguments share is asked of real tensors
            module = functional_calls(module)
    # The code and what it reads: a graph with its descriptions of tensors would be larger.
    code = module.graph.python_code("self")
    names = {str(node.target).split(".")[0] for node in module.graph.find_nodes(op="get_attr")}
    held = types.SimpleNamespace(**{name: getattr(module, name) for name in names})

    @functools.cache
    def function() -> Callable[..., Any]:
        found: dict[str, Any] = dict(code.globals)
        exec(code.src, found)
        return found["forward"]  # type: ignore[no-any-return]

    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return function()(held, *taken)

    return run
