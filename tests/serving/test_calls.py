"""Calls: beam search, and what is freed when calls end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
import torch
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.llm.generation import Completion, Generation, Logprob, first_logprobs
from cluster.scheduling.event import TokenEvent
from cluster.serving.auth import Tenant
from cluster.serving.beam_search import Beam, BeamSearch, EarlyStopping
from cluster.serving.engine_client import EngineClient
from cluster.serving.generation_call import BeamStream, GenerationCall
from cluster.serving.http.http_call import HttpCall
from cluster.serving.intake import Intake, IntakeLimits
from cluster.serving.open_calls import OpenCall, OpenCalls
from cluster.serving.openai.bodies.completion_body import CompletionBody
from pagedray.batch import TokenLogprobs
from pagedray.errors import DeadlineError, EngineError, OverloadedError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.serving.conftest import engine_config, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.serving.telemetry.log_lines import IgnoredParameters
    from cluster.serving.telemetry.metrics import Metrics
    from pagedray.errors import PagedRayError
    from tests.serving.conftest import Server

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
        self._client.attach_engine(self.engine)  # type: ignore[arg-type]  # a part of it
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


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_calls() -> int:
    return sum(type(one) is GenerationCall for one in gc.get_objects())


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("num_lines", [2, 1000])
async def test_the_call_of_a_stream_is_freed_at_its_end(server: Server, num_lines: int) -> None:
    server.engine.reset()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    before = num_calls()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        # A client that has read enough leaves.
        for _, _ in zip(range(num_lines), answer.iter_lines(), strict=False):
            pass
    await wait_until(lambda: num_calls() == before, timeout_s=60.0)


ANN = Tenant(name="ann", max_requests=1)
BOB = Tenant(name="bob")


@dataclass(eq=False)
class Work:
    """What a call runs, which refers to it."""

    call: OpenCall

    def abort(self) -> None:
        pass

    def fail(self, error: PagedRayError) -> None:
        pass


def test_a_call_counts_before_it_begins() -> None:
    calls = OpenCalls()
    entered = calls.enter_call(ANN)
    with pytest.raises(OverloadedError, match="1 open call,"):
        calls.enter_call(ANN)
    # A drain waits only for calls that have begun.
    assert len(calls) == 0
    entered.leave()
    calls.enter_call(ANN)


def test_a_call_that_has_begun_stays_when_its_frontend_leaves() -> None:
    calls = OpenCalls()
    call = calls.enter_call(ANN)
    call.begin()
    call.leave()
    assert len(calls) == 1
    with pytest.raises(OverloadedError):
        calls.enter_call(ANN)
    call.close()
    calls.enter_call(ANN)


def test_a_call_that_may_resume_a_stream_enters_beyond_the_limit_but_does_not_begin() -> None:
    calls = OpenCalls()
    calls.enter_call(ANN).begin()
    entered = calls.enter_call(ANN, may_resume=True)
    with pytest.raises(OverloadedError):
        entered.begin()
    entered.leave()


def test_a_call_that_another_replica_admitted_has_no_limit() -> None:
    calls = OpenCalls()
    calls.enter_call(ANN).begin()
    calls.enter_call(ANN, is_admitted=True, may_resume=True).begin()


async def test_calls_of_a_tenant_are_read_in_turns_beside_calls_of_another_tenant() -> None:
    calls = OpenCalls()
    calls.enter_call(BOB).begin()
    tenant = replace(ANN, max_requests=None)
    first, second = calls.enter_call(tenant), calls.enter_call(tenant)
    await first.take_turn()
    waiting = asyncio.create_task(second.take_turn())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    third = calls.enter_call(tenant)
    left = asyncio.create_task(third.take_turn())
    await asyncio.sleep(0)
    left.cancel()
    first.leave()
    first.end_turn()
    await waiting
    second.end_turn()
    fourth = calls.enter_call(tenant)
    await fourth.take_turn()


async def test_calls_of_a_tenant_alone_are_read_at_once() -> None:
    calls = OpenCalls()
    other = calls.enter_call(BOB)
    other.leave()
    tenant = replace(ANN, max_requests=None)
    opened = [calls.enter_call(tenant) for _ in range(3)]
    for call in opened:
        await asyncio.wait_for(call.take_turn(), 60.0)


async def test_a_call_whose_client_left_while_it_waited_is_not_read() -> None:
    body = {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}
    messages = iter((body, {"type": "http.disconnect"}))

    async def receive() -> dict[str, Any]:  # Any: as in ASGI
        return next(messages)

    calls = OpenCalls()
    calls.enter_call(BOB).begin()
    headers = [(b"content-type", b"application/json")]
    intake = Intake(engine_config(), IntakeLimits(), note_freed=lambda _: None)
    call = HttpCall(
        request=HttpRequest({"type": "http", "method": "POST", "headers": headers}, receive),
        tenant=ANN,
        path_value="",
        metrics=cast("Metrics", SimpleNamespace(counting_rejections=lambda _: nullcontext())),
        ignored=cast("IgnoredParameters", None),
        intake=intake,
        read_timeout_s=60.0,
        entered=calls.enter_call(ANN),
    )
    with pytest.raises(ClientDisconnect):
        await call.body(CompletionBody, lambda *_: pytest.fail("The body was read."))
    intake.close()


async def test_rejections_are_delayed_only_while_a_call_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    loop, pause = asyncio.get_running_loop(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        # Servers of other tests have loops in other threads.
        if asyncio.get_running_loop() is loop:
            slept.append(seconds)
        await pause(0.01)

    calls = OpenCalls()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await calls.delay_rejection()
    assert slept == []
    calls.enter_call(BOB)
    await asyncio.gather(*(calls.delay_rejection() for _ in range(7)))
    assert slept == pytest.approx([0.05] * 5 + [0.06, 0.07])


def test_the_work_of_a_closed_call_is_freed_at_once() -> None:
    calls = OpenCalls()
    call = calls.enter_call(ANN)
    call.begin()
    call.task = Work(call)
    work = weakref.ref(call.task)
    gc.disable()
    try:
        call.close()
        del call
        assert work() is None
    finally:
        gc.enable()


PROMPT = [1, 2, 6]
MAX_TOKENS = 9
CASES: list[tuple[int, float, EarlyStopping]] = list(
    itertools.product((2, 5), (-1.0, 0.0, 1.0, 2.0), (False, True, "never"))
)


@pytest.fixture(scope="module")
def model() -> Any:  # Any: transformers' annotations exclude what it returns
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 40.0
    return model


def likeliest(model: Any, beam: Beam, number: int) -> TokenLogprobs:  # Any: as above
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(beam.token_ids)])).logits[0, -1]
    values, ids = torch.log_softmax(logits, dim=-1).topk(number)
    return TokenLogprobs(0.0, ids.tolist(), values.tolist())


@pytest.mark.parametrize("eos_token_ids", [(3,), (3, 7, 9)], ids=str)
def test_ended_beams_are_those_of_transformers(
    model: Any,
    eos_token_ids: tuple[int, ...],  # Any: as above
) -> None:
    num_ended = 0
    for width, length_penalty, early_stopping in CASES:
        search = searched(model, eos_token_ids, width, length_penalty, early_stopping)
        expected = model.generate(
            torch.tensor([PROMPT]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(eos_token_ids),
            pad_token_id=11,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        case = (width, length_penalty, early_stopping)
        for (_, beam), sequence in zip(search.best, expected.sequences.tolist(), strict=True):
            end = len(PROMPT) + len(beam.token_ids)
            assert sequence[:end] == [*PROMPT, *beam.token_ids], case
            assert set(sequence[end:]) <= {11}, case
            num_ended += beam.is_ended
        scores = [score for score, _ in search.best]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5), case
    assert num_ended > len(CASES)


def searched(
    model: Any,  # Any: as above
    eos_token_ids: tuple[int, ...],
    width: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> BeamSearch:
    search = BeamSearch(
        width=width,
        max_tokens=MAX_TOKENS,
        eos_token_ids=eos_token_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    while search.running:
        search.advance([likeliest(model, beam, search.num_logprobs) for beam in search.running])
    return search


@pytest.mark.parametrize(
    ("reason", "has_token"),
    [
        (None, False),
        (FinishReason.ABORT, False),
        (FinishReason.ERROR, False),
        (FinishReason.ERROR, True),
        (FinishReason.LENGTH, True),
    ],
)
def test_a_step_that_the_engine_ended_is_an_engine_error(
    reason: FinishReason | None, has_token: bool
) -> None:
    found = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-2.0, 2, "b")}
    output = Completion(
        index=0,
        text="",
        token_ids=(5,) if has_token else (),
        finish_reason=reason,
        logprobs=(found,) if has_token else (),
    )
    step = Generation(request_id="a", prompt=None, prompt_token_ids=(1,), outputs=(output,))
    if reason is FinishReason.LENGTH:
        assert first_logprobs(step) == TokenLogprobs(-0.1, [5, 6], [-0.1, -2.0])
    else:
        with pytest.raises(EngineError, match=reason.value if reason else "no event"):
            first_logprobs(step)
