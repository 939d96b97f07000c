"""Judges a history. It knows nothing of servers and clients, only what was written down."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.chaos.history.calls import CallJudge
from tests.chaos.history.events import (
    CallAccepted,
    CallEnded,
    CallSent,
    Leftovers,
    Reference,
    Resources,
    RunEnded,
    SequenceEnded,
    ServerExited,
    Tokens,
)
from tests.chaos.history.fault_windows import fault_windows
from tests.chaos.history.movement import Movement
from tests.chaos.history.verdict import Gap, Verdict, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.chaos.history.events import Event
    from tests.chaos.history.fault_windows import FaultWindow

__all__ = ["STANDSTILL_S", "check"]

STANDSTILL_S = 12.0
"""How long a server may be ready while no open call gets a token; it has 10 s to notice."""
_MORE_DESCRIPTORS = 16
_MORE_PROCESSES = 2
"""Ray keeps idle workers, whose number changes."""
_FREQUENT = (CallAccepted, CallEnded, CallSent, SequenceEnded, Tokens)


def check(events: Iterable[Event]) -> Verdict:
    """Return what is wrong in a history, and its figures."""
    references: dict[str, Reference] = {}
    calls = CallJudge(references)
    movement = Movement()
    others: list[Event] = []
    end_s = 0.0
    for event in events:
        if isinstance(event, Reference):
            references[event.spec] = event
            continue
        calls.take(event)
        movement.take(event)
        if not isinstance(event, _FREQUENT):
            others.append(event)
        end_s = max(end_s, event.at_s)
    calls.finish(end_s)
    windows = fault_windows(others)
    violations = [
        *calls.violations,
        *_unexcused(calls, windows, movement),
        *_unhealed(windows, calls.spans),
        *_paused(windows, calls.gaps),
        *_standstills(calls, movement, end_s),
        *_resources(others),
    ]
    if not any(isinstance(event, RunEnded) for event in others):
        violations.append(Violation(rule="the run did not end", at_s=end_s, what=""))
    if not calls.ends["finished"]:
        violations.append(Violation(rule="nothing finished", at_s=end_s, what=""))
    return Verdict(
        violations=tuple(sorted(violations, key=lambda one: one.at_s)),
        figures=_figures(calls, windows, others, end_s),
    )


def _unexcused(
    calls: CallJudge, windows: Sequence[FaultWindow], movement: Movement
) -> Iterator[Violation]:
    """Yield errors that no fault explains."""
    for failure in calls.failures:
        causes = [one for one in windows if one.contains(failure.at_s)]
        if failure.is_accepted:
            is_excused = any(one.injected.may_end_streams for one in causes)
        else:
            is_excused = bool(causes) or not movement.is_ready(failure.at_s)
        if not is_excused:
            yield Violation(
                rule="lost" if failure.is_accepted else "refused without a reason",
                at_s=failure.at_s,
                what=f"{failure.call}: {failure.status}",
            )


def _unhealed(
    windows: Sequence[FaultWindow], spans: Sequence[tuple[float, float]]
) -> Iterator[Violation]:
    for one in windows:
        at_s, limit_s = one.injected.at_s, one.injected.limit_s
        if one.healed_s == math.inf:
            yield Violation(rule="never healed", at_s=at_s, what=one.name)
        elif one.healed_s - at_s > limit_s:
            what = f"{one.name}: {one.healed_s - at_s:.1f} s, {limit_s:g} s allowed"
            yield Violation(rule="healed late", at_s=at_s, what=what)
        if not any(begin_s <= at_s <= end_s for begin_s, end_s in spans):
            yield Violation(rule="fault without open streams", at_s=at_s, what=one.name)


def _paused(windows: Sequence[FaultWindow], gaps: Sequence[Gap]) -> Iterator[Violation]:
    """Yield the longest pause of each combination of faults if it is longer than they may last."""
    longest: dict[str, tuple[float, float, float]] = {}
    for gap in gaps:
        causes = [one for one in windows if one.overlaps(gap)]
        limit_s = sum(one.injected.pause_limit_s for one in causes)
        name = " + ".join(one.name for one in causes)
        length_s = gap.end_s - gap.begin_s
        if causes and length_s > max(limit_s, longest.get(name, (0.0, 0.0, 0.0))[0]):
            longest[name] = (length_s, limit_s, gap.begin_s)
    for name, (length_s, limit_s, begin_s) in longest.items():
        what = f"{name}: {length_s:.1f} s, {limit_s:g} s allowed"
        yield Violation(rule="paused too long", at_s=begin_s, what=what)


def _standstills(calls: CallJudge, movement: Movement, end_s: float) -> Iterator[Violation]:
    for gap in movement.standstills(calls.spans, end_s, at_least_s=STANDSTILL_S):
        what = f"for {gap.end_s - gap.begin_s:.1f} s"
        yield Violation(rule="ready while nothing moves", at_s=gap.begin_s, what=what)


def _resources(events: Sequence[Event]) -> Iterator[Violation]:
    """Yield what the server holds after the run and did not hold before."""
    before: Resources | None = None
    for event in events:
        if isinstance(event, Resources) and event.when == "before":
            before = event
        elif isinstance(event, Resources):
            for name, found, allowed in _compared(before, event):
                if found > allowed:
                    what = f"{name}: {found}, at most {allowed} expected"
                    yield Violation(rule="not given back", at_s=event.at_s, what=what)
        elif isinstance(event, Leftovers):
            what = ", ".join([*event.processes, *event.shared_memory])
            if what:
                yield Violation(rule="left behind", at_s=event.at_s, what=what)
            if event.num_tracebacks:
                what = f"{event.num_tracebacks}, the first: {event.first_traceback}"
                yield Violation(rule="tracebacks in the log", at_s=event.at_s, what=what)


def _compared(before: Resources | None, after: Resources) -> Iterator[tuple[str, int, int]]:
    """Yield what is counted, how many there are and how many there may be."""
    if before is not None:
        yield "processes", after.num_processes, before.num_processes + _MORE_PROCESSES
        yield "descriptors", after.num_descriptors, before.num_descriptors + _MORE_DESCRIPTORS
        yield "shared memory", after.num_shared_memory, before.num_shared_memory
    yield "calls", after.num_calls, 0
    yield "blocks", after.num_blocks - after.num_free_blocks, 0


def _figures(
    calls: CallJudge, windows: Sequence[FaultWindow], others: Sequence[Event], end_s: float
) -> dict[str, object]:
    return {
        "seconds": round(end_s, 1),
        "calls": dict(calls.ends),
        "tokens_checked": calls.num_tokens,
        "faults": len(windows),
        "server_exits": [event.code for event in others if isinstance(event, ServerExited)],
        "by_fault": {
            name: _of_fault(same, calls, windows) for name, same in _by_name(windows).items()
        },
        "longest_pause_without_fault_s": _longest(_gaps_of(0, calls, windows)),
        "longest_pause_of_several_faults_s": _longest(
            gap for gap in calls.gaps if sum(one.overlaps(gap) for one in windows) > 1
        ),
        "rss_mib": [event.rss_mib for event in others if isinstance(event, Resources)],
    }


def _of_fault(
    windows: Sequence[FaultWindow], calls: CallJudge, all_windows: Sequence[FaultWindow]
) -> dict[str, object]:
    """Return the figures of all faults of one kind."""
    alone = list(_gaps_of(1, calls, all_windows))
    pauses = [_longest(gap for gap in alone if one.overlaps(gap)) for one in windows]
    failures = Counter(
        "lost" if failure.is_accepted else "refused"
        for failure in calls.failures
        if any(one.contains(failure.at_s) for one in windows)
    )
    open_streams = [
        sum(begin_s <= one.injected.at_s <= end_s for begin_s, end_s in calls.spans)
        for one in windows
    ]
    healed = [one.healed_s - one.injected.at_s for one in windows if one.healed_s < math.inf]
    seen = [one.seen_s - one.injected.at_s for one in windows if one.seen_s < math.inf]
    return {
        "count": len(windows),
        "open_streams": sum(open_streams),
        "longest_pause_s": max(pauses, default=0.0),
        "longest_until_seen_s": round(max(seen, default=0.0), 2),
        "longest_until_healed_s": round(max(healed, default=0.0), 2),
        **failures,
    }


def _gaps_of(number: int, calls: CallJudge, windows: Sequence[FaultWindow]) -> Iterator[Gap]:
    """Yield the pauses in which this number of faults fell."""
    for gap in calls.gaps:
        if sum(one.overlaps(gap) for one in windows) == number:
            yield gap


def _by_name(windows: Sequence[FaultWindow]) -> dict[str, list[FaultWindow]]:
    names: defaultdict[str, list[FaultWindow]] = defaultdict(list)
    for one in windows:
        names[one.name].append(one)
    return dict(sorted(names.items()))


def _longest(gaps: Iterable[Gap]) -> float:
    return round(max((gap.end_s - gap.begin_s for gap in gaps), default=0.0), 2)
