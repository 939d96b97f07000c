"""Events between the step thread and the calls of `LLM`."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from cluster.engine.event_buffers import EventBuffer, EventDispatcher
from cluster.scheduling.event import TokenEvent
from pagedray.errors import EngineError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator


def request(name: str) -> Request:
    return Request(id=name, prompt_token_ids=(1,), sampling=SamplingParams(), seed=0)


def event(name: str, token_id: int = 5, *, is_last: bool = False) -> TokenEvent:
    return TokenEvent(name, 0, (token_id,), finish_reason=FinishReason.LENGTH if is_last else None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


class Taker:
    """Takes events on another thread, which the test waits for."""

    def __init__(self, pool: ThreadPoolExecutor, buffer: EventBuffer) -> None:
        self._is_taking = threading.Event()
        self.taken: Future[list[TokenEvent]] = pool.submit(self._take, buffer)
        assert self._is_taking.wait(60.0)

    def _take(self, buffer: EventBuffer) -> list[TokenEvent]:
        self._is_taking.set()
        # Longer than the test waits, or it would take the events without being woken.
        return buffer.take_events(120.0)

    @property
    def sleeps(self) -> bool:
        try:
            self.taken.exception(timeout=0.1)
        except TimeoutError:
            return True
        return False


def test_each_call_gets_its_events_in_order() -> None:
    dispatcher = EventDispatcher()
    first = dispatcher.open_buffer([request("a"), request("b")], is_watched=True)
    second = dispatcher.open_buffer([request("c")], is_watched=True)
    published = [event(name, place) for place, name in enumerate("abcxacb")]
    dispatcher.publish(published)
    assert first.take_events() == [one for one in published if one.request_id in "ab"]
    assert second.take_events() == [one for one in published if one.request_id == "c"]


def test_thread_without_watch_sleeps_until_a_sequence_ends(pool: ThreadPoolExecutor) -> None:
    dispatcher = EventDispatcher()
    taker = Taker(pool, dispatcher.open_buffer([request("a")], is_watched=False))
    dispatcher.publish([event("a")] * 100)
    assert taker.sleeps
    dispatcher.publish([event("a", is_last=True)])
    assert len(taker.taken.result(60.0)) == 101


def test_thread_without_watch_takes_many_events_before_a_sequence_ends(
    pool: ThreadPoolExecutor,
) -> None:
    dispatcher = EventDispatcher()
    taker = Taker(pool, dispatcher.open_buffer([request("a")], is_watched=False))
    for _ in range(32):
        dispatcher.publish([event("a")] * 256)
    assert len(taker.taken.result(60.0)) == 32 * 256


def test_error_follows_the_events() -> None:
    dispatcher = EventDispatcher()
    buffer = dispatcher.open_buffer([request("a")], is_watched=True)
    dispatcher.publish([event("a")])
    dispatcher.fail_all(EngineError("gone"))
    assert buffer.take_events() == [event("a")]
    with pytest.raises(EngineError, match="gone"):
        buffer.take_events()
