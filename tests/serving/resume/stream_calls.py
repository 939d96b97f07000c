"""Calls that begin streams and resume them, over HTTP and gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    import httpx

Stub = pagedray_pb2_grpc.GenerationServiceStub
MANY = 100_000


def body(**fields: Any) -> dict[str, Any]:  # Any: JSON
    return {
        "model": "tiny", "prompt": "x", "max_tokens": 20, "ignore_eos": True, "stream": True,
        "stream_options": {"resumable": True}, **fields,
    }  # fmt: skip


def begin(http: httpx.Client, name: str, *, num_events: int = 1, **fields: Any) -> None:
    """Start a stream, read some events and close the connection."""
    headers = {"x-request-id": name}
    with http.stream("POST", "/v1/completions", json=body(**fields), headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            num_events -= line.startswith("data")
            if not num_events:
                break


def numbers(text: str) -> list[int]:
    return [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]


def rest(http: httpx.Client, name: str, number: int | str, **headers: str) -> httpx.Response:
    return http.get(f"/v1/streams/{name}", headers={"last-event-id": str(number), **headers})


def messages(name: str, **fields: Any) -> pb.GenerateRequest:  # Any: fields of all types
    sampling = pb.SamplingParams(max_tokens=20, ignore_eos=True)
    return pb.GenerateRequest(
        text="x", request_id=name, resumable=True, sampling=sampling, **fields
    )


def code_of(stub: Stub, method: str, message: Any) -> grpc.StatusCode:  # Any: two messages
    with pytest.raises(grpc.RpcError) as caught:
        list(getattr(stub, method)(message))
    code = caught.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def resumption(name: str, number: int, **fields: Any) -> pb.GenerateRequest:  # Any: as above
    return pb.GenerateRequest(request_id=name, resume_from=number, **fields)
