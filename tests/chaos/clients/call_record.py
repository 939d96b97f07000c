"""Writes down what one call receives; tokens are gathered over short times."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.history.events import CallAccepted, CallEnded, CallSent, SequenceEnded, Tokens

if TYPE_CHECKING:
    from tests.chaos.history.writer import History

__all__ = ["CallRecord"]

_GATHER_S = 0.25


class _Gathered:
    """What a sequence gained and was not written down yet."""

    def __init__(self, at_s: float, begin: int) -> None:
        self.at_s = at_s
        self.begin = begin
        self.until_s = at_s
        self.token_ids: list[int] = []
        self.texts: list[str] = []


class CallRecord:
    """The events of one call."""

    def __init__(self, history: History, sent: CallSent) -> None:
        self._history = history
        self._call = sent.call
        self._has_tokens = sent.frontend.startswith("grpc")
        self._gathered: dict[int, _Gathered] = {}
        self._lengths: Counter[int] = Counter()
        self.is_accepted = False
        self.num_events = 0
        """Parts with tokens or text that have arrived."""
        history.add(sent)

    def accept(self) -> None:
        """Note that the server has begun to answer."""
        if not self.is_accepted:
            self.is_accepted = True
            self._history.add(CallAccepted(at_s=self._history.now_s, call=self._call))

    def gain(self, sequence: int, token_ids: tuple[int, ...], text: str) -> None:
        """Note new tokens or text of a sequence."""
        if not token_ids and not text:
            return
        self.num_events += 1
        self._history.num_arrivals += 1
        now_s = self._history.now_s
        gathered = self._gathered.get(sequence)
        if gathered is not None and now_s - gathered.at_s > _GATHER_S:
            self._write(sequence)
            gathered = None
        if gathered is None:
            gathered = self._gathered[sequence] = _Gathered(now_s, self._lengths[sequence])
        self._lengths[sequence] += len(token_ids) if self._has_tokens else len(text)
        gathered.until_s = now_s
        gathered.token_ids += token_ids
        gathered.texts.append(text)

    def end_sequence(self, sequence: int, reason: str) -> None:
        """Note a finish reason."""
        self._write(sequence)
        self._history.add(
            SequenceEnded(
                at_s=self._history.now_s, call=self._call, sequence=sequence, reason=reason
            )
        )

    def end(self, status: str, num_generated: int | None = None) -> None:
        """Note the end of the call."""
        for sequence in tuple(self._gathered):
            self._write(sequence)
        self._history.add(
            CallEnded(
                at_s=self._history.now_s,
                call=self._call,
                status=status,
                num_generated=num_generated,
            )
        )

    def _write(self, sequence: int) -> None:
        gathered = self._gathered.pop(sequence, None)
        if gathered is None:
            return
        self._history.add(
            Tokens(
                at_s=gathered.at_s,
                until_s=gathered.until_s,
                begin=gathered.begin,
                call=self._call,
                sequence=sequence,
                token_ids=tuple(gathered.token_ids),
                text="".join(gathered.texts),
            )
        )
