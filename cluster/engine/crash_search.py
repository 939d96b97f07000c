"""Finds the requests that kill their ranks, from which requests ran at each death.

A request may kill its ranks at the same token each time, or the same number of steps or the same
time after each start. Either way the next death follows soon, so a request that gets a margin of
tokens beyond a death did not cause the death. The margin is three times the number of steps from
the start of the ranks to the death. Hence deaths with another cause, such as a signal, clear every
request within a few steps. Requests that saw two deaths without getting beyond the margin are
examined: half of them run, without any other request. The half that dies is halved again, and a
request that dies alone runs once more: if it dies alone again it is isolated, since the first of
these deaths may have had another cause. Then a probe runs alone, a request of the engine itself. If
it survives, the ranks work and the isolated request is to blame; if it dies twice, the ranks die
whatever runs, and only deaths without progress count until they run for longer. One such request
among n costs at most 4 + log2(n) deaths.

Requests may die only together. Then each half survives and the search finds none. After two such
searches among the same requests, half of them wait until the others have ended.

It has no clock, and knows requests only by their ids and numbers of tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.engine.output_watch import make_engine_request
from pagedray.errors import LethalRequestError, OverloadedError, WorkerError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Hashable

    from cluster.engine.watchdog import EngineClock
    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.scheduler import Scheduler
    from pagedray.request import Request

__all__ = ["CrashHandler", "CrashSearch", "CrashingRequests", "DeathBudget"]

logger = logging.getLogger(__name__)

Lengths = Mapping[str, Mapping[int, int]]
"""The number of known tokens of unfinished sequences, by request and index.

