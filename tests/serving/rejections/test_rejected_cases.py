"""Invalid requests get the same error over every frontend and never reach the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from tests.serving.rejections.rejected_cases import CASES, Case

if TYPE_CHECKING:
    from pagedray.v1 import pagedray_pb2_grpc
    from tests.serving.conftest import Server


def _grpc_text(stub: pagedray_pb2_grpc.GenerationServiceStub, case: Case) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(case.grpc_message()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def _http_error(server: Server, case: Case, *, stream: bool) -> dict[str, Any]:  # Any: JSON
    sampling = dict(case.sampling)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(name): one for name, one in sampling["logit_bias"].items()}
    body = {"model": "tiny", "prompt": case.prompt, "stream": stream, **sampling}
    headers = {"x-request-id": case.client_id} if case.client_id else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]  # Any: JSON
    return error


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_frontend_rejects_with_the_same_message(
    server: Server, stub: pagedray_pb2_grpc.GenerationServiceStub, case: Case
) -> None:
    assert _grpc_text(stub, case) == case.text
    for stream in (False, True):
        assert _http_error(server, case, stream=stream) == {
            "message": case.text,
            "type": "invalid_request_error",
            "param": case.param,
            "code": case.code,
        }
    assert server.engine.log.submitted == []


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_rejected_over_grpc(
    server: Server, stub: pagedray_pb2_grpc.GenerationServiceStub, name: str, value: float
) -> None:
    text = _grpc_text(stub, Case("", name, sampling={name: value}))
    assert text.startswith(f"{name} must be")
    assert server.engine.log.submitted == []
