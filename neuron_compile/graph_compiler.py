"""Compiles one AOT graph: partition, lower, compile, and recover where a compiler refuses."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import logs
from .background import in_background, in_parallel
from .caching import Compiled, compiled, keep_refusals, recall_refusals
from .classify import Boundary, bound
from .dynamic import Bucketer, Runner, Specializer
from .effects import plain_checks
from .errors import UnsupportedError
from .higher_order import adopt
from .isolation import CompilerCrashed, lower_and_compile_isolated
from .lowering import LoweredModule, LoweringError, lower, signature, why_unsupported
from .lowering.registry import is_check, refusals, remember_refusal, takes_stock
from .partition import LATE, Partitioned, eager_nodes, is_operator, partition
from .randomness import REASON, HostDraws, draws, host_draws
from .records import (
    DEVICE,
    EAGER,
    HOST,
    GraphRecord,
    OperatorRecord,
    count,
    record_graph,
)
from .runtime import (
    Check,
    Executor,
    Neff,
    ResultSpec,
    RuntimeCompileError,
    Signature,
    compile_stablehlo,
    results_plan,
)
from .scalars import take_scalars
from .settings import Settings
from .torch_internals import boxed, copied, has_symbols, outside_fake_mode, user_line

_REFUSALS = (LoweringError, RuntimeCompileError)


class _Refused(Exception):
    """A compiler refused nodes of the whole graph: partition again without them."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__()
        self.reasons = reasons


def compile_graph(
    module: fx.GraphModule, kind: str, static: frozenset[int], settings: Settings
) -> Runner:
    """Compile a functional graph into a boxed callable.

    Args:
        module: a graph of ATen operators as AOT Autograd makes it; it is not changed.
        kind: ``inference``, ``forward`` or ``backward`` (for the report).
        static: positions of the inputs that are parameters or buffers.

    Raises:
        UnsupportedError: if an operator cannot run on the device and
            ``settings.fullgraph_on_device`` is set.
    """
    module = plain_checks(module)
    scalars = take_scalars(module, static) if has_symbols(module) else None
    if scalars is not None:
        runner = compile_graph(scalars.module, kind, scalars.static, settings)
        return boxed(scalars.serve(runner))
    if has_symbols(module):
        # A gradient through a size that depends on data meets it again, in what ATen made.
        return boxed(serve(module, kind, static, settings, nested=True))
    return boxed(_served(module, kind, static, settings))


def serve(
    module: fx.GraphModule,
    kind: str,
    static: frozenset[int],
    settings: Settings,
    *,
    nested: bool,
) -> Runner:
    """A graph with symbolic sizes, which is compiled when it is called.

    ``nested``: what still has sizes that depend on data then stays in eager.
    """

    def compiled(module: fx.GraphModule) -> Runner:
        return _served(module, kind, static, settings, nested)

    server = Specializer if settings.dynamic_shapes == "specialize" else Bucketer
    return server(module, kind, settings, compiled)


def _served(
    module: fx.GraphModule,
    kind: str,
    static: frozenset[int],
    settings: Settings,
    nested: bool = False,
) -> Runner:
    """A graph with static sizes, compiled now or by the pool's threads."""

    def compile_it(module: fx.GraphModule) -> Runner:
        return _compile_static(module, kind, static, settings, nested)

    if settings.compile_in_background:
        return in_background(module, kind, compile_it, settings.eager_rng)
    if settings.compile_in_parallel:
        return in_parallel(module, kind, compile_it)
    with outside_fake_mode():
        return compile_it(module)


def _compile_static(
    module: fx.GraphModule,
    kind: str,
    static: frozenset[int],
    settings: Settings,
    nested: bool = False,
) -> Runner:
    recall_refusals(settings)
    module = adopt(module)
    host = host_draws(module) if settings.eager_rng else HostDraws(module)
    refused = dict(host.left)
    while True:
        seconds: collections.Counter[str] = collections.Counter()
        try:
            runner = _compile_partitioned(host, kind, static, settings, refused, seconds, nested)
        except _Refused as error:
            count("refusals")
            refused.update(error.reasons)
        else:
            return runner if host.prologue is None else _behind(host.prologue, runner)


