"""Drafts: guesses of the next tokens of sequences, which a step computes with their last tokens.

A draft costs a row of a step, and saves a step if it is right. Drafters guess; the speculator
predicts how likely guesses are right and how long steps take, and buys the guesses that make the
engine faster. Which tokens are sampled does not depend on any of this.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cluster.scheduling.fault_recovery import BlamedError
from cluster.scheduling.sequence import Sequence, SequenceDrafts
from cluster.scheduling.stats import SpeculationStats
from pagedray.batch import TOKEN_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as AnySequence

    from pagedray.config import SpeculationConfig

__all__ = ["Chain", "Drafter", "NgramDrafter", "PredictionDrafter", "RowTimes", "Speculator"]

_LONGEST_ANCHOR = 4
"""Generated tokens that are looked for in a prediction; the next is their minimum."""
_SHORTEST_ANCHOR = 2
_FIRST_RATE = 0.6
"""How likely a draft is right as long as none was verified."""
_SEQUENCE_WEIGHT = 0.08
"""Weight of a draft in the rates of its sequence; the next is that in the rates of all."""
_COMMON_WEIGHT = 0.01
_TIME_WEIGHT = 0.2
"""Weight of a step in the time of its number of rows."""
_NUM_STEPS_KEPT = 2000
"""Steps after which the time of a number of rows is measured again."""
_UNKNOWN_ROW = 0.005
"""The time that a row is assumed to add to a step as long as that is not measured, in steps."""
_GAP_S = 0.0003
"""Time between steps without a plan that was made ahead."""
_MOST_PAUSED = 8
"""Tokens of a sequence without guesses after several misses, if many sequences are running."""
_MOST_WAITING = 256
"""Running sequences up to which a plan may wait for the tokens of the step before."""


class Chain(NamedTuple):
    """A sequence with drafts in a plan."""

    sequence: Sequence
    position: int
    """The position of its last known token, which the plan computes too."""
    draft_ids: AnySequence[int]


class Drafter(Protocol):
    """Guesses the next tokens of sequences."""

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        """Return guesses of the tokens that follow the known tokens, at most `limit`."""


class NgramDrafter:
    """Guesses the tokens that followed the last n-gram where it occurred before."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        """N-grams have `shortest` to `longest` tokens; longer n-grams are preferred."""
        self._sizes = range(longest, shortest - 1, -1)

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        token_ids = sequence.token_ids
        packed = token_ids.tobytes()
        for size in self._sizes:
            if size >= len(token_ids):
                continue
            first = _find_last(packed, packed[-size * TOKEN_ID_BYTES :])
            if first >= 0:
                return _continued(token_ids, first + size, limit)
        return ()


class PredictionDrafter:
    """Guesses the tokens of the prediction of a request."""

    def __init__(self, others: Drafter) -> None:
        """`others` guesses the tokens of sequences without a prediction."""
        self._others = others

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        prediction, drafts = sequence.active.request.prediction, sequence.drafts
        if not prediction or drafts is None:
            return self._others.propose(sequence, limit)
        first = sequence.num_prompt_tokens
        added = sequence.token_ids[first + drafts.num_followed :].tobytes()
        begin = drafts.place * TOKEN_ID_BYTES
        if not prediction.startswith(added, begin):
            found = self._find_again(sequence, prediction, begin)
            if found is None:
                return self._others.propose(sequence, limit)
            drafts.place = found
        else:
            drafts.place += len(added) // TOKEN_ID_BYTES
        drafts.num_followed = len(sequence.token_ids) - first
        begin = drafts.place * TOKEN_ID_BYTES
        return array("I", prediction[begin : begin + limit * TOKEN_ID_BYTES])

    @staticmethod
    def _find_again(sequence: Sequence, prediction: bytes, begin: int) -> int | None:
        """Return the place behind the last generated tokens, first behind the place so far."""
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        for size in range(min(_LONGEST_ANCHOR, len(output)), _SHORTEST_ANCHOR - 1, -1):
            pattern = output[-size:].tobytes()
            for start in (begin, 0):
                place = _find_first(prediction, pattern, start)
                if place >= 0:
                    return place + size
        return None


def _find_first(packed: bytes, pattern: bytes, start: int) -> int:
    """Return the token at which a pattern occurs first from a byte on in packed tokens, or -1."""
    while (place := packed.find(pattern, start)) >= 0:
        if place % TOKEN_ID_BYTES == 0:
            return place // TOKEN_ID_BYTES
        start = place + 1
    return -1


def _find_last(packed: bytes, pattern: bytes) -> int:
    """Return the token at which a pattern occurs last before the end of packed tokens, or -1."""
    end = len(packed) - TOKEN_ID_BYTES
    while (place := packed.rfind(pattern, 0, end)) >= 0:
        if place % TOKEN_ID_BYTES == 0:
            return place // TOKEN_ID_BYTES
        end = place + len(pattern) - 1
    return -1


def _continued(token_ids: AnySequence[int], first: int, limit: int) -> AnySequence[int]:
    """Return `limit` tokens from `first` on; behind the last token, they are repeated."""
    tokens = list(token_ids[first : first + limit])
    period = len(tokens)
    while len(tokens) < limit:
        tokens.append(tokens[-period])
    return tokens


class RowTimes:
    """The time of steps by number of rows, as measured.

    A straight line would not do: kernels take as long for a few rows as for the largest number of
    rows of the same launch.
    """

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, int]] = {}
        """The time of steps of a size, and the step that measured it last."""
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Note the duration of a step of decodes."""
        size = _size_of(num_rows)
        self._num_steps += 1
        weight = _TIME_WEIGHT if size in self._times else 1.0
        before = self.time_of(size) if self._times else seconds
        # A single step may take any time; the first of a size may capture a graph.
        change = min(seconds, 2 * before) - before
        self._times[size] = before + weight * change, self._num_steps

    def time_of(self, num_rows: int) -> float:
        """Return the predicted duration of a step of decodes, in seconds; 1 if none is known.

        Sizes that were not measured are assumed to be fast, so that they are tried.
        """
        size = _size_of(num_rows)
        known = self._times.get(size)
        if known is not None and self._num_steps - known[1] < _NUM_STEPS_KEPT:
            return known[0]
        below = max((other for other in self._times if other < size), default=0)
        above = min((other for other in self._times if other > size), default=0)
        if not below:
            return self._times[above][0] * size / above if above else 1.0
        least = self._times[below][0]
        if not above:
            return least * (1 + _UNKNOWN_ROW * (size - below))
        part = (size - below) / (above - below)
        return least + part * max(self._times[above][0] - least, 0.0)


