"""An attack on a real server beside an honest tenant and health checks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tests.hostile.attack import Target
from tests.hostile.health_probe import HealthProbe
from tests.hostile.honest_tenant import HonestTenant
from tests.hostile.memory_watch import MemoryWatch
from tests.hostile.outcome import Outcome, Period
from tests.orphan_guard import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.hostile.attack import Attack, Findings
    from tests.hostile.hostile_server import HostileServer

__all__ = ["Trial", "attacker_process"]


@contextmanager
def attacker_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process for attacks."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_give_way) as attacker:
        yield attacker


class Trial:
    """Measures honest clients of one server before, beside and after an attack."""

    def __init__(self, server: HostileServer, attacker: ProcessPoolExecutor) -> None:
        self._server = server
        self._attacker = attacker
        measured = server.measured
        self._honest = HonestTenant(measured.grpc_target, server.keys.get("honest"))
        self._probe = HealthProbe(measured.http_port, measured.grpc_port)
        self._target = Target(
            http_port=measured.http_port,
            grpc_port=measured.grpc_port,
            key=server.keys.get("hostile"),
        )

    async def warm_up(self, seconds: float) -> None:
        """Let honest clients use the server, whose memory grows with its first requests."""
        await self._observe(asyncio.create_task(asyncio.sleep(seconds)))

    async def run(
        self,
        attack: Attack,
        *,
        seconds: float,
        before_s: float,
        after_s: float,
        note_attacked: Callable[[], None] | None = None,
    ) -> Outcome:
        """Attack for `seconds`, after `before_s` and before `after_s` without it.

        `note_attacked` is called when all times are measured and only memory is still watched.
        """
        measured = self._server.measured
        before = await self._observe(asyncio.create_task(asyncio.sleep(before_s)))
        old_log = measured.log()
        memory = MemoryWatch(measured.processes())
        rss_before_mib = memory.sample_mib()
        watching = asyncio.create_task(memory.watch())
        attacking = asyncio.create_task(self._attack(attack, seconds))
        beside = await self._observe(attacking)
        if note_attacked is not None:
            note_attacked()
        await asyncio.sleep(after_s)
        log = measured.log()[len(old_log) :]
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        return Outcome(
            attack=attack,
            server_command=measured.command,
            findings=await attacking,
            before=before,
            beside=beside,
            rss_before_mib=rss_before_mib,
            rss_peak_mib=memory.peak_mib,
            rss_after_mib=memory.sample_mib(),
            num_log_lines=log.count("\n"),
            num_tracebacks=log.count("Traceback"),
        )

    async def _attack(self, attack: Attack, seconds: float) -> Findings:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._attacker, attack.run, self._target, seconds)

    async def _observe(self, meanwhile: asyncio.Task[Findings] | asyncio.Task[None]) -> Period:
        """Return the results of honest clients until a task is done."""
        ended = asyncio.Event()
        meanwhile.add_done_callback(lambda _: ended.set())
        streamed, probed = await asyncio.gather(
            self._honest.stream_until(ended), self._probe.probe_until(ended)
        )
        return Period(streamed=streamed, probed=probed)


def _give_way() -> None:
    """Let the honest clients interrupt this process at any time, as if it were on another machine.

    A niceness does not suffice: such a process may go on until the next tick of its core.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    end_with_parent()
