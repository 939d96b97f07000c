"""Clients that stream without a pause, each call against a text that is known."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.chaos.clients.call import Call
from tests.chaos.clients.call_record import CallRecord
from tests.chaos.history.events import CallSent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.clients.frontends import Frontend
    from tests.chaos.clients.requests import Spec
    from tests.chaos.history.writer import History

__all__ = ["Clients"]

_RETRY_S = 0.5
_ABORTED = 0.1
"""The part of the calls that their client aborts."""
_LATEST_ABORT = 60


class Clients:
    """A number of streams at once."""

    def __init__(
        self,
        specs: Sequence[Spec],
        frontends: Sequence[Frontend],
        history: History,
        *,
        keys: Mapping[str, str],
        seed: int,
    ) -> None:
        self._specs = specs
        self._frontends = frontends
        self._history = history
        self._keys = keys
        self._seed = seed
        self._is_stopping = False
        self.num_accepted = 0

    async def run(self, number: int) -> None:
        """Stream until `stop` is called and all calls have ended."""
        await asyncio.gather(*(self._client(index) for index in range(number)))

    def stop(self) -> None:
        """Let clients end after their present calls."""
        self._is_stopping = True

    async def _client(self, index: int) -> None:
        generator = random.Random(f"{self._seed} client {index}")
        frontend = self._frontends[index % len(self._frontends)]
        tenant = generator.choice(list(self._keys))
        number = 0
        while not self._is_stopping:
            spec = generator.choice(self._specs)
            aborts_after = None
            # What an aborted text holds back for a stop string is no part of the whole text.
            if generator.random() < _ABORTED and not spec.stop:
                aborts_after = generator.randint(1, _LATEST_ABORT)
            sent = CallSent(
                at_s=self._history.now_s,
                call=f"{index}-{number}",
                spec=spec.name,
                frontend=frontend.name,
                tenant=tenant,
                is_to_be_aborted=aborts_after is not None,
            )
            record = CallRecord(self._history, sent)
            call = Call(
                name=sent.call,
                spec=spec,
                record=record,
                key=self._keys[tenant],
                aborts_after=aborts_after,
            )
            await frontend.run(call)
            number += 1
            if record.is_accepted:
                self.num_accepted += 1
            else:
                await asyncio.sleep(_RETRY_S)
