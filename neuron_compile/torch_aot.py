"""The boundary to AOT Autograd and to the cache of its graphs, torch's private API.

Tested with torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import codecache, output_code
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.compiler import config as compiler_config
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.package.importer import ObjMismatchError, ObjNotFoundError, sys_importer

from .torch_internals import autograd_decomposes, memory

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


def prefetch_key() -> None:
    """Let torch compute, in a thread of its own, the digest of its sources, which is a part of
    AOTAutogradCache's key and takes 0.1 s, while Dynamo traces."""
    prefetch = getattr(codecache.torch_key, "prefetch", None)
    if prefetch is None or compiler_config.force_disable_caches:
        return
    prefetch()
    if hasattr(os, "register_at_fork"):
        # A child has not the thread that it would wait for.
        os.register_at_fork(after_in_child=codecache.torch_key.clear)  # type: ignore[attr-defined]


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


#: Namespaces of operators whose gradients and meanings torch's version tells.
_TORCHS = frozenset({"aten", "prim", "prims"})


def custom_operator(module: fx.GraphModule) -> str | None:
    """The name of an operator not of torch's in a Dynamo graph, or in one that it holds.

    AOT Autograd traces through the gradient that was registered for it, and through its own code
    if it is composite: Python of the user's, which AOTAutogradCache's key does not know.
    """
    for graph in module.modules():
        for node in graph.graph.nodes if isinstance(graph, fx.GraphModule) else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverload):
                target = target.overloadpacket
            if isinstance(target, torch._ops.OpOverloadPacket):
                name = str(target._qualified_op_name)
                if name.split("::", maxsplit=1)[0] not in _TORCHS:
                    return name
    return None


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


def static_input_indices() -> frozenset[int]:
    """Positions of the forward graph's inputs that are parameters or buffers."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return frozenset()
    return frozenset(metadata.static_input_indices or ())
