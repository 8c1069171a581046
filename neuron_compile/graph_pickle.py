"""A partition's graph as bytes, for a compiler in another process of this machine.

The bytes are a pickle: they go to a process that this one started, and come from no one else.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .lowering.region import CALLED, HigherOrderOperator, held
from .lowering.registry import ORIGIN, UNTRACED
from .torch_internals import fake_mode, is_fake

#: What the lowering reads of a node, besides the description of its value.
_KEPT = (ORIGIN, CALLED, UNTRACED)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A description of a tensor: of a fake mode's, or on device meta."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class _Reference:
    """Stands for the n-th node of a graph among the arguments of another."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    value: Any
    meta: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Graph:
    nodes: Sequence[_Node]
    attributes: Mapping[str, Any]


def graph_to_bytes(module: fx.GraphModule) -> bytes:
    """``module``, whose sizes are static, as bytes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: where its nodes hold what no other process
            can have, such as a local function.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(_described(module))
    return stream.getvalue()


def graph_from_bytes(data: bytes) -> fx.GraphModule:
    """The module again; its tensors' descriptions are those of a new fake mode."""
    _in_thread.mode = fake_mode()
    try:
        return _rebuilt(pickle.loads(data))
    finally:
        _in_thread.mode = None


_in_thread = threading.local()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _overload, (value.namespace, value._opname, value._overloadname)
        if isinstance(value, HigherOrderOperator):
            return _higher_order, (value.name(),)
        if isinstance(value, fx.GraphModule):  # of a region
            return _rebuilt, (_described(value),)
        if isinstance(value, torch.Tensor) and (is_fake(value) or value.is_meta):
            return _made, (_of(value),)
        return NotImplemented


def _of(tensor: torch.Tensor) -> _Tensor:
    return _Tensor(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
    )


def _described(module: fx.GraphModule) -> _Graph:
    references: dict[fx.Node, Any] = {
        node: _Reference(index) for index, node in enumerate(module.graph.nodes)
    }
    nodes = []
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), references.__getitem__)
        kept = {key: node.meta[key] for key in _KEPT if key in node.meta}
        described = (node.op, node.name, node.target, args, kwargs, node.meta.get("val"), kept)
        nodes.append(_Node(*described))
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    return _Graph(nodes, {name: held(module, name) for name in names})


def _rebuilt(described: _Graph) -> fx.GraphModule:
    root = torch.nn.Module()
    names = {name: name.replace(".", "_") for name in described.attributes}
    for name, value in described.attributes.items():
        setattr(root, names[name], value)
    graph = fx.Graph()
    made: list[fx.Node] = []
    for node in described.nodes:
        args, kwargs = pytree.tree_map(
            lambda leaf: made[leaf.index] if isinstance(leaf, _Reference) else leaf,
            (node.args, node.kwargs),
        )
        target = names[node.target] if node.op == "get_attr" else node.target
        made.append(graph.create_node(node.op, target, args, kwargs, node.name))
        made[-1].meta.update(node.meta)
        made[-1].meta["val"] = node.value
    return fx.GraphModule(root, graph)


def _overload(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)


def _made(described: _Tensor) -> torch.Tensor:
    with _in_thread.mode:
        tensor = torch.empty_strided(
            described.shape, described.stride, dtype=described.dtype, device=described.device
        )
        if described.offset:
            reach = tensor.untyped_storage().nbytes() // tensor.element_size()
            base = tensor.new_empty(reach + described.offset)
            tensor = base.as_strided(described.shape, described.stride, described.offset)
        return tensor.requires_grad_(described.requires_grad)
