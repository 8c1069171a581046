"""The boundary to torch's private API above the runtime: Dynamo, AOT Autograd, fake tensors.

Tested with torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.inductor_prims  # registers prims.fma
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._higher_order_ops.auto_functionalize import (
    AsStridedViewInfo,
    SliceViewInfo,
    can_auto_functionalize,
    get_mutable_args,
    read_view_information_from_args,
)
from torch._inductor import codecache, output_code
from torch._library.utils import is_out
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.compiler import config as compiler_config
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.package.importer import ObjMismatchError, ObjNotFoundError, sys_importer
from torch.utils import _pytree as pytree

from .lowering.functional import Place

#: Wraps an operator with an effect: its first argument and result are tokens.
with_effects = torch.ops.higher_order.with_effects

#: Into this Dynamo turns ``addcmul``.
fma = torch.ops.prims.fma.default

#: What AOTAutogradCache keeps of a compiled graph; its subclasses say how they are pickled.
OutputCode = output_code.OutputCode

GraphCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def aot_compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inference: GraphCompiler,
    forward: GraphCompiler,
    backward: GraphCompiler,
    decompositions: dict[Any, Callable[..., Any]],
    whole: Iterable[Any],
    partitioned: Callable[[fx.GraphModule, fx.GraphModule], None],
    cache_tag: str | None,
    backward_at_once: bool,
) -> Callable[..., Any]:
    """Run AOT Autograd over a Dynamo graph and compile what it makes.

    With a ``cache_tag``, which becomes part of the key, AOTAutogradCache is used: the compilers
    must then return an ``OutputCode``, and that of the backward is called at once.

    Operators in ``whole`` arrive as they are, and their backward as an operator of its own, though
    torch has a decomposition that it would trace through above autograd. ``partitioned`` may
    change the forward and the backward graph, once the joint graph was cut into them.
    ``backward_at_once``: compile the backward after the forward, not when it is first called.
    """

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        forward, backward = _partition(joint, *args, **kwargs)
        partitioned(forward, backward)
        if not all(map(_has_a_name, backward.graph.nodes)):
            # It would be an error where the graph is kept. The patch of the config undoes this.
            functorch_config.bundled_autograd_cache = False
        return forward, backward

    at_once = backward_at_once or cache_tag is not None

    def compiler_of(graphs: GraphCompiler) -> Any:
        if cache_tag is None:
            return graphs
        return SerializableAOTDispatchCompiler(OutputCode, graphs)  # type: ignore[arg-type]

    def known_at_once(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        context = TracingContext.try_get()
        if context is not None and context.fw_metadata is not None:
            # Else it would refuse to run twice, for fear that it was given saved tensors to write
            # to. Ours writes to none.
            context.fw_metadata.bw_donated_idxs = []
        return backward(graph, inputs)

    compiler = aot_autograd(
        fw_compiler=compiler_of(forward),
        bw_compiler=compiler_of(known_at_once) if at_once else backward,
        inference_compiler=compiler_of(inference),
        partition_fn=partition,
        decompositions=decompositions,
    )
    with _without_python_kernels(whole), _backward_first(at_once), _cached_under(cache_tag):
        return compiler(module, example_inputs)


@contextlib.contextmanager
def _backward_first(at_once: bool) -> Iterator[None]:
    """Whether AOT Autograd calls the backward's compiler at once, not at the backward's first call.

    Its cache keeps nothing without the backward.
    """
    if not at_once:
        yield
        return
    mode = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    with functorch_config.patch(mode):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def _cached_under(tag: str | None) -> Iterator[None]:
    if tag is None:
        yield
        return
    key = f"{compiler_config.cache_key_tag} neuron {tag}"
    with (
        compiler_config.patch(cache_key_tag=key),  # type: ignore[attr-defined]
        functorch_config.patch(bundled_autograd_cache=True),  # type: ignore[attr-defined]
        _without_inductor(),
    ):
        yield


#: For AOTAutogradCache's key, these import Inductor's code generators, most of a second, and ask
#: them for passes that nobody else runs.
_OF_INDUCTOR = {
    "init_backend_registration": lambda: None,
    "custom_backend_passes": {},
    "custom_backend_codegen_configs": {},
}


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep Inductor out of a key. Dynamo's lock lets one thread compile."""
    before = {name: getattr(codecache, name) for name in _OF_INDUCTOR if hasattr(codecache, name)}
    vars(codecache).update({name: _OF_INDUCTOR[name] for name in before})
    try:
        yield
    finally:
        vars(codecache).update(before)


