"""The one registry of lowerings: which operator is lowered, and by whom.

An entry has up to two roads. ``function`` is a function over ``jax.numpy`` whose StableHLO is
spliced into the module. ``stock`` says for which nodes Torch-MLIR's own lowering is known to give
eager's values; those nodes take it, because it is cheaper to compile. A node with neither road
is not supported and stays with ATen.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .functional import Opaque
from .region import CALLED, HigherOrderOperator, Region, inner_nodes, region
from .seeded import Seeded
from .types import CARRIERS, FLOAT8, MLIR_DTYPES, LoweringError

OpOverload = torch._ops.OpOverload
#: Key of ``node.meta``: the name of the node that a pass made this one from.
ORIGIN = "neuron_origin"

#: Key of ``node.meta``: why the graphs of a higher-order operator could not be traced.
UNTRACED = "neuron_untraced"

Predicate = Callable[[fx.Node], bool]
Validator = Callable[[fx.Node], str | None]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How one operator overload is lowered.

    ``refuse`` returns why a node cannot take any road, or ``None``. ``random`` operators get a
    seed as ``ctx.seed``. ``foreign`` ones are not of this package, so that its version does not
    tell what they do.
    """

    op: Any
    function: Callable[..., Any] | None = None
    stock: Predicate | None = None
    refuse: Validator | None = None
    random: bool = False
    foreign: bool = False


_REGISTRY: dict[Any, Lowering] = {}
#: Calls (see ``_call``) that Torch-MLIR or a lowering turned out to refuse in this process.
_REFUSED: dict[str, str] = {}
#: Those of them that hold in other processes: lowerings of the user's own may change.
_LASTING: set[str] = set()
#: Operators that may have float8 operands and results, and for which nodes.
_FLOAT8: dict[Any, Predicate] = {}
_registered: list[Any] = []


def _register(op: Any, **fields: Any) -> None:
    if isinstance(op, torch._ops.OpOverloadPacket):
        raise TypeError(f"{op} has several overloads: register one of them")
    old = _REGISTRY.get(op, Lowering(op))
    for name, value in fields.items():
        if value not in (None, False) and getattr(old, name) not in (None, False):
            raise ValueError(f"{op}: its {name!r} is registered twice")
    _REGISTRY[op] = dataclasses.replace(
        old, **{k: v for k, v in fields.items() if v not in (None, False)}
    )
    _registered.append(op)


