"""How much of the event loop one client may take with requests that are answered at once.

Rejected requests, short texts to tokenize and calls of many sequences that are cancelled again cost
a client little, and the event loop up to milliseconds. The engine's queue does not limit them. Of
calls it limits how many wait, but not how many begin in a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from types import coroutine
from typing import TYPE_CHECKING, TypeVar

from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

__all__ = ["MAX_WAITING", "MAX_WAIT_S", "LoopShares", "LoopTimer", "TooManyWaitError"]

MAX_WAITING = 1024
"""Requests of a client that may wait."""
MAX_WAIT_S = 10.0
"""The longest wait of a client for its next turn."""

_BURST_S = 0.02
_MAX_IDLE_WAIT_S = 0.5
"""The longest wait of requests that arrive while no call waits for tokens."""
_MIN_RETRY_S = 1.0
_CALL_S = 0.002
"""Time that most calls take until they are in the engine's queue; no call is charged more."""
_FIRST_MEAN_S = 0.0003
"""The mean that is assumed until a request of the client has been measured."""
_SMOOTHING = 0.2
_MAX_ACCOUNTS = 1024
"""Number of accounts from which on those with a full balance are dropped."""

Result = TypeVar("Result")


class TooManyWaitError(OverloadedError):
    """Too many requests of one client wait for their turn."""

    def __init__(self, wait_s: float) -> None:
        """The client may have its next turn in `wait_s`."""
        super().__init__(
            "Too many requests of this client are waiting to be handled.",
            retry_after_s=max(wait_s, _MIN_RETRY_S),
        )


class _Account:
    """The time of one client, as a token bucket, and its requests that wait."""

    __slots__ = ("_balance_s", "_changed_s", "_share", "mean_s", "timer", "waiting")

    def __init__(self, now_s: float, share: float) -> None:
        self._share = share
        self._balance_s = _BURST_S
        self._changed_s = now_s
        self.mean_s = _FIRST_MEAN_S
        """What its requests take, on average."""
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.timer: asyncio.TimerHandle | None = None
        """Gives the first of them its turn."""

    def balance_s(self, now_s: float) -> float:
        return min(self._balance_s + self._share * (now_s - self._changed_s), _BURST_S)

    def charge(self, seconds: float, now_s: float, *, max_wait_s: float) -> None:
        balance_s = self.balance_s(now_s)
        # The debt is bounded, so that a client recovers.
        lowest_s = min(balance_s, -self._share * max_wait_s)
        self._balance_s = max(balance_s - seconds, lowest_s)
        self._changed_s = now_s
        self.mean_s += _SMOOTHING * (seconds - self.mean_s)

    def is_new(self, now_s: float) -> bool:
        return not self.waiting and self.balance_s(now_s) >= _BURST_S


class LoopShares:
    """Delays the requests of clients that take more than their share.

    A client is a tenant, or a host without a valid key. Used from the event loop only.
    """

    def __init__(
        self,
        *,
        has_streams: Callable[[], bool],
        do_others_wait: Callable[[str], bool] | None = None,
        share: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_streams` returns whether any client waits for tokens; otherwise none is delayed.

        `do_others_wait` returns whether one of another tenant does. Meanwhile a tenant's calls are
        charged; None charges none. Of the event loop's time, one client may take `share` while
        anyone waits for tokens.
        """
        self._has_streams = has_streams
        self._do_others_wait = do_others_wait
        self._share = share
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._has_ended = False

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits for its turn."""
        return any(account.waiting for account in self._accounts.values())

    def num_waiting(self, client: str) -> int:
        """Return how many requests of a client wait."""
        account = self._accounts.get(client)
        return 0 if account is None else len(account.waiting)

    def wait_s(self, client: str) -> float:
        """Return how long a client has to wait until one of its requests may be handled."""
        account = self._accounts.get(client)
        return 0.0 if account is None else self._wait_s(account)

    async def wait_turn(self, client: str) -> None:
        """Wait before a request of a client is handled, behind those that wait already."""
        account = self._accounts.get(client)
        if account is None or not (account.waiting or self._wait_s(account)):
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        account.waiting.append(given)
        if account.timer is None:
            self._set_timer(account, self._wait_s(account))
        try:
            await given
        finally:
            if given.cancelled():
                with suppress(ValueError):
                    account.waiting.remove(given)

    def end_waits(self) -> None:
        """Stop delaying requests, because the server stops."""
        self._has_ended = True
        for account in self._accounts.values():
            if account.waiting:
                self._give_turn(account)

    def charge(self, client: str, seconds: float) -> None:
        """Note that a request of a client has taken time on the event loop.

        If no call waits for tokens, the request delays none, and its client waits less later.
        """
        if not seconds:
            return
        now_s = self._clock()
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= _MAX_ACCOUNTS:
                self._drop_new(now_s)
            account = self._accounts[client] = _Account(now_s, self._share)
        max_wait_s = MAX_WAIT_S if self._has_streams() else _MAX_IDLE_WAIT_S
        account.charge(seconds, now_s, max_wait_s=max_wait_s)

    def charge_call(
        self, client: str, tenant: str, seconds: float, *, always_s: float = 0.0
    ) -> None:
        """Note what a call took until it was in the engine's queue, or found no room there.

        While other tenants wait for tokens, the tenant is charged for it; it is charged `always_s`
        more in any case.
        """
        if self._do_others_wait is not None and self._do_others_wait(tenant):
            always_s += min(seconds, _CALL_S)
        self.charge(client, always_s)

    @property
    def _delays(self) -> bool:
        return not self._has_ended and self._has_streams()

    def _wait_s(self, account: _Account) -> float:
        if not self._delays:
            return 0.0
        return min(max(0.0, -account.balance_s(self._clock()) / self._share), MAX_WAIT_S)

    def _set_timer(self, account: _Account, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        account.timer = loop.call_later(wait_s, self._give_turn, account)

    def _give_turn(self, account: _Account) -> None:
        """Let the first waiting request continue, or all of them if none is delayed any longer."""
        account.timer = None
        wait_s = self._wait_s(account)
        while account.waiting and not wait_s:
            given = account.waiting.popleft()
            # A request that was just cancelled has not removed itself yet.
            if not given.done():
                given.set_result(None)
                if self._delays:
                    # The time that it takes is not known yet.
                    wait_s = account.mean_s / self._share
        if account.waiting:
            self._set_timer(account, wait_s)

    def _drop_new(self, now_s: float) -> None:
        self._accounts = {
            name: one for name, one in self._accounts.items() if not one.is_new(now_s)
        }


class LoopTimer:
    """Measures how long awaited work holds the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.used_s = 0.0
        self.last_s = 0.0
        """What the work has used since it last waited."""

    @coroutine
    def run(self, work: Awaitable[Result]) -> Generator[object, None, Result]:
        """Await `work`, return its result, and add the time that it ran to `used_s`."""
        steps = work.__await__()
        error: BaseException | None = None
        while True:
            started_s = self._clock()
            try:
                awaited = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                result: Result = end.value
                return result
            finally:
                self.last_s = self._clock() - started_s
                self.used_s += self.last_s
            try:
                yield awaited
                error = None
            except BaseException as thrown:
                error = thrown