def _has_a_name(node: fx.Node) -> bool:
    """Whether what a node calls is found by its name, as in the code that PyTorch keeps."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return True
    try:
        sys_importer.get_name(node.target)
    except (ObjNotFoundError, ObjMismatchError):
        return False
    return True


class GraphPicklingError(Exception):
    """A graph holds what cannot be pickled."""


def graph_to_bytes(graph: fx.GraphModule, kept: frozenset[str]) -> bytes:
    """A graph with the metadata ``kept`` of its nodes, as a pickle.

    Raises:
        GraphPicklingError: for what no pickle can hold.
    """
    options = PicklerOptions(ops_filter=None, node_metadata_key_filter=kept.__contains__)
    try:
        with unset_fake_temporarily():
            return GraphPickler.dumps(graph, options)
    except Exception as error:  # whatever an object in the graph raises when it is pickled
        raise GraphPicklingError(f"{type(error).__name__}: {error}") from error


def graph_from_bytes(data: bytes, mode: FakeTensorMode) -> fx.GraphModule:
    """The inverse of :func:`graph_to_bytes`; tensors in the metadata are of ``mode``."""
    with unset_fake_temporarily():
        found: Any = GraphPickler.loads(data, mode)
        for module in found.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()  # graphs inside of it come without their code
    return found  # type: ignore[no-any-return]


def not_cacheable(reason: str) -> Exception:
    """What keeps a result out of AOTAutogradCache, with its reason in the log."""
    return BypassAOTAutogradCache(reason)


def functional_program(
    program: Any, decompositions: dict[Any, Callable[..., Any]], whole: Iterable[Any]
) -> Any:
    """An ``ExportedProgram`` whose graph is functional, as AOT Autograd makes it for a compiler.

    Composite operators are traced through, but those in ``whole`` arrive as they are.
    """
    with _without_python_kernels(whole), torch.no_grad(), warnings.catch_warnings():
        # torch copies its own description of a leaf, which warns of itself.
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        composite = torch.export.default_decompositions()
        table = {op: function for op, function in composite.items() if autograd_decomposes(op)}
        return program.run_decompositions({**table, **decompositions})


def shared_inputs(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> list[tuple[int, torch.Tensor, torch.Tensor] | None]:
    """Which results of a graph share the memory of an input, by running it on fake tensors.

    The graph may mutate its inputs: that is how eager PyTorch itself would share.

    Returns:
        For each result the position of the input, the (fake) result and the (fake) input; both
        are one object where eager returns the input itself.
    """
    mode = fake_mode()
    with unset_fake_temporarily(), torch.no_grad():
        fakes = fake_inputs(mode, inputs)
        with mode:
            results = pytree.tree_leaves(module(*fakes))
    found: list[tuple[int, torch.Tensor, torch.Tensor] | None] = []
    for result in results:
        same = [i for i, fake in enumerate(fakes) if fake is result]
        same += [i for i, fake in enumerate(fakes) if _one_memory(fake, result)]
        found.append((same[0], result, fakes[same[0]]) if same else None)
    return found


def written_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Positions of the inputs that a graph writes to, by running it on fake tensors."""
    mode = fake_mode()
    with unset_fake_temporarily(), torch.no_grad():
        # Each with a memory of its own, or a write to one would count for all that share it.
        apart = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        fakes = fake_inputs(mode, apart)
        before = [x._version if isinstance(x, torch.Tensor) else 0 for x in fakes]
        with mode:
            module(*fakes)
        after = [x._version if isinstance(x, torch.Tensor) else 0 for x in fakes]
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new != old]


