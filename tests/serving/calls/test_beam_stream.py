"""However a call with beams ends, its sequences end once, and nothing stays in the engine."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from cluster.scheduling.event import TokenEvent
from cluster.serving.calls.generation_call import BeamStream
from cluster.serving.engine_client import EngineClient
from pagedray.batch import TokenLogprobs
from pagedray.errors import DeadlineError, OverloadedError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 9
FOUND = TokenLogprobs(-0.1, [5, 6, EOS], [-0.1, -2.0, -3.0])


class Engine:
    """An engine whose steps end when the test says so."""

    is_healthy = True

    def __init__(self) -> None:
        self.running: list[str] = []
        self.num_submitted = 0
        self.num_rejected = 0

    def submit_request(self, request: Request) -> None:
        if self.num_rejected:
            self.num_rejected -= 1
            raise OverloadedError("The queue is full.")
        self.num_submitted += 1
        self.running.append(request.id)

    def abort_request(self, request_id: str) -> None:
        # One that was rejected may be aborted, too.
        self.running = [one for one in self.running if one != request_id]


class Call:
    """A call of two beams for each of two prompts, and its engine."""

    def __init__(self, generated: tuple[tuple[int, ...] | None, ...] = ()) -> None:
        """`generated` are the tokens of each sequence of a prompt that its client has."""
        self.engine = Engine()
        self._client = EngineClient(asyncio.get_running_loop())
        self._client.attach_generation_engine(self.engine)  # type: ignore[arg-type]  # a part of it
        sampling = SamplingParams(n=2, max_tokens=3)
        requests = [
            Request(
                id=name,
                prompt_token_ids=(1,),
                sampling=sampling,
                seed=0,
                eos_token_ids=(EOS,),
                generated_token_ids=generated,
            )
            for name in "ab"
        ]
        self.stream = BeamStream(self._client, requests, length_penalty=1.0)
        self.reading = asyncio.ensure_future(anext(self.stream))

    async def end_step(self, finish_reason: FinishReason = FinishReason.LENGTH) -> None:
        """End what runs, the first of it as given."""
        running, self.engine.running = self.engine.running, []
        reasons = [finish_reason] + [FinishReason.LENGTH] * (len(running) - 1)
        self._client.publish(
            [
                TokenEvent(request_id, 0, (5,), (FOUND,), finish_reason=reason)
                for request_id, reason in zip(running, reasons, strict=True)
            ]
        )
        # Whatever it brings happens in the passes of the event loop that follow.
        for _ in range(20):
            await asyncio.sleep(0)


async def events_of(call: Call) -> list[TokenEvent]:
    return await call.reading + [event async for events in call.stream for event in events]


def reasons_of(events: Sequence[TokenEvent]) -> dict[tuple[str, int], FinishReason | None]:
    assert len(events) == 4
    return {(event.request_id, event.index): event.finish_reason for event in events}


ALL = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


async def test_a_search_of_three_steps_has_its_events_at_the_end() -> None:
    call = Call()
    for num_running in (2, 4, 4):
        assert len(call.engine.running) == num_running
        assert not call.reading.done()
        await call.end_step()
    events = await events_of(call)
    assert reasons_of(events) == dict.fromkeys(ALL, FinishReason.LENGTH)
    assert events[0].token_ids == (5, 5, 5)
    with pytest.raises(StopAsyncIteration):
        await anext(call.stream)


async def test_a_call_that_continues_has_the_beams_that_its_client_lacks() -> None:
    call = Call(generated=(None, ()))
    for _ in range(3):
        await call.end_step()
    events = await call.reading + [event async for some in call.stream for event in some]
    assert [(event.request_id, event.index) for event in events] == [("a", 1), ("b", 1)]
    assert events[0].token_ids == (5, 5, 6)


async def test_other_tasks_run_between_the_beams_of_a_result() -> None:
    call = Call()
    for _ in range(3):
        await call.end_step()
    log = [f"{event.request_id}{event.index}" for event in await call.reading]

    async def read() -> None:
        async for events in call.stream:
            log.extend(f"{event.request_id}{event.index}" for event in events)

    async def tick() -> None:
        while not reading.done():
            log.append(".")
            await asyncio.sleep(0)

    reading = asyncio.ensure_future(read())
    await tick()
    assert re.match(r"a0\.+a1\.+b0\.+b1", "".join(log))


async def test_a_call_may_be_aborted_between_the_beams_of_a_result() -> None:
    call = Call()
    for _ in range(3):
        await call.end_step()
    await call.reading
    call.stream.abort()
    reasons = reasons_of(await events_of(call))
    assert [reasons[key] for key in ALL] == [FinishReason.LENGTH] + [FinishReason.ABORT] * 3


async def test_an_aborted_call_has_an_event_for_each_sequence() -> None:
    call = Call()
    await call.end_step()
    call.stream.abort()
    assert call.engine.running == []
    assert reasons_of(await events_of(call)) == dict.fromkeys(ALL, FinishReason.ABORT)


async def test_a_closed_call_leaves_nothing_in_the_engine() -> None:
    call = Call()
    await call.end_step()
    call.reading.cancel()
    await asyncio.wait([call.reading])
    call.stream.close()
    call.stream.close()
    assert call.engine.running == []


async def test_a_deadline_ends_the_call_with_its_error() -> None:
    call = Call()
    await call.end_step()
    call.stream.close()
    call.stream.fail(DeadlineError("late"))
    with pytest.raises(DeadlineError):
        await call.reading
    assert call.engine.running == []


async def test_an_error_of_one_beam_ends_all() -> None:
    call = Call()
    await call.end_step()
    await call.end_step(FinishReason.ERROR)
    assert reasons_of(await events_of(call)) == dict.fromkeys(ALL, FinishReason.ERROR)
    assert call.engine.running == []


async def test_a_step_waits_while_the_queue_is_full() -> None:
    call = Call()
    call.engine.num_rejected = 1
    await call.end_step()
    assert call.engine.running == []
    await wait_until(lambda: len(call.engine.running) == 4)
    call.stream.abort()
    await events_of(call)


async def test_a_call_may_end_while_its_step_waits() -> None:
    call = Call()
    call.engine.num_rejected = 1000
    await call.end_step()
    call.stream.abort()
    assert reasons_of(await events_of(call)) == dict.fromkeys(ALL, FinishReason.ABORT)
    assert call.engine.num_submitted == 2
