"""The boundary to the import of jax: its core, for jaxlib's buffers, without the rest.

jaxlib asks for ``jax.core``, for the class that says what a buffer is, whenever it makes one.
Before any module of a package, Python runs the package's ``__init__``, and jax's imports all of
it: half a second, of which the core is a sixth. Here Python knows the package first, and imports
it as ever, into the same module, as soon as anybody asks for an attribute or another module of it:
what ``importlib.util.LazyLoader`` does, but for threads, and for modules in it. Tested with jax
0.10.2.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: What jaxlib asks for when it makes a buffer.
_CORE = ("jax.core", "jax._src.sharding_impls", "jax._src.named_sharding")

_lock = threading.Lock()
#: The thread that imports the core now.
_importing: list[int] = []
#: Whether somebody has begun to import all of jax.
_begun: list[bool] = []


def import_core() -> None:
    """Import the core of jax, unless jax is there already.

    Raises:
        ModuleNotFoundError: if jax is not installed.
    """
    with _lock:
        if "jax" in sys.modules or _begun:
            return
        spec = importlib.util.find_spec("jax")
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError("No module named 'jax'", name="jax")
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Package
        sys.meta_path.insert(0, _Finder(package, spec.loader))
        sys.modules["jax"] = package
        _importing.append(threading.get_ident())
    try:
        for name in _CORE:
            importlib.import_module(name)
    finally:
        _importing.clear()


def _complete() -> None:
    """Have Python import jax, or wait for the thread in which it does."""
    with _lock:
        if not _begun:
            _begun.append(True)
            del sys.modules["jax"]  # as if nobody had imported it yet
    importlib.import_module("jax")


class _Package(ModuleType):
    """jax until its ``__init__`` has run."""

    def __getattr__(self, name: str) -> Any:
        # Python itself asks modules for such names; these are the ones that jax sets.
        if name.startswith("__") and name not in ("__version__", "__version_info__"):
            raise AttributeError(f"module 'jax' has no attribute {name!r}")
        _complete()
        # Not by getattr, which would come here again while the __init__ runs.
        return ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        _complete()
        return sorted(vars(self))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds jax, and has it completed before another one of its modules is made.

    That is for a loader to do: a finder is called under a lock that every import takes.
    """

    def __init__(self, package: ModuleType, loader: importlib.abc.Loader) -> None:
        self._package = package
        self._loader = _PackageLoader(package, loader)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for jax or one of its modules, until all of jax is being imported."""
        if name == "jax":
            places = list(self._package.__path__)
            return importlib.util.spec_from_file_location(
                name, self._package.__file__, loader=self._loader, submodule_search_locations=places
            )
        if _begun or not name.startswith("jax.") or threading.get_ident() in _importing:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _PartLoader(spec.loader)
        return spec


class _PackageLoader(importlib.abc.Loader):
    """Runs jax's ``__init__`` in the package that is known already."""

    def __init__(self, package: ModuleType, loader: importlib.abc.Loader) -> None:
        self._package = package
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The package, which has the modules that were imported as its attributes."""
        return self._package

    def exec_module(self, module: ModuleType) -> None:
        """Run the ``__init__``; from then on the package is like any other."""
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        module.__class__ = ModuleType
        sys.meta_path[:] = [item for item in sys.meta_path if not isinstance(item, _Finder)]


class _PartLoader(importlib.abc.Loader):
    """Loads a module of jax after all of jax, unless it came with that."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader
        self._came = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that came with jax, or a new one."""
        _complete()
        found = sys.modules.get(spec.name)
        self._came = found is not None
        return found or self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, once."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        if not self._came:
            self._loader.exec_module(module)
