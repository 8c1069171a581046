"""Graphs from ``torch.export``: what goes in, what comes out, what is shared and what changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .decompositions import decompositions, lowered_whole
from .errors import PackageError
from .export_inputs import as_module
from .package_structures import leaf, structure
from .package_trees import Tree
from .runtime import ResultSpec, View
from .specialize import specialize
from .torch_aot import functional_program
from .torch_internals import copied, has_symbols, shared_inputs, size_expression, written_inputs

#: Checks that hold by the time a graph has static sizes: tracing has made them.
_PROVED = (torch.ops.aten._assert_tensor_metadata.default,)


@dataclasses.dataclass(frozen=True)
class CapturedWeight:
    """A parameter, a buffer or a tensor that the code held.

    ``names`` are all that the tensor has in the state dict; ``in_state`` is whether it has any.
    """

    name: str
    names: tuple[str, ...]
    tensor: torch.Tensor
    in_state: bool


@dataclasses.dataclass(frozen=True)
class Static:
    """A graph of static sizes whose inputs are tensors.

    Attributes:
        captured: what it comes from.
        module: its results are new values of ``mutations``, then the tensors in ``outputs``.
        sources: for each input ``("weight", n)`` of ``captured.weights``, or ``("input", n)`` of
            ``tensors``.
        tensors: the tensors among a call's arguments.
        inputs: the structure of ``(args, kwargs)``.
        outputs: the structure of the results; its tensors count from the first after mutations.
        mutations: positions of the inputs that change.
        shared: results that are inputs, or views of them, in eager PyTorch.
    """

    captured: Captured
    module: fx.GraphModule
    sources: tuple[tuple[str, int], ...]
    tensors: tuple[torch.Tensor, ...]
    inputs: Tree
    outputs: Tree
    mutations: tuple[int, ...]
    shared: Mapping[int, ResultSpec]

    def static_positions(self) -> Iterator[int]:
        """Positions of the inputs that are weights."""
        return (index for index, (kind, _) in enumerate(self.sources) if kind == "weight")


class Captured:
    """A model that ``torch.export`` captured, with symbolic sizes or without."""

    def __init__(self, program: Any, inputs: Sequence[Any], prefix: str) -> None:
        _refuse_shared_writes(program, inputs)
        #: As it was captured: it mutates what the model mutates.
        self._original = program
        self._program = functional_program(program, decompositions(), lowered_whole())
        #: The leaves of a call.
        self.inputs = tuple(inputs)
        names = _names_by_memory(program.state_dict, prefix)
        self.weights: list[CapturedWeight] = []
        self._sources: list[tuple[str, int]] = []
        leaves = 0
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self._sources.append(("input", leaves))
                leaves += 1
                continue
            self._sources.append(("weight", len(self.weights)))
            self.weights.append(self._weight(spec, names, prefix))

    def _weight(self, spec: Any, names: Mapping[Any, list[str]], prefix: str) -> CapturedWeight:
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if spec.kind not in kinds:
            raise PackageError(
                f"{spec.target} is a {spec.kind.name}: a package holds tensors, no objects"
            )
        program, name = self._program, str(spec.target)
        in_state = spec.kind is not InputKind.CONSTANT_TENSOR and spec.persistent is not False
        tensor = program.state_dict[name] if in_state else program.constants[name]
        known = tuple(names.get(_identity(tensor), ())) if in_state else ()
        return CapturedWeight(name.removeprefix(prefix), known, tensor.detach(), in_state)

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The leaves of another call, which must have the same structure.

        Raises:
            PackageError: where it has not.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        wanted = self._original.call_spec.in_spec
        if spec != wanted:
            raise PackageError(f"examples differ in structure: {spec}, not {wanted}")
        return tuple(leaves)

    def shapes(self) -> list[Any]:
        """The (symbolic) values of a call's leaves."""
        nodes = self._program.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self._sources, strict=True)
        return [node.meta.get("val") for node, (kind, _) in pairs if kind == "input"]

    def resized(
        self, sizes: Mapping[str, int], dims: Mapping[str, tuple[int, int]]
    ) -> tuple[Any, ...]:
        """The leaves of a call with other sizes; tensors hold no values that mean something.

        Args:
            dims: for each name the leaf and the dimension that have its size.
        """
        values = self.shapes()
        symbols: dict[Any, int] = {}
        for name, size in sizes.items():
            if name not in dims:
                raise PackageError(
                    f"sizes: no Dim is named {name!r}; dynamic_shapes has {', '.join(dims)}"
                )
            place, dim = dims[name]
            expression = size_expression(values[place].shape[dim])
            if not isinstance(expression, int):
                symbols[expression] = size
            elif expression != size:
                raise PackageError(f"sizes: {name!r} is {expression}, as the model demands")
        return tuple(
            _resized(example, value, symbols)
            for example, value in zip(self.inputs, values, strict=True)
        )

    def static(self, inputs: Sequence[Any]) -> Static:
        """The graph for a call with these leaves.

        Raises:
            PackageError: for a call that the graph is not for, an argument or result that a
                package cannot hold, or arguments that share memory and change.
        """
        self._check_ranges(inputs)
        every = [
            inputs[index] if kind == "input" else self.weights[index].tensor
            for kind, index in self._sources
        ]
        module = self._program.graph_module
        module = specialize(module, every) if has_symbols(module) else copied(module)
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _PROVED:
                module.graph.erase_node(node)
        return _Finisher(self, module, every, inputs).static()

    def shared(self, every: Sequence[Any]) -> list[Any]:
        """For each result, the input whose memory it shares; see ``shared_inputs``."""
        order = [str(spec.arg.name) for spec in self._original.graph_signature.input_specs]
        ours = [str(spec.arg.name) for spec in self._program.graph_signature.input_specs]
        given = dict(zip(ours, every, strict=True))
        found = shared_inputs(self._original.graph_module, [given[name] for name in order])
        return [item and (ours.index(order[item[0]]), *item[1:]) for item in found]

    @property
    def results(self) -> list[Any]:
        """What torch.export says of each result of the functional graph."""
        return list(self._program.graph_signature.output_specs)

    @property
    def targets(self) -> list[str]:
        """What torch.export calls each input: a name in the state dict, or an argument."""
        return [str(x.target or x.arg.name) for x in self._program.graph_signature.input_specs]

    @property
    def sources(self) -> list[tuple[str, int]]:
        """For each input of the graph ``("weight", n)`` or ``("input", n)``, a leaf of a call."""
        return list(self._sources)

    @property
    def structures(self) -> tuple[Any, Any]:
        """The tree specs of ``(args, kwargs)`` and of the results."""
        spec = self._original.call_spec
        return spec.in_spec, spec.out_spec

    def _check_ranges(self, inputs: Sequence[Any]) -> None:
        """Compare a call with the symbolic sizes: equal symbols, ranges, fixed numbers."""
        found: dict[Any, int] = {}
        ranges = self._program.range_constraints
        checks: list[tuple[int, Any, int]] = []
        for place, (value, given) in enumerate(zip(self.shapes(), inputs, strict=True)):
            if isinstance(value, torch.Tensor) != isinstance(given, torch.Tensor):
                raise PackageError(f"examples differ at leaf {place}: {type(given).__name__}")
            pairs = [(value, given)]
            if isinstance(value, torch.Tensor):
                if value.dtype != given.dtype or value.dim() != given.dim():
                    raise PackageError(f"examples differ in dtype or dimensions at leaf {place}")
                pairs = list(zip(value.shape, given.shape, strict=True))
            elif not isinstance(value, torch.SymInt):
                if type(value) is not type(given) or value != given:
                    raise PackageError(f"examples differ at leaf {place}: {given!r}, not {value!r}")
                continue
            for size, actual in pairs:
                expression = size_expression(size)
                if getattr(expression, "is_Symbol", False):
                    found.setdefault(expression, actual)
                checks.append((place, expression, actual))
        for place, expression, actual in checks:
            wanted = expression if isinstance(expression, int) else expression.subs(found)
            if wanted != actual:
                raise PackageError(
                    f"leaf {place} of the arguments has the size {actual}, where the model was "
                    f"exported for {wanted if isinstance(wanted, int) else expression}"
                )
        for symbol, size in found.items():
            allowed = ranges.get(symbol)
            if allowed is not None and not allowed.lower <= size <= allowed.upper:
                raise PackageError(
                    f"the size {size} is not within {allowed.lower} to {allowed.upper}, for which "
                    "the model was exported"
                )


