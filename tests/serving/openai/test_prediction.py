"""Predictions of the output: their tokens, how many appeared in the output, and invalid ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pagedray.batch import pack_token_ids
from pagedray.config import SpeculationConfig
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

TEXT = "the quick brown fox"
# Any: JSON
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


class SpeculatingServer(Server):
    """A server of which the engine uses predictions."""

    def config(self, context: int) -> EngineConfig:
        speculation = SpeculationConfig(num_speculative_tokens=4)
        return replace(super().config(context), speculation=speculation)


@pytest.fixture(scope="module")
def speculating_server(tokenizer: Tokenizer) -> Iterator[Server]:
    with SpeculatingServer(tokenizer) as server:
        yield server


def post(server: Server, **given: object) -> httpx.Response:
    server.engine.reset()
    return httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | given)


@pytest.mark.parametrize(
    "content",
    [TEXT, ["the quick ", {"type": "text", "text": "brown fox"}], [{"type": "text", "text": TEXT}]],
)
def test_tokens_of_a_prediction_reach_the_engine(
    speculating_server: Server, content: object
) -> None:
    answer = post(speculating_server, prediction={"type": "content", "content": content})
    assert answer.status_code == 200, answer.text
    (request,) = speculating_server.engine.log.submitted
    token_ids = speculating_server.tokenizer.encode(TEXT, add_special_tokens=False)
    assert request.prediction == pack_token_ids(token_ids)
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6
    assert details["rejected_prediction_tokens"] == 3


def test_client_reads_the_usage_of_a_stream(speculating_server: Server) -> None:
    with httpx.stream(
        "POST",
        f"{speculating_server.url}/v1/chat/completions",
        json=CHAT
        | {
            "n": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prediction": {"type": "content", "content": TEXT},
        },
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert '"accepted_prediction_tokens":12,"rejected_prediction_tokens":6' in lines[-1]


def test_without_speculation_a_prediction_is_ignored(server: Server) -> None:
    answer = post(server, prediction={"type": "content", "content": TEXT})
    (request,) = server.engine.log.submitted
    assert request.prediction == b""
    assert "prediction" not in answer.text
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'pagedray_ignored_parameters_total{parameter="prediction"}' in metrics


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ("text", "prediction", "prediction must be an object."),
        ({"type": "image", "content": "x"}, "prediction.type", "must be 'content', not 'image'."),
        ({"type": "content"}, "prediction.content", "prediction.content is required."),
        ({"content": 5}, "prediction.content", "must be a string or a list of text parts."),
        ({"content": [5]}, "prediction.content", "must be a string or a list of text parts."),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content.0",
            "is not supported: the model only reads text, not image_url parts.",
        ),
    ],
)
@pytest.mark.parametrize("speculates", [False, True])
def test_a_prediction_that_is_not_text_is_rejected(
    server: Server,
    speculating_server: Server,
    given: object,
    param: str,
    message: str,
    *,
    speculates: bool,
) -> None:
    answer = post(speculating_server if speculates else server, prediction=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].endswith(message)
