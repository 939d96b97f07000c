"""Judges a history of events: which rules it breaks, and its figures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.events import (
    CallAccepted,
    CallEnded,
    CallSent,
    ClientLag,
    Event,
    FaultHealed,
    FaultInjected,
    FaultSeen,
    Leftovers,
    Readiness,
    Reference,
    ReferenceSequence,
    Resources,
    RunEnded,
    SequenceEnded,
    ServerExited,
    Tokens,
)

STANDSTILL_S = 12.0
"""How long a server may be ready while no open call gets a token; it has 10 s to notice."""
_MORE_DESCRIPTORS = 16
_MORE_PROCESSES = 2
"""Ray keeps idle workers, whose number changes."""
_FREQUENT = (CallAccepted, CallEnded, CallSent, SequenceEnded, Tokens)

_LEAST_GAP_S = 0.5
_NUM_COMPARED = 4
_SLOT_S = 0.25
_GRACE_S = 2.0
"""What a fault did can reach a client shortly after the server has recovered."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that ended with an error."""

    call: str
    at_s: float
    status: str
    is_accepted: bool


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(slots=True)
class _Call:
    sent: CallSent
    moved_s: float = -1.0
    """When it was accepted or last gained tokens; below 0 if it was not accepted."""
    sequences: dict[int, _Sequence] = field(default_factory=dict)

    def sequence(self, index: int) -> _Sequence:
        return self.sequences.setdefault(index, _Sequence())


