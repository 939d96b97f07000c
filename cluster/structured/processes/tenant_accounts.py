"""The CPU time that each tenant may take for its masks, in the process that makes them.

All sequences of a step wait for the slowest mask. What one sequence may take says nothing of a
hundred of them, nor does what one grammar may take: a comment makes another one of it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CpuAccount", "TenantAccounts"]

_STEP_S = 0.01
"""CPU time that a step adds to an account."""
_ROW_S = 0.003
"""The same for each row of the tenant in the step.

A JSON schema takes 0.1 to 0.3 ms, and up to 2.4 ms where a limited string is near its end.
"""
_IDLE_SHARE = 0.1
"""CPU time that a second adds, so that a tenant whose sequences have ended may come again."""
_BURST_S = 0.5
"""The most that there is in an account, beside its rows; and the most that it owes."""
_FULL_AGAIN_S = 2 * _BURST_S / _IDLE_SHARE


class CpuAccount:
    """What is left of one tenant's CPU time. Any thread may charge it."""

    def __init__(self, now_s: float) -> None:
        self._left_s = _BURST_S
        self._filled_s = now_s
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether the tenant took more than there was."""
        return self._left_s < 0.0

    def charge(self, cpu_s: float) -> None:
        """Take seconds of CPU time out of it."""
        with self._lock:
            self._left_s = max(self._left_s - cpu_s, -_BURST_S)

    def fill(self, num_rows: int, now_s: float) -> None:
        """Add what a step with so many rows of the tenant allows."""
        rows_s = _ROW_S * num_rows
        added_s = _STEP_S + rows_s + _IDLE_SHARE * (now_s - self._filled_s)
        with self._lock:
            self._left_s = min(self._left_s + added_s, _BURST_S + rows_s)
        self._filled_s = now_s

    def is_old(self, now_s: float) -> bool:
        """Whether time alone has filled it."""
        return now_s - self._filled_s >= _FULL_AGAIN_S


class TenantAccounts:
    """The accounts of the tenants whose sequences are followed, or were a short time ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._accounts: dict[str, CpuAccount] = {}
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._accounts)

    def add(self, sequence_id: int, tenant: str) -> None:
        """Have a sequence charged to its tenant."""
        self._tenants[sequence_id] = tenant

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that are followed no more."""
        for sequence_id in sequence_ids:
            self._tenants.pop(sequence_id, None)

    def begin_step(self, sequence_ids: Iterable[int]) -> None:
        """Fill the accounts of the tenants that have these sequences; drop those of no use."""
        now_s = self._clock()
        num_rows = Counter(self._tenants[sequence_id] for sequence_id in sequence_ids)
        for tenant, number in num_rows.items():
            self._accounts.setdefault(tenant, CpuAccount(now_s)).fill(number, now_s)
        # Who ends what it follows must not get a full account for it. One that is full by now is
        # like a new one, also if something of the tenant's waits for its next step.
        old = [tenant for tenant, one in self._accounts.items() if one.is_old(now_s)]
        for tenant in old:
            del self._accounts[tenant]

    def of(self, sequence_id: int) -> CpuAccount:
        """Return the account that pays for a sequence of this step."""
        return self._accounts[self._tenants[sequence_id]]