def _behind(prologue: fx.GraphModule, runner: Runner) -> Runner:
    """Run ``runner`` with what ``prologue`` makes of the arguments as further ones."""

    def run(args: list[Any]) -> Any:
        args.extend(prologue(*args))
        return runner(args)

    return run


def _compile_partitioned(
    host: HostDraws,
    kind: str,
    static: frozenset[int],
    settings: Settings,
    refused: Mapping[str, str],
    seconds: collections.Counter[str],
    nested: bool,
) -> Runner:
    started = time.perf_counter()
    module = host.module
    eager = eager_nodes(module, refused, nested)
    missing = {node: why for node, why in eager.items() if why != REASON}
    if missing and settings.fullgraph_on_device:
        raise UnsupportedError(_explain_strict(missing))
    parts = partition(module, eager)
    seconds.update({"partition": time.perf_counter() - started})
    counts: collections.Counter[str] = collections.Counter()
    if parts.whole:
        runner = _compile_partition(module, static, settings, seconds, counts)
    else:
        runner = _assemble(parts, kind, static, settings, seconds, counts)
    record_graph(
        GraphRecord(
            kind=kind,
            operators=_records(host, eager),
            partitions=counts["partitions"],
            vendor_kernels=counts["vendor_kernels"],
            seconds=dict(seconds),
        )
    )
    return runner


def _assemble(
    parts: Partitioned,
    kind: str,
    static: frozenset[int],
    settings: Settings,
    seconds: collections.Counter[str],
    counts: collections.Counter[str],
) -> Runner:
    """Put compiled partitions into the graph whose other operators ATen runs."""
    graph = parts.module.graph
    parameters = {x for i, x in enumerate(graph.find_nodes(op="placeholder")) if i in static}
    for call in graph.find_nodes(op="call_module"):
        name = str(call.target)
        inner = getattr(parts.module, name)
        kept = frozenset(index for index, arg in enumerate(call.args) if arg in parameters)
        if name.startswith(LATE):
            runner = serve(inner, kind, kept, settings, nested=True)
        else:
            runner = _compile_partition(inner, kept, settings, seconds, counts)
        setattr(parts.module, name, _Partition(runner, _single_result(inner)))
    parts.module.recompile()
    forward = parts.module.forward

    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return forward(*taken)

    return run


class _Partition(torch.nn.Module):
    """A compiled partition as a submodule of the graph around it."""

    def __init__(self, runner: Runner, single: bool) -> None:
        super().__init__()
        self._runner = runner
        self._single = single

    def forward(self, *args: Any) -> Any:
        results = self._runner(list(args))
        return results[0] if self._single else results


def _single_result(module: fx.GraphModule) -> bool:
    return not isinstance(module.graph.output_node().args[0], tuple | list)


def _compile_partition(
    module: fx.GraphModule,
    static: frozenset[int],
    settings: Settings,
    seconds: collections.Counter[str],
    counts: collections.Counter[str],
) -> Runner:
    """Lower and compile a graph whose every operator is supported."""
    boundary, numbers = _boundary(module, static)
    if not _computes(boundary):
        return _trivial(boundary.signature.results)
    try:
        made = _compiled(boundary, settings)
    except _REFUSALS as error:
        at_fault = _at_fault(module, error, settings)
        keep_refusals(settings)
        raise _Refused(at_fault) from error
    seconds.update(made.seconds)
    counts["partitions"] += 1
    counts["vendor_kernels"] += made.neff.vendor_kernels
    checks = _checks(module, made)
    executor = Executor(
        made.neff, dataclasses.replace(boundary.signature, checks=checks), boundary.constants
    )
    logs.artifacts(boundary, made, executor, settings.dump_dir)
    return _entry(executor, numbers)


@dataclasses.dataclass(frozen=True)
class WholeGraph:
    """A graph that runs on the device alone. ``neff`` is ``None`` if it computes nothing."""

    neff: Neff | None
    signature: Signature
    constants: tuple[torch.Tensor, ...]


