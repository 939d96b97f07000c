"""Watches whether a server reports that it is ready."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import httpx

from tests.chaos.history.events import ClientLag, Readiness

if TYPE_CHECKING:
    from tests.chaos.history.writer import History

__all__ = ["ReadinessWatch"]

_PERIOD_S = 0.2
_TIMEOUT_S = 2.0
_LEAST_LAG_S = 0.5


class ReadinessWatch:
    """Polls /ready and writes down each change; and notes when this process did not run."""

    def __init__(self, url: str, history: History) -> None:
        self._url = f"{url}/ready"
        self._history = history
        self.state = ""

    @property
    def is_ready(self) -> bool:
        """Whether the last answer was that it is ready."""
        return self.state == "ready"

    async def run(self) -> None:
        """Poll until cancelled."""
        await asyncio.gather(self._poll(), self._watch_lag())

    async def _poll(self) -> None:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            while True:
                asked_s = self._history.now_s
                try:
                    answer = await client.get(self._url)
                    state = "ready" if answer.status_code == 200 else "not_ready"
                except httpx.HTTPError:
                    state = "no_answer"
                if state != self.state:
                    # The server stopped answering before the request was sent.
                    at_s = asked_s if state == "no_answer" else self._history.now_s
                    self.state = state
                    self._history.add(Readiness(at_s=at_s, state=state))
                await asyncio.sleep(_PERIOD_S)

    async def _watch_lag(self) -> None:
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            lag_s = time.monotonic() - slept_s - _PERIOD_S
            if lag_s > _LEAST_LAG_S:
                self._history.add(ClientLag(at_s=self._history.now_s, seconds=round(lag_s, 3)))
