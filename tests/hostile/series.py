"""Attacks one after another, each on a server of its own that starts while the last one rests."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.hostile.engine_load import EngineLoad
from tests.hostile.hostile_server import HostileServer, ServerOptions
from tests.hostile.trial import Trial, attacker_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.hostile.attack import Attack
    from tests.hostile.outcome import Outcome

__all__ = ["Series", "Timing"]

_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long honest clients are measured."""

    seconds: float | None
    """Beside the attack; None is the attack's own time."""
    before_s: float
    after_s: float
    """Until the last look at the server's memory."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A server, an attacker's process, and what ends both."""

    server: HostileServer
    attacker: ProcessPoolExecutor
    stack: ExitStack


class Series:
    """Runs attacks.

    A server takes five seconds of its core to start. The next one does so once an attack has ended
    and only memory is watched, and has started before its own measurement begins.
    """

    def __init__(
        self, attacks: Sequence[Attack], timing: Timing, *, has_rank_processes: bool
    ) -> None:
        self._attacks = tuple(attacks)
        self._timing = timing
        self._has_rank_processes = has_rank_processes
        self._next: Future[_Started] | None = None

    def run(self) -> Iterator[Outcome | Exception]:
        """Yield how each server fared, or what has ended its trial early."""
        with ThreadPoolExecutor(1) as starter:
            following = (*self._attacks[1:], None)
            self._start(starter, self._attacks[0])
            try:
                for attack, another in zip(self._attacks, following, strict=True):
                    yield self._try(starter, attack, another)
            finally:
                if self._next is not None and self._next.exception() is None:
                    self._next.result().stack.close()

    def _try(
        self, starter: ThreadPoolExecutor, attack: Attack, another: Attack | None
    ) -> Outcome | Exception:
        """Return the outcome of one attack, and have the server of another one started."""
        started, self._next = self._next, None
        assert started is not None

        def start_next() -> None:
            if another is not None and self._next is None:
                self._start(starter, another)

        try:
            with started.result().stack:
                outcome = self._attack(attack, started.result(), start_next)
            self._await_start()
            return self._beside_engine(outcome)
        except Exception as error:
            return error
        finally:
            start_next()
            self._await_start()

    def _await_start(self) -> None:
        """Wait for the next server, whose start would be measured otherwise."""
        if self._next is not None:
            self._next.exception()

    def _beside_engine(self, outcome: Outcome) -> Outcome:
        """Return an outcome with the times beside the same work in process, if it is valid work."""
        timing = self._timing
        seconds = timing.seconds or outcome.attack.full_s
        load = EngineLoad.of(outcome.attack, outcome.findings, seconds)
        if load is None:
            return outcome
        return replace(outcome, engine=load.measure(timing.before_s, seconds))

    def _attack(
        self, attack: Attack, started: _Started, note_attacked: Callable[[], None]
    ) -> Outcome:
        trial = Trial(started.server, started.attacker)
        timing = self._timing
        asyncio.run(trial.warm_up(_WARM_UP_S))
        return asyncio.run(
            trial.run(
                attack,
                seconds=timing.seconds or attack.full_s,
                before_s=timing.before_s,
                after_s=timing.after_s,
                note_attacked=note_attacked,
            )
        )

    def _start(self, starter: ThreadPoolExecutor, attack: Attack) -> None:
        self._next = starter.submit(self._started, attack)

    def _started(self, attack: Attack) -> _Started:
        with ExitStack() as stack:
            server = HostileServer(
                ServerOptions.of(attack), has_rank_processes=self._has_rank_processes
            )
            stack.enter_context(server)
            return _Started(server, stack.enter_context(attacker_process()), stack.pop_all())
