from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from cluster.scheduling.scheduler import Deadlines
from cluster.scheduling.sequence import ActiveRequest
from pagedray.batch import StepOutput, StepPlan, TokenLogprobs
from pagedray.errors import CapacityError, InvalidRequestError, OverloadedError, WorkerError
from pagedray.request import FinishReason
from tests.scheduling.builders import make_active, make_request, make_scheduler
from tests.scheduling.fake_worker import EOS
from tests.scheduling.harness import Harness

if TYPE_CHECKING:
    pass

N = 64
NUM_TOKENS = 20_000


def planned(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """Return (first position, number of tokens, is sampled) of each sequence of a plan."""
    assert plan is not None
    return [(s.first_position, s.num_tokens, s.is_sampled) for s in plan.sequences]


def token_after(harness: Harness, request_id: str, place: int) -> int:
    """Return the token at `place` of a completion, from a separate run."""
    alone = Harness()
    for request in harness.requests.values():
        alone.add(request.prompt_token_ids, max_tokens=place + 1)
    alone.drain()
    return alone.results.tokens[request_id, 0][place]


@pytest.mark.parametrize(("max_model_len", "max_tokens", "num_tokens"), [(100, 5, 5), (6, 50, 3)])
def test_tokens_are_sampled_until_a_limit(
    max_model_len: int, max_tokens: int, num_tokens: int
) -> None:
    harness = Harness(max_model_len=max_model_len)
    request_id = harness.add([1, 2, 4], max_tokens=max_tokens)
    harness.drain()
    assert len(harness.results.tokens[request_id, 0]) == num_tokens
    assert harness.results.reasons[request_id, 0] is FinishReason.LENGTH


def test_next_plan_is_made_before_the_token_is_known() -> None:
    harness = Harness()
    harness.add([1, 2, 4])
    assert planned(harness.schedule()) == [(0, 3, True)]
    assert planned(harness.schedule()) == [(3, 1, True)]
    assert harness.schedule() is None


def test_sequence_is_not_planned_while_its_last_token_is_in_flight() -> None:
    harness = Harness()
    harness.add([1, 2, 4], max_tokens=1)
    harness.schedule()
    assert harness.schedule() is None


def test_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add([1] * 9)
    plans = [harness.schedule(), harness.schedule()]
    harness.settle()
    plans.append(harness.schedule())
    assert [planned(plan) for plan in plans] == [[(0, 4, False)], [(4, 4, False)], [(8, 1, True)]]


def test_running_sequences_come_before_chunks_in_the_budget_and_after_them_in_the_plan() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add([1, 2])
    harness.step()
    harness.add([4] * 9)
    assert planned(harness.schedule()) == [(0, 3, False), (2, 1, True)]


def test_urgent_request_starts_before_those_that_came_earlier() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add([1, 2])
    urgent = harness.add([4, 5, 6], priority=-1)
    plan = harness.plan()
    assert plan.starts[0].seed == harness.requests[urgent].seed


def test_end_of_sequence_is_found_one_step_late_and_the_row_is_ended() -> None:
    harness = Harness()
    probe = harness.add([1, 2, 4])
    stop_token_id = token_after(harness, probe, 0)
    harness = Harness()
    request_id = harness.add([1, 2, 4], stop_token_ids=[stop_token_id])
    harness.schedule()
    harness.schedule()
    harness.execute()
    (event,) = harness.collect()
    assert event.token_ids == (stop_token_id,)
    assert event.finish_reason is FinishReason.STOP
    assert event.stop_token_id == stop_token_id
    harness.execute()
    assert harness.collect() == []
    assert harness.schedule() is None
    assert not harness.scheduler.has_work
    assert harness.results.tokens[request_id, 0] == [stop_token_id]


def test_stop_token_does_not_end_a_sequence_before_min_tokens() -> None:
    harness = Harness()
    probe = harness.add([1, 2, 4])
    stop_token_id = token_after(harness, probe, 0)
    harness = Harness()
    request_id = harness.add([1, 2, 4], stop_token_ids=[stop_token_id], min_tokens=1)
    harness.drain()
    assert harness.results.tokens[request_id, 0][0] == stop_token_id
    assert len(harness.results.tokens[request_id, 0]) > 1


def test_worker_forbids_end_of_sequence_only_where_it_would_end() -> None:
    harness = Harness()
    harness.add([1], ignore_eos=False)
    harness.add([2], ignore_eos=True)
    plan = harness.plan()
    assert [start.eos_token_ids for start in plan.starts] == [(EOS,), ()]


def test_sequence_whose_logits_are_not_finite_ends_alone() -> None:
    harness = Harness()
    bad = harness.add([1, 2, 4], bad_length=5)
    good = harness.add([1, 2, 4])
    harness.drain()
    assert harness.results.reasons[bad, 0] is FinishReason.ERROR
    assert len(harness.results.tokens[bad, 0]) == 2
    assert harness.results.reasons[good, 0] is FinishReason.LENGTH


def test_prefix_of_a_sequence_with_bad_logits_is_not_reused() -> None:
    harness = Harness()
    harness.add([1] * 9, bad_length=9)
    harness.drain()
    assert harness.scheduler.stats().num_cached_blocks == 0


def test_logprobs_go_with_their_token() -> None:
    harness = Harness()
    harness.add([1, 2])
    harness.schedule()
    logprobs = TokenLogprobs(-0.5, [7], [-0.5])
    (event,) = harness.scheduler.update(StepOutput(0, [7], [logprobs]))
    assert event.logprobs == (logprobs,)


def test_output_of_another_step_is_rejected() -> None:
    harness = Harness()
    harness.add([1, 2])
    harness.schedule()
    with pytest.raises(WorkerError, match="step 1, but expected step 0"):
        harness.scheduler.update(StepOutput(1, [7]))
    with pytest.raises(WorkerError, match="samples 1 tokens but its output has 2"):
        harness.scheduler.update(StepOutput(0, [7, 7]))


def test_abort_ends_every_sequence_once() -> None:
    harness = Harness()
    request_id = harness.add([1, 2, 4], n=3)
    harness.step()
    events = harness.abort(request_id)
    assert [event.index for event in events] == [0, 1, 2]
    assert all(event.finish_reason is FinishReason.ABORT for event in events)
    assert harness.abort(request_id) == []
    assert harness.abort("no such request") == []
    harness.drain()


def test_sequence_that_its_reader_finished_has_no_more_events() -> None:
    harness = Harness()
    request_id = harness.add([1, 2, 4], n=2)
    harness.step()
    harness.step()
    harness.finish(request_id, 0)
    harness.finish(request_id, 0)
    harness.drain()
    assert harness.results.reasons == {(request_id, 1): FinishReason.LENGTH}


def test_request_that_can_never_fit_is_rejected() -> None:
    harness = Harness(num_blocks=2, block_size=4)
    with pytest.raises(CapacityError, match="needs 3 KV blocks, but the cache has only 2"):
        harness.add([1, 2, 4], max_tokens=6)
    assert not harness.scheduler.has_work
    harness.add([1, 2, 4], max_tokens=5)
    harness.drain()


def test_request_over_the_queue_limit_is_rejected() -> None:
    harness = Harness(max_queued_requests=1)
    harness.add([1, 2])
    with pytest.raises(OverloadedError, match="The queue is full: at most 1 request may wait"):
        harness.add([1, 2])
    harness.schedule()
    harness.add([1, 2])


def test_a_rejected_request_may_come_back_when_half_of_the_queue_has_started() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=40)
    # One request starts in each second while others wait.
    for second in range(20):
        harness.add([1, 2], max_tokens=1)
        harness.add([1, 2], max_tokens=1)
        harness.scheduler.expire_requests(float(second))
        harness.step()
    for _ in range(20):
        harness.add([1, 2])
    with pytest.raises(OverloadedError) as rejected:
        harness.add([1, 2])
    assert rejected.value.retry_after_s == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "1 to 99 tokens, not 0"),
        ([1] * 100, "1 to 99 tokens, not 100"),
        ([-1], "from 0 to 2147483647"),
        ([2**31], "from 0 to 2147483647"),
    ],
)
def test_prompt_that_cannot_be_computed_is_rejected(prompt: list[int], message: str) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match=message):
        harness.add(prompt)
    assert not harness.scheduler.has_work


