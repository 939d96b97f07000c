"""Requests whose logits are not finite: whether they or the ranks are to blame."""

from __future__ import annotations

import logging

import pytest

from cluster.engine.output_watch import OutputWatch, client_events, make_engine_request
from cluster.scheduling.event import TokenEvent
from pagedray.errors import OverloadedError, WorkerError
from pagedray.request import FinishReason
from tests.scheduling.harness import Harness


def finite(request_id: str) -> TokenEvent:
    return TokenEvent(request_id, 0, (7,), finish_reason=FinishReason.LENGTH)


def bad(request_id: str) -> TokenEvent:
    return TokenEvent(request_id, 0, finish_reason=FinishReason.ERROR)


def suspicious_watch() -> OutputWatch:
    """Return a watch that has seen three bad requests in a row."""
    watch = OutputWatch()
    for request_id in "abc":
        assert watch.next_test(0.0) is None
        watch.note_events([bad(request_id)], 0.0)
    return watch


def test_three_requests_in_a_row_are_followed_by_one_test() -> None:
    watch = suspicious_watch()
    request = watch.next_test(0.0)
    assert request is not None
    assert watch.next_test(5.0) is None


def test_one_request_with_many_sequences_is_no_reason_for_a_test() -> None:
    watch = OutputWatch()
    for _ in range(9):
        watch.note_events([bad("a")], 0.0)
    assert watch.next_test(0.0) is None


def test_finite_logits_begin_the_count_again() -> None:
    watch = OutputWatch()
    for events in ([bad("a")], [bad("b"), finite("x")], [bad("c")], [bad("d")]):
        watch.note_events(events, 0.0)
        assert watch.next_test(0.0) is None
    watch.note_events([finite("x")], 0.0)
    assert not watch.is_suspicious


def test_a_test_that_succeeds_blames_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    watch = suspicious_watch()
    request = watch.next_test(0.0)
    assert request is not None
    with caplog.at_level(logging.WARNING):
        watch.note_events([finite(request.id)], 0.1)
    assert not watch.is_broken
    assert not watch.is_suspicious
    assert "the cause is in these requests" in caplog.text


def test_a_test_that_fails_is_repeated_until_one_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = suspicious_watch()
    with caplog.at_level(logging.WARNING):
        for second in range(5):
            request = watch.next_test(float(second))
            assert request is not None
            watch.note_events([bad(request.id)], second + 0.1)
            assert watch.is_broken
            assert watch.next_test(second + 0.5) is None
        request = watch.next_test(6.0)
        assert request is not None
        watch.note_events([finite(request.id)], 6.1)
    assert not watch.is_broken
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_tests_that_fail_for_half_a_minute_end_the_engine() -> None:
    watch = suspicious_watch()
    request = watch.next_test(0.0)
    assert request is not None
    watch.note_events([bad(request.id)], 0.0)
    watch.next_test(29.0)
    with pytest.raises(WorkerError, match="not finite for 30 s"):
        watch.next_test(30.0)


def test_a_test_that_was_lost_is_repeated() -> None:
    watch = suspicious_watch()
    assert watch.next_test(0.0) is not None
    assert watch.next_test(9.0) is None
    assert watch.next_test(10.0) is not None


def test_full_queue_accepts_engine_requests() -> None:
    harness = Harness(max_queued_requests=1)
    harness.add([1])
    with pytest.raises(OverloadedError):
        harness.add([1])
    for name in ("probe", "output-test-1", "output-test-2"):
        harness.scheduler.add_request(make_engine_request(name, max_tokens=1))
    assert harness.scheduler.num_waiting == 4


def test_clients_do_not_receive_events_of_engine_requests() -> None:
    request = make_engine_request("probe", max_tokens=1)
    of_client = TokenEvent("a", 0, (7,))
    assert client_events([of_client, TokenEvent(request.id, 0, (7,))]) == [of_client]
