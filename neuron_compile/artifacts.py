"""NEFF files among the artifacts of ``torch.compiler.save_cache_artifacts``.

``import torch`` loads this module by the entry point ``torch.backends``, for
``torch.compiler.load_cache_artifacts`` refuses a bundle with artifacts of a kind that nobody
registered. So it is small, and never a reason for ``import torch`` to fail. The boundary to
private API of ``torch.compiler``; tested with torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading

KIND = "neuron_neff"

_lock = threading.Lock()
#: Files from a loaded bundle that no cache on disk has taken yet, as bytes by key.
_carried: dict[str, bytes] = {}


def register() -> None:
    """Let bundles of cache artifacts hold NEFF files. Torch calls this at the end of its import."""
    with contextlib.suppress(ImportError):
        _kind()


@functools.cache
def _kind() -> type:
    from torch.compiler._cache import CacheArtifact, CacheArtifactFactory

    class NeffArtifact(CacheArtifact):
        """A NEFF file: ``content`` is the file, ``key`` its name in the cache."""

        def populate_cache(self) -> None:
            _populate(self.key, self.content)

        @staticmethod
        def type() -> str:
            return KIND

    return CacheArtifactFactory.register(NeffArtifact)


def _populate(key: str, content: bytes) -> None:
    """Keep a file for this process, and for others in the cache on disk.

    The bundle is the user's own, who trusts it: PyTorch unpickles what else is in it.
    """
    from .caching import open_cache
    from .runtime import NeffError, unpack
    from .settings import resolve

    with _lock:
        _carried[key] = content
    cache = open_cache(resolve())
    if cache is None:
        return
    try:
        file = unpack(io.BytesIO(content), len(content))
    except NeffError:
        return  # it is looked at again, and reported, where it would be used
    cache.put(key, file)


def record(key: str, content: bytes) -> None:
    """Add a file to what ``torch.compiler.save_cache_artifacts`` saves."""
    from torch.compiler._cache import CacheArtifactRecorder

    _kind()
    CacheArtifactRecorder(KIND, key).record(content)


def carried(key: str) -> bytes | None:
    """A file from a bundle that was loaded in this process."""
    with _lock:
        return _carried.get(key)