def lowers(
    *ops: Any,
    refuse: Validator | None = None,
    random: bool = False,
    foreign: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function over ``jax.numpy`` as the lowering of ``ops``.

    It is called as ``function(ctx, *args, **kwargs)`` with the node's arguments, tensors as JAX
    arrays; it returns one array or a tuple, in the order of the operator's results.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _register(op, function=function, refuse=refuse, random=random, foreign=foreign)
        return function

    return decorate


def torch_mlir_lowers(*ops: Any, when: Predicate) -> None:
    """Trust Torch-MLIR with the nodes of ``ops`` for which ``when`` holds."""
    for op in ops:
        _register(op, stock=when)


def takes_float8(*ops: Any, when: Predicate = lambda node: True) -> None:
    """Let the nodes of ``ops`` for which ``when`` holds have float8 operands and results."""
    _FLOAT8.update(dict.fromkeys(ops, when))


def wrap(op: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``around`` the function that is registered for ``op``."""
    entry = _REGISTRY[op]
    assert entry.function is not None
    _REGISTRY[op] = dataclasses.replace(entry, function=around(entry.function))


def lookup(op: Any) -> Lowering | None:
    """The entry of an operator overload, a region or a seeded operator, or ``None``."""
    if isinstance(op, Seeded):
        entry = _REGISTRY.get(op.op)
        return entry and dataclasses.replace(entry, random=False)
    if not isinstance(op, Region):
        return _REGISTRY.get(op)
    entry = _REGISTRY.get(op.op)
    inner = (lookup(node.target) for node in inner_nodes(op))
    random = any(found is not None and found.random for found in inner)
    return entry and dataclasses.replace(entry, random=random)


def foreign(node: fx.Node) -> bool:
    """Whether a node is lowered, or one in its graphs, by a function not of this package."""
    found = region(node)
    inner = [] if found is None else [inner.target for inner in inner_nodes(found)]
    entries = map(lookup, (called(node), *inner))
    return any(entry is not None and entry.foreign for entry in entries)


def called(node: fx.Node) -> Any:
    """What a node calls, whatever target Torch-MLIR's importer must see."""
    return node.meta.get(CALLED, node.target)


def registered() -> Iterator[Lowering]:
    """All entries."""
    return iter(tuple(_REGISTRY.values()))


def version() -> int:
    """A number that changes with every registration."""
    return len(_registered)


def node_tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The (fake) tensors among a node's operands and results."""
    for operand in node.all_input_nodes:
        yield from result_tensors(operand)
    yield from result_tensors(node)


def result_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors among a node's results."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def is_check(node: fx.Node) -> bool:
    """Whether a node has no results: it is there to raise."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def origin(node: fx.Node) -> str:
    """The name of the node in the graph that was handed in."""
    return str(node.meta.get(ORIGIN, node.name))


def signature(node: fx.Node) -> str:
    """Operator, shapes and dtypes of a node, for messages."""
    operands = ", ".join(
        _describe(tensor) for operand in node.all_input_nodes for tensor in result_tensors(operand)
    )
    return f"{called(node)}({operands})"


def _describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(size) for size in tensor.shape)}]"


def _call(node: fx.Node) -> str:
    """All that decides how a node is lowered: its signature, its numbers and its results."""
    operands = {operand: f"%{index}" for index, operand in enumerate(node.all_input_nodes)}
    arguments = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
    results = ", ".join(map(_describe, result_tensors(node)))
    return f"{signature(node)} {arguments} -> {results}"


def why_unsupported(node: fx.Node) -> str | None:
    """Why this ``call_function`` node cannot be lowered, or ``None`` if it can.

    This is the one question that the partitioner asks.
    """
    if node.target is operator.getitem:
        source = node.args[0]
        return why_unsupported(source) if isinstance(source, fx.Node) else "not a tuple"
    if isinstance(node.target, Opaque):
        return node.target.reason
    entry = lookup(called(node))
    if entry is None:
        return f"no lowering is registered for {node.target}"
    for tensor in node_tensors(node):
        if tensor.layout is not torch.strided:
            return f"layout {tensor.layout} is not supported"
        if tensor.device.type not in ("cpu", "meta"):
            return f"a tensor is on device {tensor.device}"
        if tensor.dtype not in MLIR_DTYPES:
            return f"dtype {tensor.dtype} is not supported"
        if tensor.dtype in FLOAT8 and not _FLOAT8.get(node.target, lambda node: False)(node):
            return f"it is not lowered for {tensor.dtype}"
    if isinstance(node.target, Region | HigherOrderOperator):
        reason = _why_region_unsupported(node)
        if reason is not None:
            return reason
    if entry.refuse is not None and (reason := entry.refuse(node)):
        return reason
    if entry.function is None and entry.stock is not None and not entry.stock(node):
        return f"{node.target} has no lowering for this signature"
    return _REFUSED.get(_call(node)) if _REFUSED else None


def _why_region_unsupported(node: fx.Node) -> str | None:
    """The first reason in the graphs of a region, all of which JAX traces."""
    found = region(node)
    if found is None:
        return str(node.meta.get(UNTRACED, "its graphs were not traced"))
    for inner in inner_nodes(found):
        if any(_is_symbolic(leaf) for leaf in pytree.tree_leaves(inner.meta.get("val"))):
            return f"in its graph, {inner.target} makes a size that depends on data"
        reason = why_unsupported(inner)
        entry = lookup(inner.target)
        if reason is None and entry is not None and entry.function is None:
            reason = "it has no spliced lowering"
        if reason is not None:
            return f"in its graph, {signature(inner)}: {reason}"
    return None


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not all(isinstance(size, int) for size in leaf.shape)
    return isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)


def takes_stock(node: fx.Node) -> bool:
    """Whether Torch-MLIR's own lowering is used for a supported node."""
    entry = lookup(called(node))
    if entry is None or entry.stock is None or not entry.stock(node):
        return False
    if entry.function is not None and any(t.dtype in CARRIERS for t in node_tensors(node)):
        return False
    return entry.function is None or not _REFUSED or f"stock {_call(node)}" not in _REFUSED


def remember_refusal(node: fx.Node, reason: str, *, lasting: bool = True) -> None:
    """Note that Torch-MLIR refused this operator with these arguments.

    The spliced lowering takes over where there is one; else the node is unsupported. ``lasting``:
    any process would find it so.
    """
    entry = lookup(called(node))
    spliced = entry is not None and entry.function is not None and takes_stock(node)
    call = f"stock {_call(node)}" if spliced else _call(node)
    _REFUSED[call] = reason
    if lasting and (entry is None or not entry.foreign):
        _LASTING.add(call)


def refusals() -> int:
    """How many calls are known to be refused."""
    return len(_REFUSED)


def known_refusals() -> dict[str, str]:
    """What is refused, for :func:`adopt_refusals` in a worker of this process."""
    return dict(_REFUSED)


def adopt_refusals(known: Mapping[str, str]) -> None:
    """Refuse what another process does, and nothing else."""
    _REFUSED.clear()
    _REFUSED.update(known)


def lasting_refusals() -> dict[str, str]:
    """What any other process would find refused, too, as data to keep."""
    return {call: reason for call, reason in _REFUSED.items() if call in _LASTING}


def restore_refusals(known: Mapping[str, str]) -> None:
    """Take up what :func:`lasting_refusals` gave, in this process or another."""
    _REFUSED.update(known)
    _LASTING.update(known)


def forget_refusals() -> None:
    """Forget what Torch-MLIR refused (after ``torch.compiler.reset`` and in tests)."""
    _REFUSED.clear()
    _LASTING.clear()


def require(node: fx.Node) -> Lowering:
    """The entry of a node that must be lowered.

    Raises:
        LoweringError: naming operator, overload, shapes, dtypes and reason.
    """
    reason = why_unsupported(node)
    entry = lookup(called(node))
    if entry is None or reason is not None:
        raise LoweringError(f"{signature(node)}: {reason}", node.name)
    return entry
