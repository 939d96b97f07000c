"""The open calls of a server: their tenants, their ids, and the limits of each tenant.

A call counts from its arrival, so that calls being tokenized are within the limits too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from cluster.serving.server_info import CallInfo
from pagedray.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.auth.tenant import Tenant
    from pagedray.errors import PagedRayError

__all__ = ["OpenCall", "OpenCalls"]

_MAX_SHOWN = 100
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_FIRST_DURATION_S = 1.0
_DURATION_SMOOTHING = 0.1


class _Task(Protocol):
    """The running work of a call."""

    def abort(self) -> None:
        """End it with its partial result."""

    def fail(self, error: PagedRayError) -> None:
        """End it with an error."""


class OpenCall:
    """One open call of a tenant."""

    def __init__(self, calls: OpenCalls, tenant: Tenant) -> None:
        self._calls = calls
        self.tenant = tenant
        self.started_s = time.monotonic()
        self.id = ""
        """The id that its client knows; empty until it is set."""
        self.task: _Task | None = None
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_reserved_tokens = 0
        """Prompt tokens plus the most tokens it may generate."""

    def set_id(self, call_id: str) -> None:
        """Set its id. Raises InvalidRequestError if another open call of its tenant has it."""
        self._calls.set_id(self, call_id)

    def reserve_tokens(self, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count its tokens. Raises OverloadedError beyond the tenant's limit."""
        self._calls.reserve_tokens(self, num_tokens)
        self.num_prompt_tokens = num_prompt_tokens

    def release(self) -> None:
        """Free its id and its share of the tenant's limits."""
        self._calls.release(self)

    def close(self) -> None:
        """Release it and remove it from the open calls."""
        self._calls.close(self)

    def info(self) -> CallInfo:
        """Return what the server reports of it."""
        return CallInfo(
            id=self.id,
            tenant=self.tenant.name,
            age_s=time.monotonic() - self.started_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )


class _Account:
    """The sums over one tenant's open calls."""

    __slots__ = ("mean_duration_s", "num_calls", "num_tokens")

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self.mean_duration_s = _FIRST_DURATION_S

    @property
    def retry_after_s(self) -> float:
        """Seconds until one of the open calls is expected to end."""
        return _within_bounds(self.mean_duration_s / max(self.num_calls, 1))


class OpenCalls:
    """Holds every open call and enforces each tenant's limits."""

    def __init__(self) -> None:
        # In the order of arrival.
        self._open: dict[OpenCall, None] = {}
        self._counted: set[OpenCall] = set()
        self._by_id: dict[tuple[str, str], OpenCall] = {}
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._open))

    def open_call(self, tenant: Tenant) -> OpenCall:
        """Return a new call. Raises OverloadedError beyond the tenant's limit."""
        account = self._accounts.setdefault(tenant.name, _Account())
        if tenant.max_requests is not None and account.num_calls >= tenant.max_requests:
            raise OverloadedError(
                f"The tenant of this API key has {account.num_calls} open calls, which is its "
                "limit.",
                retry_after_s=account.retry_after_s,
            )
        call = OpenCall(self, tenant)
        account.num_calls += 1
        self._open[call] = None
        self._counted.add(call)
        return call

    def find_call(self, tenant_name: str, call_id: str) -> OpenCall | None:
        """Return a tenant's own call by its id."""
        return self._by_id.get((tenant_name, call_id))

    def infos(self, tenant: Tenant) -> tuple[CallInfo, ...]:
        """Return the open calls that a tenant may see, oldest first."""
        shown = (call for call in self._open if tenant.is_admin or call.tenant.name == tenant.name)
        return tuple(call.info() for call, _ in zip(shown, range(_MAX_SHOWN), strict=False))

    def set_id(self, call: OpenCall, call_id: str) -> None:
        """Set a call's id, which no other open call of its tenant may have."""
        key = (call.tenant.name, call_id)
        if key in self._by_id:
            raise InvalidRequestError(
                f"request_id {call_id!r} is in use by a running request.",
                param="request_id",
            )
        self._by_id[key] = call
        call.id = call_id

    def reserve_tokens(self, call: OpenCall, num_tokens: int) -> None:
        """Reserve a call's tokens within its tenant's limit."""
        account = self._accounts[call.tenant.name]
        limit = call.tenant.max_tokens
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
        call.num_reserved_tokens = num_tokens

    def release(self, call: OpenCall) -> None:
        """Free a call's id and its share of the tenant's limits; idempotent."""
        if call not in self._counted:
            return
        self._counted.remove(call)
        if self._by_id.get((call.tenant.name, call.id)) is call:
            del self._by_id[call.tenant.name, call.id]
        account = self._accounts[call.tenant.name]
        account.num_calls -= 1
        account.num_tokens -= call.num_reserved_tokens
        age_s = time.monotonic() - call.started_s
        account.mean_duration_s += _DURATION_SMOOTHING * (age_s - account.mean_duration_s)

    def close(self, call: OpenCall) -> None:
        """Release a call and remove it; idempotent."""
        self.release(call)
        self._open.pop(call, None)


def _within_bounds(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
