"""The asyncio side of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from cluster.scheduling.event import TokenEvent
from cluster.serving.buffers import BufferLimits, OutputBuffers
from cluster.serving.engine_client import EngineClient
from pagedray.batch import TokenLogprobs
from pagedray.errors import EngineError, OverloadedError, WorkerError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.engine.stats import EngineStats


class _Recorder:
    """An engine that only records its calls."""

    is_healthy = True

    def __init__(self, *, room: int = 8) -> None:
        self.room = room
        self.calls: list[tuple[object, ...]] = []

    def submit_request(self, request: Request) -> None:
        if len([call for call in self.calls if call[0] == "submit_request"]) == self.room:
            raise OverloadedError("The queue is full.")
        self.calls.append(("submit_request", request.id))

    def abort_request(self, request_id: str) -> None:
        self.calls.append(("abort_request", request_id))

    def finish_sequence(self, request_id: str, index: int) -> None:
        self.calls.append(("finish_sequence", request_id, index))

    def stats(self) -> EngineStats:
        raise NotImplementedError


@pytest.fixture
def recorder() -> _Recorder:
    return _Recorder()


@pytest.fixture
async def client(recorder: _Recorder) -> EngineClient:
    client = EngineClient(asyncio.get_running_loop())
    client.attach_generation_engine(recorder)  # type: ignore[arg-type]  # narrower stubs than the library
    return client


def _request(name: str = "r", n: int = 1) -> Request:
    return Request(id=name, prompt_token_ids=(1,), sampling=SamplingParams(n=n), seed=0)


def _end(name: str = "r", index: int = 0) -> TokenEvent:
    return TokenEvent(name, index, (9,), finish_reason=FinishReason.LENGTH)


async def test_events_from_a_thread_reach_their_stream(client: EngineClient) -> None:
    stream = client.open_stream([_request()])
    events = [TokenEvent("r", 0, (5,)), TokenEvent("other", 0, (6,)), _end()]
    threading.Thread(target=client.publish, args=(events,)).start()
    assert [event async for batch in stream for event in batch] == [events[0], events[2]]


async def test_a_slow_reader_gets_all_events_at_once(client: EngineClient) -> None:
    stream = client.open_stream([_request()])
    for token_id in range(5):
        client.publish([TokenEvent("r", 0, (token_id,))])
    await asyncio.sleep(0)
    assert len(await anext(stream)) == 5
    stream.close()


async def test_leaving_early_aborts(client: EngineClient, recorder: _Recorder) -> None:
    async with client.open_stream([_request()]):
        pass
    assert recorder.calls == [("submit_request", "r"), ("abort_request", "r")]


async def test_leaving_at_the_end_does_not(client: EngineClient, recorder: _Recorder) -> None:
    async with client.open_stream([_request()]) as stream:
        client.publish([_end()])
        assert len([batch async for batch in stream]) == 1
    assert recorder.calls == [("submit_request", "r")]


async def test_finished_sequences_end_the_stream(client: EngineClient, recorder: _Recorder) -> None:
    async with client.open_stream([_request(n=2)]) as stream:
        stream.finish_sequence("r", 0)
        client.publish([TokenEvent("r", 0, (5,)), _end(index=1)])
        assert [event.index async for batch in stream for event in batch] == [1]
    assert recorder.calls == [("submit_request", "r"), ("finish_sequence", "r", 0)]


async def test_abort_ends_each_sequence_once(client: EngineClient) -> None:
    stream = client.open_stream([_request(n=2)])
    stream.abort()
    client.publish([_end()])
    events = [event async for batch in stream for event in batch]
    assert [(event.index, event.finish_reason) for event in events] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]


async def test_failure_reaches_every_stream_after_its_tokens(client: EngineClient) -> None:
    stream = client.open_stream([_request()])
    client.publish([TokenEvent("r", 0, (5,))])
    client.fail_all(WorkerError("A rank died."))
    await asyncio.sleep(0)
    assert len(await anext(stream)) == 1
    with pytest.raises(WorkerError):
        await anext(stream)


async def test_events_count_until_they_are_read(client: EngineClient) -> None:
    buffers = OutputBuffers(BufferLimits())
    stream = client.open_stream([_request()], buffer=buffers.open_buffer("ann"))
    few = [TokenEvent("r", 0, (5,))] * 68
    client.publish(few)
    await asyncio.sleep(0)
    assert buffers.num_bytes == 0
    logprobs = TokenLogprobs(-1.0, [5] * 20, [-1.0] * 20)
    client.publish([TokenEvent("r", 0, (5,)), TokenEvent("r", 0, (5,), logprobs=(logprobs,))])
    await asyncio.sleep(0)
    # The numbers and ids alone take 24 bytes each.
    assert buffers.num_bytes > 40 * 24
    assert len(await anext(stream)) == 70
    assert buffers.num_bytes == 0
    stream.close()


async def test_rejected_request_aborts_the_others_of_its_call() -> None:
    recorder = _Recorder(room=1)
    client = EngineClient(asyncio.get_running_loop())
    client.attach_generation_engine(recorder)  # type: ignore[arg-type]  # narrower stubs than the library
    with pytest.raises(OverloadedError):
        client.open_stream([_request("a"), _request("b")])
    assert ("abort_request", "a") in recorder.calls


async def test_without_an_engine_there_is_an_error() -> None:
    with pytest.raises(EngineError, match="not loaded"):
        EngineClient(asyncio.get_running_loop()).open_stream([_request()])


@contextlib.contextmanager
def _closed_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    loop.close()
    yield loop


def test_publishing_to_a_closed_loop_is_harmless() -> None:
    with _closed_loop() as loop:
        EngineClient(loop).publish([_end()])