For texts to embed it is the number of steps that a request has run.
"""
_DEATHS_TO_EXAMINE = 2
_SOLITARY_DEATHS = 2
"""Deaths of a request that ran alone after which it is isolated, or acquitted by the probe."""
_LEAST_MARGIN = 3
"""Tokens without which there was no progress since a death: two steps were in flight."""
_MARGIN_PER_STEP = 3
"""Fewer requests run faster: when half run, ranks may get further in the same time."""
_EARLY_STEPS = 200
"""Steps from a start to a death that the start may have led to."""
_LATE_MARGIN = 51
"""The margin after a later death, before it is known how soon the next death follows."""
_VAIN_SEARCHES = 2
"""Number of searches without a result after which requests are separated."""
_WINDOW_S = 600.0
_MAX_OF_TENANT = 3
"""Crashing requests of a tenant within the window after which it waits."""
_MAX_KEPT = 256
_RETRY_S = 10.0
"""Time after which a client may retry: a supervisor restarts the process, or routes elsewhere."""

_PROBE_ID = "engine-probe"


@dataclass(slots=True)
class _Suspect:
    """A request that ran at a death and did not get beyond it."""

    num_deaths: int = 0
    num_solitary: int = 0
    """Deaths at which no other request ran."""
    marks: dict[int, int] = field(default_factory=dict)
    """The number of tokens that clears each sequence."""


class _Separation(NamedTuple):
    """Requests that do not run together."""

    first: set[str]
    second: set[str]
    """Requests that wait until all of `first` have ended."""


class CrashSearch:
    """The open requests that may have caused a death, and the search among them."""

    def __init__(self) -> None:
        self.isolated: str | None = None
        """A request that died alone twice: only the probe runs."""
        self._num_probe_deaths = 0
        self._suspects: dict[str, _Suspect] = {}
        self._margin = 0
        """Tokens beyond the last death that clear a sequence."""
        self._are_steady = True
        """Whether the ranks may die soon after a start because of a request."""
        self._is_searching = False
        self._examined: set[str] = set()
        """The requests that run during a search."""
        self._other_half: list[str] = []
        """Includes a crashing request unless an examined request crashes."""
        self._rest: list[str] = []
        """Suspects that may all be innocent, to be examined together at the end."""
        self._died: list[str] = []
        """The requests that ran at the last death of the search."""
        self._survivors: set[str] = set()
        """Open requests that survived the search."""
        self._has_found = False
        """Whether the search has found a crashing request."""
        self._num_vain: dict[str, int] = {}
        """Searches without a result that an open request survived."""
        self._separations: list[_Separation] = []

    @property
    def are_any(self) -> bool:
        """Whether `note_lengths` may change the requests that run."""
        return bool(self._suspects or self.isolated or self._separations)

    @property
    def ids(self) -> set[str]:
        """The requests that `note_lengths` needs the lengths of."""
        isolated = () if self.isolated is None else (self.isolated,)
        return {*self._suspects, *self._num_vain, *isolated}

    @property
    def is_searching(self) -> bool:
        """Whether only some requests may run because suspects are examined."""
        return self._is_searching

    @property
    def num_probe_tokens(self) -> int:
        """Tokens after which the probe has survived longer than the isolated request.

        It keeps its tokens at a death.
        """
        return max(self._margin, _LATE_MARGIN) + 1

    def may_run(self, request_id: str) -> bool:
        """Return whether a request other than the probe may run now."""
        if self._is_searching:
            return request_id in self._examined
        return not any(request_id in one.second for one in self._separations)

    def note_death(self, lengths: Lengths, num_steps: int) -> bool:
        """Note the sequences that ran at a death; return whether it narrowed a search.

        `num_steps` counts the steps since the ranks started.
        """
        if self.isolated is not None:
            self._num_probe_deaths += 1
            if self._num_probe_deaths == _SOLITARY_DEATHS:
                self._give_up()
            return False
        self._note_margin(num_steps)
        for request_id, known in lengths.items():
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.marks |= {index: length + self._margin for index, length in known.items()}
            suspect.num_deaths += 1
            suspect.num_solitary += len(lengths) == 1
        if self._is_searching:
            # Other sequences may be in flight; then it is not known who died.
            ran = [one for one in lengths if one in self._examined]
            is_known = bool(ran) and (self._examined | self._survivors).issuperset(lengths)
            return is_known and self._narrow(ran)
        deadly = [one for one in lengths if self._suspects[one].num_deaths >= _DEATHS_TO_EXAMINE]
        if deadly:
            self._is_searching = True
            self._died = deadly
            self._halve(deadly)
        return False

    def note_lengths(self, lengths: Lengths) -> bool:
        """Note how far the requests of `ids` are; return whether `may_run` changes.

        Requests and sequences without a length have ended.
        """
        for request_id in self.ids:
            if not lengths.get(request_id):
                self._forget(request_id)
        for request_id in list(self._examined if self._is_searching else self._suspects):
            known, marks = lengths[request_id], self._suspects[request_id].marks.items()
            if all(index not in known or known[index] >= mark for index, mark in marks):
                self._clear(request_id)
                if self._is_searching:
                    self._survivors.add(request_id)
        return self._go_on()

    def confirm_crash(self) -> str:
        """Return the isolated request, without which the ranks work, and continue the search."""
        assert self.isolated is not None
        crashing_id, self.isolated = self.isolated, None
        self._has_found = True
        self._go_on()
        return crashing_id

    def _give_up(self) -> None:
        """End the search: the ranks die without the isolated request too."""
        self.isolated, self._are_steady = None, False
        self._is_searching = self._has_found = False
        self._examined, self._other_half, self._rest, self._died = set(), [], [], []
        self._survivors.clear()
        self._suspects.clear()

    def _note_margin(self, num_steps: int) -> None:
        is_early = num_steps <= _EARLY_STEPS
        self._are_steady = self._are_steady or not is_early
        margin = _MARGIN_PER_STEP * (num_steps + 1) if is_early else _LATE_MARGIN
        if not self._are_steady:
            margin = _LEAST_MARGIN
        # Requests that survived may have run since the start.
        self._margin = max(margin, self._margin) if self._is_searching else margin

    def _narrow(self, ran: list[str]) -> bool:
        """Continue the search after a death of examined requests only.

        Returns whether fewer are examined than before, or one of them died alone for the first
        time.
        """
        num_examined = len(self._examined)
        self._rest += self._other_half
        self._rest += (one for one in self._examined if one not in ran)
        self._other_half = []
        self._died = ran
        if len(ran) > 1 or self._suspects[ran[0]].num_solitary < _SOLITARY_DEATHS:
            self._halve(ran)
            return len(self._examined) < num_examined or len(ran) == 1
        self._examined = set()
        (self.isolated,) = ran
        self._clear(self.isolated)
        self._num_probe_deaths = 0
        return False

    def _halve(self, deadly: list[str]) -> None:
        """Examine half of some requests that include a crashing request."""
        half = (len(deadly) + 1) // 2
        self._examined, self._other_half = set(deadly[:half]), deadly[half:]

    def _go_on(self) -> bool:
        """Examine the next suspects if all are examined; return whether any changed."""
        has_ended = self._end_separations()
        if not self._is_searching or self.isolated is not None:
            return has_ended
        if self._examined:
            return False
        if self._other_half:
            self._halve(self._other_half)
        elif self._rest:
            self._examined, self._rest = set(self._rest), []
        else:
            self._end_search()
        return True

    def _end_search(self) -> None:
        if not self._has_found:
            for one in self._survivors:
                self._num_vain[one] = self._num_vain.get(one, 0) + 1
            self._separate([o for o in self._died if self._num_vain.get(o, 0) >= _VAIN_SEARCHES])
        self._is_searching = self._has_found = False
        self._died, self._survivors = [], set()

    def _separate(self, requests: list[str]) -> None:
        """Have half of some requests wait until the others have ended."""
        half = (len(requests) + 1) // 2
        if half < len(requests):
            self._separations.append(_Separation(set(requests[:half]), set(requests[half:])))
        for one in requests:
            self._num_vain[one] -= 1

    def _end_separations(self) -> bool:
        left = [one for one in self._separations if one.first and one.second]
        has_ended = len(left) < len(self._separations)
        self._separations = left
        return has_ended

    def _clear(self, request_id: str) -> None:
        """Stop suspecting a request."""
        self._suspects.pop(request_id, None)
        self._examined.discard(request_id)

    def _forget(self, request_id: str) -> None:
        """Forget all about a request."""
        self._clear(request_id)
        self._num_vain.pop(request_id, None)
        self._survivors.discard(request_id)
        if request_id == self.isolated:
            self.isolated = None
        for requests in (self._other_half, self._rest):
            if request_id in requests:
                requests.remove(request_id)
        for one in self._separations:
            one.first.discard(request_id)
            one.second.discard(request_id)


class _Crash(NamedTuple):
    """A request that killed its ranks."""

    noted_s: float
    tenant: str


class CrashingRequests:
    """Rejects equal requests, and tenants that send many, for ten minutes.

    Requests without a key belong to one tenant, which is never rejected as a whole.
    """

    def __init__(self) -> None:
        self._crashing: OrderedDict[Hashable, _Crash] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether there is anything to check."""
        return bool(self._crashing)

    def note_request(self, content: Hashable, tenant: str, now_s: float) -> None:
        """Note a request that killed its ranks; equal requests have equal `content`."""
        self._crashing[content] = _Crash(now_s, tenant)
        self._crashing.move_to_end(content)
        if len(self._crashing) > _MAX_KEPT:
            self._crashing.popitem(last=False)

    def check(self, content: Hashable, tenant: str, now_s: float) -> None:
        """Raise LethalRequestError for an equal request, and OverloadedError for its tenant."""
        while self._crashing and next(iter(self._crashing.values())).noted_s < now_s - _WINDOW_S:
            self._crashing.popitem(last=False)
        if content in self._crashing:
            raise LethalRequestError
        times = [one.noted_s for one in self._crashing.values() if one.tenant == tenant]
        if tenant and len(times) >= _MAX_OF_TENANT:
            raise OverloadedError(
                f"{len(times)} requests of this tenant ended the processes that ran them. Its "
                "requests are accepted again later.",
                retry_after_s=times[-_MAX_OF_TENANT] + _WINDOW_S - now_s,
            )


