"""The limits of the backlog, and when a rejected client may retry."""

import pytest

from cluster.scheduling.fair_queue import Backlog
from pagedray.errors import OverloadedError


def rejection(backlog: Backlog, num_tokens: int = 1) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        backlog.check_room("", num_tokens)
    return caught.value


def filled(num_requests: int, *, num_tokens: int = 10, max_tokens: int = 10**6) -> Backlog:
    backlog = Backlog(max_requests=num_requests, max_tokens=max_tokens)
    for _ in range(num_requests):
        backlog.check_room("", num_tokens)
        backlog.add_request("", num_tokens)
    return backlog


def test_requests_and_their_tokens_are_bounded() -> None:
    assert "The queue is full: at most 2 requests may wait." in str(rejection(filled(2)))
    backlog = Backlog(max_requests=9, max_tokens=25)
    backlog.add_request("", 20)
    backlog.check_room("", 5)
    assert "would exceed the limit of 25" in str(rejection(backlog, 6))
    backlog.drop_request("", 20)
    backlog.check_room("", 6)


def test_one_request_alone_may_be_longer_than_all_that_may_wait() -> None:
    Backlog(max_requests=9, max_tokens=25).check_room("", 1000)


def test_retry_after_is_the_time_to_serve_half_of_the_queue() -> None:
    backlog = filled(100)
    assert rejection(backlog).retry_after_s == 1.0
    now_s = 0.0
    for _ in range(60):
        # 20 requests a second.
        backlog.tick(now_s)
        for _ in range(5):
            backlog.start_request("", 10)
            backlog.add_request("", 10)
        now_s += 0.25
    assert rejection(backlog).retry_after_s == pytest.approx(50 / 20, rel=0.05)


def test_retry_after_of_a_queue_of_tokens_uses_the_token_rate() -> None:
    backlog = filled(100, num_tokens=10, max_tokens=1000)
    for step in range(60):
        backlog.tick(step * 0.25)
        backlog.start_request("", 10)
        backlog.add_request("", 10)
    backlog.drop_request("", 10)
    # 40 tokens a second.
    assert rejection(backlog, 20).retry_after_s == pytest.approx(990 / 2 / 40, rel=0.05)


def test_the_rate_is_that_of_a_full_engine_and_not_of_the_arrivals() -> None:
    backlog = Backlog(max_requests=10, max_tokens=10**6)
    for step in range(20):
        backlog.add_request("", 1)
        backlog.start_request("", 1)
        backlog.tick(step * 0.25)
    for _ in range(10):
        backlog.add_request("", 1)
    assert rejection(backlog).retry_after_s == 1.0


def test_an_engine_that_starts_nothing_gives_a_minute() -> None:
    backlog = filled(10)
    for step in range(9):
        backlog.tick(step * 0.25)
    assert rejection(backlog).retry_after_s == 60.0


def test_no_tenant_is_rejected_for_the_queue_of_another() -> None:
    backlog = filled(4, max_tokens=40)
    backlog.check_room("other", 1000)
    backlog.add_request("other", 1000)
    with pytest.raises(OverloadedError, match="4 requests may wait"):
        backlog.check_room("other", 1)
    backlog.start_request("other", 1000)
    backlog.check_room("other", 1)
    assert "4 requests may wait" in str(rejection(backlog))