def test_second_request_of_the_same_id_is_rejected() -> None:
    scheduler = make_scheduler()
    request = make_request()
    scheduler.add_request(request)
    with pytest.raises(InvalidRequestError, match="'r' is already running"):
        scheduler.add_request(request)
    assert scheduler.num_waiting == 1


def test_work_is_over_when_requests_have_ended_and_plans_are_collected() -> None:
    harness = Harness()
    harness.add([1, 2], max_tokens=1)
    harness.schedule()
    assert harness.scheduler.has_work
    harness.settle()
    assert not harness.scheduler.has_work
    assert harness.schedule() is None


def test_known_prefix_is_reported_as_cached() -> None:
    harness = Harness(block_size=4)
    harness.add([1] * 10)
    harness.drain()
    harness.add([1] * 10)
    plan = harness.schedule()
    assert planned(plan) == [(8, 2, True)]
    (event,) = harness.settle()
    assert (event.num_cached_tokens, event.num_prompt_tokens) == (8, 10)


def test_continuation_is_a_known_prefix_too() -> None:
    harness = Harness(block_size=4)
    request_id = harness.add([1] * 6, max_tokens=7)
    harness.drain()
    harness.add([1] * 6 + harness.results.tokens[request_id, 0])
    assert planned(harness.schedule()) == [(12, 1, True)]