def _one_memory(one: Any, other: Any) -> bool:
    """Whether two tensors share memory, and a view can say how."""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.layout is other.layout is torch.strided
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _partition(
    joint: fx.GraphModule, *args: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph in two; what it saves of an input that it changes is a copy.

    AOT Autograd writes the change after the forward, and autograd would then refuse the saved
    input in the backward.
    """
    forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
    graph = forward.graph
    output = graph.output_node()
    meanings = output.meta.get("desc") or ()
    changed = {x.mutated_input for x in meanings if isinstance(x, InputMutationAOTOutput)}
    memories = {
        memory(node)
        for node in graph.find_nodes(op="placeholder")
        if node.meta.get("desc") in changed
    } - {None}
    if not memories:
        return forward, backward
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for index, (node, meaning) in enumerate(zip(results, meanings, strict=True)):
        if isinstance(meaning, SavedForBackwardsAOTOutput) and memory(node) in memories:
            with graph.inserting_before(output):
                results[index] = graph.call_function(torch.ops.aten.clone.default, (node,))
            results[index].meta["val"] = node.meta["val"].clone()
    output.args = (tuple(results),)
    forward.recompile()
    return forward, backward


def results_alias(module: fx.GraphModule) -> bool:
    """Whether two results that the user sees are not the same tensor, but share its memory.

    Gradients and what a forward saves for the backward are not seen; views of arguments are made
    by AOT Autograd itself.
    """
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    meanings = output.meta.get("desc") or [None] * len(results)
    hidden = SavedForBackwardsAOTOutput | GradAOTOutput
    seen = {
        result
        for result, meaning in zip(results, meanings, strict=True)
        if isinstance(result, fx.Node) and not isinstance(meaning, hidden)
    }
    arguments = {memory(node) for node in module.graph.find_nodes(op="placeholder")} | {None}
    memories = [found for node in seen if (found := memory(node)) not in arguments]
    return len(set(memories)) < len(memories)


def memory(node: Any) -> int | None:
    """What identifies the storage of a node's tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


_ABOVE_AUTOGRAD = (
    torch._C.DispatchKey.Autograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)


@contextlib.contextmanager
def _without_python_kernels(ops: Iterable[Any]) -> Iterator[None]:
    """Let the dispatcher take the C++ kernels of ``ops`` while it runs in Python.

    Only tracing runs the dispatcher in Python, and Dynamo's lock lets one thread trace.
    """
    kept = {
        op: {key: op.py_kernels.pop(key) for key in _ABOVE_AUTOGRAD if key in op.py_kernels}
        for op in ops
    }
    for op in kept:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in kept.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def decomposed_above_autograd(op: Any) -> list[Any]:
    """The overloads of an operator's packet that torch decomposes in Python above autograd."""
    packet = op.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [
        overload
        for overload in overloads
        if torch._C.DispatchKey.Autograd in overload.py_kernels and not overload._schema.is_mutable
    ]


def core_decompositions(more: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions and those of the operators in ``more``.

    The public table also imports ``torch.export`` to add operators that autograd decomposes
    anyway, which costs a fresh process half a second.
    """
    return {**get_decompositions(more), **_core_aten_decompositions_post_autograd()}


def static_input_indices() -> frozenset[int]:
    """Positions of the forward graph's inputs that are parameters or buffers."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return frozenset()
    return frozenset(metadata.static_input_indices or ())


def has_symbols(module: fx.GraphModule) -> bool:
    """Whether an input's value or size is symbolic."""
    placeholders = module.graph.find_nodes(op="placeholder")
    return any(symbolic(node.meta.get("val")) for node in placeholders)


def symbolic(values: Any) -> bool:
    """Whether numbers among ``values`` are symbolic, or layouts of tensors."""
    return any(
        isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        for value in pytree.tree_leaves(values)
        for number in _layout(value)
    )


def free_symbols(values: Any) -> set[Any]:
    """The symbols in the numbers among ``values``, and in layouts of tensors."""
    return {
        symbol
        for value in pytree.tree_leaves(values)
        for number in _layout(value)
        if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool)
        for symbol in number.node.expr.free_symbols
    }


def _layout(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (value,)
    strides = value.stride() if value.layout is torch.strided else ()
    return (*value.shape, *strides)


def size_expression(size: Any) -> Any:
    """A size as an int, or as a sympy expression in a graph's symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph may be changed; tensors that the graph holds are shared."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def with_own_descriptions(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose ``meta["val"]`` belong to a fake mode of their own, for another thread.

    A fake mode marks in itself that a kernel is being asked, so two threads must not share one.
    Which descriptions share memory stays as it is.
    """
    module = copied(module)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in made:
            with in_kernel_invocation_manager(value.fake_mode):
                plain = value.detach()
            made[id(value)] = FakeTensor(
                mode, plain, value.fake_device, requires_grad=value.requires_grad
            )
        return made[id(value)]

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(own, node.meta["val"])
    return module


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Make real tensors from real tensors, though AOT Autograd compiles under a fake mode."""
    return unset_fake_temporarily()


def retraced(
    graph: fx.GraphModule, inputs: Sequence[Any], decompositions: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """``graph`` traced again for (fake) inputs of static sizes, by the given decompositions.

    Its nodes keep their lines in the user's code.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return fx.Interpreter(graph).run(*args)

    with unset_fake_temporarily(), torch.no_grad(), mode:
        fakes = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for value in inputs
        ]
        return make_fx(run, decomposition_table=decompositions)(*fakes)


def fake_mode() -> FakeTensorMode:
    """A fake-tensor mode of its own, whose only symbols are sizes that depend on data."""
    return FakeTensorMode(shape_env=ShapeEnv())


def fake_inputs(mode: FakeTensorMode, args: Sequence[Any]) -> list[Any]:
    """Fake versions of real arguments; numbers stay."""
    return [
        mode.from_tensor(arg, static_shapes=True) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]


_STACK_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def user_line(node: fx.Node) -> str:
    """``file:line in function`` of the user's code that made a node, or an empty string."""
    found = _STACK_LINE.findall(node.meta.get("stack_trace") or "")
    return "{}:{} in {}".format(*found[-1]) if found else ""


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments as one list, which it empties."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def is_dispatched(op: Any) -> bool:
    """Whether an overload is a tensor operator (TorchScript has others, ``aten.add.str``)."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def autograd_decomposes(op: Any) -> bool:
    """Whether an overload is made of others before a backend can see it."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def can_be_functional(op: Any) -> bool:
    """Whether AOT Autograd makes an operator that changes its arguments functional."""
    return bool(can_auto_functionalize(op))


def is_out_operator(op: Any) -> bool:
    """Whether an operator writes its results into arguments that it does not read."""
    return bool(is_out(op))


def mutated_places(
    op: Any, arguments: dict[str, Any], bases: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``auto_functionalized_v2`` knows of the arguments of ``op``: those that are read, and
    where those that are changed lie in the bases (lists for lists, ``None`` for ``None``)."""
    names, types = get_mutable_args(op)
    rest = dict(arguments)
    views = read_view_information_from_args(names, types, rest, list(bases))

    def place(info: Any) -> Place | None:
        if info is None:
            return None
        base = bases[info.base_index]
        size, stride, begin = tuple(base.shape), tuple(base.stride()), int(base.storage_offset())
        if isinstance(info, SliceViewInfo):
            # Its numbers count from the begin of the storage.
            dim = int(info.dim)
            start, end = (int(bound) - begin // stride[dim] for bound in (info.start, info.end))
            size = (*size[:dim], end - start, *size[dim + 1 :])
            offset = start * stride[dim]
            return Place(info.base_index, size, stride, offset, slice=(dim, start, end))
        if isinstance(info, AsStridedViewInfo):
            size, stride = tuple(map(int, info.size)), tuple(map(int, info.stride))
            return Place(info.base_index, size, stride, info.storage_offset - begin)
        return Place(info.base_index, size, stride, 0, whole=True)

    return rest, pytree.tree_map(place, views)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a description, of a fake mode's."""
    return isinstance(tensor, FakeTensor)
