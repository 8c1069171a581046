"""The TorchDynamo backend: ``torch.compile(model, backend="neuron")``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from . import logs
from .aot_cache import GraphCode, cache_tag, compiling
from .caching import open_cache
from .decompositions import decompositions, lowered_whole
from .errors import SettingsError
from .garbage import uncollected
from .lowering.trace import trace_on
from .randomness import COMPOSED_OF_DRAWS, seed_recomputation
from .runtime import (
    CompilerOptions,
    RuntimeCompileError,
    compile_stablehlo,
    forked,
    open_platform,
)
from .served import served
from .settings import Settings, resolve
from .torch_aot import aot_compile, custom_operator, prefetch_key, static_input_indices

logs.install()
prefetch_key()


def neuron(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph. Dynamo calls this through the entry point ``neuron``.

    Args:
        module: the graph as Dynamo captured it.
        example_inputs: its (fake) inputs.
        options: fields of :class:`neuron_compile.settings.Settings`.
        mode: a key of :data:`neuron_compile.settings.MODES`.

    Raises:
        SettingsError: for an unknown mode or option, or a value out of its range.
        PlatformError: if ``options["platform"]`` is not installed, listing those that are; in
            strict mode, in a process that was forked after something had been compiled.
        UnsupportedError: in strict mode, for an operator that cannot run on the device.
    """
    return compile_dynamo_graph(module, example_inputs, resolve(options, mode))


def compile_dynamo_graph(
    module: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> Callable[..., Any]:
    """Compile a Dynamo graph under resolved settings."""
    if not forked() or settings.fullgraph_on_device:
        open_device(settings)
    static: frozenset[int] = frozenset()

    cached = open_cache(settings) is not None
    if cached and (custom := custom_operator(module)) is not None:
        logs.log.info("AOT Autograd's graphs are not kept: a gradient of %s may change", custom)
        cached = False

    def compiled(graph: fx.GraphModule, kind: str, static: frozenset[int]) -> Callable[..., Any]:
        if cached:
            return GraphCode(graph, kind, static, lazy=kind == "backward")
        return served(graph, kind, static, settings)

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compiled(graph, "inference", static_input_indices())

    def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal static
        static = static_input_indices()
        return compiled(graph, "forward", static)

    def backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compiled(graph, "backward", _saved_parameters(graph, static))

    with uncollected(), compiling(module, settings):
        return aot_compile(
            module,
            example_inputs,
            inference=inference,
            forward=forward,
            backward=backward,
            decompositions=decompositions(),
            whole=lowered_whole() | (COMPOSED_OF_DRAWS if settings.eager_rng else set()),
            partitioned=functools.partial(seed_recomputation, eager=settings.eager_rng),
            cache_tag=cache_tag(settings) if cached else None,
            backward_at_once=settings.compile_in_parallel,
        )


def open_device(settings: Settings) -> None:
    """Make ready to compile, so that a missing platform or a wrong flag is an error at once.

    Raises:
        PlatformError, SettingsError: as :func:`neuron`.
    """
    trace_on(open_platform(settings.platform))
    _check_flags(settings.platform, settings.xla_options)


_EMPTY = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"


@functools.cache
def _check_flags(platform: str, flags: tuple[tuple[str, Any], ...]) -> None:
    """Let XLA judge its flags by themselves, lest it blame every operator of the user's graph."""
    if flags:
        try:
            compile_stablehlo(_EMPTY, CompilerOptions(platform, flags))
        except RuntimeCompileError as error:
            raise SettingsError(f"options['xla_options']: {error}") from error


def _saved_parameters(graph: fx.GraphModule, static: frozenset[int]) -> frozenset[int]:
    """Positions of a backward graph's inputs that are parameters saved by the forward.

    AOT Autograd names the forward's inputs ``primals_<n>``, from 1, in both graphs.
    """
    names = {f"primals_{index + 1}" for index in static}
    return frozenset(
        index
        for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if node.name in names
    )
