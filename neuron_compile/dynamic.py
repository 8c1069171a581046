"""Serves graphs with symbolic sizes: executables made on demand, in a bounded table."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from . import logs
from .bucket import CannotPad
from .bucket_rules import pad_graph
from .bucket_sizes import Sizes
from .records import count, note_unpadded
from .settings import Settings
from .specialize import call_key, specialize

Runner = Callable[[list[Any]], Any]
#: Compiles a graph with static sizes.
Compiler = Callable[[fx.GraphModule], Runner]

#: Numbers of executables for one graph that are worth a word.
_MANY = (16, 64, 256)
#: Combinations of sizes that ``dynamic_shapes="auto"`` gives executables of their own: the batch
#: and the last one, in training and in evaluation, are no more.
_EXACT = 4


class Specializer:
    """Serves a graph with symbolic sizes: one executable for each combination of sizes seen."""

    def __init__(
        self, module: fx.GraphModule, kind: str, settings: Settings, compiled: Compiler
    ) -> None:
        self._module = module
        self._kind = kind
        self._settings = settings
        self._compiled = compiled
        self._table: collections.OrderedDict[Any, Runner] = collections.OrderedDict()
        self._lock = threading.RLock()
        self._made = 0

    def __call__(self, args: list[Any]) -> Any:
        runner = self._kept(call_key(args), lambda: self._compiled(specialize(self._module, args)))
        return runner(args)

    def _kept(self, key: Any, make: Callable[[], Runner]) -> Runner:
        """The executable of ``key``, which ``make`` compiles."""
        with self._lock:
            runner = self._table.get(key)
            if runner is None:
                runner = make()
                count("specializations")
                self._table[key] = runner
                self._made += 1
                if self._made in _MANY:
                    logs.many_specializations(self._kind, self._made, self._settings)
                while len(self._table) > self._settings.max_specializations:
                    self._table.popitem(last=False)
            self._table.move_to_end(key)
            return runner


class Bucketer(Specializer):
    """Serves it by executables of padded sizes, where each operator is known to bear that.

    With ``dynamic_shapes="auto"``, the first combinations of sizes get executables of their own,
    which cost neither copies nor more than the real computation.
    """

    def __init__(
        self, module: fx.GraphModule, kind: str, settings: Settings, compiled: Compiler
    ) -> None:
        super().__init__(module, kind, settings, compiled)
        self._sizes = Sizes(module, settings.buckets)
        self._exact = 0 if settings.dynamic_shapes == "bucket" else _EXACT

    def __call__(self, args: list[Any]) -> Any:
        runner = None if self._sizes.hopeless else self._padded(args)
        return super().__call__(args) if runner is None else runner(args)

    def _padded(self, args: list[Any]) -> Runner | None:
        """The padded executable for a call; ``None`` where its sizes get one of their own."""
        with self._lock:
            padded = self._sizes.padded(self._sizes.of(args))
            if padded is None or self._has_own(args):
                return None
            exact = self._sizes.exact(args, padded)
            try:
                key = self._sizes.key(args, padded)
                return self._kept(key, lambda: self._pad(args, padded, exact))
            except CannotPad as error:
                logs.log.info("%s graph: sizes are specialized: %s", self._kind, error)
                note_unpadded(str(error))
                self._sizes.refuse(padded)
                return None

    def _has_own(self, args: list[Any]) -> bool:
        """Whether these sizes have an executable of their own, or shall get one."""
        return self._exact > 0 and (self._made < self._exact or call_key(args) in self._table)

    def _pad(self, args: list[Any], padded: Mapping[Any, int], exact: Mapping[Any, int]) -> Runner:
        sizes, found = self._sizes, pad_graph(self._module, args, padded, exact)
        runner = self._compiled(found.module)
        pad, cut = sizes.padder(found.padding), sizes.cutter(found.splits)
        count("padded")

        def run(args: list[Any]) -> Any:
            real, returned = sizes.of(args), sizes.returned(args)
            inputs = pad(args)
            args.clear()
            return cut(runner(inputs), real, returned)

        return run
