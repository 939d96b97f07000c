"""A handle's stream that is cut anywhere and continues in another replica is that of one replica.

The replicas are real servicers over fake engines; Serve's responses are stand-ins.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest

from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError
from cluster.serving.ray_serve.router import HandleRequest, HandleStream
from pagedray.errors import DeadlineError, EngineError, InvalidRequestError
from tests.serving.conftest import TEXT
from tests.serving.ray_serve.failing_replicas import Replica
from tests.virtual_time import pass_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from cluster.serving.generation_call import GenerationOutput
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

ERRORS: tuple[Exception, ...] = (
    ActorDiedError(),
    ActorUnavailableError("The replica does not respond.", None),
    ReplicaDiedError(),
    EngineError("The engine failed."),
)
GIVEN = {"model": None, "request_id": None, "priority": 0, "timeout_s": None, "key": None}
SAMPLINGS: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "plain": {"max_tokens": 30, "ignore_eos": True},
    "several": {"max_tokens": 30, "ignore_eos": True, "n": 3, "logprobs": 1},
    "stop": {"stop": ["says h\u00e9llo \u4f60"], "n": 2, "min_tokens": 3},
}


class Result:
    """The response of one replica as Serve's handles read it; it fails after some outputs."""

    def __init__(
        self, outputs: AsyncGenerator[GenerationOutput], cut: tuple[int, Exception] | None
    ) -> None:
        self._outputs = outputs
        self._cut = cut
        self._num_passed = 0
        self._loop = asyncio.get_running_loop()
        self.is_cancelled = False

    async def __anext__(self) -> GenerationOutput:
        if self._cut is not None and self._num_passed == self._cut[0]:
            await self._outputs.aclose()
            raise self._cut[1]
        self._num_passed += 1
        return await anext(self._outputs)

    def __next__(self) -> GenerationOutput:
        async def read() -> GenerationOutput | None:
            return await anext(self, None)

        output = asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        if output is None:
            raise StopIteration
        return output

    def cancel(self) -> None:
        self.is_cancelled = True


class Serve:
    """Sends requests to one replica after another."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.cuts: list[tuple[int, Exception]] = []
        self.sent: list[PendingRequest] = []
        self.results: list[Result] = []
        self._replicas = replicas

    # Any: its methods are replaced.
    def stream(self, prompt: object, sampling: object, **arguments: object) -> Any:
        """Return the response to a program's call."""
        metadata = RequestMetadata("r", "r", call_method="generate", is_streaming=True)
        pending = PendingRequest([prompt, sampling], {**arguments}, metadata)
        request = HandleRequest(pending)
        request.set_continuation()
        result = self._result(request, pending)
        HandleStream(result, request, self._send)  # type: ignore[arg-type]  # a stand-in for Serve's
        return result

    async def _send(self, request: HandleRequest) -> Result:
        return self._result(request, request.continued())

    def _result(self, request: HandleRequest, pending: PendingRequest) -> Result:
        replica = self._replicas[len(self.sent) % len(self._replicas)]
        self.sent.append(pending)
        request.call.note_sent("one", may_continue=True)
        request.call.note_accepted()
        handle = ServeHandle(replica.servicer, MessagePace(1e6))
        outputs = handle.generate(*pending.args, **{**GIVEN, **pending.kwargs})
        self.results.append(Result(outputs, self.cuts.pop(0) if self.cuts else None))
        return self.results[-1]


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    def script(request: Request, index: int) -> list[int]:
        """Return tokens that depend on the seed, as sampled ones do."""
        words = TEXT.split(" ")
        turn = random.Random(f"{request.seed} {index}").randrange(len(words))
        text = " ".join(words[turn:] + words[:turn])
        return [*tokenizer.encode(text, add_special_tokens=False), 1]

    replicas = [Replica(tokenizer, script) for _ in range(4)]
    yield Serve(replicas)
    for one in replicas:
        await one.close()


async def collect(stream: Any) -> list[GenerationOutput]:
    return [output async for output in iterated(stream)]


