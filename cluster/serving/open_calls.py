"""The open calls of a server: whose they are, what they are called, what they may hold.

A call is counted from its arrival, so that what is being tokenized is within its tenant's
limits too.
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
_WEIGHT_OF_NEWS = 0.1


class _Task(Protocol):
    """What runs for a call."""

    def abort(self) -> None:
        """End it with what there is."""

    def fail(self, error: PagedRayError) -> None:
        """End it with an error."""


class OpenCall:
    """One open call of a tenant."""

    def __init__(self, calls: OpenCalls, tenant: Tenant) -> None:
        self._calls = calls
        self.tenant = tenant
        self.started_s = time.monotonic()
        self.id = ""
        """The id that the client knows, once it has one."""
        self.task: _Task | None = None
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_reserved_tokens = 0
        """Prompt tokens and tokens that may be generated, once they are known."""

    def set_id(self, call_id: str) -> None:
        """Give it an id. Raises InvalidRequestError if an open call of its tenant has it."""
        self._calls.set_id(self, call_id)

    def reserve_tokens(self, *, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count its tokens. Raises OverloadedError beyond the tenant's limit."""
        self._calls.reserve_tokens(self, num_tokens)
        self.num_prompt_tokens = num_prompt_tokens

    def release(self) -> None:
        """Let its id and its part of the tenant's limits be used again."""
        self._calls.release(self)

    def close(self) -> None:
        """End it, and forget it."""
        self._calls.close(self)

    def info(self) -> CallInfo:
        """Return what is told of it."""
        return CallInfo(
            id=self.id,
            tenant=self.tenant.name,
            age_s=time.monotonic() - self.started_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
        )


class _Account:
    """What the open calls of one tenant hold together."""

    __slots__ = ("mean_duration_s", "num_calls", "num_tokens")

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self.mean_duration_s = _FIRST_DURATION_S

    @property
    def retry_after_s(self) -> float:
        """When one of so many calls is likely to have ended."""
        return _within_bounds(self.mean_duration_s / max(self.num_calls, 1))


class OpenCalls:
    """Keeps every open call, and each tenant within its limits."""

    def __init__(self) -> None:
        # In the order in which they came.
        self._open: dict[OpenCall, None] = {}
        self._counted: set[OpenCall] = set()
        self._by_id: dict[tuple[str, str], OpenCall] = {}
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(tuple(self._open))

    def open_call(self, tenant: Tenant) -> OpenCall:
        """Return a call that arrives. Raises OverloadedError beyond the tenant's limit."""
        account = self._accounts.setdefault(tenant.name, _Account())
        if tenant.max_requests is not None and account.num_calls >= tenant.max_requests:
            raise OverloadedError(
                f"{account.num_calls} calls of this key's tenant are open, which is all that it "
                "may have.",
                retry_after_s=account.retry_after_s,
            )
        call = OpenCall(self, tenant)
        account.num_calls += 1
        self._open[call] = None
        self._counted.add(call)
        return call

    def find_call(self, tenant_name: str, call_id: str) -> OpenCall | None:
        """Return a tenant's call of this id; what is another's is not found."""
        return self._by_id.get((tenant_name, call_id))

    def infos(self, tenant: Tenant) -> tuple[CallInfo, ...]:
        """Return what a tenant may know of open calls, the oldest first."""
        shown = (call for call in self._open if tenant.is_admin or call.tenant.name == tenant.name)
        return tuple(call.info() for call, _ in zip(shown, range(_MAX_SHOWN), strict=False))

    def set_id(self, call: OpenCall, call_id: str) -> None:
        """Give a call an id that no other of its tenant has."""
        key = (call.tenant.name, call_id)
        if key in self._by_id:
            raise InvalidRequestError(
                f"request_id {call_id!r} belongs to a request that is running.",
                param="request_id",
            )
        self._by_id[key] = call
        call.id = call_id

    def reserve_tokens(self, call: OpenCall, num_tokens: int) -> None:
        """Count the tokens of a call, within its tenant's limit."""
        account = self._accounts[call.tenant.name]
        limit = call.tenant.max_tokens
        if limit is not None and num_tokens > limit:
            raise InvalidRequestError(
                f"The call may take {num_tokens} tokens, but all open calls of this key's tenant "
                f"together may take {limit}.",
                param="max_tokens",
            )
        if limit is not None and account.num_tokens + num_tokens > limit:
            raise OverloadedError(
                f"The open calls of this key's tenant may take {account.num_tokens} tokens; with "
                f"{num_tokens} more they would pass its limit of {limit}.",
                retry_after_s=account.retry_after_s,
            )
        account.num_tokens += num_tokens
        call.num_reserved_tokens = num_tokens

    def release(self, call: OpenCall) -> None:
        """Take what a call holds from it; twice is harmless."""
        if call not in self._counted:
            return
        self._counted.remove(call)
        if self._by_id.get((call.tenant.name, call.id)) is call:
            del self._by_id[call.tenant.name, call.id]
        account = self._accounts[call.tenant.name]
        account.num_calls -= 1
        account.num_tokens -= call.num_reserved_tokens
        age_s = time.monotonic() - call.started_s
        account.mean_duration_s += _WEIGHT_OF_NEWS * (age_s - account.mean_duration_s)

    def close(self, call: OpenCall) -> None:
        """End a call, and forget it; twice is harmless."""
        self.release(call)
        self._open.pop(call, None)


def _within_bounds(wait_s: float) -> float:
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
