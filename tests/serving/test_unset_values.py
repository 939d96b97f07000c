"""Values by which clients say that a parameter is not set, in every API."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import pagedray
from cluster.serving.openai.bodies import generation_body
from cluster.serving.telemetry.log_lines import LineLimit
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub
Given = dict[str, Any]  # Any: JSON
CONTEXT = 256
HELLO = 3
"""Tokens of the prompt `hello`, and of that message."""
TURN = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, Given] = {
    "/v1/completions": {"prompt": [5] * HELLO},
    "/v1/chat/completions": TURN,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, **TURN},
}
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
CHATS = ("/v1/completions", "/v1/chat/completions")
UNSET: list[tuple[tuple[str, ...], Given, Given]] = [
    ((*OPENAI, "/v1/messages"), {"seed": -1}, {"seed": None}),
    (OPENAI, {"seed": None}, {"seed": None}),
    (OPENAI, {"seed": -1.0}, {"seed": None}),
    (OPENAI, {"seed": -2}, {"seed": -2}),
    (OPENAI, {"seed": 42.0}, {"seed": 42}),
    ((*OPENAI, "/v1/messages"), {"top_k": 40.0}, {"top_k": 40}),
    ((*OPENAI, "/v1/messages"), {"top_k": 0}, {"top_k": 0}),
    ((*OPENAI, "/v1/messages"), {"top_k": -1}, {"top_k": -1}),
    ((*OPENAI, "/v1/messages"), {"top_k": None}, {"top_k": 0}),
    ((*OPENAI, "/v1/messages"), {"temperature": None, "top_p": None}, {"temperature": 1.0}),
    (OPENAI, {"stop": None}, {"stop": ()}),
    (OPENAI, {"stop": ""}, {"stop": ()}),
    (OPENAI, {"stop": []}, {"stop": ()}),
    (("/v1/messages",), {"stop_sequences": []}, {"stop": ()}),
    (("/v1/messages",), {"stop_sequences": None}, {"stop": ()}),
    (OPENAI, {"logit_bias": None}, {"logit_bias": {}}),
    (OPENAI, {"logit_bias": {}}, {"logit_bias": {}}),
    (OPENAI, {"logit_bias": []}, {"logit_bias": {}}),
    (CHATS, {"n": None}, {"n": 1}),
    (CHATS, {"n": 2.0}, {"n": 2}),
    (CHATS, {"logprobs": None}, {"logprobs": None}),
    (CHATS, {"logprobs": False}, {"logprobs": None}),
    (("/v1/completions",), {"logprobs": 2.0}, {"logprobs": 2}),
    (("/v1/chat/completions",), {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    (("/v1/completions",), {"max_tokens": None}, {"max_tokens": 16}),
    (("/v1/completions",), {"max_tokens": -1}, {"max_tokens": CONTEXT - HELLO}),
    (("/v1/completions",), {"max_completion_tokens": -1}, {"max_tokens": CONTEXT - HELLO}),
    (("/v1/completions",), {"max_completion_tokens": 7}, {"max_tokens": 7}),
    (("/v1/completions",), {"max_completion_tokens": None, "max_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5.0}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 6, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": -1, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"stop_token_ids": [], "bad_words": []}, {"stop_token_ids": (), "bad_words": ()}),
    (("/v1/responses",), {"max_output_tokens": 5.0}, {"max_tokens": 5}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [(path, given, expected) for paths, given, expected in UNSET for path in paths],
)
def test_unset_values_are_accepted(
    server: Server, path: str, given: Given, expected: Given
) -> None:
    answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | given)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.log.submitted
    found = {name: getattr(request.sampling, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_minus_one_is_no_limit(server: Server, path: str, name: str) -> None:
    limits = []
    for given in ({}, {name: -1}):
        server.engine.reset()
        answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | given)
        assert answer.status_code == 200, answer.text
        limits.append(server.engine.log.submitted[0].sampling.max_tokens)
    assert limits[0] == limits[1] > 200


def test_a_random_seed_differs_between_requests(server: Server) -> None:
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "seed": -1})
    first, second = (request.seed for request in server.engine.log.submitted)
    assert first != second
    assert min(first, second) >= 0


def test_seed_of_minus_one_is_random_over_grpc(stub: Stub, engine: FakeEngine) -> None:
    sampling = pb.SamplingParams(seed=-1)
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)))
    [request] = engine.log.submitted
    assert request.sampling.seed is None
    assert request.seed >= 0


def test_seed_of_minus_one_is_random_in_python() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1) == SamplingParams()
    params = pagedray.SamplingParams(seed=-1, max_tokens=-1, stop="")
    assert params == pagedray.SamplingParams(seed=None, max_tokens=None, stop=None)


def test_two_limits_are_logged(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_body, "_conflict_lines", LineLimit())
    caplog.set_level(logging.INFO)
    body = {"prompt": "x", "max_tokens": 600, "max_completion_tokens": 300}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("max_completion_tokens must be from 1 to 254, not 300:")
    lines = [line for line in caplog.messages if line.startswith("Calls with different values")]
    assert lines == [
        "Calls with different values of max_tokens and max_completion_tokens, of which the smaller "
        "is used: 1, the last one with 600 and 300."
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_tokens": -2}, "max_tokens must be 1 or more, not -2."),
        ({"max_tokens": 5.5}, "max_tokens must be an integer, not 5.5."),
        ({"max_tokens": "5"}, "max_tokens must be an integer, not '5'."),
        ({"n": 0.0}, "n must be from 1 to 128, not 0."),
        ({"logprobs": True}, "logprobs must be an integer, not true."),
        ({"seed": "-1"}, "seed must be an integer, not '-1'."),
        ({"logit_bias": [1]}, "logit_bias must be an object that maps token ids to numbers."),
        ({"stop": [5]}, "stop must contain strings of 1 to 512 characters."),
    ],
)
def test_other_values_are_rejected(server: Server, given: Given, text: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"} | given)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
