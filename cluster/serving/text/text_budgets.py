"""The CPU time that the long texts of a tenant may take before others have priority."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TextBudgets"]

_SHARE = 0.02
"""CPU seconds added to a budget in each second."""
_BURST_S = 0.1
"""The largest balance of a budget."""


class _Balance(NamedTuple):
    left_s: float
    changed_s: float

    def at(self, now_s: float) -> float:
        """Return the balance at a time after the last change."""
        return min(self.left_s + _SHARE * (now_s - self.changed_s), _BURST_S)


class TextBudgets:
    """A token bucket for each tenant. Used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._balances: dict[str, _Balance] = {}

    def __len__(self) -> int:
        return len(self._balances)

    def is_spent(self, tenant: str) -> bool:
        """Return whether a tenant's texts took more time than its budget had."""
        balance = self._balances.get(tenant)
        return balance is not None and balance.at(self._clock()) < 0.0

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Subtract CPU time from a tenant's balance."""
        now_s = self._clock()
        balance = self._balances.get(tenant, _Balance(_BURST_S, now_s))
        # The debt is bounded, so that a tenant recovers within seconds.
        left_s = max(balance.at(now_s) - cpu_s, -_BURST_S)
        self._balances = {
            name: one for name, one in self._balances.items() if one.at(now_s) < _BURST_S
        }
        self._balances[tenant] = _Balance(left_s, now_s)
