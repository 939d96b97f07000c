"""Turns outputs into events: appends sampled tokens, and ends finished sequences.

It does not know the plans in flight: the scheduler passes the plan of an output.
"""

from __future__ import annotations

from array import array
from itertools import repeat, takewhile
from typing import TYPE_CHECKING

import msgspec

from cluster.scheduling.event import ChainEvent, TokenEvent
from cluster.scheduling.masked_step import MaskedRow
from cluster.scheduling.sequence import FINISHED, ActiveRequest, Running, Sequence
from cluster.scheduling.speculation import Chain
from pagedray.batch import PromptLogprobs, StepOutput, StepPlan, TokenLogprobs
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.fault_recovery import FaultRecovery
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.sequence_table import SequenceTable
    from cluster.scheduling.speculation import Speculator

__all__ = ["InFlightStep", "OutputReader", "PromptLogprobsBuffer"]


class OutputReader:
    """Applies outputs to the sequences of their plans."""

    __slots__ = (
        "_prefixes",
        "_prompt_logprobs",
        "_recovery",
        "_speculator",
        "_table",
        "num_nonfinite_sequences",
    )

    def __init__(
        self,
        kv: KvManager,
        sequence_table: SequenceTable,
        *,
        recovery: FaultRecovery,
        prompt_logprobs: PromptLogprobsBuffer,
        speculator: Speculator | None,
    ) -> None:
        self._prefixes = kv.prefixes
        self._speculator = speculator
        self._table = sequence_table
        self._recovery = recovery
        self._prompt_logprobs = prompt_logprobs
        self.num_nonfinite_sequences = 0
        """Sequences that ended because their logits were not finite."""

    def read_output(self, in_flight: InFlightStep, output: StepOutput) -> list[TokenEvent]:
        """Apply the output of a plan and return its events."""
        events = self._append_tokens(in_flight, output)
        if len(events) < len(in_flight.sampled):
            self._forget_ended(in_flight, output)
        if in_flight.chains:
            events += self._read_chains(in_flight, output)
        if output.draft_ids:
            in_flight.keep_guesses(output.draft_ids)
        if self._prompt_logprobs.requests:
            self._prompt_logprobs.keep(in_flight.prompt_logprob_rows, output.prompt_logprobs)
            events = [self._prompt_logprobs.add_to(event) for event in events]
        return events

    def end_sequence(self, sequence: Sequence, reason: FinishReason, error: str = "") -> TokenEvent:
        """End a sequence and return the event."""
        self._table.remove_sequence(sequence)
        event = TokenEvent(
            sequence.request_id,
            sequence.index,
            finish_reason=reason,
            num_cached_tokens=sequence.active.num_cached_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
            started_s=sequence.active.started_s,
            error=error,
        )
        return self._prompt_logprobs.add_to(event)

    def _append_tokens(self, in_flight: InFlightStep, output: StepOutput) -> list[TokenEvent]:
        """Append each token to its sequence. This is where a step takes the longest."""
        sampled, late, faulty = in_flight.sampled, in_flight.late, self._recovery.faulty_ids
        finished, stop = FINISHED, FinishReason.STOP
        logprobs = [() if one is None else (one,) for one in output.logprobs]
        events: list[TokenEvent] = []
        # The tokens of chains follow.
        is_whole = not in_flight.chains
        for sequence, token_id, found in zip(
            sampled, output.token_ids, logprobs or repeat((), len(sampled)), strict=is_whole
        ):
            # A token is discarded if the previous step ended its sequence, or lost a token of it.
            if sequence.state is finished or (late and sequence in late):
                continue
            if faulty and sequence.request_id in faulty:
                continue
            try:
                if token_id < 0:
                    events.append(self._end_nonfinite(sequence))
                    continue
                token_ids, active = sequence.token_ids, sequence.active
                token_ids.append(token_id)
                sequence.share.time += active.token_cost
                reason = None
                if len(token_ids) >= sequence.recheck_at or token_id in sequence.stop_token_ids:
                    reason = self._examine(sequence, token_id)
                events.append(
                    TokenEvent(
                        sequence.request_id,
                        sequence.index,
                        (token_id,),
                        found,
                        reason,
                        token_id if reason is stop else None,
                        active.num_cached_tokens,
                        sequence.num_prompt_tokens,
                        active.started_s,
                    )
                )
            except Exception as error:
                self._recovery.note_fault(sequence, error)
        return events

    def _read_chains(self, in_flight: InFlightStep, output: StepOutput) -> list[TokenEvent]:
        """Append the tokens of chains up to the token that follows the last right draft."""
        speculator = self._speculator
        assert speculator is not None
        events: list[TokenEvent] = []
        end = len(in_flight.sampled)
        for planned in in_flight.chains:
            chain = planned.with_guesses() if planned.is_guessed else planned
            sequence, first = chain.sequence, end
            end = first + len(chain.draft_ids) + 1
            token_ids = output.token_ids[first:end]
            num_accepted = _num_equal(chain.draft_ids[: chain.num_usable], token_ids)
            if sequence in in_flight.late:
                speculator.note_chain(chain, 0)
                continue
            if sequence.state is FINISHED:
                if token_ids[num_accepted] < 0:
                    self._prefixes.forget_blocks(sequence)
                speculator.num_dropped_drafts += len(chain.draft_ids)
                continue
            sequence.refuse_drafts(len(chain.draft_ids) - num_accepted)
            if sequence.request_id in self._recovery.faulty_ids:
                continue
            speculator.note_chain(chain, num_accepted)
            logprobs = [one for one in output.logprobs[first:end] if one is not None]
            try:
                events += self._append_chain(chain, token_ids[: num_accepted + 1], logprobs)
            except Exception as error:
                self._recovery.note_fault(sequence, error)
        return events

    def _append_chain(
        self, chain: Chain, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> Iterator[TokenEvent]:
        """Append tokens until the sequence ends, and yield its events."""
        sequence, reason, number = chain.sequence, None, 0
        # Only the last token can be none.
        for token_id in token_ids if token_ids[-1] >= 0 else token_ids[:-1]:
            sequence.token_ids.append(token_id)
            sequence.share.time += sequence.active.token_cost
            number += 1
            is_stop = token_id in sequence.stop_token_ids
            if len(sequence.token_ids) >= sequence.recheck_at or is_stop:
                reason = self._examine(sequence, token_id)
            if reason is not None:
                break
        if number:
            yield ChainEvent(
                sequence.request_id,
                sequence.index,
                tuple(token_ids[:number]),
                tuple(logprobs[:number]),
                reason,
                token_ids[number - 1] if reason is FinishReason.STOP else None,
                sequence.active.num_cached_tokens,
                sequence.num_prompt_tokens,
                sequence.active.started_s,
                num_accepted=min(number, len(token_ids) - 1),
                num_refused=len(chain.draft_ids) - len(token_ids) + 1,
            )
        if reason is None and token_ids[-1] < 0:
            yield self._end_nonfinite(sequence)

    def _examine(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Handle a sequence's last token; return why the sequence ends, if it does."""
        if isinstance(sequence.state, Running):
            if not sequence.recheck_at:
                self._prefixes.mark_verified(sequence)
            self._prefixes.register_blocks(sequence)
        if sequence.may_end_with(token_id):
            reason = FinishReason.STOP
        elif len(sequence.token_ids) == sequence.max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        self._prefixes.mark_verified(sequence)
        if self._speculator is not None:
            self._speculator.close_sequence(sequence)
        self._table.remove_sequence(sequence)
        return reason

    def _end_nonfinite(self, sequence: Sequence) -> TokenEvent:
        """End a sequence after logits that were not finite, and return the event."""
        self.num_nonfinite_sequences += 1
        self._prefixes.forget_blocks(sequence)
        return self.end_sequence(sequence, FinishReason.ERROR)

    def _forget_ended(self, in_flight: InFlightStep, output: StepOutput) -> None:
        """Forget the blocks of sequences that ended with logits that were not finite."""
        for sequence, token_id in zip(in_flight.sampled, output.token_ids, strict=False):
            is_ended = token_id < 0 and sequence.state is FINISHED
            if is_ended and sequence not in in_flight.late:
                self._prefixes.forget_blocks(sequence)


def _num_equal(draft_ids: AnySequence[int], token_ids: AnySequence[int]) -> int:
    """Return how many drafts are the tokens that were sampled."""
    pairs = zip(draft_ids, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class InFlightStep(msgspec.Struct, frozen=True):
    """A plan without an output yet."""

    plan: StepPlan
    sampled: list[Sequence]
    prefilled: list[Sequence]
    """Sequences that compute known tokens, whether they sample or not."""
    late: list[Sequence]
    """Sampled sequences with late masks; they sample no token."""
    prompt_logprob_rows: dict[int, Sequence]
    """Sequences by row with log-probabilities of their prompts in the step."""
    masked: list[MaskedRow]
    """Sequences with masked tokens, in the order of the plan."""
    chains: list[Chain] = []
    """Sequences with drafts, which follow the other sampled sequences. Only an overlapped plan is
    made before their output is known."""
    is_alone: bool = False
    """Whether no other plan was in flight when it was made."""

    def cut_chains(self, num_usable: Mapping[Sequence, int]) -> None:
        """Accept at most so many drafts of some chains."""
        self.chains[:] = [
            chain._replace(num_usable=num_usable.get(chain.sequence)) for chain in self.chains
        ]

    def note_late(self, sequence: Sequence) -> None:
        """Note that a sequence samples no token, since its first mask is late."""
        self.late.append(sequence)
        for chain in self.chains:
            if chain.sequence is sequence:
                sequence.refuse_drafts(len(chain.draft_ids))

    def keep_guesses(self, packed_ids: bytes) -> None:
        """Keep the guesses of a draft head at the sequences that they continue."""
        draft_ids, number = array("i", packed_ids), self.plan.num_drafts
        for place, sequence in enumerate(self.sampled_sequences):
            if sequence.drafts is not None and sequence not in self.late:
                sequence.drafts.head_ids = draft_ids[place * number : (place + 1) * number]
                sequence.drafts.num_known = len(sequence.token_ids)

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """All sequences that sample tokens, in the order of the output."""
        return self.sampled + [chain.sequence for chain in self.chains]

    @property
    def num_head_drafts(self) -> int:
        """Tokens that a draft head guesses behind the step."""
        return self.plan.num_drafts * len(self.sampled_sequences)


class PromptLogprobsBuffer:
    """Log-probabilities of prompts that were requested and that no event contains yet."""

    def __init__(self) -> None:
        self.requests: dict[str, ActiveRequest] = {}
        """The requests, by id. While there is none, nothing else needs to be called."""

    def add_request(self, active: ActiveRequest) -> None:
        """Expect log-probabilities of a prompt, if its request has `prompt_logprobs`."""
        if active.prompt_logprobs is not None:
            self.requests[active.request.id] = active

    def forget_sequence(self, sequence: Sequence) -> None:
        """Drop a request's log-probabilities when its first sequence ends."""
        if sequence.index == 0:
            self.requests.pop(sequence.request_id, None)

    def prompt_logprob_rows(self, prefilled: Iterable[Sequence]) -> dict[int, Sequence]:
        """Return the sequences of a plan that compute the log-probabilities of prompts, by row."""
        return {
            sequence.state.row: sequence
            for sequence in prefilled
            if sequence.index == 0 and sequence.active.prompt_logprobs is not None
        }

    def keep(
        self, prompt_logprob_rows: dict[int, Sequence], computed: Iterable[PromptLogprobs]
    ) -> None:
        """Keep the log-probabilities that a step has computed for the sequences of the rows."""
        for found in computed:
            sequence = prompt_logprob_rows.get(found.row)
            kept = None if sequence is None else sequence.active.prompt_logprobs
            if kept is None:
                continue
            if found.first_position == 1:
                # The prompt is computed again if the sequence was preempted.
                kept.clear()
            kept.append(found)

    def add_to(self, event: TokenEvent) -> TokenEvent:
        """Return the first event of a request with the log-probabilities of its prompt.

        It belongs to another sequence if the mask of the first sequence is late.
        """
        active = self.requests.get(event.request_id)
        if active is None:
            return event
        kept = active.prompt_logprobs or []
        # Other sequences may also have computed the prompt, after the first was preempted.
        if event.index and (kept[-1].end if kept else 1) < event.num_prompt_tokens:
            return event
        del self.requests[event.request_id]
        active.prompt_logprobs = None
        return msgspec.structs.replace(event, prompt_logprobs=tuple(kept))
