"""What a compiled graph depends on: the named components of its key in the NEFF cache.

Values of parameters and of tensors that a graph holds are no part of a key, since an executable
takes them as arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import fx

from .classify import Boundary
from .lowering.region import lines
from .runtime import machine, versions
from .runtime.neff_file import VERSION
from .settings import Settings

#: Settings that change what a graph is lowered to; the runtime's options are another component.
LOWERING_SETTINGS = ("check_indices",)


@dataclasses.dataclass(frozen=True)
class Key:
    """Names of components, in their order, and the SHA-256 of each."""

    components: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> str:
        """The name of the entry."""
        return _digest(*(f"{name} {value}" for name, value in self.components.items()))

    def differences(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the components that ``other`` has otherwise."""
        return tuple(x for x, value in self.components.items() if other.get(x) != value)


def graph_key(boundary: Boundary, settings: Settings) -> Key:
    """The key of a graph between contiguous tensors, as it is before it is lowered."""
    options = settings.compiler_options
    calls, values = zip(*lines(boundary.module), strict=True)
    arguments = (
        (item.shape, item.dtype, item.permutation, item.dense, item.carrier)
        for item in boundary.signature.arguments
    )
    parts: dict[str, tuple[str, ...]] = {
        **environment(),
        "options": (
            repr(options),
            *(f"{name} {getattr(settings, name)}" for name in LOWERING_SETTINGS),
        ),
        "arguments": tuple(map(str, arguments)),
        "constants": tuple(f"{x.dtype} {tuple(x.shape)}" for x in boundary.constants),
        "operators": calls,
        "values": values,
    }
    return Key({name: _digest(*part) for name, part in parts.items()})


def environment() -> Mapping[str, tuple[str, ...]]:
    """The components that are the same for every graph of a process."""
    return {
        "format": (str(VERSION),),
        "versions": tuple(" ".join(pair) for pair in versions()),
        "package": (sources(),),
        "machine": (machine(), str(_processors())),
        "xla_flags": (os.environ.get("XLA_FLAGS", ""),),
    }


@functools.cache
def sources() -> str:
    """A digest of the code that makes executables, which no version names while it is worked on."""
    from . import lowering, runtime  # which lie elsewhere in an editable installation

    files = set(Path(__file__).parent.glob("*.py"))
    for module in (lowering, runtime):
        files |= set(Path(str(module.__file__)).parent.rglob("*.py"))
    return _digest(*(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)))


def _processors() -> int:
    """Into how many pieces XLA cuts the loops of a graph is decided when it is compiled."""
    count: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


def positions(module: fx.GraphModule) -> dict[str, int]:
    """Where each node of a graph stands, by its name: a name changes from process to process."""
    return {node.name: index for index, node in enumerate(module.graph.nodes)}


def _digest(*parts: str) -> str:
    found = hashlib.sha256()
    for part in parts:
        data = part.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()
