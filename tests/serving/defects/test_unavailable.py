"""A client of an engine that has ended learns when to try again, over both protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo

from pagedray.errors import EngineError
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    import httpx

    from pagedray.v1 import pagedray_pb2_grpc
    from tests.serving.fake_engine import FakeEngine


def test_unavailable_engine_says_when_to_retry(
    http: httpx.Client, stub: pagedray_pb2_grpc.GenerationServiceStub, engine: FakeEngine
) -> None:
    engine.rejection = EngineError("The engine has stopped.")
    engine.rejection.retry_after_s = 9.5
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="x")))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    retry = RetryInfo()
    assert any(one.Unpack(retry) for one in status_of_call(caught.value).details)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 9.5
