"""The backlog: requests that have not started, their limits and the rate at which they start.

It has no clock: times are arguments. Rates are measured only while requests are waiting, since
they would otherwise be arrival rates.
"""

from collections import Counter

from pagedray.errors import OverloadedError
from pagedray.text import pluralize

__all__ = ["Backlog"]

_WINDOW_S = 0.25
_WEIGHT_OF_NEWS = 0.3
_UNMEASURED_RETRY_S = 1.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class _Rate:
    """A moving average of a rate per second."""

    __slots__ = ("_count", "per_s")

    def __init__(self) -> None:
        self._count = 0
        self.per_s: float | None = None
        """None before the first window with a backlog."""

    def add(self, count: int) -> None:
        self._count += count

    def end_window(self, elapsed_s: float, *, is_valid: bool) -> None:
        """Start a new window; the old one enters the average if it is valid."""
        found = self._count / elapsed_s
        self._count = 0
        if not is_valid:
            return
        old = found if self.per_s is None else self.per_s
        self.per_s = old + _WEIGHT_OF_NEWS * (found - old)

    def half_of(self, amount: int) -> float:
        """Return the seconds until half of an amount has started."""
        if self.per_s is None:
            return _UNMEASURED_RETRY_S
        wait_s = amount / 2 / self.per_s if self.per_s else _MAX_RETRY_S
        return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)


class Backlog:
    """Counts the requests that have not started, and rejects requests beyond its limits."""

    __slots__ = (
        "_max_requests",
        "_max_tokens",
        "_num_of_tenants",
        "_request_rate",
        "_token_rate",
        "_was_busy",
        "_window_s",
        "num_requests",
        "num_tokens",
    )

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._request_rate = _Rate()
        self._token_rate = _Rate()
        self._window_s: float | None = None
        self._was_busy = False
        self._num_of_tenants: Counter[str] = Counter()
        self.num_requests = 0
        self.num_tokens = 0
        """Prompt tokens of these requests."""

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if there is no room for a request of this many prompt tokens.

        A tenant's only request always has room, whatever its length, so that no tenant can lock
        out others. May be called from any thread.
        """
        if not self._num_of_tenants[tenant]:
            return
        if self.num_requests >= self._max_requests:
            raise OverloadedError(
                f"The queue is full: at most {pluralize(self._max_requests, 'request')} may wait.",
                retry_after_s=self._request_rate.half_of(self.num_requests),
            )
        if self.num_tokens + num_tokens > self._max_tokens:
            raise OverloadedError(
                f"The queue is full: {num_tokens} more prompt tokens would exceed the limit of "
                f"{self._max_tokens}.",
                retry_after_s=self._token_rate.half_of(self.num_tokens),
            )

    def add_request(self, tenant: str, num_tokens: int) -> None:
        """Add a request that waits, with its prompt tokens."""
        self._num_of_tenants[tenant] += 1
        self.num_requests += 1
        self.num_tokens += num_tokens

    def start_request(self, tenant: str, num_tokens: int) -> None:
        """Remove a request that started, and count it for the estimated wait of others."""
        self.drop_request(tenant, num_tokens)
        self._request_rate.add(1)
        self._token_rate.add(num_tokens)

    def drop_request(self, tenant: str, num_tokens: int) -> None:
        """Remove a request that ended before it started."""
        self._num_of_tenants[tenant] -= 1
        if not self._num_of_tenants[tenant]:
            del self._num_of_tenants[tenant]
        self.num_requests -= 1
        self.num_tokens -= num_tokens

    def tick(self, now_s: float) -> None:
        """Advance the clock; to be called regularly."""
        if self._window_s is None:
            self._window_s = now_s
        elapsed_s = now_s - self._window_s
        if elapsed_s < _WINDOW_S:
            return
        is_busy = self.num_requests > 0
        for rate in (self._request_rate, self._token_rate):
            rate.end_window(elapsed_s, is_valid=is_busy and self._was_busy)
        self._window_s, self._was_busy = now_s, is_busy
