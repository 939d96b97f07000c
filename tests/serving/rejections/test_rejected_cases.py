"""Requests that HTTP and gRPC can express, and their rejections, which are counted."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.inputs import GenerationInput
from cluster.serving.validator import Validator
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.v1 import pagedray_pb2_grpc
    from tests.serving.conftest import Server

__all__ = ["CASES", "Case"]

_TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Case:
    """A request that both frontends can write, and the rejection."""

    text: str
    param: str
    prompt: str | list[int] = "hello"
    client_id: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # Any: fields of all types
    code: str | None = None

    def grpc_message(self) -> pb.GenerateRequest:
        """Return the request for gRPC."""
        message = pb.GenerateRequest(
            request_id=self.client_id, sampling=pb.SamplingParams(**self.sampling)
        )
        if isinstance(self.prompt, str):
            message.text = self.prompt
        else:
            message.token_ids.ids.extend(self.prompt)
            message.token_ids.SetInParent()
        return message


CASES = {
    "empty prompt": Case("prompt must not be empty.", "prompt", prompt=""),
    "no token ids": Case("prompt must not be empty.", "prompt", prompt=[]),
    "long prompt": Case(
        "prompt has 256 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt=[5] * 256,
        code=_TOO_LONG,
    ),
    "long text": Case(
        "prompt has 301 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt="~" * 300,
        code=_TOO_LONG,
    ),
    "huge text": Case(
        "prompt has 1000000 characters, but the context of 256 tokens holds at most 3328.",
        "prompt",
        prompt="x" * 1_000_000,
        code=_TOO_LONG,
    ),
    "huge token list": Case(
        "prompt has 8000 tokens, but the context length of 256 allows at most 255 and one "
        "generated token.",
        "prompt",
        prompt=[5] * 8000,
        code=_TOO_LONG,
    ),
    "unknown token": Case(
        "prompt contains token id 320, but ids are 0 to 319.", "prompt", prompt=[5, 320]
    ),
    "max_tokens too large": Case(
        "max_tokens must be from 1 to 253, not 254: the prompt has 3 tokens and the "
        "context length is 256.",
        "max_tokens",
        prompt=[5, 6, 7],
        sampling={"max_tokens": 254},
        code=_TOO_LONG,
    ),
    "temperature": Case(
        "temperature must be from 0 to 100, not -0.1.",
        "temperature",
        sampling={"temperature": -0.1},
    ),
    "top_p": Case("top_p must be from 0 to 1, not 1.01.", "top_p", sampling={"top_p": 1.01}),
    "min_p": Case("min_p must be from 0 to 1, not 2.", "min_p", sampling={"min_p": 2.0}),
    "repetition_penalty": Case(
        "repetition_penalty must be from 0.01 to 100, not 0.",
        "repetition_penalty",
        sampling={"repetition_penalty": 0.0},
    ),
    "presence_penalty": Case(
        "presence_penalty must be from -2 to 2, not 2.5.",
        "presence_penalty",
        sampling={"presence_penalty": 2.5},
    ),
    "frequency_penalty": Case(
        "frequency_penalty must be from -2 to 2, not -3.",
        "frequency_penalty",
        sampling={"frequency_penalty": -3.0},
    ),
    "n 0": Case("n must be from 1 to 128, not 0.", "n", sampling={"n": 0}),
    "n 1000": Case("n must be from 1 to 128, not 1000.", "n", sampling={"n": 1000}),
    "n of 10^9": Case(
        "n must be from 1 to 128, not 1000000000.", "n", sampling={"n": 1_000_000_000}
    ),
    "logprobs": Case(
        "logprobs must be from 0 to 20, not 21.", "logprobs", sampling={"logprobs": 21}
    ),
    "empty stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": [""]}
    ),
    "long stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": ["x" * 513]}
    ),
    "many stops": Case(
        "stop may have at most 16 entries, not 17.", "stop", sampling={"stop": ["x"] * 17}
    ),
    "unknown stop token": Case(
        "stop_token_ids contains token id 999, but ids are 0 to 319.",
        "stop_token_ids",
        sampling={"stop_token_ids": [999]},
    ),
    "many stop tokens": Case(
        "stop_token_ids may have at most 1024 entries, not 8000.",
        "stop_token_ids",
        sampling={"stop_token_ids": [5] * 8000},
    ),
    "unknown biased token": Case(
        "logit_bias contains token id 320, but ids are 0 to 319.",
        "logit_bias",
        sampling={"logit_bias": {320: 1.0}},
    ),
    "large bias": Case(
        "logit_bias must be from -100 to 100, not 101.",
        "logit_bias",
        sampling={"logit_bias": {5: 101.0}},
    ),
    "many biases": Case(
        "logit_bias may have at most 1024 entries, not 1025.",
        "logit_bias",
        sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    "allowed token beyond the vocabulary": Case(
        "allowed_token_ids contains token id 320, but ids are 0 to 319.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5, 320]},
    ),
    "too many allowed tokens": Case(
        "allowed_token_ids may have at most 4096 entries, not 4097.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5] * 4097},
    ),
    "no token is allowed": Case(
        "allowed_token_ids must contain a token that does not end the output if min_tokens is set.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [1, 7], "stop_token_ids": [7], "min_tokens": 2},
    ),
    "bad word of spaces": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a", " "]},
    ),
    "long bad word": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a" * 129]},
    ),
    "bad word of many tokens": Case(
        "bad_words must contain strings of 1 to 32 tokens, but '~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~' "
        "has 33.",
        "bad_words",
        sampling={"bad_words": ["~" * 33]},
    ),
    "too many bad words": Case(
        "bad_words may have at most 256 entries, not 257.",
        "bad_words",
        sampling={"bad_words": ["a"] * 257},
    ),
    "all allowed tokens end bad words": Case(
        "allowed_token_ids must contain a token that does not end one of bad_words.",
        "allowed_token_ids",
        # Of the test's tokenizer: "!" and "#".
        sampling={"allowed_token_ids": [5, 7], "bad_words": ["!", "~#"]},
    ),
    "long id": Case(
        "request_id must have 1 to 128 printable characters.", "request_id", client_id="x" * 129
    ),
}


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


@pytest.mark.parametrize("client_id", ["", "x" * 129, "a\nb", "a\x00", "\u200b"])
async def test_ids_are_short_and_printable(tokenizer: Tokenizer, client_id: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    with pytest.raises(InvalidRequestError, match="1 to 128 printable"):
        await validator.validate(GenerationInput(prompts=("x",), client_id=client_id))


@pytest.mark.parametrize("given", ["a\ud800", "\udfffb"])
async def test_lone_surrogates_are_rejected(tokenizer: Tokenizer, given: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    for one in (
        GenerationInput(prompts=(given,)),
        GenerationInput(prompts=("x",), sampling={"stop": (given,)}),
    ):
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            await validator.validate(one)


async def test_bounds_are_inclusive(tokenizer: Tokenizer) -> None:
    validator = Validator(engine_config(), tokenizer)
    (request,) = await validator.validate(
        GenerationInput(
            prompts=((319,) * 255,),
            client_id="x" * 128,
            priority=-(2**31),
            sampling={
                "n": 128,
                "max_tokens": 1,
                "logprobs": 20,
                "stop": ("x" * 512,) * 16,
                "logit_bias": dict.fromkeys(range(320), 100.0),
                "seed": 2**63 - 1,
            },
        )
    )
    assert isinstance(request.sampling, SamplingParams)
    assert len(request.id) == 32
    assert request.seed == 2**63 - 1


NO_HTTP = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA: %b\r\n\r\n" % (b"a" * 2**17),
)
JSON = {"content-type": "application/json"}


def num_invalid(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    found = [
        line
        for line in lines
        if line.startswith("pagedray_requests_total{") and 'outcome="invalid"' in line
    ]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", JSON),
        (b'{"model": "tiny", "prompt": "x", "frobnicate": 1}', JSON),
        (b'{"model": "tiny", "prompt": 5}', JSON),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 0}', JSON),
        (b"{}", {"content-type": "text/plain"}),
        (b" " * (5 * 2**20), JSON),
    ],
    ids=["no JSON", "unknown field", "prompt of no kind", "out of range", "no JSON type", "large"],
)
def test_call_that_http_rejects_is_counted(
    http: httpx.Client, body: bytes, headers: dict[str, str]
) -> None:
    before = num_invalid(http)
    assert http.post("/v1/completions", content=body, headers=headers).is_client_error
    assert num_invalid(http) == before + 1


@pytest.mark.parametrize(
    "message",
    [b"\xff", b"\xf8\x07\x01", b"\xff" * (3 * 2**19)],
    ids=["no message", "unknown field", "large"],
)
@pytest.mark.parametrize("method", ["Generate", "Embed", "Tokenize"])
def test_call_that_grpc_rejects_is_counted(
    http: httpx.Client, server: Server, method: str, message: bytes
) -> None:
    before = num_invalid(http)
    with grpc.insecure_channel(server.grpc_target) as channel:
        generate = channel.unary_stream(
            f"/pagedray.v1.GenerationService/{method}",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        with pytest.raises(grpc.RpcError) as rejected:
            list(generate(message))
    assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert num_invalid(http) == before + 1


@pytest.mark.parametrize("sent", NO_HTTP, ids=["no host", "long head"])
def test_malformed_request_is_counted(http: httpx.Client, server: Server, sent: bytes) -> None:
    before = num_invalid(http)
    with socket.create_connection(("127.0.0.1", server.frontends.http_port or 0), 60) as connection:
        connection.sendall(sent)
        assert connection.recv(2**12).startswith(b"HTTP/1.1 4")
    assert num_invalid(http) == before + 1
