"""What is known not to hold, one line each with the reason; the suite fails once it does hold."""

from __future__ import annotations

import dataclasses

from .catalog import Case


@dataclasses.dataclass(frozen=True)
class Expected:
    """Cases of an entry that are known to fail: in these dtypes and modes (empty means all)."""

    reason: str
    dtypes: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()

    def covers(self, case: Case) -> bool:
        """Whether a case of the entry is among them."""
        return (not self.dtypes or case.dtype in self.dtypes) and (
            not self.modes or case.mode in self.modes
        )


def _some(reason: str, dtypes: str = "", modes: str = "") -> Expected:
    return Expected(reason, frozenset(dtypes.split()), frozenset(modes.split()))


_STRIDES = (
    "FakeTensor's max_unpool2d promises contiguous results; eager's follow the memory format that "
    "the input's strides suggest"
)
#: Entries whose values, gradients or errors differ from eager's, at most fifteen.
FAILURES: dict[str, Expected] = {
    "nn.functional.max_unpool2d": _some(_STRIDES),
    "nn.functional.max_unpool2d.grad": _some(_STRIDES),
}

_SIZE = "the size of the result depends on the values of a tensor"
_NUMBER = "a number that is read out of a tensor decides on sizes or offsets"
_COMPLEX32 = "neither Torch-MLIR nor XLA has complex32"
#: Entries that keep an operator in eager fallback, and why it has no lowering.
FALLBACKS: dict[str, Expected] = {
    "argwhere": _some(_SIZE),
    "as_strided.partial_views": _some("the strides walk over memory outside of the tensor"),
    "bincount": _some(_SIZE),
    "chalf": _some(_COMPLEX32),
    "combinations": _some(_SIZE + " (masked_select)"),
    "complex": _some(_COMPLEX32, "float16"),
    "index_fill": _some(_SIZE + " (unique)", modes="training"),
    "index_put": _some(_SIZE + " (a boolean mask)", modes="training"),
    "item": _some(_NUMBER),
    "masked_select": _some(_SIZE),
    "narrow": _some(_NUMBER),
    "nonzero": _some(_SIZE),
    "repeat_interleave": _some(_SIZE + " unless output_size is given"),
    "tensor_split": _some(_NUMBER),
    "unique": _some(_SIZE),
    "unique_consecutive": _some(_SIZE),
    "view_as_complex": _some(_COMPLEX32, "float16"),
}


def expected_failure(case: Case) -> str | None:
    """Why a case is known to fail, or ``None``."""
    found = FAILURES.get(case.entry)
    return found.reason if found is not None and found.covers(case) else None


def expected_fallback(case: Case) -> str | None:
    """Why a case is known to keep operators in eager, or ``None``."""
    found = FALLBACKS.get(case.entry)
    return found.reason if found is not None and found.covers(case) else None