def _size_of(num_rows: int) -> int:
    """Return the number of rows that is measured for a number of rows, as graphs are padded."""
    return num_rows if num_rows <= 8 else -(-num_rows // 8) * 8


class _Offer(NamedTuple):
    """Drafts that may be bought."""

    sequence: Sequence
    draft_ids: AnySequence[int]
    survivals: list[float]


class Speculator:
    """Decides which drafts are computed; without a drafter's guesses there are none."""

    def __init__(self, config: SpeculationConfig, drafter: Drafter | None = None) -> None:
        self.drafter = drafter or PredictionDrafter(
            NgramDrafter(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)
        )
        self._num_drafts = config.num_speculative_tokens
        self._rates = [_FIRST_RATE] * self._num_drafts
        """The rates of all sequences, with which a sequence begins."""
        self.times = RowTimes()
        self._most_paused = 0
        self.num_chains = 0
        self.num_draft_tokens = 0
        self.num_accepted_at = [0] * self._num_drafts

    def open_sequence(self, sequence: Sequence) -> None:
        """Let a sequence have drafts, unless it samples under masks."""
        if sequence.masks is None:
            sequence.drafts = SequenceDrafts(self._rates.copy())

    def is_worth_waiting(self, running: AnySequence[Sequence], *, room: int) -> bool:
        """Return whether the next plan should wait for the tokens that are being sampled.

        With these tokens, it can have up to `room` drafts.
        """
        if len(running) > _MOST_WAITING:
            return False
        self._most_paused = min(len(running) // 4, _MOST_PAUSED)
        offers = []
        for sequence in running:
            drafts = sequence.drafts
            if drafts is None or sequence.is_prefill or sequence.num_pending != 1:
                continue
            self._settle_guess(sequence, drafts)
            proposed = self._proposed(sequence, drafts, num_pending=1)
            if proposed:
                drafts.note_guess(len(sequence.token_ids), proposed[0])
                # If the guess is wrong, there may be other guesses.
                survivals = self._survivals(drafts, len(proposed) - 1)
                offers.append(_Offer(sequence, proposed[1:], survivals))
        return bool(self._chosen(offers, num_rows=len(running), room=room))

    def buy_drafts(self, sequences: Iterable[Sequence], *, num_rows: int, room: int) -> list[Chain]:
        """Return the drafts worth their time, at most `room`, of sequences that a plan decodes.

        All of their tokens are known. The plan has `num_rows` rows without drafts.
        """
        offers = []
        for sequence in sequences:
            drafts = sequence.drafts
            if drafts is None:
                continue
            self._settle_guess(sequence, drafts)
            proposed = self._proposed(sequence, drafts, num_pending=0)
            if proposed:
                survivals = self._survivals(drafts, len(proposed))
                offers.append(_Offer(sequence, proposed, survivals))
        chosen = self._chosen(offers, num_rows=num_rows, room=room)
        return [
            Chain(offer.sequence, len(offer.sequence.token_ids) - 1, offer.draft_ids[:number])
            for index, offer in enumerate(offers)
            if (number := chosen[index])
        ]

    def note_chain(self, chain: Chain, num_accepted: int) -> None:
        """Note how many drafts of a chain were right."""
        drafts = chain.sequence.drafts
        assert drafts is not None
        self.num_chains += 1
        self.num_draft_tokens += len(chain.draft_ids)
        for place in range(min(num_accepted + 1, len(chain.draft_ids))):
            self._note_draft(drafts, place, is_right=place < num_accepted)
            self.num_accepted_at[place] += place < num_accepted

    def stats(self) -> SpeculationStats:
        """Return a snapshot of the counters."""
        return SpeculationStats(self.num_chains, self.num_draft_tokens, tuple(self.num_accepted_at))

    def _settle_guess(self, sequence: Sequence, drafts: SequenceDrafts) -> None:
        """Learn from a guess that no step has verified."""
        is_right = drafts.take_guess(sequence.token_ids)
        if is_right is None:
            return
        self._note_draft(drafts, 0, is_right=is_right)
        if is_right:
            drafts.note_hit()
        else:
            drafts.note_miss(len(sequence.token_ids), self._most_paused)

    def _note_draft(self, drafts: SequenceDrafts, place: int, *, is_right: bool) -> None:
        rates, common = drafts.rates, self._rates
        rates[place] += _SEQUENCE_WEIGHT * (is_right - rates[place])
        common[place] += _COMMON_WEIGHT * (is_right - common[place])

    def _survivals(self, drafts: SequenceDrafts, num_drafts: int) -> list[float]:
        """Return how likely each of the first drafts of a chain is accepted.

        The rates of a sequence are known too badly to choose the best of many sequences by them.
        """
        pairs = zip(drafts.rates[:num_drafts], self._rates, strict=False)
        return list(accumulate(((own + common) / 2 for own, common in pairs), mul))

    def _proposed(
        self, sequence: Sequence, drafts: SequenceDrafts, *, num_pending: int
    ) -> AnySequence[int]:
        """Return guesses of the pending tokens, and of the tokens behind these."""
        num_tokens = len(sequence.token_ids)
        # A chain samples one token more than it has drafts.
        limit = min(self._num_drafts, sequence.max_length - num_tokens - num_pending - 1)
        if limit <= 0 or num_tokens < drafts.paused_until:
            return ()
        # A defect of a drafter ends only the request.
        try:
            proposed = self.drafter.propose(sequence, num_pending + limit)
        except Exception as error:
            raise BlamedError(sequence) from error
        if not proposed:
            drafts.note_miss(num_tokens, self._most_paused)
        return proposed

    def _chosen(self, offers: list[_Offer], *, num_rows: int, room: int) -> Counter[int]:
        """Return how many drafts of each offer, by index, give the most tokens per second."""
        candidates = sorted(
            (
                (-survival, index)
                for index, offer in enumerate(offers)
                for survival in offer.survivals
            ),
        )[: max(room, 0)]
        num_best, num_tokens = 0, float(num_rows)
        best_rate = num_rows / self.times.time_of(num_rows)
        for number, (loss, _) in enumerate(candidates, 1):
            num_tokens -= loss
            rate = num_tokens / (self.times.time_of(num_rows + number) + _GAP_S)
            if rate > best_rate:
                num_best, best_rate = number, rate
        return Counter(index for _, index in candidates[:num_best])
