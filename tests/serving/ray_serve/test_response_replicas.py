"""Responses and Messages on several replicas: what one keeps, others find; streams that are cut."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.responses.stored_responses import (
    Kept,
    ResponseStore,
    StoredResponses,
    StoredTurn,
    StoreLimits,
)
from cluster.serving.text.template_arguments import ChatMessage
from pagedray.errors import EngineError
from tests.serving.ray_serve.failing_replicas import FailingReplicas, Replica, reset, some_cuts
from tests.serving.ray_serve.proxied_clients import over_http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster.serving.responses.stored_responses import Action
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

EOS = 1
TEMPLATE = (
    "{# <tool_call> #}{% for message in messages %}{{ message.role }}={{ message.content }};"
    "{% endfor %}>"
)
SAID = "Hm, one moment: seven times six is what I am asked, so it is 42, as everybody knows."
NUM_RUNS = 15
RESPONSES = {"model": "tiny", "input": "hi", "max_output_tokens": 90}
MESSAGES = {
    "model": "tiny",
    "max_tokens": 90,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.fixture(scope="module")
def tokenizer(template_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return template_tokenizer(TEMPLATE)


@pytest.fixture
def stores() -> dict[str, ResponseStore]:
    """The stores of the replicas that have not ended."""
    return {}


@pytest.fixture
async def replicas(
    tokenizer: Tokenizer, stores: dict[str, ResponseStore]
) -> AsyncIterator[list[Replica]]:
    def script(request: Request, index: int) -> list[int]:
        return [*tokenizer.encode(SAID, add_special_tokens=False), EOS]

    names = [f"replica{number}" for number in range(3)]
    found = [Replica(tokenizer, script, name=name, stores=stores) for name in names]
    yield found
    for one in found:
        await one.close()


@pytest.fixture
def serve(replicas: list[Replica]) -> FailingReplicas:
    return FailingReplicas(replicas)


async def responses(serve: FailingReplicas, **given: object) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a response that is not streamed."""
    received = await over_http(serve, "/v1/responses", RESPONSES | given)
    return received[0]["status"], json.loads(b"".join(one["body"] for one in received[1:]))


async def of_id(serve: FailingReplicas, method: str, response_id: str) -> tuple[int, Any]:
    received = await over_http(serve, f"/v1/responses/{response_id}", {}, method=method)
    return received[0]["status"], json.loads(b"".join(one["body"] for one in received[1:]))