class _Finisher:
    """Brings a graph into the form that a package holds."""

    def __init__(
        self,
        captured: Captured,
        module: fx.GraphModule,
        every: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        self._captured = captured
        self._module = module
        self._every = every
        self._inputs = inputs

    def static(self) -> Static:
        captured, graph = self._captured, self._module.graph
        results = list(graph.output_node().args[0])  # type: ignore[arg-type]
        specs = captured.results
        count = sum(spec.kind is not OutputKind.USER_OUTPUT for spec in specs)
        mutated = [self._mutated(spec) for spec in specs[:count]]
        leaves, shared = self._results(results, count)
        graph.output_node().args = (tuple(results),)
        graph.eliminate_dead_code()
        kept = self._keep({*mutated, *(spec.index for spec in shared.values())})
        self._module.recompile()
        new = {old: position for position, old in enumerate(kept)}
        tensors = [i for i, x in enumerate(self._inputs) if isinstance(x, torch.Tensor)]
        in_spec, out_spec = captured.structures
        return Static(
            captured=captured,
            module=self._module,
            sources=tuple(
                (kind, tensors.index(index) if kind == "input" else index)
                for kind, index in (captured.sources[old] for old in kept)
            ),
            tensors=tuple(self._inputs[i] for i in tensors),
            inputs=structure(
                in_spec, [self._input(x, tensors, i) for i, x in enumerate(self._inputs)]
            ),
            outputs=structure(out_spec, leaves),
            mutations=tuple(new[old] for old in mutated),
            shared={
                index: dataclasses.replace(spec, index=new[spec.index])
                for index, spec in shared.items()
            },
        )

    def _input(self, value: Any, tensors: Sequence[int], index: int) -> Tree:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout is not torch.strided:
                raise PackageError("arguments must be dense CPU tensors")
            return Tree("tensor", index=tensors.index(index))
        return leaf(value, "an argument")

    def _mutated(self, spec: Any) -> int:
        """The position of the input that a result is the new value of."""
        kinds = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
        parameter = getattr(OutputKind, "PARAMETER_MUTATION", None)
        if spec.kind not in (*kinds, parameter):
            raise PackageError(f"a result is a {spec.kind.name}, which a package does not hold")
        return self._captured.targets.index(str(spec.target))

    def _results(self, results: list[Any], count: int) -> tuple[list[Tree], dict[int, ResultSpec]]:
        """The leaves of the results' structure, and results that are made from inputs.

        What need not be computed becomes ``None`` in ``results``.
        """
        leaves: list[Tree] = []
        shared: dict[int, ResultSpec] = {}
        sharing = self._captured.shared(self._every)
        for index, origin in enumerate(sharing, count):
            item = results[index]
            if not isinstance(item, fx.Node):
                leaves.append(leaf(item, "a result"))
                results[index] = None
                continue
            if not isinstance(item.meta.get("val"), torch.Tensor):
                raise PackageError(
                    f"a result ({item.format_node()}) is a number that depends on data, or no "
                    "tensor: return a tensor"
                )
            leaves.append(Tree("tensor", index=index - count))
            if origin is not None:
                shared[index] = _from_input(*origin)
                results[index] = None
        return leaves, shared

    def _keep(self, needed: set[int]) -> list[int]:
        """Drop inputs that nothing uses; the positions of those that stay."""
        kept = []
        for index, node in enumerate(self._module.graph.find_nodes(op="placeholder")):
            if node.users or index in needed:
                kept.append(index)
            else:
                self._module.graph.erase_node(node)
        return kept


def _from_input(position: int, result: torch.Tensor, base: torch.Tensor) -> ResultSpec:
    """A result that is an input, or a view of one."""
    if result is base:
        return ResultSpec("input", position)
    begin = result.storage_offset() * result.element_size()
    begin -= base.storage_offset() * base.element_size()
    retyped = result.dtype if result.dtype != base.dtype else None
    return ResultSpec(
        "input",
        position,
        view=View(
            tuple(result.shape),
            tuple(result.stride()),
            begin // result.element_size(),
            tuple(base.stride()),
            retyped,
        ),
    )


def _refuse_shared_writes(program: Any, inputs: Sequence[Any]) -> None:
    """Refuse a model that writes to memory which two of its buffers share in part.

    torch.export and the functional graph take each for a tensor with a memory of its own.

    Raises:
        PackageError: naming what is written to.
    """
    leaves = iter(inputs)
    held = {**program.state_dict, **program.constants}
    specs = program.graph_signature.input_specs
    values = [
        next(leaves) if spec.kind is InputKind.USER_INPUT else held.get(str(spec.target))
        for spec in specs
    ]
    used = [bool(node.users) for node in program.graph.find_nodes(op="placeholder")]
    places = [
        x.untyped_storage().data_ptr()
        if use and isinstance(x, torch.Tensor) and x.layout is torch.strided
        else 0
        for x, use in zip(values, used, strict=True)
    ]
    if not any(place and places.count(place) > 1 for place in places):
        return
    for index in written_inputs(program.graph_module, values):
        if places[index] and places.count(places[index]) > 1:
            raise PackageError(
                f"{specs[index].target or specs[index].arg.name} is written to and shares memory "
                "with another parameter or buffer; make them one tensor, or clone one"
            )


def capture(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    strict: bool,
) -> Captured:
    """Export a model for one call; see :func:`neuron_compile.export`."""
    module, prefix = as_module(model)
    with torch.no_grad():
        program = torch.export.export(
            module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=strict
        )
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    wanted = program.call_spec.in_spec
    if spec != wanted:
        # torch.export sorts keyword arguments into the order of the function's own.
        names = [*wanted.children()[1].context]
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in names}))
    return Captured(program, leaves, prefix)


def _identity(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _names_by_memory(state: Mapping[str, torch.Tensor], prefix: str) -> dict[Any, list[str]]:
    """The names of each tensor of a state dict; tied ones have several."""
    found: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        found.setdefault(_identity(tensor), []).append(name.removeprefix(prefix))
    return found


def _resized(example: Any, value: Any, symbols: Mapping[Any, int]) -> Any:
    """A tensor like ``example`` with the sizes that ``value`` has for these symbols."""
    if isinstance(value, torch.SymInt):
        expression = size_expression(value)
        return int(expression.subs(symbols)) if not isinstance(expression, int) else example
    if not isinstance(value, torch.Tensor):
        return example
    expressions = [size_expression(size) for size in value.shape]
    shape = []
    for expression, size in zip(expressions, example.shape, strict=True):
        number = expression if isinstance(expression, int) else expression.subs(symbols)
        # A symbol that nobody asked to change keeps the size of the example.
        shape.append(int(number) if getattr(number, "is_number", True) else size)
    order = sorted(range(len(shape)), key=lambda dim: (-example.stride(dim), dim))
    moved = torch.empty([shape[dim] for dim in order], dtype=example.dtype)
    return moved.permute([order.index(dim) for dim in range(len(shape))])