class DeathBudget:
    """The deaths of a group's ranks, and the pauses before they are replaced."""

    def __init__(
        self,
        *,
        max_deaths: int = 60,
        window_s: float = 600.0,
        max_barren: int = 5,
        barren_s: float = 60.0,
        first_pause_s: float = 1.0,
        max_pause_s: float = 10.0,
    ) -> None:
        """The budget is spent by `max_deaths` within `window_s`.

        It is also spent by `max_barren` deaths over at least `barren_s` without any step between
        them. After three such deaths there is a pause, which doubles with each.
        """
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._max_barren = max_barren
        self._barren_s = barren_s
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._deaths: deque[float] = deque()
        self._num_steps = 0
        self._num_barren = 0
        self._barren_since_s = 0.0

    def note_death(
        self, now_s: float, error: WorkerError, *, num_steps: int, has_narrowed: bool = False
    ) -> float:
        """Return the pause before the replacement, in seconds. Raises WorkerError without budget.

        `num_steps` counts the steps that have finished since the engine started. `has_narrowed`
        says that the death narrowed the search for the request that causes them.
        """
        if num_steps != self._num_steps:
            self._num_steps, self._num_barren = num_steps, 0
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - self._window_s:
            self._deaths.popleft()
        if not self._num_barren:
            self._barren_since_s = now_s
        self._num_barren += not has_narrowed
        barren_s = now_s - self._barren_since_s
        if self._num_barren >= self._max_barren and barren_s >= self._barren_s:
            raise _spent(
                f"its ranks died {self._num_barren} times in {barren_s:.0f} s without finishing a "
                f"step. {error}",
                error,
            )
        if len(self._deaths) >= self._max_deaths:
            raise _spent(
                f"its ranks died {len(self._deaths)} times in {self._window_s:g} s. {error}", error
            )
        num_pauses = self._num_barren - 3
        if has_narrowed or num_pauses < 0:
            return 0.0
        return min(self._first_pause_s * 2.0**num_pauses, self._max_pause_s)