def last_prompt(replica: Replica, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(replica.engine.log.submitted[-1].prompt_token_ids)


async def test_any_replica_continues_a_response(
    serve: FailingReplicas, replicas: list[Replica], tokenizer: Tokenizer
) -> None:
    _, first = await responses(serve, input="one")
    _, second = await responses(serve, input="two", previous_response_id=first["id"])
    assert [one["id"].split("_")[1] for one in (first, second)] == ["replica0", "replica1"]
    status, third = await responses(serve, input="three", previous_response_id=second["id"])
    assert status == 200
    assert third["previous_response_id"] == second["id"]
    expected = f"user=one;assistant={SAID};user=two;assistant={SAID};user=three;>"
    assert last_prompt(replicas[2], tokenizer) == expected
    # The first one is still there, and may be continued twice.
    _, other = await responses(serve, input="four", previous_response_id=first["id"])
    assert last_prompt(replicas[0], tokenizer) == f"user=one;assistant={SAID};user=four;>"
    assert other["id"] not in (first["id"], second["id"], third["id"])
    _, page = await of_id(serve, "GET", f"{third['id']}/input_items")
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["three", SAID, "two", SAID, "one"]


async def test_any_replica_reads_and_deletes_a_response(serve: FailingReplicas) -> None:
    _, made = await responses(serve)
    assert await of_id(serve, "GET", made["id"]) == (200, made)
    for _ in range(3):
        status, page = await of_id(serve, "GET", f"{made['id']}/input_items")
        texts = [item["content"][0]["text"] for item in page["data"]]
        assert (status, texts) == (200, [RESPONSES["input"]])
    status, deleted = await of_id(serve, "DELETE", made["id"])
    assert (status, deleted["deleted"]) == (200, True)
    # On its own replica and on another one.
    for _ in range(3):
        status, rejected = await of_id(serve, "GET", made["id"])
        assert status == 404
        assert rejected["error"]["message"] == f"Response with id {made['id']!r} not found."
    status, rejected = await responses(serve, previous_response_id=made["id"])
    assert (status, rejected["error"]["code"]) == (400, "previous_response_not_found")


async def test_what_a_replica_kept_is_lost_with_it(
    serve: FailingReplicas, stores: dict[str, ResponseStore]
) -> None:
    _, made = await responses(serve)
    del stores["replica0"]
    status, rejected = await responses(serve, previous_response_id=made["id"])
    assert status == 400
    assert rejected["error"]["param"] == "previous_response_id"
    assert rejected["error"]["code"] == "previous_response_not_found"
    assert "the replica that kept it has ended" in rejected["error"]["message"]
    assert "send the earlier items as input" in rejected["error"]["message"]
    status, rejected = await of_id(serve, "GET", made["id"])
    assert (status, "has ended" in rejected["error"]["message"]) == (404, True)


@pytest.mark.parametrize("given", ["resp_1", "resp_nobody", "resp_x_y", "resp_" + "0" * 32])
async def test_ids_of_no_replica_are_unknown(serve: FailingReplicas, given: str) -> None:
    status, rejected = await responses(serve, previous_response_id=given)
    assert (status, rejected["error"]["message"]) == (
        400, f"Previous response with id {given!r} not found."
    )  # fmt: skip


def test_another_tenant_finds_nothing() -> None:
    turn = StoredTurn(b"{}", (ChatMessage("user", "a"),), None)
    store = ResponseStore(StoredResponses(StoreLimits()))
    store.keep("mine", "resp_a", turn)
    actions: tuple[Action, ...] = ("read", "continue", "items", "delete")
    assert [store.answer(one, "theirs", "resp_a") for one in actions] == [None] * 4
    assert store.answer("continue", "mine", "resp_a") == Kept(messages=turn.messages)


def events_of(received: list[Any]) -> tuple[list[str], list[Any]]:
    """Return the names and the data of all events of a stream."""
    assert [one["type"] for one in received].count("http.response.start") == 1
    text = b"".join(one["body"] for one in received[1:]).decode()
    assert text.endswith("\n\n")
    pairs = [one.split("\n") for one in text.removesuffix("\n\n").split("\n\n")]
    assert all(len(one) == 2 for one in pairs), text[-300:]
    return (
        [name.removeprefix("event: ") for name, _ in pairs],
        [json.loads(data.removeprefix("data: ")) for _, data in pairs],
    )


def joined(received: list[Any]) -> tuple[str, list[Any]]:
    """Return the text that the deltas join to, and all other events, without random ids."""
    _, events = events_of(received)
    deltas = [one for one in events if one["type"].endswith("delta") and "delta" in one]
    text = "".join(
        one["delta"] if isinstance(one["delta"], str) else one["delta"].get("text", "")
        for one in deltas
    )
    others = json.dumps([one for one in events if one not in deltas])
    ids = sorted(set(re.findall(r"(?:resp_\w+_|resp_|msg_)?[0-9a-f]{32}", others)))
    for number, one in enumerate(ids):
        others = others.replace(one, f"id{number}")
    others = re.sub(r'"(sequence_number|created_at)": \d+', "", others)
    others = re.sub(r'"output_tokens": [1-9]\d*', "", others)
    return text, [len(ids), json.loads(others.replace("{, ", "{").replace(", , ", ", "))]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
)
async def test_a_cut_stream_of_events_with_names_is_equal(
    serve: FailingReplicas, replicas: list[Replica], path: str, body: dict[str, Any]
) -> None:
    body = body | {"stream": True}
    whole = joined(await over_http(serve, path, body))
    assert whole[0] == SAID
    chance = random.Random(5)
    for _ in range(NUM_RUNS):
        reset(replicas)
        serve.cuts = some_cuts(chance, 20)[:2]
        assert joined(await over_http(serve, path, body)) == whole


async def test_a_response_that_another_replica_began_is_not_kept(serve: FailingReplicas) -> None:
    serve.cuts = [(4, "died")]
    _, events = events_of(await over_http(serve, "/v1/responses", RESPONSES | {"stream": True}))
    made = events[-1]["response"]
    assert made["status"] == "completed"
    assert {one["response"]["id"] for one in events if "response" in one} == {made["id"]}
    status, _ = await responses(serve, previous_response_id=made["id"])
    assert status == 400


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
)
async def test_errors_of_the_proxy_have_the_shape_of_their_api(
    serve: FailingReplicas, replicas: list[Replica], path: str, body: dict[str, Any]
) -> None:
    serve.cuts = [(3, "time limit")]
    names, events = events_of(await over_http(serve, path, body | {"stream": True}))
    assert names[-1] == events[-1]["type"] == "error"
    assert "[DONE]" not in names
    if path == "/v1/messages":
        assert events[-1]["error"]["type"] == "timeout_error"
    else:
        assert events[-1]["sequence_number"] == len(events) - 1
        assert "time limit" in events[-1]["message"]
    for one in replicas:
        one.engine.fail_all(EngineError("The engine failed."))
    received = await over_http(serve, path, body)
    error = json.loads(received[1]["body"])
    assert received[0]["status"] == 503
    assert (error.get("type") == "error") == (path == "/v1/messages")