class CallJudge:
    """Follows the calls of a history; what it finds is in its attributes."""

    def __init__(self, references: dict[str, Reference]) -> None:
        self._references = references
        self._open: dict[str, _Call] = {}
        self._ended: set[str] = set()
        self.violations: list[Violation] = []
        self.failures: list[Failure] = []
        self.gaps: list[Gap] = []
        """The times without tokens of calls, those that are too short left out."""
        self.spans: list[tuple[float, float]] = []
        """When each accepted call was open."""
        self.ends: Counter[str] = Counter()
        self.num_tokens = 0
        self._accepted_s: dict[str, float] = {}

    def take(self, event: Event) -> None:
        """Judge the next event; those that are not of calls are ignored."""
        if isinstance(event, CallSent):
            self._send(event)
        elif isinstance(event, CallAccepted | Tokens | SequenceEnded | CallEnded):
            call = self._open.get(event.call)
            if call is None:
                rule = "after its end" if event.call in self._ended else "never sent"
                self._violate(rule, event.at_s, f"{event.call}: {type(event).__name__}")
            elif isinstance(event, Tokens):
                self._gain(call, event)
            elif isinstance(event, CallAccepted):
                self._accept(call, event)
            elif isinstance(event, SequenceEnded):
                self._end_sequence(call, event)
            else:
                self._end(call, event)

    def finish(self, at_s: float) -> None:
        """Judge what is still open when the run has ended."""
        for name, call in self._open.items():
            self._violate("never ended", at_s, name)
            if call.moved_s >= 0:
                self.spans.append((self._accepted_s[name], at_s))
                self._note_gap(call, at_s)

    def _send(self, event: CallSent) -> None:
        if event.call in self._open or event.call in self._ended:
            self._violate("sent twice", event.at_s, event.call)
        self._open[event.call] = _Call(event)

    def _accept(self, call: _Call, event: CallAccepted) -> None:
        if call.moved_s >= 0:
            self._violate("accepted twice", event.at_s, event.call)
        call.moved_s = event.at_s
        self._accepted_s[event.call] = event.at_s

    def _gain(self, call: _Call, event: Tokens) -> None:
        if call.moved_s < 0:
            self._violate("tokens before acceptance", event.at_s, event.call)
            self._accepted_s[event.call] = event.at_s
        else:
            self._note_gap(call, event.at_s)
        call.moved_s = event.until_s
        sequence = call.sequence(event.sequence)
        if sequence.reason:
            self._violate("tokens after the finish reason", event.at_s, event.call)
        is_grpc = call.sent.frontend.startswith("grpc")
        length = len(sequence.token_ids) if is_grpc else sum(map(len, sequence.texts))
        if event.begin != length:
            what = f"{event.call}: {event.begin} after {length}"
            self._violate("the history has a hole", event.at_s, what)
        sequence.token_ids += event.token_ids
        sequence.texts.append(event.text)

    def _end_sequence(self, call: _Call, event: SequenceEnded) -> None:
        sequence = call.sequence(event.sequence)
        if sequence.reason:
            self._violate("finished twice", event.at_s, event.call)
        sequence.reason = event.reason

    def _end(self, call: _Call, event: CallEnded) -> None:
        self._ended.add(event.call)
        del self._open[event.call]
        is_accepted = call.moved_s >= 0
        if is_accepted:
            self.spans.append((self._accepted_s[event.call], event.at_s))
            self._note_gap(call, event.at_s)
        expected = self._references[call.sent.spec].sequences
        if call.sent.frontend.startswith("http"):
            self.num_tokens += event.num_generated or 0
        self._compare(call, event, expected)
        if event.status == "ok":
            self._check_finished(call, event, expected)
        elif event.status == "cancelled":
            self.ends["cancelled"] += 1
            if not call.sent.is_to_be_aborted:
                self._violate("cancelled without a cause", event.at_s, event.call)
        else:
            self.ends["failed" if is_accepted else "refused"] += 1
            self.failures.append(
                Failure(
                    call=event.call,
                    at_s=event.at_s,
                    status=event.status,
                    is_accepted=is_accepted,
                )
            )

    def _compare(
        self, call: _Call, event: CallEnded, expected: Sequence[ReferenceSequence]
    ) -> None:
        for index, sequence in call.sequences.items():
            self.num_tokens += len(sequence.token_ids)
            if index >= len(expected):
                self._violate("too many sequences", event.at_s, f"{event.call}: {index}")
                continue
            where = f"{event.call} ({call.sent.frontend}, {call.sent.spec}), sequence {index}"
            how = _difference(tuple(sequence.token_ids), expected[index].token_ids)
            # An aborted text may end in the middle of a character.
            text = "".join(sequence.texts)
            if sequence.reason == "aborted":
                text = text.rstrip("\ufffd")
            how = how or _difference(text, expected[index].text)
            if how:
                self._violate(how, event.at_s, where)

    def _check_finished(
        self, call: _Call, event: CallEnded, expected: Sequence[ReferenceSequence]
    ) -> None:
        reasons = [call.sequence(index).reason for index in range(len(expected))]
        where = f"{event.call} ({call.sent.frontend}, {call.sent.spec})"
        if "" in reasons or event.num_generated is None:
            self.ends["truncated"] += 1
            self._violate("truncated", event.at_s, f"{where}: {reasons}, {event.num_generated}")
            return
        if "aborted" in reasons and call.sent.is_to_be_aborted:
            self.ends["aborted"] += 1
            return
        self.ends["finished"] += 1
        wanted = [sequence.reason for sequence in expected]
        if reasons != wanted:
            self._violate("wrong finish reason", event.at_s, f"{where}: {reasons}, not {wanted}")
            return
        num_tokens = sum(len(sequence.token_ids) for sequence in expected)
        if event.num_generated != num_tokens:
            what = f"{where}: {event.num_generated}, not {num_tokens}"
            self._violate("wrong usage", event.at_s, what)
        for index, sequence in enumerate(expected):
            found = call.sequence(index)
            is_whole = "".join(found.texts) == sequence.text and (
                call.sent.frontend.startswith("http")
                or len(found.token_ids) == len(sequence.token_ids)
            )
            if not is_whole:
                self._violate("incomplete", event.at_s, f"{where}, sequence {index}")

    def _note_gap(self, call: _Call, until_s: float) -> None:
        if until_s - call.moved_s >= _LEAST_GAP_S:
            self.gaps.append(Gap(begin_s=call.moved_s, end_s=until_s))

    def _violate(self, rule: str, at_s: float, what: str) -> None:
        self.violations.append(Violation(rule=rule, at_s=at_s, what=what))


