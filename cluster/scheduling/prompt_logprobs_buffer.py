"""The log-probabilities of prompts, from the steps that compute them to the first event."""

from collections.abc import Iterable

import msgspec

from cluster.scheduling.event import TokenEvent
from cluster.scheduling.sequence import ActiveRequest, Sequence
from pagedray.batch import PromptLogprobs

__all__ = ["PromptLogprobsBuffer"]


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
        """Drop those of a request whose first sequence, which computes them, has ended."""
        if sequence.index == 0:
            self.requests.pop(sequence.request_id, None)

    def described(self, prefilled: Iterable[Sequence]) -> dict[int, Sequence]:
        """Return the sequences of a plan that compute the log-probabilities of prompts, by row."""
        return {
            sequence.row: sequence
            for sequence in prefilled
            if sequence.index == 0 and sequence.active.prompt_logprobs is not None
        }

    def keep(self, described: dict[int, Sequence], computed: Iterable[PromptLogprobs]) -> None:
        """Keep what a step has computed for the `described` sequences of its plan."""
        for found in computed:
            sequence = described.get(found.row)
            kept = None if sequence is None else sequence.active.prompt_logprobs
            if kept is None:
                continue
            if found.first_position == 1:
                # The prompt is computed again if the sequence was preempted.
                kept.clear()
            kept.append(found)

    def add_to(self, event: TokenEvent) -> TokenEvent:
        """Return the first event of a request with the log-probabilities of its prompt.

        It is that of another sequence if the mask of the first one is late.
        """
        active = self.requests.get(event.request_id)
        if active is None:
            return event
        kept = active.prompt_logprobs or []
        # Others may also have computed the prompt, after the first one was preempted.
        if event.index and (kept[-1].end if kept else 1) < event.num_prompt_tokens:
            return event
        del self.requests[event.request_id]
        active.prompt_logprobs = None
        return msgspec.structs.replace(event, prompt_logprobs=tuple(kept))
