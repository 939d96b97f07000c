"""The open calls of a server: their tenants, their ids, and the limits of each tenant.

A call counts from its arrival, before its message is read, so that calls being received and
tokenized are within the limits too.
"""

from __future__ import annotations

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


class _Task(Protocol):
    """The running work of a call."""

    def abort(self) -> None:
        """End it with its partial result."""

    def fail(self, error: PagedRayError) -> None:
        """End it with an error."""


class _Account:
    """The open calls of one tenant, and their sums."""

    __slots__ = ("aborted_s", "by_id", "mean_duration_s", "num_calls", "num_open", "num_tokens")

    def __init__(self) -> None:
        self.by_id: dict[str, OpenCall] = {}
        self.aborted_s: dict[str, float] = {}
        """The times at which ids of clients and of proxies were aborted, the latest last."""
        self.num_calls = 0
        self.num_open = 0
        """Number of calls that have begun."""
        self.num_tokens = 0
        self.mean_duration_s = _FIRST_DURATION_S

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
        open_calls: dict[OpenCall, None],
        *,
        is_admitted: bool,
        may_resume: bool,
    ) -> None:
        self.tenant = tenant
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
        account.num_calls += 1
        self._open_calls = open_calls

    def begin(self) -> None:
        """Open it. Raises OverloadedError if it entered to resume a stream, but is another call."""
        if self._may_resume and not self.is_admitted:
            self._account.check_limit(self.tenant, self._account.num_calls - 1)
        self._has_begun = True
        self._open_calls[self] = None
        self._account.num_open += 1

    def leave(self) -> None:
        """Release it unless it has begun; then the caller of `begin` closes it."""
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
        account.num_calls -= 1
        account.num_tokens -= self._num_reserved_tokens
        age_s = time.monotonic() - self.started_s
        account.mean_duration_s += _DURATION_SMOOTHING * (age_s - account.mean_duration_s)

    def close(self) -> None:
        """Release it and remove it from the open calls; idempotent."""
        self.release()
        # It refers to this call. Objects in a reference cycle are freed later, by the collector
        # only.
        self.task = None
        if self in self._open_calls:
            del self._open_calls[self]
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
        self._open: dict[OpenCall, None] = {}
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._open))

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
        return OpenCall(tenant, account, self._open, is_admitted=is_admitted, may_resume=may_resume)

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

    def count(self, tenant: Tenant) -> int:
        """Return the number of open calls of a tenant, or of all for an admin."""
        if tenant.is_admin:
            return len(self._open)
        return sum(call.tenant.name == tenant.name for call in self._open)

    def infos(self, tenant: Tenant) -> tuple[CallInfo, ...]:
        """Return the open calls that a tenant may see, oldest first."""
        shown = (call for call in self._open if tenant.is_admin or call.tenant.name == tenant.name)
        return tuple(call.info() for call, _ in zip(shown, range(_MAX_SHOWN), strict=False))


def _within_bounds(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
