"""Which requests are suspected when groups die."""

from __future__ import annotations

from cluster.engine.journal import Journal
from cluster.scheduling.event import TokenEvent
from pagedray.request import FinishReason, Request, SamplingParams


def request(request_id: str, n: int = 1) -> Request:
    return Request(id=request_id, prompt_token_ids=(1,), sampling=SamplingParams(n=n), seed=0)


def test_only_requests_that_ran_at_every_death_are_suspected() -> None:
    journal = Journal()
    journal.accept(request("poison"))
    journal.accept(request("queued"))
    assert journal.note_death(["poison"]) == []
    assert journal.note_death(["poison"]) == []
    assert journal.note_death(["poison", "queued"]) == ["poison"]


def test_request_is_forgotten_with_its_last_sequence() -> None:
    journal = Journal()
    journal.accept(request("a", n=2))
    journal.note(TokenEvent("a", 0, (7,)))
    journal.note(TokenEvent("a", 0, finish_reason=FinishReason.STOP))
    assert len(journal) == 1
    journal.end_sequence("a")
    assert len(journal) == 0
    journal.end_sequence("a")
    assert len(journal) == 0
