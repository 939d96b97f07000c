"""Judges each call of a history against the undisturbed text of its request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos.history.events import CallAccepted, CallEnded, CallSent, SequenceEnded, Tokens
from tests.chaos.history.verdict import Gap, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.history.events import Event, Reference, ReferenceSequence

__all__ = ["CallJudge", "Failure"]

_LEAST_GAP_S = 0.5
_NUM_COMPARED = 4


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
