"""Which requests are suspected of killing their group."""

from __future__ import annotations

from cluster.engine.open_requests import OpenRequests
from cluster.scheduling.event import TokenEvent
from pagedray.request import FinishReason, Request, SamplingParams


def request(request_id: str, n: int = 1) -> Request:
    return Request(id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(n=n), seed=0)


def test_only_requests_that_ran_at_every_death_are_suspected() -> None:
    open_requests = OpenRequests()
    open_requests.add_request(request("poison"))
    open_requests.add_request(request("queued"))
    assert open_requests.note_death(["poison"]) == []
    assert open_requests.note_death(["poison"]) == []
    assert open_requests.note_death(["poison", "queued"]) == ["poison"]


def test_request_is_forgotten_with_its_last_sequence() -> None:
    open_requests = OpenRequests()
    open_requests.add_request(request("a", n=2))
    open_requests.note_event(TokenEvent("a", 0, (7,)))
    open_requests.note_event(TokenEvent("a", 0, finish_reason=FinishReason.STOP))
    assert len(open_requests) == 1
    open_requests.end_sequence("a")
    assert len(open_requests) == 0
    open_requests.end_sequence("a")
    assert len(open_requests) == 0
