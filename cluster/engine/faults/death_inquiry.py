"""Finds the requests that cause deaths of ranks, by running only some requests, and ends them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from cluster.engine.faults.engine_request import make_engine_request
from cluster.engine.faults.lethal_requests import LethalRequests
from cluster.engine.faults.suspects import Suspects
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.engine.engine_clock import EngineClock
    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.scheduler import Scheduler
    from pagedray.request import Request

__all__ = ["DeathInquiry"]

logger = logging.getLogger(__name__)


_PROBE_ID = "engine-probe"


class DeathInquiry:
    """Restricts the scheduler to some requests after deaths, and ends the requests that cause them.

    Used under the controller's lock.
    """

    def __init__(self, scheduler: Scheduler, clock: EngineClock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._suspects = Suspects()
        self._lethal = LethalRequests()
        self._has_probe = False
        self._has_died = False
        """Whether ranks died, or a culprit ended, since the last call of `examine`."""
        self.is_active = False
        """Whether `examine` is to be called before each plan."""
        self.num_culprits = 0
        """Requests that ended because they killed their ranks."""

    def check(self, request: Request) -> None:
        """Raise LethalRequestError or OverloadedError if a request is likely to kill its ranks."""
        if self._lethal:
            self._lethal.check(_content_of(request), request.tenant, self._clock.now_s())

    def note_death(self) -> bool:
        """Note a death, before the scheduler is reset; return whether it narrowed a search."""
        suspects = self._suspects
        was_searching = suspects.is_searching
        has_narrowed = suspects.note_death(
            self._scheduler.in_flight_lengths(), self._scheduler.num_epoch_steps
        )
        self._has_died = self.is_active = True
        if suspects.is_searching and not was_searching:
            logger.warning(
                "Ranks died twice in a short time. The requests that ran then are examined in "
                "groups to find the cause; other requests wait meanwhile."
            )
        return has_narrowed

    def examine(self) -> list[TokenEvent]:
        """Note how far the suspects are, decide who runs, and return the ends of culprits."""
        suspects, scheduler = self._suspects, self._scheduler
        events: list[TokenEvent] = []
        if self._has_probe and suspects.accused is None:
            # The accused request has left, or the ranks die without it too.
            scheduler.abort_request(_PROBE_ID)
            self._has_probe = False
        elif self._has_probe and not scheduler.is_open(_PROBE_ID):
            events = self._end(suspects.convict())
            self._has_probe, self._has_died = False, True
        has_changed = suspects.note_lengths(scheduler.lengths_of(suspects.ids))
        if has_changed or self._has_died:
            scheduler.recovery.restrict(self._may_run)
            self._has_died = False
        if suspects.accused is not None and not self._has_probe:
            self._add_probe(scheduler.request_of(suspects.accused))
        self.is_active = self._has_probe or suspects.are_any
        return events

    def _may_run(self, request_id: str) -> bool:
        return request_id == _PROBE_ID or self._suspects.may_run(request_id)

    def _add_probe(self, accused: Request) -> None:
        """Run a request that gets as far as the accused request, if the ranks work."""
        max_tokens = min(self._suspects.num_probe_tokens, accused.sampling.max_tokens)
        self._scheduler.add_request(make_engine_request("probe", max_tokens=max_tokens))
        self._has_probe = True

    def _end(self, culprit: str) -> list[TokenEvent]:
        self.num_culprits += 1
        request = self._scheduler.request_of(culprit)
        self._lethal.note_request(_content_of(request), request.tenant, self._clock.now_s())
        logger.error(
            "Request %s of tenant %r ended with an error: the ranks died whenever it ran, and work "
            "without it.",
            culprit,
            request.tenant,
        )
        return [
            msgspec.structs.replace(event, finish_reason=FinishReason.ERROR, is_lethal=True)
            for event in self._scheduler.abort_request(culprit)
        ]


def _content_of(request: Request) -> Hashable:
    """Return the content of a request that stays the same when a client sends it again."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return request.prompt_token_ids, msgspec.msgpack.encode(sampling)
