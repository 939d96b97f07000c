"""gRPC calls that clients cancel or abort, and those that a deadline or the engine ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.errors import OverloadedError, WorkerError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.serving.waiting import wait_until
from tests.virtual_time import pass_time

if TYPE_CHECKING:
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub


def _call(**sampling: Any) -> pb.GenerateRequest:  # Any: fields of all types
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))


async def test_cancel_aborts_in_the_engine(server: Server) -> None:
    engine = server.engine
    engine.most_tokens = 1
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).Generate(_call(max_tokens=200))
        await call.read()
        call.cancel()
        await wait_until(lambda: engine.num_sequences == 0)
    assert engine.log.aborted == [engine.log.submitted[0].id]


async def test_cancel_before_the_first_token_aborts(server: Server) -> None:
    engine = server.engine
    engine.is_paused = True
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).Generate(_call())
        reading = asyncio.ensure_future(call.read())
        await wait_until(lambda: engine.num_sequences == 1)
        call.cancel()
        await wait_until(lambda: engine.num_sequences == 0)
        await asyncio.gather(reading, return_exceptions=True)


async def test_64_streams_a_third_cancelled_leave_nothing(server: Server) -> None:
    engine = server.engine
    # No call ends before all that are to be cancelled are.
    engine.most_tokens = 1

    async def run(stub: Any, number: int) -> int:  # Any: the generated stub is not async to mypy
        call = stub.Generate(_call(max_tokens=50))
        num_messages = 0
        async for _ in call:
            num_messages += 1
            if number % 3 == 0:
                call.cancel()
                break
        return num_messages

    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub = Stub(channel)
        running = [asyncio.create_task(run(stub, number)) for number in range(64)]
        await wait_until(lambda: len(engine.log.submitted) == 64)
        await wait_until(lambda: engine.num_sequences == 42)
        engine.most_tokens = None
        await asyncio.gather(*running)
        await wait_until(lambda: engine.num_sequences == 0)
        await wait_until(lambda: server.frontends.servicer.num_open_calls == 0)
    assert len(engine.log.submitted) == 64
    assert len(set(engine.log.aborted)) == 22


async def test_abort_hits_exactly_the_named_request(server: Server) -> None:
    engine = server.engine
    engine.most_tokens = 1
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub: Any = Stub(channel)  # Any: the generated stub is not async to mypy
        calls = {
            name: stub.Generate(pb.GenerateRequest(text="x", request_id=name))
            for name in ("job-1", "job-11")
        }
        readers = {name: aiter(call) for name, call in calls.items()}
        for reader in readers.values():
            await anext(reader)
        await stub.Abort(pb.AbortRequest(request_ids=["job-1", "unknown", "job-1", ""]))
        rest = [message async for message in readers["job-1"]]
        assert rest[-1].sequences[0].finish_reason == pb.FINISH_REASON_ABORTED
        assert rest[-1].request_id == "job-1"
        assert rest[-1].HasField("usage")
        assert engine.num_sequences == 1
        calls["job-11"].cancel()
        await wait_until(lambda: engine.num_sequences == 0)


async def test_running_id_is_rejected_and_free_again_later(server: Server) -> None:
    server.engine.most_tokens = 1
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub: Any = Stub(channel)  # Any: the generated stub is not async to mypy
        message = pb.GenerateRequest(text="x", request_id="mine")
        first = stub.Generate(message)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(message).read()
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "'mine' is in use by a running request" in str(caught.value.details())
        first.cancel()
        await wait_until(lambda: server.frontends.servicer.num_open_calls == 0)
        message.sampling.max_tokens = 1
        for _ in range(20):
            answers = [answer async for answer in stub.Generate(message)]
            assert answers[-1].HasField("usage")


def test_deadline_ends_the_call(stub: Stub, engine: FakeEngine) -> None:
    engine.is_paused = True
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_call(), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: engine.num_sequences == 0)


@pytest.mark.parametrize("is_in_message", [False, True])
def test_deadline_reaches_the_engine(stub: Stub, engine: FakeEngine, is_in_message: bool) -> None:
    engine.is_paused = True
    message = pb.GenerateRequest(text="x", timeout={"seconds": 300} if is_in_message else None)
    started_s = time.monotonic()
    call = stub.Generate(message, timeout=600 if is_in_message else 300)
    wait_for(lambda: engine.num_sequences == 1)
    (request,) = engine.log.submitted
    assert request.deadline_s is not None
    # gRPC rounds it up.
    assert started_s + 299 < request.deadline_s < time.monotonic() + 301
    call.cancel()
    wait_for(lambda: engine.num_sequences == 0)


def test_timeout_in_the_message_ends_the_call(server: Server, stub: Stub) -> None:
    engine = server.engine
    engine.is_paused = True
    call = stub.Generate(pb.GenerateRequest(text="x", timeout={"seconds": 300}))
    wait_for(lambda: engine.num_sequences == 1)
    server.loop.call_soon_threadsafe(pass_time, 300.0)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "passed before the request was finished" in str(caught.value.details())
    assert engine.num_sequences == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OverloadedError("The queue is full."), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (WorkerError("A rank died."), grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_errors_of_the_engine_have_their_codes(
    stub: Stub, engine: FakeEngine, error: Any, code: grpc.StatusCode
) -> None:
    engine.rejection = error
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_call()))
    assert (caught.value.code(), caught.value.details()) == (code, str(error))


def test_death_of_the_engine_ends_running_calls(stub: Stub, engine: FakeEngine) -> None:
    engine.most_tokens = 1
    call = stub.Generate(_call())
    next(call)
    engine.fail_all(WorkerError("A rank died."))
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
