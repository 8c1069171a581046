"""Keeps Python's garbage collector from running while graphs are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without collections of garbage, if they are on.

    A graph is many objects that stay, and their number makes Python look through all it has:
    torch's half a million of them, 0.2 s each time, of which a first call had two or three.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
