"""Drafts: guesses of the next tokens of sequences, which a step computes with their last tokens.

A draft costs a row of a step, and saves a step if it is right. Drafters guess; the speculator
predicts how likely guesses are right and how long steps take, and buys the guesses that make the
engine faster. Which tokens are sampled does not depend on any of this.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate, chain
from operator import neg
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.draft_estimates import DraftRates, HeadFeeding, RowTimes, size_of
from cluster.scheduling.drafters import HeadDrafter, NgramDrafter, PredictionDrafter
from cluster.scheduling.fault_recovery import BlamedError
from cluster.scheduling.masked_step import MaskedRow
from cluster.scheduling.sequence import Sequence, SequenceDrafts
from cluster.scheduling.stats import SpeculationStats
from cluster.scheduling.suffix_decoding import SuffixDrafter
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.drafters import Drafter
    from cluster.scheduling.sequence import Sequence
    from cluster.scheduling.suffix_decoding import PastAnswers
    from pagedray.batch import StepOutput, StepPlan
    from pagedray.config import SpeculationConfig

__all__ = ["Chain", "Speculator"]

_HOPE = 1.25
"""How much faster than measured behind a gap a step may be that has never been planned ahead."""
_LEAST_GAIN = 1.01
"""Tokens per second with drafts over tokens per second without, from which drafts are bought. Of
estimates that differ by less, the largest is often an error."""
_MOST_PAUSED = 8
"""Tokens of a sequence without guesses after several misses, if many sequences are running."""
_MOST_WAITING = 256
"""Running sequences up to which a plan may wait for the tokens of the step before."""
_UNKNOWN = -2
"""A draft that is not known yet."""


class Chain(NamedTuple):
    """A sequence with drafts in a plan."""

    sequence: Sequence
    position: int
    """The position of its last token before the drafts, which the plan computes too."""
    draft_ids: AnySequence[int]
    num_forced: int = 0
    """The first drafts that the grammar of the sequence forces."""
    num_usable: int | None = None
    """The number of the first drafts with masks, if other drafts have none and count as wrong."""
    is_guessed: bool = False
    """Whether a draft head is guessing the drafts, which are not known yet."""
    last_id: int | None = None
    """The guess of the token before the drafts, in an overlapped plan."""

    @property
    def is_misplaced(self) -> bool:
        """Whether the drafts of an overlapped plan follow other tokens than the tokens sampled.

        To be called once the tokens of the step before are known.
        """
        token_ids = self.sequence.token_ids
        is_behind = self.position == len(token_ids) - 1 and token_ids[-1] == self.last_id
        return self.last_id is not None and not is_behind

    @property
    def masked_row(self) -> MaskedRow | None:
        """The part of the chain that samples under masks, if any."""
        masks = self.sequence.masks
        if masks is None:
            return None
        first_masked = self.sequence.num_prompt_tokens + masks.start
        row = MaskedRow(self.sequence, self.draft_ids, max(first_masked - self.position - 1, 0))
        return row if row.num_masks > 0 else None

    def with_guesses(self) -> Chain:
        """Return the chain of an overlapped plan with its drafts, once the guesses have come.

        Raises WorkerError if the output of the step before has no guesses.
        """
        drafts = self.sequence.drafts
        assert drafts is not None
        draft_ids = drafts.head_ids[: len(self.draft_ids)]
        if drafts.num_known != len(self.sequence.token_ids) or len(draft_ids) < len(self.draft_ids):
            raise WorkerError("The guesses of a draft head are missing.")
        return self._replace(position=drafts.num_known - 1, draft_ids=draft_ids, is_guessed=False)


def _set_feeding(new: Iterable[SequenceDrafts], number: int) -> None:
    for drafts in new:
        drafts.feeding = number


class _Offer(NamedTuple):
    """Drafts that may be bought."""

    sequence: Sequence
    draft_ids: AnySequence[int]
    num_forced: int
    survivals: list[float]

    def chain(
        self, draft_ids: AnySequence[int], *, is_guessed: bool = False, last_id: int | None = None
    ) -> Chain:
        """Return a chain of an overlapped plan, of which no token is planned yet."""
        position = self.sequence.num_computed
        return Chain(self.sequence, position, draft_ids, is_guessed=is_guessed, last_id=last_id)


class Speculator:
    """Decides which drafts are computed; without a drafter's guesses there are none."""

    def __init__(self, config: SpeculationConfig, drafter: Drafter | None = None) -> None:
        self.has_head = config.method in ("eagle3", "mtp", "draft_model")
        """Whether a draft head or a draft model on the ranks guesses tokens."""
        self._answers: PastAnswers | None = None
        self.drafter = drafter or PredictionDrafter(self._drafter_of(config))
        self._num_drafts = config.num_speculative_tokens
        self.rates = DraftRates()
        # Behind the guesses of a head, most plans are overlapped.
        self.times = RowTimes(0.0) if self.has_head else RowTimes()
        self.feeding = HeadFeeding()
        self.is_trying = False
        """Whether the guesses behind the latest plan are only tried: no chain will verify them."""
        self._tried: AnySequence[Sequence] = ()
        """Sequences with such guesses."""
        self._most_paused = 0
        self._guessed: list[_Offer] = []
        """Drafts behind guesses of the tokens of the plan in flight."""
        self.num_chains = 0
        self.num_draft_tokens = 0
        self.num_dropped_drafts = 0
        self.num_accepted_at = [0] * self._num_drafts

    def open_sequence(self, sequence: Sequence) -> None:
        """Let a sequence have drafts, unless its request forbids them."""
        if not sequence.active.request.sampling.disable_spec_decode:
            sequence.drafts = SequenceDrafts()

    def close_sequence(self, sequence: Sequence) -> None:
        """Let an answer that ends draft for others of its tenant."""
        if self._answers is not None and sequence.drafts is not None:
            self._answers.add(sequence)

    def is_worth_waiting(self, running: AnySequence[Sequence], *, room: int) -> bool:
        """Return whether the next plan should wait for the tokens that are being sampled.

        With these tokens, it can have up to `room` drafts.
        """
        self._guessed = []
        if self.has_head or len(running) > _MOST_WAITING:
            return False
        self._most_paused = min(len(running) // 4, _MOST_PAUSED)
        offers = []
        for sequence in running:
            drafts = sequence.drafts
            if drafts is None or sequence.is_prefill or sequence.num_pending != 1:
                continue
            self._settle_guess(sequence, drafts)
            proposed, num_forced = self._proposed(sequence, drafts, num_pending=1)
            if num_forced:
                survivals = self.rates.survivals(drafts.lead, len(proposed), num_forced)[1:]
                offers.append(_Offer(sequence, proposed[1:], num_forced - 1, survivals))
            elif proposed:
                drafts.note_guess(len(sequence.token_ids), proposed[0])
                survivals = self.rates.survivals(drafts.lead, len(proposed))
                # If the guess is wrong, there may be other guesses.
                offers.append(_Offer(sequence, proposed[1:], 0, survivals[:-1]))
                self._guessed.append(_Offer(sequence, proposed[1:], 0, survivals[1:]))
        return bool(offers) and any(self._chosen(offers, num_rows=len(running), room=room))

    def is_worth_guessing(self, *, num_rows: int, room: int) -> bool:
        """Return whether the next plan should have drafts behind guesses of the sampled tokens.

        To be called if it is not worth waiting for these tokens.
        """
        if not self._guessed:
            return False
        return any(self._bought(self._guessed, num_rows=num_rows, room=room, is_alone=False)[0])

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
            proposed, num_forced = self._proposed(sequence, drafts, num_pending=0)
            if proposed:
                survivals = self.rates.survivals(drafts.lead, len(proposed), num_forced)
                offers.append(_Offer(sequence, proposed, num_forced, survivals))
        chosen = self._chosen(offers, num_rows=num_rows, room=room)
        return [
            Chain(
                offer.sequence,
                len(offer.sequence.token_ids) - 1,
                offer.draft_ids[:number],
                offer.num_forced,
            )
            for offer, number in zip(offers, chosen, strict=True)
            if number
        ]

    def most_guesses(self, sequence: Sequence, most: int) -> int:
        """Return how many drafts, at most `most`, a sequence needs behind the only plan in flight.

        Negative if it will probably have ended.
        """
        if sequence.num_computed + most < sequence.max_length - 1:
            return most
        lead = 0.0 if sequence.drafts is None else sequence.drafts.lead
        num_sampled = 1 + sum(self.rates.survivals(lead, sequence.num_pending - 1))
        num_left = sequence.max_length - len(sequence.token_ids) - num_sampled
        return min(most, math.ceil(num_left) - 1)

    def most_drafts(self, last: StepPlan) -> int:
        """Return how many drafts a sequence may have behind the only plan in flight."""
        return last.num_drafts if self.has_head else self._num_drafts

    def chains_behind(
        self, last: AnySequence[Chain], limits: Mapping[Sequence, int], *, room: int
    ) -> list[Chain] | None:
        """Return chains behind the only plan in flight, which has the chains `last`.

        All together have at most `room` drafts.

        They are for a plan with a token of each of the sequences, of which the number of drafts is
        limited. None if the next plan should wait for the tokens of the plan in flight.
        """
        num_rows = len(limits)
        if self.has_head:
            guessed = [
                _Offer(one, (_UNKNOWN,) * most, 0, self.rates.survivals(one.drafts.lead, most))
                for one, most in limits.items()
                if one.drafts is not None and self._has_read(one) and most > 0
            ]
            chosen = self._chosen(guessed, num_rows=num_rows, room=room)
            return [
                one.chain(one.draft_ids[:number], is_guessed=True)
                for one, number in zip(guessed, chosen, strict=True)
                if number
            ]
        behind, later = self._offers_behind(last, limits)
        chosen, rate = self._bought(behind, num_rows=num_rows, room=room, is_alone=False)
        # After the wait, drafts follow tokens that are known.
        waiting_rate = num_rows / self.times.time_of(num_rows, is_alone=True)
        _, later_rate = self._bought(
            later, num_rows=num_rows, room=room, is_alone=True, least_rate=waiting_rate
        )
        # A step that was only measured behind a gap may be faster than predicted.
        hope = 1.0 if self.times.has_run_ahead(num_rows + sum(chosen)) else _HOPE
        if hope * rate <= later_rate:
            return None
        return [
            one.chain(one.draft_ids[1 : number + 1], last_id=one.draft_ids[0])
            for one, number in zip(behind, chosen, strict=True)
            if number
        ]

    def _offers_behind(
        self, last: AnySequence[Chain], limits: Mapping[Sequence, int]
    ) -> tuple[list[_Offer], list[_Offer]]:
        """Return offers behind the drafts in flight, and offers as if these were verified.

        The former begin with the guess of the token before the drafts.
        """
        in_flight = {chain.sequence: chain.draft_ids for chain in last}
        behind, later = [], []
        for sequence, most in limits.items():
            drafts = sequence.drafts
            if drafts is None or most <= 0:
                continue
            pending, number = in_flight.get(sequence, ()), sequence.num_pending
            proposed, _ = self._proposed(sequence, drafts, num_pending=number)
            num_more = min(len(proposed) - number, most)
            if proposed:
                survivals = self.rates.survivals(drafts.lead, min(len(proposed), most))
                later.append(_Offer(sequence, proposed, 0, survivals))
            if num_more > 0 and [*proposed[: number - 1]] == [*pending]:
                survivals = self.rates.survivals(drafts.lead, number + num_more)[number:]
                behind.append(_Offer(sequence, proposed[number - 1 :], 0, survivals))
        return behind, later

    def plan_head(
        self,
        sampled: AnySequence[Sequence],
        prefilled: Iterable[Sequence],
        *,
        num_running: int,
        room: int,
    ) -> tuple[bool, int]:
        """Return whether a draft head reads the tokens of a plan, and how many tokens it guesses.

        It guesses behind each of the `sampled` sequences; `prefilled` sequences have known tokens
        in the plan, and `room` is the number of rows of the next plan.
        """
        feeding, was_trying = self.feeding, self.is_trying
        was_on, self.is_trying = feeding.is_on, False
        new = [one.drafts for one in prefilled if one.drafts and one.drafts.feeding is None]
        readable: list[Sequence] = []
        if was_on:
            _set_feeding(new, feeding.number)
            readable = [one for one in sampled if self._has_read(one)]
            pays = self._do_guesses_pay(len(sampled), len(readable), room)
        else:
            pays = self._do_guesses_pay(num_running, num_running, room)
        if sampled or new:
            feeding.advance(pays=pays, has_starts=bool(new))
        if not was_on:
            _set_feeding(new, feeding.number if feeding.is_on else -1)
            if feeding.is_on:
                self.rates.renew()
            return feeding.is_on, 0
        if feeding.is_settled:
            self._settle_tries()
        # The guesses of a try come after this plan is made.
        if was_trying or not readable:
            return feeding.is_on, 0
        if not pays and feeding.is_try and 2 * len(sampled) <= room:
            self.is_trying, self._tried = True, readable
        return feeding.is_on, self._num_drafts if pays or self.is_trying else 0

    def _has_read(self, sequence: Sequence) -> bool:
        """Return whether a draft head has read all tokens of a sequence."""
        return sequence.drafts is not None and sequence.drafts.feeding == self.feeding.number

    def _settle_tries(self) -> None:
        """Learn from guesses that no chain has verified."""
        for sequence in self._tried:
            drafts = sequence.drafts
            assert drafts is not None
            known = sequence.token_ids[drafts.num_known :]
            for place, (guess, token_id) in enumerate(zip(drafts.head_ids, known, strict=False)):
                self.rates.note_draft(drafts, place, is_right=guess == token_id)
                if guess != token_id:
                    break
        self._tried = ()

    def _do_guesses_pay(self, num_sequences: int, num_guessed: int, room: int) -> bool:
        """Return whether guesses of a draft head give more tokens per second than none.

        Only so many of the sequences have guesses, and some of the guesses may be verified.
        """
        head_s = self.times.head_s
        if not num_guessed or head_s is None:
            return False
        num_tokens = float(num_sequences)
        plain_rate = _LEAST_GAIN * num_tokens / self.times.time_of(num_sequences)
        more_s = head_s + self.times.gap_s
        for number, survival in enumerate(self.rates.survivals(0.0, self._num_drafts), 1):
            num_rows = num_sequences + num_guessed * number
            if num_rows > room:
                break
            num_tokens += num_guessed * survival
            if num_tokens > plain_rate * (self.times.time_of(num_rows) + more_s):
                return True
        return False

    def note_step(self, plan: StepPlan, output: StepOutput, *, is_alone: bool) -> None:
        """Note the duration of a step; it `is_alone` if its plan was made after the step before."""
        # Without decodes, there may have been nothing to do before.
        has_decodes = plan.decodes.rows and not plan.swap_ins
        if has_decodes and (self.has_head or not plan.is_overlapped):
            self.times.note_idle(output.idle_s, has_gap=is_alone or plan.is_overlapped)
        if plan.chunks:
            return
        seconds = output.forward_s
        num_rows, has_guesses = len(plan.decodes), plan.num_drafts > 0
        has_chains = bool(plan.decodes.draft_ids) or plan.is_overlapped
        if has_guesses and not has_chains and self.times.has_measured(num_rows):
            self.times.note_head(num_rows, seconds, is_alone=is_alone)
        else:
            seconds -= (self.times.head_s or 0.0) if has_guesses else 0.0
            self.times.note(num_rows, seconds, is_alone=is_alone)

    def note_chain(self, chain: Chain, num_accepted: int) -> None:
        """Note how many drafts of a chain were right; its sequence has not ended."""
        sequence, drafts = chain.sequence, chain.sequence.drafts
        assert drafts is not None
        # An overlapped plan may have drafts behind the end.
        number = min(len(chain.draft_ids), sequence.max_length - len(sequence.token_ids))
        self.num_chains += 1
        self.num_draft_tokens += number
        self.num_dropped_drafts += len(chain.draft_ids) - number
        is_misplaced = chain.is_misplaced
        for place in range(min(num_accepted + 1, number)):
            is_right = place < num_accepted
            if not is_misplaced:
                self.rates.note_draft(drafts, place, is_right=is_right, num_forced=chain.num_forced)
            self.num_accepted_at[place] += is_right

    def stats(self) -> SpeculationStats:
        """Return a snapshot of the counters."""
        return SpeculationStats(
            self.num_chains,
            self.num_draft_tokens,
            tuple(self.num_accepted_at),
            0 if self._answers is None else self._answers.num_bytes,
            self.num_dropped_drafts,
        )

    def _drafter_of(self, config: SpeculationConfig) -> Drafter:
        if config.method == "suffix":
            drafter = SuffixDrafter(config)
            self._answers = drafter.answers
            return drafter
        if self.has_head:
            return HeadDrafter()
        return NgramDrafter(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)

    def _settle_guess(self, sequence: Sequence, drafts: SequenceDrafts) -> None:
        """Learn from a guess that no step has verified."""
        is_right = drafts.take_guess(sequence.token_ids)
        if is_right is None:
            return
        self.rates.note_draft(drafts, 0, is_right=is_right)
        if is_right:
            drafts.note_hit()
        else:
            drafts.note_miss(len(sequence.token_ids), self._most_paused)

    def _proposed(
        self, sequence: Sequence, drafts: SequenceDrafts, *, num_pending: int
    ) -> tuple[AnySequence[int], int]:
        """Return guesses of the pending tokens, and of the tokens behind these.

        The second result is the number of the first guesses that the grammar of the sequence
        forces.
        """
        num_tokens, masks = len(sequence.token_ids), sequence.masks
        # A chain samples one token more than it has drafts.
        limit = min(self._num_drafts, sequence.max_length - num_tokens - num_pending - 1)
        if limit <= 0 or (masks is not None and masks.num_deferred):
            # The masks behind drafts of a deferred sequence would not be made in time.
            return (), 0
        forced_ids: AnySequence[int] = ()
        if masks is not None and masks.forced is not None:
            forced_ids = masks.forced_ids(sequence.token_ids)[: num_pending + limit]
        if num_tokens < drafts.paused_until:
            return forced_ids, len(forced_ids)
        proposed: AnySequence[int] = ()
        # A defect of a drafter ends only the request.
        try:
            if not self.has_head or self._has_read(sequence):
                proposed = self.drafter.propose(sequence, num_pending + limit)
        except Exception as error:
            raise BlamedError(sequence) from error
        if not proposed and not self.has_head:
            drafts.note_miss(num_tokens, self._most_paused)
        if forced_ids and [*proposed[: len(forced_ids)]] != forced_ids:
            proposed = forced_ids
        return proposed, len(forced_ids)

    def _chosen(self, offers: list[_Offer], *, num_rows: int, room: int) -> list[int]:
        """Return how many drafts of each offer give the most tokens per second."""
        # Ranks have waited for the guesses of a draft head already.
        return self._bought(offers, num_rows=num_rows, room=room, is_alone=not self.has_head)[0]

    def _bought(
        self,
        offers: list[_Offer],
        *,
        num_rows: int,
        room: int,
        is_alone: bool,
        least_rate: float | None = None,
    ) -> tuple[list[int], float]:
        """Return how many drafts of each offer give the most tokens per second, and that rate.

        If a step with drafts `is_alone`, it follows a gap. `least_rate` is the rate without drafts,
        by default without a gap.
        """
        likeliest = _likeliest(offers, room)
        if least_rate is None:
            least_gain = 1.0 if self.has_head else _LEAST_GAIN
            least_rate = least_gain * num_rows / self.times.time_of(num_rows)
        number, rate = self._best_total(
            likeliest, num_rows, is_alone=is_alone, least_rate=least_rate
        )
        if not number:
            return [0] * len(offers), rate
        loss = -likeliest[number - 1]
        chosen = [bisect_left(offer.survivals, loss, key=neg) for offer in offers]
        # Of drafts that are as likely as the last, the first offers have as many as are left.
        num_left = number - sum(chosen)
        for index, offer in enumerate(offers):
            if num_left <= 0:
                break
            num_equal = bisect_right(offer.survivals, loss, key=neg) - chosen[index]
            chosen[index] += min(num_equal, num_left)
            num_left -= num_equal
        return chosen, rate

    def _best_total(
        self, survivals: list[float], num_rows: int, *, is_alone: bool, least_rate: float
    ) -> tuple[int, float]:
        """Return how many of the drafts, the likeliest first, give the most tokens per second.

        The second result is that rate.
        """
        best, best_rate = 0, least_rate
        if not survivals:
            return best, best_rate
        num_tokens = [*accumulate(survivals, initial=float(num_rows))]
        number = 0
        while number < len(survivals):
            # Until the next size of steps, more drafts take no more time.
            number = min(size_of(num_rows + number + 1) - num_rows, len(survivals))
            step_s = self.times.time_of(num_rows + number, is_alone=is_alone)
            if num_tokens[number] > best_rate * step_s:
                best, best_rate = number, num_tokens[number] / step_s
            elif num_tokens[-1] <= best_rate * step_s:
                break
        return best, best_rate


def _likeliest(offers: list[_Offer], room: int) -> list[float]:
    """Return how likely the likeliest drafts are right, at most `room`."""
    survivals = sorted(chain.from_iterable(offer.survivals for offer in offers), reverse=True)
    return survivals[: max(room, 0)]
