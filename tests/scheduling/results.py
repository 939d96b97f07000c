"""What each sequence was given, and whether that is what it would have got alone."""

from collections.abc import Iterable, Mapping

from cluster.scheduling.event import TokenEvent
from pagedray.request import FinishReason, Request
from tests.scheduling.fake_worker import SeedRecords, undisturbed


class Results:
    """The events of all requests, checked as they arrive."""

    def __init__(
        self, requests: Mapping[str, Request], *, max_model_len: int, seeds: SeedRecords
    ) -> None:
        self._requests = requests
        self._max_model_len = max_model_len
        self._seeds = seeds
        self.events: list[TokenEvent] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        """What sequences generated, by request and index."""
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        """Why sequences ended, unless the caller finished them."""
        self._finished_by_caller: set[tuple[str, int]] = set()

    def expect(self, request: Request) -> None:
        """Expect events of the open sequences of a request, which may have tokens already."""
        generated = request.generated_token_ids
        for index in request.open_indices:
            known = generated[index] if generated else None
            self.tokens[request.id, index] = list(known or ())

    def note(self, events: Iterable[TokenEvent]) -> None:
        """Add events. None follows the end of its sequence."""
        for event in events:
            key = (event.request_id, event.index)
            assert key not in self.reasons, "an event follows the last"
            assert key not in self._finished_by_caller
            self.tokens[key] += event.token_ids
            assert event.num_prompt_tokens == len(self._requests[key[0]].prompt_token_ids)
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
            self.events.append(event)

    def note_finish(self, request_id: str, index: int) -> None:
        """Expect no more events of a sequence, which the caller finishes."""
        if (request_id, index) not in self.reasons:
            self._finished_by_caller.add((request_id, index))

    def check_complete(self) -> None:
        """Check that each sequence ended once, with its expected tokens."""
        for (request_id, index), token_ids in self.tokens.items():
            request = self._requests[request_id]
            reason = self.reasons.get((request_id, index))
            assert (reason is None) == ((request_id, index) in self._finished_by_caller)
            expected, expected_reason = undisturbed(
                request,
                index,
                max_model_len=self._max_model_len,
                bad_length=self._seeds.bad_lengths.get(request.seed),
            )
            has_read_bad = (request.seed, index) in self._seeds.bad_sequences
            if reason in (None, FinishReason.ABORT) or (
                has_read_bad and reason is FinishReason.ERROR
            ):
                assert token_ids == expected[: len(token_ids)]
            else:
                assert token_ids == expected
                assert reason is expected_reason