def _difference(found: Sequence[object], expected: Sequence[object]) -> str:
    """Return how a stream differs from a prefix of what was expected; empty if it does not."""
    num_equal = next(
        (
            place
            for place, (one, other) in enumerate(zip(found, expected, strict=False))
            if one != other
        ),
        min(len(found), len(expected)),
    )
    if num_equal == len(found):
        return ""
    following = found[num_equal : num_equal + _NUM_COMPARED]
    for back in range(1, num_equal + 1):
        place = num_equal - back
        if expected[place : place + len(following)] == following:
            return "repeated"
    for place in range(num_equal + 1, len(expected)):
        if expected[place : place + len(following)] == following:
            return "left out"
    return "different"


class Movement:
    """The slots in which tokens arrived, and those in which the server said that it was ready."""

    def __init__(self) -> None:
        self._moved: set[int] = set()
        self._ready: list[tuple[float, bool]] = []

    def take(self, event: Event) -> None:
        """Note an event; most kinds are ignored."""
        if isinstance(event, Tokens):
            self._note(event.at_s, event.until_s)
        elif isinstance(event, ClientLag):
            # It is unknown what arrived while the clients did not run.
            self._note(event.at_s - event.seconds, event.at_s)
        elif isinstance(event, Readiness):
            self._ready.append((event.at_s, event.state == "ready"))

    def is_ready(self, at_s: float) -> bool:
        """Whether the server said that it was ready at this time."""
        return next((state for since_s, state in reversed(self._ready) if since_s <= at_s), False)

    def standstills(
        self, spans: Sequence[tuple[float, float]], end_s: float, *, at_least_s: float
    ) -> Iterable[Gap]:
        """Yield when calls were open and the server was ready, but no call got a token."""
        still = self._open_slots(spans) & self._ready_slots(end_s) - self._moved
        begin = None
        for slot in range(int(end_s / _SLOT_S) + 2):
            if slot in still:
                begin = slot if begin is None else begin
            elif begin is not None:
                gap = Gap(begin_s=begin * _SLOT_S, end_s=slot * _SLOT_S)
                if gap.end_s - gap.begin_s >= at_least_s:
                    yield gap
                begin = None

    def _note(self, begin_s: float, end_s: float) -> None:
        self._moved.update(range(int(begin_s / _SLOT_S), int(end_s / _SLOT_S) + 1))

    def _ready_slots(self, end_s: float) -> set[int]:
        slots: set[int] = set()
        # The last state holds until the end.
        changes = [*self._ready, (end_s, False)]
        for (since_s, is_ready), (until_s, _) in pairwise(changes):
            if is_ready:
                slots.update(range(int(since_s / _SLOT_S), int(until_s / _SLOT_S) + 1))
        return slots

    @staticmethod
    def _open_slots(spans: Sequence[tuple[float, float]]) -> set[int]:
        slots: set[int] = set()
        for begin_s, end_s in spans:
            slots.update(range(int(begin_s / _SLOT_S) + 1, int(end_s / _SLOT_S)))
        return slots


@dataclass(slots=True, kw_only=True)
class FaultWindow:
    """One fault, or a pair of them."""

    injected: FaultInjected
    seen_s: float = math.inf
    healed_s: float = math.inf

    @property
    def name(self) -> str:
        """The names of the faults."""
        return " + ".join(self.injected.faults)

    def contains(self, at_s: float) -> bool:
        """Whether the fault can be the cause of what happened at this time."""
        return self.injected.at_s <= at_s <= self.healed_s + _GRACE_S

    def overlaps(self, gap: Gap) -> bool:
        """Whether the fault can be the cause of a time without tokens."""
        return gap.begin_s < self.healed_s and gap.end_s > self.injected.at_s


def fault_windows(events: Iterable[Event]) -> list[FaultWindow]:
    """Return the faults among the events, in order."""
    windows: dict[int, FaultWindow] = {}
    for event in events:
        if isinstance(event, FaultInjected):
            windows[event.number] = FaultWindow(injected=event)
        elif isinstance(event, FaultSeen):
            windows[event.number].seen_s = event.at_s
        elif isinstance(event, FaultHealed):
            windows[event.number].healed_s = event.at_s
    return list(windows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a history breaks."""

    rule: str
    at_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which an open call got no token."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The violations of a history, and its figures."""

    violations: tuple[Violation, ...]
    figures: dict[str, object]

    @property
    def rules(self) -> Counter[str]:
        """How often each rule was broken."""
        return Counter(one.rule for one in self.violations)
