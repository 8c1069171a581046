"""Arguments and results of a graph: what each is, and how it crosses into the executable."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .lowering import seed_random_operators
from .lowering.region import Region
from .lowering.types import CARRIERS
from .runtime import ArgumentSpec, ResultSpec, Signature, View

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A graph whose placeholders and results are contiguous tensors, and its signature.

    ``constants`` are tensors that the graph held; they follow the arguments.
    """

    module: fx.GraphModule
    signature: Signature
    constants: tuple[torch.Tensor, ...]


def dense_permutation(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a dense tensor is contiguous, or ``None`` if it is not
    dense (it has gaps, overlaps or broadcast dimensions)."""
    shape, stride = tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], shape[dim] == 1))
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes ``permutation``."""
    result = [0] * len(permutation)
    for position, dim in enumerate(permutation):
        result[dim] = position
    return tuple(result)


def bound(module: fx.GraphModule, static: frozenset[int]) -> Boundary:
    """Make every placeholder and result of ``module`` (changed in place) a contiguous tensor.

    Args:
        static: positions of arguments that are parameters or buffers.
    """
    # In this order the constants follow the arguments, and the seed is last.
    constants = hoist_constants(module)
    seeded = seed_random_operators(module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    arguments = placeholders[: len(placeholders) - len(constants) - int(seeded)]
    wanted = list(graph.output_node().args[0])  # type: ignore[arg-type]
    sources = _Sources(arguments)
    specs = tuple(
        _bind_argument(graph, node, index in static) for index, node in enumerate(arguments)
    )
    results = _bind_results(graph, wanted, sources)
    return Boundary(module, Signature(specs, results, seeded), constants)


def hoist_constants(module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Turn tensors that the graph holds into placeholders: the IR holds no data."""
    constants: list[torch.Tensor] = []
    placeholders = module.graph.find_nodes(op="placeholder")
    last = placeholders[-1] if placeholders else None
    for node in module.graph.find_nodes(op="get_attr"):
        value = _attribute(module, node.target)  # type: ignore[arg-type]
        where = (
            module.graph.inserting_after(last)
            if last is not None
            else module.graph.inserting_before(next(iter(module.graph.nodes)))
        )
        with where:
            placeholder = module.graph.placeholder(f"constant_{len(constants)}")
        placeholder.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        last = placeholder
        node.replace_all_uses_with(placeholder)
        module.graph.erase_node(node)
        carrier = CARRIERS.get(value.dtype)
        constants.append(value if carrier is None else value.view(carrier))
    return tuple(constants)


def _attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the graph holds {path}, a {type(value).__name__}")
    return value


def _bind_argument(graph: fx.Graph, node: fx.Node, static: bool) -> ArgumentSpec:
    value = node.meta["val"]
    permutation = dense_permutation(value)
    spec = ArgumentSpec(
        name=node.name,
        shape=tuple(value.shape),
        dtype=value.dtype,
        permutation=None if value.is_contiguous() else permutation,
        static=static,
        dense=permutation is not None,
        carrier=CARRIERS.get(value.dtype),
    )
    if spec.permutation is not None:
        back = inverse(spec.permutation)
        with graph.inserting_after(node):
            restored = graph.call_function(aten.permute.default, (node, list(back)))
        restored.meta["val"] = value
        node.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not restored)
        node.meta["val"] = value.permute(spec.permutation)
    return spec


class _Sources:
    """Which results share memory with an argument or with each other, as they do in ATen."""

    def __init__(self, arguments: Sequence[fx.Node]) -> None:
        self.positions = {node: index for index, node in enumerate(arguments)}
        self._values = {node: node.meta["val"] for node in arguments}

    def value(self, node: fx.Node) -> torch.Tensor:
        """The tensor of a node, before arguments were made contiguous."""
        value: torch.Tensor = self._values.get(node, node.meta["val"])
        return value

    def base(self, node: fx.Node) -> fx.Node:
        """The node that allocated the memory of ``node`` (itself, for most)."""
        memory = _memory(node.meta["val"])
        while True:
            source = node
            for operand in node.all_input_nodes:
                if isinstance(operand.target, Region):
                    # Calls with equal graphs get the descriptions of the first one's results.
                    continue
                values = operand.meta.get("val")
                values = values if isinstance(values, tuple | list) else [values]
                if any(_memory(value) == memory for value in values):
                    source = operand
            if source is node:
                break
            node = source
        if isinstance(node.meta["val"], torch.Tensor):
            return node
        # One of several results: the first node that takes it out.
        return next(user for user in node.users if _memory(user.meta.get("val")) == memory)

    def view(self, node: fx.Node, base: fx.Node) -> View | None:
        """How ``node`` lies in the memory of ``base``; ``None`` if strides cannot tell."""
        value: Any = node.meta["val"]
        whole: Any = self.value(base)
        if not isinstance(whole, torch.Tensor):
            return None
        retyped = value.dtype != whole.dtype
        # The real view of a complex argument is one that autograd must know.
        if retyped and base in self.positions and (value.requires_grad or whole.requires_grad):
            return None
        if value.is_conj() != whole.is_conj() or value.is_neg() != whole.is_neg():
            return None
        if base not in self.positions and (
            dense_permutation(whole) is None
            or whole.numel() * whole.element_size() != whole.untyped_storage().nbytes()
        ):
            return None
        size = value.element_size()
        begin = value.storage_offset() * size - whole.storage_offset() * whole.element_size()
        if begin % size:
            return None
        return View(
            tuple(value.shape),
            tuple(value.stride()),
            begin // size,
            tuple(whole.stride()),
            value.dtype if retyped else None,
        )


def _memory(value: Any) -> Any:
    """What identifies the storage of a (fake) tensor; ``None`` if it has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _bind_results(
    graph: fx.Graph, wanted: Sequence[Any], sources: _Sources
) -> tuple[ResultSpec, ...]:
    output = graph.output_node()
    results = _Results(graph, output, sources)
    nodes = {x for x in wanted if isinstance(x, fx.Node) and x.meta.get("val") is not None}
    shared = collections.Counter(sources.base(node) for node in nodes)
    specs = tuple(results.bind(item, shared) for item in wanted)
    output.args = (tuple(results.tensors),)
    return specs


class _Results:
    """Collects what the executable must produce while each result of the graph is bound."""

    def __init__(self, graph: fx.Graph, output: fx.Node, sources: _Sources) -> None:
        self.tensors: list[fx.Node] = []
        self._graph = graph
        self._output = output
        self._sources = sources
        self._produced: dict[fx.Node, ResultSpec] = {}

    def bind(self, item: Any, shared: Mapping[fx.Node, int]) -> ResultSpec:
        """The spec of one result. ``shared`` counts the results in the memory of each node."""
        if not isinstance(item, fx.Node):
            return ResultSpec("none") if item is None else ResultSpec("constant", value=item)
        if item.meta.get("val") is None:
            return ResultSpec("none")
        positions = self._sources.positions
        if item in positions:
            return ResultSpec("input", positions[item])
        base = self._sources.base(item)
        view = self._sources.view(item, base) if base is not item else None
        if view is not None and base in positions:
            return ResultSpec("input", positions[base], view=view)
        if view is not None and (shared[base] > 1 or _overlaps(item.meta["val"])):
            return dataclasses.replace(self._produce(base), permutation=None, view=view)
        return self._produce(item)

    def _produce(self, node: fx.Node) -> ResultSpec:
        if node not in self._produced:
            with self._graph.inserting_before(self._output):
                tensor, spec = _bind_tensor(self._graph, node, len(self.tensors))
                dtype = node.meta["val"].dtype
                if dtype in CARRIERS:
                    spec = dataclasses.replace(spec, dtype=dtype)
                self._produced[node] = spec
            self.tensors.append(tensor)
        return self._produced[node]


def _overlaps(value: torch.Tensor) -> bool:
    """Whether elements share memory otherwise than along broadcast dimensions (``unfold``)."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if stride > 0 and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _bind_tensor(graph: fx.Graph, node: fx.Node, index: int) -> tuple[fx.Node, ResultSpec]:
    value = node.meta["val"]
    if value.is_contiguous():
        return node, ResultSpec("tensor", index)
    permutation = dense_permutation(value)
    if permutation is not None:
        moved = graph.call_function(aten.permute.default, (node, list(permutation)))
        moved.meta["val"] = value.permute(permutation)
        return moved, ResultSpec("tensor", index, permutation=inverse(permutation))
    narrowed, base = value, node
    for dim in range(value.dim()):
        if value.stride(dim) == 0 and value.shape[dim] > 1:
            narrowed = narrowed.narrow(dim, 0, 1)
            base = graph.call_function(aten.slice.Tensor, (base, dim, 0, 1))
            base.meta["val"] = narrowed
    sizes = tuple(value.shape) if base is not node else None
    stride = None if narrowed.is_contiguous() else tuple(narrowed.stride())
    return base, ResultSpec("tensor", index, expand=sizes, stride=stride)
