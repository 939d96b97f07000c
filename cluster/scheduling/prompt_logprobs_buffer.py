"""The log-probabilities of prompts, from the steps that compute them to the first token's event."""

from collections.abc import Iterable

import msgspec

from cluster.scheduling.event import TokenEvent
from cluster.scheduling.sequence import ActiveRequest, Sequence
from pagedray.batch import PromptLogprobs

__all__ = ["PromptLogprobsBuffer"]


class PromptLogprobsBuffer:
    """Those of requests that asked for them and of which no event has any yet."""

    def __init__(self) -> None:
        self.requests: dict[str, ActiveRequest] = {}
        """The requests, by id. While there is none, nothing else needs to be called."""

    def add_request(self, active: ActiveRequest) -> None:
        """Await those of a request, if it asks for them."""
        if active.prompt_logprobs is not None:
            self.requests[active.request.id] = active

    def forget_request(self, request_id: str) -> None:
        """Drop those of a request, because one of its sequences has ended."""
        self.requests.pop(request_id, None)

    def described(self, prefilled: Iterable[Sequence]) -> dict[int, Sequence]:
        """Return the sequences of a plan whose prompts they describe, by row."""
        return {
            sequence.row: sequence
            for sequence in prefilled
            if sequence.index == 0 and sequence.active.prompt_logprobs is not None
        }

    def keep(self, described: dict[int, Sequence], computed: Iterable[PromptLogprobs]) -> None:
        """Keep those that a step has computed of the sequences that its plan described."""
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
        """Return the event of a first token with the log-probabilities of its prompt."""
        if event.index != 0 or event.request_id not in self.requests:
            return event
        active = self.requests.pop(event.request_id)
        kept, active.prompt_logprobs = active.prompt_logprobs, None
        return msgspec.structs.replace(event, prompt_logprobs=tuple(kept or ()))