def compile_whole(module: fx.GraphModule, static: frozenset[int], settings: Settings) -> WholeGraph:
    """Compile a functional graph of static sizes, whose inputs are tensors, for use elsewhere.

    Args:
        module: a graph of ATen operators as AOT Autograd makes it; it is not changed.
        static: positions of the inputs that keep their memory between calls.

    Raises:
        UnsupportedError: listing all operators that cannot run on the device, or that have to
            draw random numbers on the host (``settings.eager_rng``).
    """
    module = adopt(plain_checks(module))
    refused: dict[str, str] = {}
    if settings.eager_rng:
        refused = {node.name: REASON for node in module.graph.nodes if draws(node)}
    while True:
        eager = eager_nodes(module, refused)
        if eager:
            raise UnsupportedError(_explain(eager, "these operators cannot", _NO_EAGER_GRAPH))
        boundary, _ = _boundary(module, static)
        if not _computes(boundary):
            return WholeGraph(None, boundary.signature, ())
        try:
            made = _compiled(boundary, settings)
        except _REFUSALS as error:
            refused.update(_at_fault(module, error, settings))
            continue
        signature = dataclasses.replace(boundary.signature, checks=_checks(module, made))
        return WholeGraph(made.neff, signature, boundary.constants)


def _computes(boundary: Boundary) -> bool:
    """Whether a graph has results to compute, or assertions, which have none."""
    return any(spec.kind == "tensor" for spec in boundary.signature.results) or any(
        map(is_check, boundary.module.graph.nodes)
    )


def _checks(module: fx.GraphModule, made: Compiled) -> tuple[Check, ...]:
    """The checks of a module with the user's lines that made them."""
    if not made.checks:
        return ()
    lines = {node.name: user_line(node) for node in module.graph.nodes}
    return tuple(
        Check(check.error, check.message + (f" (at {line})" if line else ""))
        for check in made.checks
        for line in [lines.get(check.node_name)]
    )


def _boundary(module: fx.GraphModule, static: frozenset[int]) -> tuple[Boundary, frozenset[int]]:
    """A copy of ``module`` between contiguous tensors, and the inputs that are numbers."""
    work = copied(module)
    output = work.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        output.args = ((output.args[0],),)
    placeholders = work.graph.find_nodes(op="placeholder")
    numbers = frozenset(
        index
        for index, node in enumerate(placeholders)
        if not isinstance(node.meta.get("val"), torch.Tensor)
    )
    for index in numbers:
        work.graph.erase_node(placeholders[index])
    kept = [index for index in range(len(placeholders)) if index not in numbers]
    static = frozenset(position for position, index in enumerate(kept) if index in static)
    return bound(work, static), numbers


def _compiled(boundary: Boundary, settings: Settings) -> Compiled:
    if logs.wants_torch_dialect() or settings.dump_dir is not None:
        settings = dataclasses.replace(settings, cache=False)  # which holds no Torch dialect
    return compiled(boundary, settings, functools.partial(_lower_and_compile, boundary))


def _lower_and_compile(boundary: Boundary, settings: Settings) -> tuple[LoweredModule, Neff]:
    options = settings.compiler_options
    capture = logs.wants_torch_dialect() or settings.dump_dir is not None
    if settings.isolate_compiler:
        done = lower_and_compile_isolated(
            boundary.module, options, capture_torch=capture, checked=settings.check_indices
        )
        if done is not None:
            return done
    lowered = lower(boundary.module, capture_torch=capture, checked=settings.check_indices)
    return lowered, compile_stablehlo(lowered.stablehlo, options)


def _entry(executor: Executor, numbers: frozenset[int]) -> Runner:
    def run(args: list[Any]) -> Any:
        results = executor(args)
        args.clear()
        return results

    def run_without_numbers(args: list[Any]) -> Any:
        tensors = [arg for index, arg in enumerate(args) if index not in numbers]
        args.clear()
        return executor(tensors)

    return run_without_numbers if numbers else run


def _trivial(results: Sequence[ResultSpec]) -> Runner:
    """A graph that computes nothing: its results are inputs, their views, numbers, ``None``."""
    plan = results_plan(results)

    def run(args: list[Any]) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        args.clear()
        return plan(tensors, [])

    return run


