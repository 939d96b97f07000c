"""Errors over gRPC, and rejected messages: malformed, too large, or too costly to parse."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.auth import ANONYMOUS
from cluster.serving.inputs import CallOptions
from cluster.serving.intake import IntakeLimits, RequestSize
from cluster.serving.rpc.call import code_of, status_of
from cluster.serving.rpc.requests import check_fields
from pagedray import errors
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import CONTEXT, wait_until
from tests.serving.grpc_frontend import grpc_frontend, status_of_call

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.rpc.status_pb2 import Status

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub
KINDS = {kind.__name__: kind for kind in (BadRequest, ErrorInfo, RetryInfo)}


def _details(status: Status) -> dict[str, Any]:  # Any: messages of all kinds
    found: dict[str, Any] = {}
    for packed in status.details:
        kind = KINDS[packed.type_url.rpartition(".")[2]]
        found[kind.__name__] = kind.FromString(packed.value)
    return found


def _rejected(call: Any) -> tuple[grpc.StatusCode, Status]:  # Any: a call of any method
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    status = status_of_call(caught.value)
    assert caught.value.code().value[0] == status.code
    return caught.value.code(), status


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        (pb.GenerateRequest(), "prompt", "prompt must not be empty."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1)),
         "sampling.temperature", "temperature must be from 0 to 100, not -1."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop_token_ids=[5] * 2000)),
         "sampling.stop_token_ids", "stop_token_ids may have at most 1024 entries, not 2000."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["x"] * 10_000)),
         "sampling.stop", "stop may have at most 16 entries, not 10000."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(
            logprobs=1, logprob_token_ids=[5] * 21)), "sampling.logprob_token_ids",
         "logprob_token_ids may have at most 20 entries, not 21."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(structure=pb.Structure())),
         "sampling.structure", "One of the kinds of structure must be set."),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(
            structure=pb.Structure(json_object=False))),
         "sampling.structure", "One of the kinds of structure must be set."),
        (pb.GenerateRequest(text="x", request_id="x" * 129), "request_id",
         "request_id must have 1 to 128 printable characters."),
        (pb.GenerateRequest(text="x", timeout={"seconds": 0}), "timeout",
         "timeout must be in (0, 86400] seconds, not 0."),
        (pb.GenerateRequest(text="x", timeout={"seconds": -5}), "timeout",
         "timeout must be in (0, 86400] seconds, not -5."),
        (pb.GenerateRequest(text="x", timeout={"seconds": 315_576_000_000}), "timeout",
         "timeout must be in (0, 86400] seconds, not 3.15576e+11."),
        (pb.GenerateRequest(text="x" * 1_500_000), "message",
         "Message of 1500004 bytes is larger than the limit of 1310720 bytes "
         "(--max-request-kib)."),
    ],
)  # fmt: skip
def test_bad_field_is_named_by_its_path(
    stub: Stub, engine: FakeEngine, message: pb.GenerateRequest, field: str, text: str
) -> None:
    code, status = _rejected(stub.Generate(message))
    assert (code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    details = _details(status)
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == (field, text)
    assert details["ErrorInfo"].reason == "INVALID_REQUEST"
    assert dict(details["ErrorInfo"].metadata) == {"field": field}
    assert "RetryInfo" not in details
    assert engine.log.submitted == []


def test_unknown_model_is_not_found(stub: Stub) -> None:
    code, status = _rejected(stub.Generate(pb.GenerateRequest(text="x", model="other")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert status.message == "The model 'other' does not exist; this server serves 'tiny'."
    info = _details(status)["ErrorInfo"]
    assert (info.reason, info.metadata["field"]) == ("UNKNOWN_MODEL", "model")
    sampling = pb.SamplingParams(max_tokens=1)
    assert list(stub.Generate(pb.GenerateRequest(text="x", model="tiny", sampling=sampling)))


def test_full_queue_sends_a_retry_delay(stub: Stub, engine: FakeEngine) -> None:
    engine.rejection = errors.OverloadedError("The queue is full.", retry_after_s=2.5)
    code, status = _rejected(stub.Generate(pb.GenerateRequest(text="x")))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = _details(status)
    assert details["ErrorInfo"].reason == "OVERLOADED"
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.5


def test_every_error_has_a_code_and_a_reason() -> None:
    reasons = set()
    for name in (one for one in errors.__all__ if one != "invalid_field"):
        kind = getattr(errors, name)
        wanted = {
            "CapacityError": (5, 3), "InternalError": (), "ShuttingDownError": (),
            "UnknownModelError": ("a", "b"), "StreamTakenError": (), "UnknownStreamError": (),
            "UnknownPreviousError": ("a",), "UnknownResponseError": ("a",),
            "UnreadError": ("call", 5), "LethalRequestError": (), "OutputLengthError": (1, 3, 3),
            "PromptLengthError": (3, 3),
        }.get(name, ("text",))  # fmt: skip
        error = kind(*wanted, param="prompt") if name == "PromptLengthError" else kind(*wanted)
        status = status_of(error)
        assert code_of(status).name == kind.grpc_status
        assert status.message == str(error)
        reasons.add(_details(status)["ErrorInfo"].reason)
    assert len(reasons) == 17


def test_defect_has_a_generic_message(caplog: pytest.LogCaptureFixture) -> None:
    status = status_of(KeyError("/home/secret"))
    assert code_of(status) is grpc.StatusCode.INTERNAL
    assert b"secret" not in status.SerializeToString()
    assert "secret" in caplog.text


LIMIT = 2**20 + 8 * 128 * CONTEXT
"""Bytes of a message."""


def _raw_call(server: Server, method: str, body: bytes, **options: Any) -> grpc.RpcError:
    # Any: the options of a grpc call
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = channel.unary_stream(f"/pagedray.v1.GenerationService/{method}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(body, **options))
        return caught.value


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x12\x7fshort"])
def test_malformed_message_is_an_invalid_argument(server: Server, body: bytes) -> None:
    error = _raw_call(server, "Generate", body)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "The message is not a valid GenerateRequest."
    assert server.engine.log.submitted == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x12\x01x\xfa\x07\x01y", "GenerateRequest has no field with number 127."),
        (b"\x12\x01x\x22\x04\xfa\x07\x01y", "SamplingParams has no field with number 127."),
        (
            pb.GenerateRequest(
                text="x",
                sampling=pb.SamplingParams(
                    logit_bias={5: 1.0},
                    structure=pb.Structure.FromString(b"\xfa\x07\x01y"),
                ),
            ).SerializeToString(),
            "Structure has no field with number 127.",
        ),
        (b"x" * 20_000, "GenerateRequest has 20000 bytes of unknown fields."),
    ],
    ids=["message", "nested message", "after a map", "many"],
)
def test_unknown_field_is_rejected(server: Server, body: bytes, text: str) -> None:
    error = _raw_call(server, "Generate", body)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (LIMIT, "The message is not a valid TokenizeRequest."),
        (
            LIMIT + 1,
            f"Message of {LIMIT + 1} bytes is larger than the limit of {LIMIT} bytes "
            "(--max-request-kib).",
        ),
    ],
)
def test_too_large_message_is_rejected_before_it_is_parsed(
    server: Server, num_bytes: int, text: str
) -> None:
    # These bytes are not a message, so parsing them fails.
    error = _raw_call(server, "Tokenize", b"\xff" * num_bytes)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_message_far_too_large_is_rejected_by_its_length(server: Server) -> None:
    error = _raw_call(server, "Generate", b"\xff" * (2 * LIMIT))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"({2 * LIMIT} vs. {LIMIT + LIMIT // 2})" in str(error.details())
    assert server.engine.log.submitted == []


def test_too_much_metadata_is_rejected(server: Server) -> None:
    error = _raw_call(server, "Generate", b"", metadata=(("x-large", "x" * 20_000),))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_nested_messages_are_rejected_quickly(server: Server) -> None:
    started_s = time.process_time()
    # An empty turn has two bytes, and takes about a microsecond to parse.
    error = _raw_call(server, "Chat", b"\x12\x00" * 500_000)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "messages has too many entries: a message may have at most 24576 fields, those of nested "
        "messages included."
    )
    assert time.process_time() - started_s < 20


def test_compressed_message_is_rejected(server: Server) -> None:
    body = pb.GenerateRequest(text="x" * 100_000).SerializeToString()
    error = _raw_call(server, "Generate", body, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.engine.log.submitted == []


def test_unknown_method_is_unimplemented(server: Server) -> None:
    assert _raw_call(server, "Nothing", b"").code() is grpc.StatusCode.UNIMPLEMENTED


SIZE = RequestSize(num_list_values=5000, context=5000)


def check(message: Message, size: RequestSize = SIZE) -> None:
    check_fields(type(message), message.SerializeToString(), size)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(text="x" * 1_000_000),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * 5000)),
        pb.GenerateRequest(
            text="x",
            sampling=pb.SamplingParams(
                max_tokens=5, temperature=0.5, seed=-1, stop=["a"], logit_bias={5: 1.0}
            ),
            timeout={"seconds": 5},
        ),
        pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")] * 4096),
        pb.EmbedRequest(prompts=[pb.EmbedPrompt(token_ids=pb.TokenIds(ids=[7] * 500))] * 2048),
    ],
    ids=["empty", "text", "ids", "sampling", "messages", "embeddings"],
)
def test_messages_within_the_limits_pass(message: Message) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatRequest(messages=[pb.ChatMessage()] * 100_000), "messages"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100_000)]),
            "messages",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 100)] * 1000),
            "messages",
        ),
        (pb.AbortRequest(request_ids=[""] * 100_000), "request_ids"),
        (
            pb.GenerateRequest(
                sampling=pb.SamplingParams(
                    structure=pb.Structure(choices=pb.Choices(texts=[""] * 100_000))
                )
            ),
            "sampling",
        ),
    ],
    ids=["messages", "tool calls", "small messages", "strings", "choices"],
)
def test_too_many_fields_are_rejected(message: Message, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} has too many entries") as rejected:
        check(message)
    assert rejected.value.param == field


def test_unpacked_numbers_and_unknown_fields_count() -> None:
    for tag in (b"\x08", b"\xf8\x07"):
        with pytest.raises(InvalidRequestError, match="too many entries"):
            check_fields(pb.TokenIds, (tag + b"\x01") * 100_000, SIZE)


MANY = pb.ChatRequest(messages=[pb.ChatMessage()] * 100_000).SerializeToString()
LONG = pb.TokenizeRequest(text="x" * 5000).SerializeToString()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (pb.ChatRequest, b"\xa3\x06\xa4\x06" + MANY),
        (pb.ChatRequest, b"\xa3\x06" + MANY + b"\xa4\x06"),
        (pb.TokenizeRequest, LONG + b"\x1a\x04\xa3\x06\xa4\x06"),
    ],
    ids=["before", "around", "nested"],
)
def test_a_group_hides_no_fields(kind: type[Message], body: bytes) -> None:
    # Field 100 as a group, which the parser skips.
    kind.FromString(body)
    with pytest.raises(InvalidRequestError, match="has no field with number 100"):
        check_fields(kind, body, SIZE)


@pytest.mark.parametrize("token_id", [0, 300, 2**32 - 1])
def test_more_token_ids_than_a_context_are_rejected(token_id: int) -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token_id] * 5001))
    with pytest.raises(ContextLengthError, match=r"5001 entries.*--max-model-len") as rejected:
        check(message)
    assert rejected.value.param == "token_ids"


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_rejected(body: bytes) -> None:
    for kind in (pb.ChatRequest, pb.GenerateRequest):
        check_fields(kind, body, SIZE)


TENANT_BYTES = 64 * 2**20
# None waits for so long that it is rejected.
LIMITS = IntakeLimits(wait_s=600.0)
REQUEST = pb.TokenizeRequest(text="hello")


async def test_calls_wait_while_others_that_are_read_have_all_the_room(
    tokenizer: Tokenizer,
) -> None:
    async with (
        grpc_frontend(tokenizer, calls=CallOptions(intake_limits=LIMITS)) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        stub = server.stub(channel)
        reception = server.servicer.intake.reception
        with reception.open_message(ANONYMOUS.name) as others:
            assert others.reserve(TENANT_BYTES)
            calls = [stub.Tokenize(REQUEST) for _ in range(300)]
            await wait_until(
                lambda: reception.num_waiting + sum(call.done() for call in calls) == 300
            )
        codes = Counter([await call.code() for call in calls])
        assert codes == {grpc.StatusCode.OK: 256, grpc.StatusCode.RESOURCE_EXHAUSTED: 44}
        assert reception.num_bytes == 0
