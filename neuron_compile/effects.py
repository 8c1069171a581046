"""Takes checks out of the tokens by which AOT Autograd keeps effects in order."""

from __future__ import annotations

import torch
from torch import fx

from .torch_internals import copied, with_effects

# Checks need no order among each other: an error is raised whichever fails first.
_CHECKS = (torch.ops.aten._linalg_check_errors.default,)


def plain_checks(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, or a copy in which checks are operators like others.

    ``with_effects(token, check, *args)[0]`` is the next token; at run time each is ``None``.
    """
    if not _wrapped_checks(module):
        return module
    module = copied(module)
    graph, tokens = module.graph, set()
    for node in _wrapped_checks(module):
        token = node.args[0]
        assert isinstance(token, fx.Node)
        with graph.inserting_before(node):
            check = graph.call_function(node.args[1], node.args[2:], node.kwargs)  # type: ignore[arg-type]
        check.meta = {**node.meta, "val": None}
        for getitem in list(node.users):
            getitem.replace_all_uses_with(token)
            graph.erase_node(getitem)
        graph.erase_node(node)
        tokens.add(token)
    output = graph.output_node()
    inputs = {x for x in tokens if x.op == "placeholder" and set(x.users) == {output}}
    output.args = fx.map_arg(output.args, lambda node: None if node in inputs else node)  # type: ignore[arg-type, return-value]
    for token in inputs:
        token.meta["val"] = None
    return module


def _wrapped_checks(module: fx.GraphModule) -> list[fx.Node]:
    nodes = module.graph.find_nodes(op="call_function", target=with_effects)
    return [node for node in nodes if node.args[1] in _CHECKS]
