"""The threads that compile: a bounded pool, of which a process has one.

XLA lets go of the interpreter's lock while it compiles, so a job leaves the rest of the program
its time. The pool is not one of ``concurrent.futures``, which run all that is queued before the
interpreter may exit, and wait for ever in a forked child: here the end of the main thread and a
fork both empty the queue, and an exit waits for no more than the jobs that run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .errors import SettingsError

T = TypeVar("T")

#: How many threads compile at once; by default as many as there are cores for this process, to 4.
ENVIRONMENT = "NEURON_COMPILE_THREADS"
_MOST = 4


class CompilePool:
    """Runs jobs in the order they came in, on at most ``limit`` threads, started as needed.

    The threads are no daemons: native code that came back to an interpreter that is gone would
    end the process by a signal.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reset()

    def _reset(self) -> None:
        # The garbage collector may drop a future's last user, who cancels it, at any line here.
        self._lock = threading.RLock()
        self._queue: collections.deque[tuple[Future[Any], Callable[[], Any]]] = collections.deque()
        self._unfinished: set[Future[Any]] = set()
        self._workers = 0

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job. Its future is cancelled if the interpreter exits before it was begun."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.append((future, job))
            self._unfinished.add(future)
            start = self._workers < self.limit
            self._workers += start
        future.add_done_callback(self._finished)
        if start:
            threading.Thread(target=self._work, name="neuron-compile").start()
        return future

    def pending(self) -> int:
        """Jobs that wait or run."""
        return len(self._unfinished)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the jobs of now, ``timeout`` seconds at most; returns whether they are done."""
        with self._lock:
            unfinished = set(self._unfinished)
        return not concurrent.futures.wait(unfinished, timeout).not_done

    def _finished(self, future: Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            future, job = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            # Not kept while the thread waits for its end: a job holds a graph.
            del taken, future, job

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if self._queue and threading.main_thread().is_alive():
                return self._queue.popleft()
            left = list(self._queue)
            self._queue.clear()
            self._workers -= 1
        for future, _ in left:
            future.cancel()
        return None


def _limit() -> int:
    wanted = os.environ.get(ENVIRONMENT, "")
    if not wanted:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return min(cores, _MOST)
    if not wanted.isdigit() or int(wanted) < 1:
        raise SettingsError(f"{ENVIRONMENT} must be an int of at least 1, not {wanted!r}")
    return int(wanted)


_pools: list[CompilePool] = []
_making = threading.Lock()


def pool() -> CompilePool:
    """The pool of this process.

    Raises:
        SettingsError: for a number of threads in the environment that is none.
    """
    with _making:
        if not _pools:
            made = CompilePool(_limit())
            if hasattr(os, "register_at_fork"):
                # The threads, and whoever held the lock, stayed in the parent.
                os.register_at_fork(after_in_child=made._reset)
            _pools.append(made)
        return _pools[0]


def wait_for_compilations(timeout: float | None = None) -> bool:
    """Wait until every compilation that was begun or queued in the background has ended.

    The next call of each graph then takes the compiled code, or raises what its compilation did.

    Args:
        timeout: seconds to wait at most; ``None``: as long as it takes.

    Returns:
        Whether all of them have ended.
    """
    return pool().wait(timeout)
