"""Turns outputs into events: appends sampled tokens, and ends the sequences that they end.

It does not know which plans are in flight: the scheduler passes the one that an output is of.
"""

from itertools import repeat

from cluster.scheduling.event import TokenEvent
from cluster.scheduling.fault_recovery import FaultRecovery
from cluster.scheduling.flight import Flight
from cluster.scheduling.prefixes.prefix_registry import PrefixRegistry
from cluster.scheduling.prompt_logprobs_buffer import PromptLogprobsBuffer
from cluster.scheduling.sequence import Sequence, SequenceState
from cluster.scheduling.sequence_table import SequenceTable
from pagedray.batch import StepOutput
from pagedray.request import FinishReason

__all__ = ["OutputReader"]


class OutputReader:
    """Applies outputs to the sequences of their plans."""

    __slots__ = ("_prompt_logprobs", "_recovery", "_registry", "_table", "num_nonfinite_sequences")

    def __init__(
        self,
        registry: PrefixRegistry,
        sequence_table: SequenceTable,
        *,
        recovery: FaultRecovery,
        prompt_logprobs: PromptLogprobsBuffer,
    ) -> None:
        self._registry = registry
        self._table = sequence_table
        self._recovery = recovery
        self._prompt_logprobs = prompt_logprobs
        self.num_nonfinite_sequences = 0
        """Sequences that ended because their logits were not finite."""

    def read_output(self, flight: Flight, output: StepOutput) -> list[TokenEvent]:
        """Apply the output of a plan and return its events."""
        events = self._append_tokens(flight, output)
        if len(events) < len(flight.sampled):
            self._forget_ended(flight, output)
        if self._prompt_logprobs.requests:
            self._prompt_logprobs.keep(flight.described, output.prompt_logprobs)
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

    def _append_tokens(self, flight: Flight, output: StepOutput) -> list[TokenEvent]:
        """Append each token to its sequence. This is where a step takes the longest."""
        sampled, late, faulty = flight.sampled, flight.late, self._recovery.faulty_ids
        finished, stop = SequenceState.FINISHED, FinishReason.STOP
        logprobs = [() if one is None else (one,) for one in output.logprobs]
        events: list[TokenEvent] = []
        for sequence, token_id, found in zip(
            sampled, output.token_ids, logprobs or repeat((), len(sampled)), strict=True
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
                active.share.time += active.token_cost
                reason = None
                if len(token_ids) >= sequence.next_check or token_id in sequence.stop_token_ids:
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
                self._recovery.note_fault(error)
        return events

    def _examine(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Do what a sequence's last token calls for; return why it ends, if it does."""
        if sequence.state is SequenceState.RUNNING:
            if not sequence.next_check:
                self._registry.prove_blocks(sequence)
            self._registry.register_blocks(sequence)
        if sequence.may_end_with(token_id):
            reason = FinishReason.STOP
        elif len(sequence.token_ids) == sequence.max_length:
            reason = FinishReason.LENGTH
        else:
            return None
        self._registry.prove_blocks(sequence)
        self._table.remove_sequence(sequence)
        return reason

    def _end_nonfinite(self, sequence: Sequence) -> TokenEvent:
        """End a sequence whose logits were not finite, and return the event."""
        self.num_nonfinite_sequences += 1
        self._registry.forget_blocks(sequence)
        return self.end_sequence(sequence, FinishReason.ERROR)

    def _forget_ended(self, flight: Flight, output: StepOutput) -> None:
        """Forget the blocks of ended sequences whose logits were not finite."""
        for sequence, token_id in zip(flight.sampled, output.token_ids, strict=True):
            is_ended = token_id < 0 and sequence.state is SequenceState.FINISHED
            if is_ended and sequence not in flight.late:
                self._registry.forget_blocks(sequence)
