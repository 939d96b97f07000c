"""The open calls of a server: their tenants, their ids, and the limits of each tenant.

A call counts from its arrival, before its message is read, so that calls being received and
tokenized are within the limits too.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from cluster.serving.server_info import CallInfo
from pagedray.errors import DuplicateIdError, InvalidRequestError, OverloadedError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.auth import Tenant
    from pagedray.errors import PagedRayError

__all__ = ["OpenCall", "OpenCalls"]

_MAX_SHOWN = 100
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_DURATION_S = 1.0
_DURATION_SMOOTHING = 0.1
_MAX_ABORTS = 1024
"""Aborts that are remembered for a tenant."""
_PAUSE_RATIO = 4.0
"""How long a tenant pauses after it read a call, compared with the time to read it."""
_MAX_PAUSE_S = 0.25
_REJECTED_S = 0.01
_MIN_REJECTED_S = 0.05
_MAX_REJECTED_S = 5.0


class _Task(Protocol):
    """The running work of a call."""

    def abort(self) -> None:
        """End it with its partial result."""

    def fail(self, error: PagedRayError) -> None:
        """End it with an error."""


class _Account:
    """The open calls of one tenant, and their sums."""

    __slots__ = (
        "aborted_s",
        "by_id",
        "mean_duration_s",
        "num_calls",
        "num_open",
        "num_tokens",
        "turns",
    )

    def __init__(self) -> None:
        self.by_id: dict[str, OpenCall] = {}
        self.aborted_s: dict[str, float] = {}
        """The times at which ids of clients and of proxies were aborted, the latest last."""
        self.num_calls = 0
        self.num_open = 0
        """Number of calls that have begun."""
        self.num_tokens = 0
        self.mean_duration_s = _FIRST_DURATION_S
        self.turns = asyncio.Lock()
        """Held by the call that is being read, and while the tenant pauses after it."""

    @property
    def retry_after_s(self) -> float:
        """Seconds until one of the open calls is expected to end."""
        return _within_bounds(self.mean_duration_s / max(self.num_calls, 1))

    def check_limit(self, tenant: Tenant, num_calls: int) -> None:
        """Raise OverloadedError if the tenant may have no call in addition to this many others."""
        if tenant.max_requests is not None and num_calls >= tenant.max_requests:
            raise OverloadedError(
                f"The tenant of this API key has {pluralize(num_calls, 'open call')}, which is its "
                "limit.",
                retry_after_s=self.retry_after_s,
            )


class OpenCall:
    """One call of a tenant, which counts toward the tenant's limits until it is released.

    It is open, so it is listed and a drain waits for it, from `begin` on.
    """

    def __init__(
        self,
        tenant: Tenant,
        account: _Account,
        calls: OpenCalls,
        *,
        is_admitted: bool,
        may_resume: bool,
    ) -> None:
        self.tenant = tenant
        self._calls = calls
        self._turn_began_s: float | None = None
        self._may_resume = may_resume
        self._has_begun = False
        self.is_admitted = is_admitted
        """Whether another replica has admitted it, so that the tenant's limits do not apply."""
        self.started_s = time.monotonic()
        self.id = ""
        """The id that its client knows; empty until it is set."""
        self.proxied_id = ""
        """The id that a proxy gave the call; the same each time that the proxy sends it."""
        self.task: _Task | None = None
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._num_reserved_tokens = 0
        self._is_released = False
        self._account = account
        calls.add_to(account, 1)

    def begin(self) -> None:
        """Open it. Raises OverloadedError if it entered to resume a stream, but is another call."""
        if self._may_resume and not self.is_admitted:
            self._account.check_limit(self.tenant, self._account.num_calls - 1)
        self._has_begun = True
        self._calls.open[self] = None
        self._account.num_open += 1

    async def take_turn(self) -> None:
        """Wait until the tenant's earlier calls are read, if calls of other tenants are entered.

        From then until `end_turn` this call is read: its message is parsed, its prompt tokenized
        and its requests are submitted. Then the tenant pauses for four times as long, so that one
        tenant's calls take a fifth of the event loop at most. A tenant alone never waits.
        """
        if self._calls.num_tenants > 1:
            await self._account.turns.acquire()
            self._turn_began_s = time.monotonic()

    def end_turn(self) -> None:
        """Let the tenant's next call be read after a pause; idempotent."""
        if self._turn_began_s is not None:
            took_s = time.monotonic() - self._turn_began_s
            self._turn_began_s = None
            pause_s = min(_PAUSE_RATIO * took_s, _MAX_PAUSE_S)
            asyncio.get_running_loop().call_later(pause_s, self._account.turns.release)

    def leave(self) -> None:
        """Release it unless it has begun; then the caller of `begin` closes it."""
        self.end_turn()
        if not self._has_begun:
            self.release()

    def set_id(self, call_id: str) -> None:
        """Set its id. Raises DuplicateIdError if another open call of its tenant has it."""
        if call_id in self._account.by_id:
            raise DuplicateIdError(call_id)
        self._account.by_id[call_id] = self
        self.id = call_id

    def reserve_tokens(self, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """Reserve its prompt and output tokens. Raises OverloadedError beyond the limit."""
        account = self._account
        limit = None if self.is_admitted else self.tenant.max_tokens
        if limit is not None and num_tokens > limit:
            raise InvalidRequestError(
                f"The request may use {num_tokens} tokens, but the limit for all open calls of "
                f"this API key's tenant is {limit}.",
                param="max_tokens",
            )
        if limit is not None and account.num_tokens + num_tokens > limit:
            raise OverloadedError(
                f"The open calls of this API key's tenant may use {account.num_tokens} tokens; "
                f"{num_tokens} more exceed the limit of {limit}.",
                retry_after_s=account.retry_after_s,
            )
        account.num_tokens += num_tokens
        self._num_reserved_tokens = num_tokens
        self.num_prompt_tokens = num_prompt_tokens

    def release(self) -> None:
        """Free its id and its share of the tenant's limits; idempotent."""
        if self._is_released:
            return
        self._is_released = True
        account = self._account
        account.by_id.pop(self.id, None)
        self._calls.add_to(account, -1)
        account.num_tokens -= self._num_reserved_tokens
        age_s = time.monotonic() - self.started_s
        account.mean_duration_s += _DURATION_SMOOTHING * (age_s - account.mean_duration_s)

    def close(self) -> None:
        """Release it and remove it from the open calls; idempotent."""
        self.end_turn()
        self.release()
        # It refers to this call. Objects in a reference cycle are freed later, by the collector
        # only.
        self.task = None
        if self in self._calls.open:
            del self._calls.open[self]
            self._account.num_open -= 1

    def was_aborted(self, earlier_s: float) -> bool:
        """Return whether the client aborted the call before this replica knew the id."""
        noted = self._account.aborted_s
        if self.proxied_id and self.proxied_id in noted:
            return True
        aborted_s = noted.get(self.id)
        return aborted_s is not None and aborted_s >= self.started_s - earlier_s

    def info(self) -> CallInfo:
        """Return the server's report on the call."""
        return CallInfo(
            id=self.id,
            tenant=self.tenant.name,
            age_s=time.monotonic() - self.started_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )


class OpenCalls:
    """Holds every open call, in the order of arrival, and enforces each tenant's limits."""

    def __init__(self) -> None:
        self.open: dict[OpenCall, None] = {}
        self.num_tenants = 0
        """Tenants with calls that have entered."""
        self._accounts: dict[str, _Account] = {}
        self._num_delayed = 0

    def __len__(self) -> int:
        return len(self.open)

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self.open))

    def enter_call(
        self, tenant: Tenant, *, is_admitted: bool = False, may_resume: bool = False
    ) -> OpenCall:
        """Return a call before its message has been read.

        Raises OverloadedError beyond the limit. A call that `may_resume` a stream may enter beyond
        the limit.
        """
        account = self._accounts.setdefault(tenant.name, _Account())
        if not is_admitted and not may_resume:
            account.check_limit(tenant, account.num_calls)
        return OpenCall(tenant, account, self, is_admitted=is_admitted, may_resume=may_resume)

    async def delay_rejection(self) -> None:
        """Wait before a call is rejected for lack of a key or of room, if any call is open.

        A client that sends calls as fast as they are rejected gets about 100 rejections a second.
        """
        if self.num_tenants:
            self._num_delayed += 1
            delay_s = max(_MIN_REJECTED_S, _REJECTED_S * self._num_delayed)
            try:
                await asyncio.sleep(min(delay_s, _MAX_REJECTED_S))
            finally:
                self._num_delayed -= 1

    def find_call(self, tenant_name: str, call_id: str) -> OpenCall | None:
        """Return a tenant's own call by its id."""
        account = self._accounts.get(tenant_name)
        return None if account is None else account.by_id.get(call_id)

    def note_abort(self, tenant_name: str, call_id: str) -> None:
        """Remember that a tenant aborted a call, by either id; it may not be open here yet."""
        aborted_s = self._accounts.setdefault(tenant_name, _Account()).aborted_s
        aborted_s.pop(call_id, None)
        aborted_s[call_id] = time.monotonic()
        if len(aborted_s) > _MAX_ABORTS:
            del aborted_s[next(iter(aborted_s))]

    def add_to(self, account: _Account, difference: int) -> None:
        """Add a call to an account, or remove it with -1."""
        account.num_calls += difference
        if account.num_calls == max(difference, 0):
            self.num_tenants += difference

    def count(self, tenant: Tenant) -> int:
        """Return the number of open calls of a tenant, or of all for an admin."""
        if tenant.is_admin:
            return len(self.open)
        return sum(call.tenant.name == tenant.name for call in self.open)

    def infos(self, tenant: Tenant) -> tuple[CallInfo, ...]:
        """Return the open calls that a tenant may see, oldest first."""
        shown = (call for call in self.open if tenant.is_admin or call.tenant.name == tenant.name)
        return tuple(call.info() for call, _ in zip(shown, range(_MAX_SHOWN), strict=False))


def _within_bounds(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
