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


#: Entries whose values, gradients or errors differ from eager's, at most fifteen.
FAILURES: dict[str, Expected] = {}

#: Entries that keep an operator in eager fallback, by the operator and why it has no lowering.
FALLBACKS: dict[str, Expected] = {}


def expected_failure(case: Case) -> str | None:
    """Why a case is known to fail, or ``None``."""
    found = FAILURES.get(case.entry)
    return found.reason if found is not None and found.covers(case) else None


def expected_fallback(case: Case) -> str | None:
    """Why a case is known to keep operators in eager, or ``None``."""
    found = FALLBACKS.get(case.entry)
    return found.reason if found is not None and found.covers(case) else None
