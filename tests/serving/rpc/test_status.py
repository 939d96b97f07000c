"""Errors over gRPC: code, message and details."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from cluster.serving.rpc.status import code_of, status_of
from pagedray import errors
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status

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
    for name in errors.__all__:
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