def _spent(message: str, cause: WorkerError) -> WorkerError:
    error = WorkerError(message, details=cause.details)
    error.retry_after_s = _RETRY_S
    return error


class CrashHandler:
    """Restricts the scheduler to some requests after deaths, and ends the requests that cause them.

    Used under the controller's lock.
    """

    def __init__(self, scheduler: Scheduler, clock: EngineClock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._search = CrashSearch()
        self._crashing = CrashingRequests()
        self._has_probe = False
        self._has_died = False
        """Whether ranks died, or a crashing request ended, since the last call of `examine`."""
        self.is_active = False
        """Whether `examine` is to be called before each plan."""
        self.num_crashing = 0
        """Requests that ended because they killed their ranks."""

    def check(self, request: Request) -> None:
        """Raise LethalRequestError or OverloadedError if a request is likely to kill its ranks."""
        if self._crashing:
            self._crashing.check(_content_of(request), request.tenant, self._clock.now_s())

    def note_death(self) -> bool:
        """Note a death, before the scheduler is reset; return whether it narrowed a search."""
        search = self._search
        was_searching = search.is_searching
        has_narrowed = search.note_death(
            self._scheduler.in_flight_lengths(), self._scheduler.num_epoch_steps
        )
        self._has_died = self.is_active = True
        if search.is_searching and not was_searching:
            logger.warning(
                "Ranks died twice in a short time. The requests that ran then are examined in "
                "groups to find the cause; other requests wait meanwhile."
            )
        return has_narrowed

    def examine(self) -> list[TokenEvent]:
        """Update the search, decide who runs, and return the ends of crashing requests."""
        search, scheduler = self._search, self._scheduler
        events: list[TokenEvent] = []
        if self._has_probe and search.isolated is None:
            # The isolated request has left, or the ranks die without it too.
            scheduler.abort_request(_PROBE_ID)
            self._has_probe = False
        elif self._has_probe and not scheduler.is_open(_PROBE_ID):
            events = self._end(search.confirm_crash())
            self._has_probe, self._has_died = False, True
        has_changed = search.note_lengths(scheduler.lengths_of(search.ids))
        if has_changed or self._has_died:
            scheduler.restrict_requests(self._may_run)
            self._has_died = False
        if search.isolated is not None and not self._has_probe:
            self._add_probe(scheduler.request_of(search.isolated))
        self.is_active = self._has_probe or search.are_any
        return events

    def _may_run(self, request_id: str) -> bool:
        return request_id == _PROBE_ID or self._search.may_run(request_id)

    def _add_probe(self, isolated: Request) -> None:
        """Run a request that gets as far as the isolated request, if the ranks work."""
        max_tokens = min(self._search.num_probe_tokens, isolated.sampling.max_tokens)
        self._scheduler.add_request(make_engine_request("probe", max_tokens=max_tokens))
        self._has_probe = True

    def _end(self, crashing_id: str) -> list[TokenEvent]:
        self.num_crashing += 1
        request = self._scheduler.request_of(crashing_id)
        self._crashing.note_request(_content_of(request), request.tenant, self._clock.now_s())
        logger.error(
            "Request %s of tenant %r ended with an error: the ranks died whenever it ran, and work "
            "without it.",
            crashing_id,
            request.tenant,
        )
        return [
            msgspec.structs.replace(event, finish_reason=FinishReason.ERROR, is_lethal=True)
            for event in self._scheduler.abort_request(crashing_id)
        ]


def _content_of(request: Request) -> Hashable:
    """Return the content of a request that stays the same when a client sends it again."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return request.prompt_token_ids, msgspec.msgpack.encode(sampling)
