"""Injects faults in turn, and writes down when each is noticed and healed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from tests.chaos.history.events import FaultHealed, FaultInjected, FaultSeen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.faults.fault import Fault, Scene
    from tests.chaos.history.writer import History
    from tests.chaos.readiness import ReadinessWatch

__all__ = ["Injector"]

_POLL_S = 0.1
_LONGEST_PAIR_DELAY_S = 2.0
_FEW_ARRIVALS = 32
_STEADY_S = 1.0
"""For how long all must be well before a fault counts as healed."""
_PATIENCE = 2.0
"""Times the limit of a fault, before the next one comes in any case."""


class Injector:
    """Injects what a schedule yields."""

    def __init__(
        self,
        plan: Iterator[tuple[type[Fault], ...]],
        scene: Scene,
        readiness: ReadinessWatch,
        history: History,
    ) -> None:
        self._plan = plan
        self._scene = scene
        self._readiness = readiness
        self._history = history
        self._number = 0

    async def run(self, *, every_s: float, for_s: float) -> None:
        """Inject a fault at most every `every_s`, the next one when the last has healed."""
        end_s = time.monotonic() + for_s
        while time.monotonic() + every_s <= end_s:
            next_s = time.monotonic() + every_s
            await self.inject(next(self._plan))
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))

    async def inject(self, kinds: tuple[type[Fault], ...]) -> None:
        """Inject one fault or a pair, and wait until it has healed."""
        faults = [kind(self._scene) for kind in kinds]
        self._number += 1
        number, limit_s = self._number, sum(one.limit_s for one in faults)
        self._history.add(
            FaultInjected(
                at_s=self._history.now_s,
                number=number,
                faults=tuple(one.name for one in faults),
                may_end_streams=any(one.may_end_streams for one in faults),
                limit_s=limit_s,
                pause_limit_s=sum(one.pause_limit_s for one in faults),
            )
        )
        delays_s = [0.0, self._scene.generator.uniform(0.0, _LONGEST_PAIR_DELAY_S)]
        injecting = asyncio.gather(
            *(_inject(one, delay_s) for one, delay_s in zip(faults, delays_s, strict=False))
        )
        try:
            async with asyncio.timeout(limit_s * _PATIENCE):
                await self._until_healed(injecting, faults, number)
        except TimeoutError:
            # The checker finds that the fault has not healed.
            injecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await injecting

    async def _until_healed(
        self, injecting: asyncio.Future[list[None]], faults: list[Fault], number: int
    ) -> None:
        is_seen = False
        well_s: float | None = None
        arrivals = 0
        while True:
            is_well = self._readiness.is_ready and self._scene.target.is_whole()
            if not is_well and not is_seen:
                is_seen = True
                self._history.add(FaultSeen(at_s=self._history.now_s, number=number))
            if injecting.done():
                injecting.result()
            if not (is_well and injecting.done() and all(one.is_over() for one in faults)):
                well_s = None
            elif well_s is None:
                well_s, arrivals = self._history.now_s, self._history.num_arrivals
            elif (
                self._history.now_s - well_s >= _STEADY_S
                and self._history.num_arrivals - arrivals >= _FEW_ARRIVALS
            ):
                if await self._scene.target.all_serve(self._scene.key):
                    self._history.add(FaultHealed(at_s=self._history.now_s, number=number))
                    return
                well_s = None
            await asyncio.sleep(_POLL_S)


async def _inject(fault: Fault, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await fault.inject()
