"""The gRPC frontend with real clients, and how calls end."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pagedray.errors import OverloadedError, WorkerError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.hostile.http2 import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Http2Connection,
    call_headers,
    frame,
)
from tests.serving.conftest import TEXT, wait_until
from tests.serving.fake_engine import failing_sequence
from tests.serving.grpc_frontend import grpc_frontend
from tests.virtual_time import pass_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub


def _call(text: str = "hello", **sampling: Any) -> pb.GenerateRequest:  # Any: fields of all types
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


def _texts(messages: list[pb.GenerateResponse]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for message in messages:
        for sequence in message.sequences:
            texts[sequence.index] = texts.get(sequence.index, "") + sequence.text
    return texts


def test_a_prompt_may_be_described_after_the_first_message(
    stub: Stub, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.describing_token = 3
    call = _call(max_tokens=5)
    call.sampling.prompt_logprobs = 1
    messages = list(stub.Generate(call))
    described = [one for one in messages if one.prompt_info.HasField("prompt_logprobs")]
    assert len(described) == 1
    found = described[0].prompt_info
    assert found.num_prompt_tokens == messages[0].prompt_info.num_prompt_tokens
    count = found.num_prompt_tokens - 1
    logprobs = found.prompt_logprobs
    assert logprobs.num_top_logprobs == 1
    assert (list(logprobs.logprobs), list(logprobs.ranks)) == ([-0.5] * count, [1] * count)
    assert list(logprobs.top_token_ids) == [100] * count
    assert list(logprobs.top_logprobs) == [-0.5] * count


def test_one_connection_carries_hundreds_of_calls_at_once(stub: Stub) -> None:
    request = pb.TokenizeRequest(text="hello")
    # The first one brings the server's limits.
    stub.Tokenize(request)
    for _ in range(4):
        calls = [stub.Tokenize.future(request) for _ in range(600)]
        assert {call.code() for call in calls} == {grpc.StatusCode.OK}


def test_stream_has_prompt_text_and_usage(
    stub: Stub, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.num_cached_tokens = 1
    num_tokens = len(tokenizer.encode(TEXT, add_special_tokens=False))
    messages = list(stub.Generate(_call(max_tokens=num_tokens)))
    assert _texts(messages) == {0: TEXT}
    num_prompt_tokens = len(tokenizer.encode("hello"))
    assert messages[0].prompt_info.num_prompt_tokens == num_prompt_tokens
    assert messages[0].prompt_info.num_cached_tokens == 1
    assert not any(message.HasField("prompt_info") for message in messages[1:])
    assert not any(message.HasField("usage") for message in messages[:-1])
    last = messages[-1]
    assert last.usage == pb.Usage(
        num_prompt_tokens=num_prompt_tokens, num_cached_tokens=1, num_generated_tokens=num_tokens
    )
    assert last.sequences[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert len({message.request_id for message in messages}) == 1
    assert len(last.request_id) == 32


def test_sampling_reaches_the_engine_as_sent(stub: Stub, engine: FakeEngine) -> None:
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6]),
        priority=-3,
        sampling=pb.SamplingParams(
            max_tokens=3, temperature=0.7, top_k=4, top_p=0.9, min_p=0.05,
            repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.2,
            logit_bias={7: -1.7}, seed=-5, n=2, stop=["zzz"], stop_token_ids=[250],
            ignore_eos=True, logprobs=2,
        ),
    )  # fmt: skip
    list(stub.Generate(message))
    (request,) = engine.log.submitted
    assert request.prompt_token_ids == (5, 6)
    assert (request.priority, request.seed, request.eos_token_ids) == (-3, -5, (1,))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.9, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, -0.3)
    assert (sampling.top_k, sampling.n, sampling.logprobs) == (4, 2, 2)
    assert dict(sampling.logit_bias) == {7: -1.7}
    assert (sampling.stop, sampling.stop_token_ids) == (("zzz",), (250,))
    assert sampling.ignore_eos


def test_present_zero_is_not_absent(stub: Stub, engine: FakeEngine) -> None:
    list(stub.Generate(_call(max_tokens=1, temperature=0.0, seed=0)))
    (request,) = engine.log.submitted
    assert request.sampling.is_greedy
    assert request.seed == 0


def test_default_is_the_rest_of_the_context(stub: Stub, engine: FakeEngine) -> None:
    list(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 200))))
    assert engine.log.submitted[0].sampling.max_tokens == 56


def test_sequences_and_logprobs(stub: Stub) -> None:
    messages = list(stub.Generate(_call(max_tokens=5, n=2, logprobs=1)))
    texts = _texts(messages)
    assert set(texts) == {0, 1}
    assert texts[0] != texts[1]
    entries = [
        (token_id, logprobs)
        for message in messages
        for sequence in message.sequences
        for token_id, logprobs in zip(sequence.token_ids, sequence.logprobs, strict=True)
    ]
    assert len(entries) == 10
    for token_id, logprobs in entries:
        assert logprobs.logprob == -0.5
        assert [top.token_id for top in logprobs.top_logprobs] == [token_id]


def test_stop_string_finishes_the_sequence_in_the_engine(stub: Stub, engine: FakeEngine) -> None:
    messages = list(stub.Generate(_call(stop=["brown fox"])))
    assert _texts(messages) == {0: "The quick "}
    last = messages[-1].sequences[0]
    assert (last.finish_reason, last.stop_reason) == (pb.FINISH_REASON_STOP, "brown fox")
    (request,) = engine.log.submitted
    assert engine.log.finished == [(request.id, 0)]
    assert engine.log.aborted == []
    assert engine.num_sequences == 0


def test_stop_token_is_named(stub: Stub, tokenizer: Tokenizer) -> None:
    stop_id = tokenizer.encode("The quick", add_special_tokens=False)[-1]
    last = list(stub.Generate(_call(stop_token_ids=[stop_id])))[-1].sequences[0]
    assert (last.finish_reason, last.stop_reason) == (pb.FINISH_REASON_STOP, str(stop_id))


@pytest.mark.parametrize(
    ("is_lethal", "text"), [(False, "could not compute"), (True, "Do not send it again")]
)
def test_failed_sequence_says_what_went_wrong(
    server: Server, stub: Stub, is_lethal: bool, text: str
) -> None:
    with failing_sequence(server, is_lethal=is_lethal):
        last = list(stub.Generate(_call()))[-1].sequences[0]
    assert last.finish_reason == pb.FINISH_REASON_ERROR
    assert text in last.stop_reason


def test_slow_client_gets_several_tokens_a_message(server: Server) -> None:
    # Large messages on a connection with a small window, which fills quickly.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
    server.engine.waits_for_reader = False
    with grpc.insecure_channel(server.grpc_target, options) as channel:
        call = Stub(channel).Generate(_call("h", max_tokens=100, n=32, logprobs=20))
        next(call)
        wait_for(lambda: server.engine.num_sequences == 0)
        messages = list(call)
    assert len(messages) < 90
    assert messages[-1].usage.num_generated_tokens == 3200


def test_tokenize(stub: Stub, tokenizer: Tokenizer) -> None:
    response = stub.Tokenize(pb.TokenizeRequest(text=TEXT))
    assert list(response.token_ids) == tokenizer.encode(TEXT)
    bare = stub.Tokenize(pb.TokenizeRequest(text=TEXT, add_special_tokens=False))
    assert list(bare.token_ids) == tokenizer.encode(TEXT, add_special_tokens=False)
    assert list(stub.Tokenize(pb.TokenizeRequest(text="")).token_ids) == tokenizer.encode("")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(pb.TokenizeRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_conversations_have_the_special_tokens_of_their_template(stub: Stub) -> None:
    conversation = pb.Conversation(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=TEXT)])
    request = pb.TokenizeRequest(conversation=conversation)
    expected = stub.Tokenize(request)
    request.add_special_tokens = True
    assert stub.Tokenize(request) == expected
    request.add_special_tokens = False
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "add_special_tokens = false requires text" in (caught.value.details() or "")


def test_server_info(stub: Stub) -> None:
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.model, info.vocab_size, info.context_length) == ("tiny", 320, 256)
    assert (info.block_size, info.num_blocks, info.num_cpu_blocks) == (16, 64, 32)
    assert (info.num_ranks, info.dtype, info.is_encoder) == (1, "bfloat16", False)
    (model,) = stub.ListModels(pb.ListModelsRequest()).models
    assert model == pb.Model(name="tiny", context_length=256)


def test_health_follows_the_engine(server: Server) -> None:
    status = health_pb2.HealthCheckResponse.ServingStatus
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "pagedray.v1.GenerationService"):
            request = health_pb2.HealthCheckRequest(service=name)
            # It is polled, and the engine of an earlier test may have died.
            wait_for(lambda: stub.Check(request).status == status.SERVING)  # noqa: B023
        updates = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(updates).status == status.SERVING
        server.engine.is_healthy_flag = False
        assert next(updates).status == status.NOT_SERVING
        server.engine.is_healthy_flag = True
        assert next(updates).status == status.SERVING
        updates.cancel()


def test_reflection_describes_the_service(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "pagedray.v1.GenerationService" in database.get_services()
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("pagedray.v1.GenerationService")
        assert "Generate" in service.methods_by_name


def test_defect_reveals_no_details(
    stub: Stub, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.rejection = KeyError("/home/secret at 0xdeadbeef")  # type: ignore[assignment]  # a defect
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_call()))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "Internal server error; see the server log."
    assert "A gRPC call failed." in caplog.text


@pytest.mark.slow
def test_a_client_that_does_not_acknowledge_the_settings_is_disconnected(server: Server) -> None:
    port = int(server.grpc_target.rpartition(":")[2])
    check = call_headers("/grpc.health.v1.Health/Check")
    with Http2Connection(port, acknowledges=False) as connection:
        connection.send_frames(frame(HEADERS, END_HEADERS | END_STREAM, 1, check))
        # Ten seconds; by default, gRPC waits a minute.
        end_s = time.monotonic() + 40.0
        while connection.is_open and time.monotonic() < end_s:
            connection.read_for(0.1)
        assert not connection.is_open


def _ends_call(**sampling: Any) -> pb.GenerateRequest:  # Any: fields of all types
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**sampling))


async def test_cancel_aborts_in_the_engine(server: Server) -> None:
    engine = server.engine
    engine.most_tokens = 1
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).Generate(_ends_call(max_tokens=200))
        await call.read()
        call.cancel()
        await wait_until(lambda: engine.num_sequences == 0)
    assert engine.log.aborted == [engine.log.submitted[0].id]


async def test_cancel_before_the_first_token_aborts(server: Server) -> None:
    engine = server.engine
    engine.is_paused = True
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        call = Stub(channel).Generate(_ends_call())
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
        call = stub.Generate(_ends_call(max_tokens=50))
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
        list(stub.Generate(_ends_call(), timeout=0.3))
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
        list(stub.Generate(_ends_call()))
    assert (caught.value.code(), caught.value.details()) == (code, str(error))


def test_death_of_the_engine_ends_running_calls(stub: Stub, engine: FakeEngine) -> None:
    engine.most_tokens = 1
    call = stub.Generate(_ends_call())
    next(call)
    engine.fail_all(WorkerError("A rank died."))
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


NUM_CALLS = 20
NUM_BYTES = 300_000


@pytest.fixture
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.usefixtures("_without_collections")
@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * NUM_BYTES)),
        pb.GenerateRequest(text="x" * NUM_BYTES),
    ],
    ids=["rejected before it is parsed", "rejected after it is parsed"],
)
async def test_rejected_message_is_freed_at_once(
    tokenizer: Tokenizer, message: pb.GenerateRequest
) -> None:
    async with (
        grpc_frontend(tokenizer) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = server.stub(channel)
        held_before, _ = tracemalloc.get_traced_memory()
        for _ in range(NUM_CALLS):
            with pytest.raises(grpc.aio.AioRpcError) as rejected:
                await stub.Generate(message).read()
            assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        held, _ = tracemalloc.get_traced_memory()
    assert held - held_before < NUM_BYTES * NUM_CALLS / 4
