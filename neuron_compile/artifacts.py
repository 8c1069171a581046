"""NEFF files among the artifacts of ``torch.compiler.save_cache_artifacts``.

Imported with the package, because ``torch.compiler.load_cache_artifacts`` refuses a bundle that
has artifacts of a kind that nobody registered. The boundary to private API of ``torch.compiler``;
tested with torch 2.13.0.
"""

from __future__ import annotations

import io
import threading

from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactRecorder

KIND = "neuron_neff"

_lock = threading.Lock()
#: Files from a loaded bundle that no cache on disk has taken yet, as bytes by key.
_carried: dict[str, bytes] = {}


@CacheArtifactFactory.register
class NeffArtifact(CacheArtifact):
    """A NEFF file: ``content`` is the file, ``key`` its name in the cache."""

    def populate_cache(self) -> None:
        """Keep the file for this process, and for others in the cache on disk.

        The bundle is the user's own, who trusts it: PyTorch unpickles what else is in it.
        """
        with _lock:
            _carried[self.key] = self.content
        from .caching import open_cache
        from .runtime import NeffError, unpack
        from .settings import resolve

        cache = open_cache(resolve())
        if cache is None:
            return
        try:
            file = unpack(io.BytesIO(self.content), len(self.content))
        except NeffError:
            return  # it is looked at again, and reported, where it would be used
        cache.put(self.key, file)

    @staticmethod
    def type() -> str:
        """The kind of these artifacts, as PyTorch lists them."""
        return KIND


def record(key: str, content: bytes) -> None:
    """Add a file to what ``torch.compiler.save_cache_artifacts`` saves."""
    CacheArtifactRecorder(KIND, key).record(content)


def carried(key: str) -> bytes | None:
    """A file from a bundle that was loaded in this process."""
    with _lock:
        return _carried.get(key)