def _at_fault(
    module: fx.GraphModule, error: LoweringError | RuntimeCompileError, settings: Settings
) -> dict[str, str]:
    """The nodes that a compiler cannot take, each with the reason.

    Where no diagnostic names one, each operator and signature is compiled on its own; where all
    of them pass, the partition as a whole is at fault. Nothing is at fault if it turned out that
    Torch-MLIR refuses nodes that also have a spliced lowering, which they take from now on.
    """
    if isinstance(error, CompilerCrashed):
        settings = dataclasses.replace(settings, isolate_compiler=True)
    reason = str(error)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    named = [node for node in nodes if node.name == getattr(error, "node_name", None)]
    if named:
        _remember(named[0], error)
        return {named[0].name: reason}
    known = refusals()
    found: dict[str, str] = {}
    tried: dict[str, str | None] = {}
    for node in nodes:
        if node.target is operator.getitem:
            continue
        key = f"{signature(node)} {node.args} {node.kwargs}"
        if key not in tried:
            tried[key] = _refusal_alone(_alone(module, node), node, settings)
        alone = tried[key]
        if alone is not None:
            found[node.name] = alone
    if found or refusals() > known:
        return found
    return {node.name: f"a partition with this operator was refused: {reason}" for node in nodes}


def _remember(node: fx.Node, error: Exception) -> bool:
    """Keep a refusal by Torch-MLIR, which holds under all settings, unlike XLA's.

    Returns whether another lowering of the node takes over.
    """
    if not isinstance(error, LoweringError):
        return False
    stock = takes_stock(node)
    # A worker may have died of something else: too little memory, or by somebody's hand.
    remember_refusal(node, str(error), lasting=not isinstance(error, CompilerCrashed))
    return stock and why_unsupported(node) is None


def _refusal_alone(module: fx.GraphModule, node: fx.Node, settings: Settings) -> str | None:
    """Why ``module``, a graph of this node alone, is refused, or ``None`` if it compiles."""
    while True:
        boundary, _ = _boundary(module, frozenset())
        try:
            _lower_and_compile(boundary, settings)
        except _REFUSALS as error:
            if not _remember(node, error):
                return str(error)
        else:
            return None


def _alone(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """A graph of one operator."""
    graph = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}
    for operand in node.all_input_nodes:
        placeholder = graph.placeholder(operand.name)
        placeholder.meta["val"] = operand.meta["val"]
        inputs[operand] = placeholder
    copy = graph.node_copy(node, inputs.__getitem__)
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        results = []
        for position, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                result = graph.call_function(operator.getitem, (copy, position))
                result.meta["val"] = item
                results.append(result)
        graph.output(tuple(results))
    else:
        graph.output((copy,))
    return fx.GraphModule(module, graph)


def _records(host: HostDraws, eager: Mapping[fx.Node, str]) -> tuple[OperatorRecord, ...]:
    places = dict.fromkeys(host.drawn, HOST)
    places |= {node: HOST if why == REASON else EAGER for node, why in eager.items()}
    return tuple(
        OperatorRecord(
            operator=str(node.target),
            signature=signature(node),
            where=where,
            reason=REASON if where == HOST else eager.get(node, ""),
            user_line=user_line(node),
        )
        for node in (*host.drawn, *host.module.graph.nodes)
        if is_operator(node) and node.target is not operator.getitem
        for where in [places.get(node, DEVICE)]
    )


def _explain_strict(eager: Mapping[fx.Node, str]) -> str:
    head = "fullgraph_on_device is set, but these operators cannot"
    return _explain(eager, head, "unset fullgraph_on_device to run these in eager PyTorch.")


_NO_EAGER_GRAPH = "leave that part out of the exported model: a package has no eager PyTorch."


def _explain(eager: Mapping[fx.Node, str], head: str, last_resort: str) -> str:
    lines = [f"{head} run on the device:"]
    for node, reason in eager.items():
        if node.target is not operator.getitem:
            line = user_line(node)
            lines.append(f"  {signature(node)}: {reason}" + (f" (at {line})" if line else ""))
    lines.append(
        "Register a lowering with neuron_compile.register_lowering, rewrite the line with "
        f"supported operators, or {last_resort}"
    )
    return "\n".join(lines)
