"""JAX, imported when a lowering is first traced.

It takes half a second, and a process that finds its executables in a cache traces nothing. Modules
of lowerings import ``jax`` and its parts from here and use them in functions alone, so
that the registry, which the partitioner asks, is complete without them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Deferred:
    """Stands for a module, which is imported when one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


class _Functions(_Deferred):
    """Stands for the functions of a module, which is imported when one of them is called."""

    def __getattr__(self, attribute: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return super(_Functions, self).__getattr__(attribute)(*args, **kwargs)

        return call


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import jax.numpy as numpy_functions
    import jax.scipy.special as special_functions
    from jax import lax
    from jax import lax as lax_functions
    from jax.scipy import special
else:
    jax, jnp, lax, special = map(_Deferred, ("jax", "jax.numpy", "jax.lax", "jax.scipy.special"))
    # For tables of lowerings, which are made when their module is imported.
    numpy_functions, lax_functions, special_functions = map(
        _Functions, ("jax.numpy", "jax.lax", "jax.scipy.special")
    )

__all__ = [
    "jax",
    "jnp",
    "lax",
    "lax_functions",
    "numpy_functions",
    "special",
    "special_functions",
]