def test_overdue_request_is_ended_and_not_started() -> None:
    harness = Harness()
    overdue = harness.add([1, 2], deadline_s=5.0)
    other = harness.add([4, 5], deadline_s=9.0)
    events = harness.expire(5.0)
    assert [event.request_id for event in events] == [overdue]
    assert events[0].finish_reason is FinishReason.ABORT
    assert harness.expire(5.0) == []
    plan = harness.plan()
    assert [start.seed for start in plan.starts] == [harness.requests[other].seed]


def test_deadline_of_an_ended_request_does_not_end_its_namesake() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(deadline_s=1.0))
    scheduler.abort_request("r")
    scheduler.add_request(make_request(deadline_s=2.0))
    assert scheduler.expire_requests(1.5) == []
    assert len(scheduler.expire_requests(2.0)) == 1


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    harness = Harness()
    for _ in range(500):
        harness.scheduler.abort_request(harness.add([1], deadline_s=1e9))
    assert len(harness.scheduler._deadlines) < 100


def test_every_sequence_continues_after_a_reset() -> None:
    harness = Harness(num_blocks=10, num_cpu_blocks=20, preemption="swap")
    for prompt in ([1] * 9, [1] * 5, [2] * 3):
        harness.add(prompt, n=2, max_tokens=12)
    for _ in range(14):
        harness.turn()
    harness.schedule()
    harness.replace_worker()
    harness.drain()
    assert set(harness.results.reasons.values()) == {FinishReason.LENGTH}


def test_siblings_that_wait_share_one_prompt() -> None:
    harness = Harness(num_blocks=6000, max_model_len=NUM_TOKENS + 10, enable_prefix_cache=False)
    prompt = [5] * NUM_TOKENS
    tracemalloc.start()
    harness.add(prompt, n=N, max_tokens=2)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    # The client's tuple has 8 bytes for each token, and the shared copy 4.
    assert size < 16 * NUM_TOKENS
    assert len({id(sequence.token_ids) for sequence in harness.sequences}) == 1


def test_what_siblings_generate_is_their_own() -> None:
    harness = Harness()
    request = harness.add([1] * 6, n=3)
    harness.drain()
    kept = [sequence.token_ids for sequence in harness.sequences]
    assert [list(one[6:]) for one in kept] == [harness.results.tokens[request, i] for i in range(3)]
    assert harness.sequences[0].active.prompt.tolist() == [1] * 6


@pytest.mark.parametrize("seed", range(5))
def test_requests_end_at_their_deadlines_whichever_others_ended_before(seed: int) -> None:
    draws = random.Random(seed)
    requests: dict[str, ActiveRequest] = {}
    deadlines = Deadlines(requests)
    for number in range(400):
        add(requests, deadlines, number, deadline_s=draws.uniform(0.0, 100.0))
    # Entries of ended requests are removed when another one is added.
    for request_id in draws.sample(sorted(requests), 300):
        del requests[request_id]
    add(requests, deadlines, 400, deadline_s=50.0)
    assert len(deadlines) == len(requests) == 101
    for now_s in range(101):
        late = {id for id, one in requests.items() if (one.request.deadline_s or 0.0) <= now_s}
        due = deadlines.take_due(now_s)
        assert sorted(due) == sorted(late)
        for request_id in due:
            del requests[request_id]
    assert not requests


def add(
    requests: dict[str, ActiveRequest], deadlines: Deadlines, number: int, *, deadline_s: float
) -> None:
    request = make_request(str(number), deadline_s=deadline_s)
    requests[request.id] = make_active(request)
    deadlines.add_request(request)
