"""The gRPC frontend with real clients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

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
from tests.serving.checkpoint import TEXT
from tests.serving.defects.failing_sequence import failing_sequence

if TYPE_CHECKING:
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
