"""Calls run in eager PyTorch until a thread of the pool has compiled their graph.

What runs meanwhile is the same functional graph, by ATen, so either half of a training step may be
compiled before the other: what a forward saves for its backward has one meaning in both. The
exception are numbers that the backward draws again from a saved seed (activation checkpointing),
which ATen and the device draw differently. A forward in eager therefore marks its seeds, and the
backward that gets a seed follows its mark, whatever is compiled by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
from torch import fx

from . import logs
from .compile_pool import pool
from .eager import eagerly
from .higher_order import adopt
from .lowering.seeded import SEED_ARGUMENT, Seeded, new_seed
from .randomness import HostDraws, host_draws
from .records import count, holding_warnings, warn_held
from .runtime import draw_seed
from .torch_internals import copied, outside_fake_mode, symbolic, with_own_descriptions

Runner = Callable[[list[Any]], Any]
Compiler = Callable[[fx.GraphModule], Runner]

#: In the second number of a seed: ATen drew from it. A generator's position never gets there.
_MARK = 1 << 62


def in_background(
    module: fx.GraphModule, kind: str, compile_it: Compiler, eager_rng: bool
) -> Runner:
    """A boxed callable for a graph with static sizes, which ``compile_it`` compiles in the pool.

    What the compilation raises is raised by the calls that come after it; its warnings about
    fallbacks are given by the first of them. A graph with sizes that depend on data is compiled
    here and now: torch's bookkeeping of such sizes belongs to the thread that traced it.
    """
    with outside_fake_mode():
        module = adopt(module)
        eager, seeds = _by_aten(module, eager_rng), _entering_seeds(module)
        if _depends_on_data(module, kind):
            compiled = compile_it(module)
        else:
            compiled = _Switch(eager, _submit(module, compile_it), waits=bool(seeds))
    return _following_seeds(seeds, eager, compiled) if seeds else compiled


def in_parallel(module: fx.GraphModule, kind: str, compile_it: Compiler) -> Runner:
    """A boxed callable as of :func:`in_background`, whose first call waits for its compilation."""
    with outside_fake_mode():
        module = adopt(module)
        if _depends_on_data(module, kind):
            return compile_it(module)
        return _Switch(eagerly(module), _submit(module, compile_it), waits=True)


def _depends_on_data(module: fx.GraphModule, kind: str) -> bool:
    found = any(symbolic(node.meta.get("val")) for node in module.graph.nodes)
    if found:
        reason = "sizes in it depend on data"
        logs.log.info("%s graph: compiled by the thread that traced it, since %s", kind, reason)
    return found


Job = Future[tuple[Runner, list[str]]]


def _submit(module: fx.GraphModule, compile_it: Compiler) -> Job:
    """Let the pool compile a copy of ``module``; a runner, and the warnings that it is to give."""
    own = with_own_descriptions(module)

    def job() -> tuple[Runner, list[str]]:
        with torch.no_grad(), holding_warnings() as held:
            return compile_it(own), held

    return pool().submit(job)


class _Switch:
    """Eager PyTorch until a job is done, then what it made.

    ``waits``: a call waits for the job instead, unless the interpreter is about to exit. A job
    that nobody waits for any more, since the graph was dropped, is cancelled if it was not begun.
    """

    def __init__(self, eager: Runner, job: Job, waits: bool) -> None:
        self._eager = eager
        self._job = job
        self._waits = waits
        self._compiled: Runner | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, job.cancel).atexit = False

    def __call__(self, args: list[Any]) -> Any:
        runner = self._compiled
        if runner is None:
            if self._waits or self._job.done():
                runner = self._settle()
            else:
                count("eager_calls")
                runner = self._eager
        return runner(args)

    def _settle(self) -> Runner:
        try:
            compiled, warnings = self._job.result()
        except CancelledError:
            return self._eager
        with self._lock:
            mine, warnings[:] = list(warnings), ()
            self._compiled = compiled
        warn_held(mine)
        return compiled


def _by_aten(module: fx.GraphModule, eager_rng: bool) -> Runner:
    """``module`` by ATen, with results in a sequence and marks in the seeds it draws."""
    host = host_draws(module) if eager_rng else HostDraws(module)
    prologue, eager = host.prologue, eagerly(_marking_seeds(host.module))
    single = not isinstance(module.graph.output_node().args[0], tuple | list)

    def run(args: list[Any]) -> Any:
        if prologue is not None:
            args.extend(prologue(*args))
        results = eager(args)
        # A partition of one result: compiled code gives it in a list.
        return [results] if single else results

    return run


def _marking_seeds(module: fx.GraphModule) -> fx.GraphModule:
    if not module.graph.find_nodes(op="call_function", target=new_seed):
        return module
    module = copied(module)
    for node in module.graph.find_nodes(op="call_function", target=new_seed):
        node.target = marked_seed
    return module


def marked_seed() -> torch.Tensor:
    """A seed as ``int64[2]`` that says that ATen draws from it."""
    seed = draw_seed()
    seed[1] = _MARK
    return seed


def _entering_seeds(module: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs that are seeds of a forward."""
    used = {
        node.kwargs[SEED_ARGUMENT]
        for node in module.graph.nodes
        if isinstance(node.target, Seeded) and SEED_ARGUMENT in node.kwargs
    }
    placeholders = module.graph.find_nodes(op="placeholder")
    return tuple(index for index, node in enumerate(placeholders) if node in used)


def _following_seeds(seeds: tuple[int, ...], eager: Runner, compiled: Runner) -> Runner:
    """``eager`` for the seeds that eager drew from, ``compiled`` for all others."""

    def run(args: list[Any]) -> Any:
        marked = {int(args[index][1]) >= _MARK for index in seeds}
        if len(marked) > 1:
            raise RuntimeError(
                "a backward got seeds of two forward calls, one of them in eager PyTorch; "
                "unset compile_in_background for this model"
            )
        if marked == {True}:
            count("eager_calls")
            return eager(args)
        return compiled(args)

    return run
