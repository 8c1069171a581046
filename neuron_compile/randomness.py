"""Random operators that must draw the same numbers twice, or those of eager PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .lowering import why_unsupported
from .lowering.registry import lookup
from .lowering.seeded import SEED_ARGUMENT, new_seed, seeded
from .runtime import draw_seed
from .torch_internals import copied

aten = torch.ops.aten
_save_state = torch.ops.higher_order.run_and_save_rng_state
_with_state = torch.ops.higher_order.run_with_rng_state

torch.library.impl("neuron_compile::seed", "CompositeExplicitAutograd", draw_seed)


def seed_recomputation(forward: fx.GraphModule, backward: fx.GraphModule, eager: bool) -> None:
    """Let operators that the backward runs again draw from a seed instead of a generator's state.

    AOT Autograd saves the state of torch's generator for random operators under activation
    checkpointing, and only ATen can draw from that. Both graphs are changed in place: a seed takes
    the place of each state among the results of the one and the inputs of the other; but states
    stay where the numbers shall be those of ``eager`` PyTorch.
    """
    saving = forward.graph.find_nodes(op="call_function", target=_save_state)
    again = backward.graph.find_nodes(op="call_function", target=_with_state)
    for state in (*(_part(node, 0) for node in saving), *(node.args[0] for node in again)):
        # Its size was taken for a dynamic one.
        state.meta["val"] = state.meta["val"].new_empty(torch.get_rng_state().shape)
    # States leave the forward, and enter the backward, in one order.
    order = {node: index for index, node in enumerate(forward.graph.output_node().all_input_nodes)}
    saving.sort(key=lambda node: order[_part(node, 0)])
    entering = {node: index for index, node in enumerate(backward.graph.nodes)}
    again.sort(key=lambda node: entering[node.args[0]])
    for first, second in zip(saving, again, strict=True):
        second.meta["val"] = _part(first, 1).meta["val"]
        if not eager:
            _seed(first, second)
    forward.recompile()
    backward.recompile()


def _seed(first: fx.Node, second: fx.Node) -> None:
    """Replace one operator in the forward and its twin in the backward, if it has a lowering."""
    state, result = _part(first, 0), _part(first, 1)
    op, *args = first.args
    with first.graph.inserting_before(first):
        seed = first.graph.call_function(new_seed)
        seed.meta["val"] = state.meta["val"].new_empty(2, dtype=torch.int64)
        drawn = _seeded(first.graph, op, args, first.kwargs, seed)
    drawn.meta = result.meta
    if why_unsupported(drawn) is not None:
        first.graph.erase_node(drawn)
        first.graph.erase_node(seed)
        return
    for old, new in ((state, seed), (result, drawn)):
        old.replace_all_uses_with(new)
        first.graph.erase_node(old)
    first.graph.erase_node(first)
    entered, op, *args = second.args
    assert isinstance(entered, fx.Node)
    entered.meta["val"] = seed.meta["val"]
    with second.graph.inserting_before(second):
        redrawn = _seeded(second.graph, op, args, second.kwargs, entered)
    redrawn.meta = second.meta
    second.replace_all_uses_with(redrawn)
    second.graph.erase_node(second)


def _part(node: fx.Node, index: int) -> fx.Node:
    """The node that takes one of the two results, state or value, of ``node``."""
    return next(
        user for user in node.users if user.target is operator.getitem and user.args[1] == index
    )


def _seeded(graph: fx.Graph, op: Any, args: Any, kwargs: Any, seed: fx.Node) -> fx.Node:
    return graph.call_function(seeded(op), tuple(args), {**kwargs, SEED_ARGUMENT: seed})


#: Operators that take nothing from a tensor but its layout.
_OF_LAYOUT = frozenset(
    {
        aten.bernoulli.p,
        aten.cauchy.default,
        aten.exponential.default,
        aten.geometric.default,
        aten.log_normal.default,
        aten.normal_functional.default,
        aten.rand_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randn_like.default,
        aten.uniform.default,
    }
)
#: What ATen composes of a draw and more, where torch's Python would take another operator.
COMPOSED_OF_DRAWS = frozenset({aten.dropout.default})
REASON = "eager_rng: torch's generator draws its numbers"


@dataclasses.dataclass(frozen=True)
class HostDraws:
    """A graph with ``eager_rng``: what ATen draws before it is called, and what is left.

    ``prologue`` takes the arguments of the graph and returns further ones for ``module``.
    ``drawn`` are the nodes that moved there, ``left`` the names of those that draw in ``module``,
    each with the reason to leave it to ATen.
    """

    module: fx.GraphModule
    prologue: fx.GraphModule | None = None
    drawn: tuple[fx.Node, ...] = ()
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _After:
    """The target of a node that draws after another one did, whose result comes first."""

    op: Any

    @property
    def __name__(self) -> str:  # torch.fx prints a call by the name of its target
        return f"after_{getattr(self.op, '__name__', self.op)}"

    def __str__(self) -> str:
        return str(self.op)

    def __call__(self, before: Any, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def draws(node: fx.Node) -> bool:
    """Whether ATen would take numbers from a generator for a node."""
    target: Any = node.target
    if target in (_save_state, _with_state):
        return True
    entry = lookup(target)
    if entry is not None:
        return entry.random
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def host_draws(module: fx.GraphModule) -> HostDraws:
    """Move what draws random numbers out of a graph with static sizes, in the order of the graph.

    What needs a result of the graph stays there, and so do all that draw after it, each behind the
    one before it. ``module`` is not changed.
    """
    if not any(node.op == "call_function" and draws(node) for node in module.graph.nodes):
        return HostDraws(module)
    module = copied(module)
    prologue = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    drawn: list[fx.Node] = []
    left: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            moved[node] = prologue.placeholder(node.name)
        elif node.target is operator.getitem and node.args[0] in drawn:
            moved[node] = prologue.node_copy(node, moved.__getitem__)
        elif node.op == "call_function" and draws(node):
            layout = _layout_operand(node)
            if left or any(x not in moved and x is not layout for x in node.all_input_nodes):
                left.append(node)
                continue
            operands = dict(moved)
            if layout is not None:
                operands[layout] = _empty(prologue, layout)
            moved[node] = prologue.node_copy(node, operands.__getitem__)
            if node.target is aten.bernoulli.p and layout is not None and _is_new(layout):
                moved[node].target = aten.bernoulli_.float
                node.meta = {**node.meta, "val": layout.meta["val"]}
            drawn.append(node)
    for before, after in itertools.pairwise(left):
        after.args = (before, *after.args)
        after.target = _After(after.target)
    taken = _take(module.graph, moved)
    prologue.output(tuple(moved[node] for node in taken))
    return HostDraws(
        module, fx.GraphModule(module, prologue), tuple(drawn), {x.name: REASON for x in left}
    )


def _layout_operand(node: fx.Node) -> fx.Node | None:
    """The tensor of which a drawing node needs the layout alone."""
    args = [arg for arg in node.args if not isinstance(arg, torch._ops.OpOverload)]
    held = [arg for arg in node.args if isinstance(arg, torch._ops.OpOverload)]
    op = held[0] if held else node.target
    operand = args[1 if node.target is _with_state else 0] if op in _OF_LAYOUT else None
    return operand if isinstance(operand, fx.Node) else None


def _is_new(node: fx.Node) -> bool:
    """Whether a tensor was made for what is drawn, as dropout does.

    It was drawn in place then. ``aten.bernoulli.p``, which the graph has for that, too, is alone
    in drawing in another order than its form in place does, where the tensor is not contiguous.
    """
    return getattr(node.target, "__name__", "").startswith(("empty", "zeros", "ones", "full"))


def _empty(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    return graph.call_function(
        aten.empty_strided.default,
        (list(value.shape), list(value.stride())),
        {"dtype": value.dtype, "device": value.device},
    )


def _take(graph: fx.Graph, moved: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Let placeholders at the end take the place of moved nodes that have a tensor for others."""
    placeholders = graph.find_nodes(op="placeholder")
    results = [
        node
        for node in moved
        if node.op != "placeholder"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and any(user not in moved for user in node.users)
    ]
    with graph.inserting_before(next(x for x in graph.nodes if x not in placeholders)):
        for index, node in enumerate(results):
            placeholder = graph.placeholder(f"drawn_{index}")
            placeholder.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user not in moved)
    for node in reversed(list(moved)):
        if node.op != "placeholder":
            graph.erase_node(node)
    return results
