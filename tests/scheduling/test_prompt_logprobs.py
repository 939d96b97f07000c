"""A request's log-probabilities of its prompt come with its first event, whichever that is."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import PromptLogprobs, StepOutput
from pagedray.request import AskedMasks, FinishReason, Request
from tests.scheduling.builders import make_request, make_scheduler, plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent

ALLOWED = b"\xff" * 4
PROMPT = (5, 6, 7, 8)


def logprobs(first_position: int, number: int) -> PromptLogprobs:
    return PromptLogprobs(
        row=0,
        first_position=first_position,
        num_likeliest=0,
        chosen=array("f", [-0.5] * number).tobytes(),
        ranks=array("i", [1] * number).tobytes(),
        token_ids=b"",
        logprobs=b"",
    )


LOGPROBS = logprobs(1, 3)


class FirstIsLate:
    """A grammar whose masks are late for the sequence that computes the prompt."""

    num_mask_bytes = 4
    error = ""
    is_costly = False
    is_free = False
    forced_ids = ()

    def __init__(self, other: bytes | FinishReason) -> None:
        self._other = other
        """What the masks of the other sequences are."""
        self.is_late = True

    def matcher(self, request: Request) -> FirstIsLate:
        return self

    def masks(
        self,
        asked: Sequence[AskedMasks],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        if not self.is_late:
            return [ALLOWED] * len(asked)
        # The first sequence is alone in the first step, and then it is deferred.
        others = [] if len(asked) == num_awaited == 1 else [self._other] * num_awaited
        return [*others, *([None] * (len(asked) - len(others)))]


def run_step(scheduler: Scheduler) -> list[TokenEvent]:
    """Run a step in which sequences with a late mask sample nothing."""
    plan, masked = scheduler.schedule(), scheduler.masked_step()
    events: list[TokenEvent] = []
    words = b""
    if masked is not None:
        made = masked.make_masks(1.0)
        words = b"" if made.masks is None else made.masks.words
        events += scheduler.apply_masks(made)
    if plan is not None:
        token_ids = [7 if not words or words[4 * at] else -1 for at in range(plan.num_sampled)]
        prompts = [LOGPROBS] if any(one.num_tokens > 1 for one in plan.chunks) else []
        events += scheduler.update(StepOutput(plan.step, token_ids, prompt_logprobs=prompts))
        scheduler.acknowledge(plan.step)
    return events


def started(grammar: FirstIsLate) -> Scheduler:
    """Return a scheduler whose request of two sequences has computed its prompt."""
    scheduler = make_scheduler()
    options = {"max_tokens": 3, "n": 2, "ignore_eos": True, "prompt_logprobs": 0}
    scheduler.add_request(make_request("r", PROMPT, grammar=grammar, **options))
    assert run_step(scheduler) == []
    return scheduler


def test_another_sequence_has_them_if_the_mask_of_the_first_is_late() -> None:
    grammar = FirstIsLate(ALLOWED)
    scheduler = started(grammar)
    (event,) = run_step(scheduler)
    assert (event.index, event.prompt_logprobs) == (1, (LOGPROBS,))
    grammar.is_late = False
    later = [event for _ in range(8) for event in run_step(scheduler)]
    assert {event.index for event in later} == {0, 1}
    assert not any(event.prompt_logprobs for event in later)


def test_a_sequence_that_ends_without_a_token_has_them_too() -> None:
    scheduler = started(FirstIsLate(FinishReason.STOP))
    events = run_step(scheduler)
    assert [(one.index, one.finish_reason) for one in events] == [(1, FinishReason.STOP)]
    assert events[0].prompt_logprobs == (LOGPROBS,)


def test_a_prompt_that_is_computed_again_has_them_once() -> None:
    parts = (logprobs(1, 2), logprobs(3, 1))
    scheduler = make_scheduler(max_num_batched_tokens=2)
    request = make_request("r", PROMPT, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    scheduler.add_request(request)

    def run_chunk(part: PromptLogprobs) -> list[TokenEvent]:
        plan = plan_of(scheduler)
        output = StepOutput(plan.step, [7] * plan.num_sampled, prompt_logprobs=[part])
        return scheduler.update(output)

    assert run_chunk(parts[0]) == []
    # The ranks have died.
    scheduler.reset()
    assert run_chunk(parts[0]) == []
    (event,) = run_chunk(parts[1])
    assert event.prompt_logprobs == parts


def test_a_prompt_that_is_computed_again_after_the_first_event_has_none() -> None:
    scheduler = make_scheduler()
    first = make_request("first", PROMPT, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    scheduler.add_request(first)
    (event,) = run_step(scheduler)
    assert event.prompt_logprobs == (LOGPROBS,)
    assert scheduler._prompt_logprobs.requests == {}
    scheduler.add_request(msgspec.structs.replace(first, id="second"))
    # The ranks have died; the next ones compute the prompt of the first request again, in row 0.
    scheduler.reset()
    events = run_step(scheduler)
    assert [(one.request_id, one.prompt_logprobs) for one in events] == [
        ("first", ()),
        ("second", ()),
    ]


def test_nothing_is_kept_of_a_request_that_its_reader_finished() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    scheduler.add_request(make_request("r", PROMPT, max_tokens=3, prompt_logprobs=0))
    assert run_step(scheduler) == []
    assert scheduler.finish_sequence("r", 0)
    assert scheduler._prompt_logprobs.requests == {}
    assert not scheduler.finish_sequence("r", 0)


def test_a_prompt_is_computed_without_cached_blocks() -> None:
    scheduler = make_scheduler()
    sizes = []
    for number, prompt_logprobs in enumerate((None, None, 0)):
        options = {"max_tokens": 1, "prompt_logprobs": prompt_logprobs}
        scheduler.add_request(make_request(f"{number}", (*PROMPT, 9), **options))
        plan = plan_of(scheduler)
        sizes.append(plan.chunks[0].num_tokens)
        scheduler.update(StepOutput(plan.step, [7]))
        scheduler.acknowledge(plan.step)
    assert sizes == [5, 1, 5]
