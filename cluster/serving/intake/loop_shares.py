"""How much of the event loop one client may take with requests that are answered at once.

Rejected requests, short texts to tokenize and calls of many sequences that are cancelled again cost
a client little, and the event loop up to milliseconds. The engine's queue does not limit them.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import coroutine
from typing import TYPE_CHECKING, TypeVar

from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

__all__ = ["MAX_WAITING", "LoopShares", "LoopTimer", "TooManyWaitError"]

MAX_WAITING = 1024
"""Requests of a client that may wait."""

_SHARE = 0.25
"""Of the event loop's time that one client may take while anyone waits for tokens."""
_BURST_S = 0.02
_MAX_WAIT_S = 10.0
_FIRST_MEAN_S = 0.0003
"""What requests take before the first one has."""
_SMOOTHING = 0.2
_MAX_ACCOUNTS = 1024
"""From this number on, those that are as good as new are dropped."""

Result = TypeVar("Result")


class TooManyWaitError(OverloadedError):
    """Too many requests of one client wait for their turn."""

    def __init__(self) -> None:
        super().__init__("Too many requests of this client are waiting to be handled.")


class _Account:
    """The time of one client, as a token bucket."""

    __slots__ = ("_balance_s", "_changed_s", "mean_s", "next_s", "num_waiting")

    def __init__(self, now_s: float) -> None:
        self._balance_s = _BURST_S
        self._changed_s = now_s
        self.mean_s = _FIRST_MEAN_S
        """What its requests take, on average."""
        self.next_s = now_s
        """When the request after those that wait may be handled."""
        self.num_waiting = 0
        """Requests that wait."""

    def balance_s(self, now_s: float) -> float:
        return min(self._balance_s + _SHARE * (now_s - self._changed_s), _BURST_S)

    def charge(self, seconds: float, now_s: float) -> None:
        # The debt is bounded, so that a client recovers.
        self._balance_s = max(self.balance_s(now_s) - seconds, -_SHARE * _MAX_WAIT_S)
        self._changed_s = now_s
        self.mean_s += _SMOOTHING * (seconds - self.mean_s)

    def is_new(self, now_s: float) -> bool:
        return not self.num_waiting and self.balance_s(now_s) >= _BURST_S


class LoopShares:
    """Delays the requests of clients that take more than their share.

    A client is a tenant, or a host without a valid key. Used from the event loop only.
    """

    def __init__(
        self, *, has_streams: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`has_streams` returns whether any client waits for tokens; otherwise none is delayed."""
        self._has_streams = has_streams
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._has_ended = asyncio.Event()

    def num_waiting(self, client: str) -> int:
        """Return how many requests of a client wait."""
        account = self._accounts.get(client)
        return 0 if account is None else account.num_waiting

    def wait_s(self, client: str) -> float:
        """Return how long the next request of a client has to wait."""
        account = self._accounts.get(client)
        if account is None or not self._delays:
            return 0.0
        now_s = self._clock()
        wait_s = max(0.0, -account.balance_s(now_s) / _SHARE)
        if account.num_waiting:
            wait_s = max(wait_s, account.next_s - now_s)
        return min(wait_s, _MAX_WAIT_S)

    async def wait_turn(self, client: str) -> None:
        """Wait before a request of a client is handled."""
        wait_s = self.wait_s(client)
        if not wait_s:
            return
        account = self._accounts[client]
        account.num_waiting += 1
        account.next_s = self._clock() + wait_s + account.mean_s / _SHARE
        try:
            while wait_s > 0.0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._has_ended.wait()
                # Those before it may have taken longer than others.
                wait_s = -account.balance_s(self._clock()) / _SHARE if self._delays else 0.0
        finally:
            account.num_waiting -= 1

    def end_waits(self) -> None:
        """Stop delaying requests, because the server stops."""
        self._has_ended.set()

    @property
    def _delays(self) -> bool:
        return self._has_streams() and not self._has_ended.is_set()

    def charge(self, client: str, seconds: float) -> None:
        """Note that a request of a client has taken time on the event loop."""
        if not seconds:
            return
        now_s = self._clock()
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= _MAX_ACCOUNTS:
                self._drop_new(now_s)
            account = self._accounts[client] = _Account(now_s)
        account.charge(seconds, now_s)

    def _drop_new(self, now_s: float) -> None:
        self._accounts = {
            name: one for name, one in self._accounts.items() if not one.is_new(now_s)
        }


class LoopTimer:
    """Measures how long awaited work holds the event loop."""

    def __init__(self) -> None:
        self.used_s = 0.0

    @coroutine
    def run(self, work: Awaitable[Result]) -> Generator[object, None, Result]:
        """Await `work`, return its result, and add the time that it ran to `used_s`."""
        steps = work.__await__()
        error: BaseException | None = None
        while True:
            started_s = time.perf_counter()
            try:
                awaited = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                result: Result = end.value
                return result
            finally:
                self.used_s += time.perf_counter() - started_s
            try:
                yield awaited
                error = None
            except BaseException as thrown:
                error = thrown
