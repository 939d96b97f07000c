"""Deadlines, beside a list that is searched whole."""

import random
from array import array

import pytest

from cluster.scheduling.scheduler import Deadlines
from cluster.scheduling.sequence import ActiveRequest
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams


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
    request = Request(
        id=str(number),
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        seed=0,
        deadline_s=deadline_s,
    )
    prompt = array("I", request.prompt_token_ids)
    requests[request.id] = ActiveRequest(request, prompt=prompt, arrival=0, max_model_len=9)
    deadlines.add_request(request)