async def iterated(stream: Any) -> AsyncGenerator[GenerationOutput]:
    """Read a response as Serve's handles do: by its own attribute."""
    while True:
        try:
            yield await stream.__anext__()
        except StopAsyncIteration:
            return


def read(outputs: list[GenerationOutput]) -> object:
    """Return what the outputs of a whole stream say together, each thing once."""
    assert [one.is_last for one in outputs] == [False] * (len(outputs) - 1) + [True]
    found: dict[int, dict[str, Any]] = {}  # Any: values of several types
    for one in (one for output in outputs for one in output.sequences):
        sequence = found.setdefault(one.index, {"text": "", "ids": [], "logprobs": 0, "end": None})
        assert sequence["end"] is None
        sequence["text"] += one.text
        sequence["ids"] += one.token_ids
        sequence["logprobs"] += len(one.logprobs)
        sequence["end"] = one.finish_reason
    assert all(one["end"] for one in found.values())
    return found, outputs[-1].usage


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_a_cut_stream_is_equal(serve: Serve, sampling: dict[str, Any]) -> None:
    sampling = {"seed": 7, **sampling}
    whole = read(await collect(serve.stream("hello", sampling)))
    chance = random.Random(1)
    for _ in range(8):
        serve.cuts = [
            (chance.randrange(15), chance.choice(ERRORS)) for _ in range(chance.randrange(1, 4))
        ]
        assert read(await collect(serve.stream("hello", sampling))) == whole


async def test_a_thread_that_reads_gets_the_same_stream(serve: Serve) -> None:
    sampling = {"seed": 7, "max_tokens": 30, "ignore_eos": True}
    whole = read(await collect(serve.stream("hello", sampling)))
    serve.cuts = [(4, ERRORS[0]), (0, ERRORS[1])]
    stream = serve.stream("hello", sampling)

    def take() -> list[GenerationOutput]:
        outputs = []
        while True:
            try:
                outputs.append(stream.__next__())
            except StopIteration:
                return outputs

    assert read(await asyncio.to_thread(take)) == whole


async def test_a_call_without_a_seed_keeps_the_one_it_began_with(serve: Serve) -> None:
    serve.cuts = [(5, ERRORS[0])]
    await collect(serve.stream("hello", {"max_tokens": 30, "ignore_eos": True}))
    seeds = {one.kwargs["continuation"].seed for one in serve.sent}
    assert (len(serve.sent), len(seeds)) == (2, 1)


async def test_a_call_continues_three_times_at_most(serve: Serve) -> None:
    serve.cuts = [(2, ERRORS[0])] * 5
    with pytest.raises(ActorDiedError):
        await collect(serve.stream("hello", {"max_tokens": 200, "ignore_eos": True}))
    assert len(serve.sent) == 4


async def test_an_invalid_request_is_rejected_once(serve: Serve) -> None:
    with pytest.raises(InvalidRequestError):
        await collect(serve.stream("hello", {"n": 0}))
    assert len(serve.sent) == 1


async def test_a_deadline_holds_across_replicas(serve: Serve) -> None:
    sampling = {"max_tokens": 200, "ignore_eos": True}
    serve.cuts = [(2, ERRORS[0])]
    for replica in serve._replicas:
        replica.engine.most_tokens = 3
    stream = serve.stream("hello", sampling, timeout_s=300.0)
    async with aclosing(iterated(stream)) as outputs:
        await anext(outputs)
        await anext(outputs)
        await anext(outputs)
        assert len(serve.sent) == 2
        pass_time(300.0)
        with pytest.raises(DeadlineError):
            await anext(outputs)


async def test_a_cancelled_stream_does_not_continue(serve: Serve) -> None:
    serve.cuts = [(2, ERRORS[0]), (2, ERRORS[0])]
    stream = serve.stream("hello", {"max_tokens": 200, "ignore_eos": True})
    async with aclosing(iterated(stream)) as outputs:
        for _ in range(3):
            await anext(outputs)
        stream.cancel()
        await anext(outputs)
        with pytest.raises(ActorDiedError):
            await anext(outputs)
    assert [one.is_cancelled for one in serve.results] == [False, True]
