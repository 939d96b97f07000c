"""The CPU time that each tenant may take for its masks: a token bucket in the mask process.

All sequences of a step wait for the slowest mask. A limit for each sequence would not bound a
hundred of them, and a limit for each grammar could be evaded: a comment makes it another one.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

__all__ = ["CpuBudget", "TenantCpuBudgets"]

_STEP_S = 0.01
"""CPU time that a step adds to a budget."""
_ROW_S = 0.003
"""CPU time that each row of the tenant in the step adds.

A JSON schema takes 0.1 to 0.3 ms, and up to 2.4 ms where a limited string is near its end.
"""
_IDLE_SHARE = 0.1
"""CPU time that a second adds, so that a tenant recovers after its sequences have ended."""
_BURST_S = 0.5
"""The largest balance, not counting its rows; and the largest debt."""
_RECOVERY_S = 2 * _BURST_S / _IDLE_SHARE


class CpuBudget:
    """The CPU time left to one tenant. Any thread may charge it."""

    def __init__(self, now_s: float) -> None:
        self._left_s = _BURST_S
        self._filled_s = now_s
        self._lock = threading.Lock()
        self.last_mask_s: float | None = None
        """CPU time of the last mask that was charged."""

    @property
    def is_exhausted(self) -> bool:
        """Whether the tenant took more than it had."""
        return self._left_s < 0.0

    def charge(self, cpu_s: float) -> None:
        """Subtract seconds of CPU time."""
        with self._lock:
            self._left_s = max(self._left_s - cpu_s, -_BURST_S)
            self.last_mask_s = cpu_s

    def refill(self, num_rows: int, now_s: float) -> None:
        """Add the CPU time of a step with this many rows of the tenant."""
        rows_s = _ROW_S * num_rows
        added_s = _STEP_S + rows_s + _IDLE_SHARE * (now_s - self._filled_s)
        with self._lock:
            self._left_s = min(self._left_s + added_s, _BURST_S + rows_s)
        self._filled_s = now_s

    def has_recovered(self, now_s: float) -> bool:
        """Return whether the time since the last step alone has filled it."""
        return now_s - self._filled_s >= _RECOVERY_S


class TenantCpuBudgets:
    """The budgets of tenants with sequences, or with sequences a short time ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._budgets: dict[str, CpuBudget] = {}
        self._tenants: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._budgets)

    def add_sequence(self, sequence_id: int, tenant: str) -> None:
        """Charge a sequence to its tenant."""
        self._tenants[sequence_id] = tenant

    def remove_sequences(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for sequence_id in sequence_ids:
            self._tenants.pop(sequence_id, None)

    def begin_step(self, sequence_ids: Iterable[int]) -> None:
        """Refill the budgets of these sequences' tenants; drop full budgets."""
        now_s = self._clock()
        num_rows = Counter(self._tenants[sequence_id] for sequence_id in sequence_ids)
        for tenant, number in num_rows.items():
            self._budgets.setdefault(tenant, CpuBudget(now_s)).refill(number, now_s)
        # A tenant that ends its sequences keeps its debt. A full budget is the same as none, even
        # if the tenant has sequences that wait for their next step.
        # A copy, as other threads may add budgets.
        for tenant, budget in list(self._budgets.items()):
            if budget.has_recovered(now_s):
                del self._budgets[tenant]

    def tenant_of(self, sequence_id: int) -> str:
        """Return the tenant of a sequence."""
        return self._tenants[sequence_id]

    def budget_of(self, sequence_id: int) -> CpuBudget:
        """Return the budget that a sequence is charged to."""
        # It may have recovered, and was dropped, while a mask was made.
        return self._budgets.setdefault(self.tenant_of(sequence_id), CpuBudget(self._clock()))

    def has_sequence(self, sequence_id: int) -> bool:
        """Return whether a sequence was added and has not ended."""
        return sequence_id in self._tenants
