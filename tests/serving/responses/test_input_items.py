"""What a stored response was generated from, its tokens, and what clients cannot do with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseFunctionToolCallItem,
    ResponseFunctionToolCallOutputItem,
    ResponseIncludable,
    ResponseInputMessageItem,
    ResponseOutputMessage,
)

from cluster.serving.responses.items import ItemsQuery, items_page, size_of_items
from cluster.serving.responses.stored_responses import StoreLimits
from cluster.serving.text.templates.chat_prompt import ChatMessage, MessageToolCall
from tests.load.tenant_keys import write_keys
from tests.serving.conftest import Server
from tests.serving.responses.response_calls import CALL, OUTPUT, TOOL, create

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer


def listed(client: openai.OpenAI, response_id: str, **given: Any) -> list[Any]:
    return list(client.responses.input_items.list(response_id, **given))


def test_input_is_listed_as_items_of_the_client(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("ok" + CALL)
    first = create(client, tools=[TOOL], instructions="Be brief.", input="look")
    tool_server.say("It is five.")
    result = {**OUTPUT, "call_id": first.output[1].call_id}
    second = create(client, tools=[TOOL], input=[result], previous_response_id=first.id)
    (only,) = listed(client, first.id)
    assert isinstance(only, ResponseInputMessageItem)
    assert (only.role, only.content[0].to_dict()) == (
        "user", {"type": "input_text", "text": "look"}
    )  # fmt: skip
    items = listed(client, second.id, order="asc")
    assert [type(item) for item in items] == [
        ResponseInputMessageItem,
        ResponseOutputMessage,
        ResponseFunctionToolCallItem,
        ResponseFunctionToolCallOutputItem,
    ]
    assert (items[1].content[0].text, items[2].name) == ("ok", first.output[1].name)
    assert items[2].call_id == items[3].call_id == first.output[1].call_id
    assert json.loads(items[2].arguments) == json.loads(first.output[1].arguments)
    assert items[3].output == result["output"]
    assert listed(client, second.id) == items[::-1]


def test_listed_items_are_an_input_with_the_same_prompt(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("ok" + CALL)
    first = create(client, tools=[TOOL], input="look")
    result = {**OUTPUT, "call_id": first.output[1].call_id}
    given = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}, result]
    create(client, input=given[:2])
    second = create(client, tools=[TOOL], input=given[2:], previous_response_id=first.id)
    rendered = tool_server.engine.log.submitted[-1].prompt_token_ids
    items = [one.model_dump() for one in listed(client, second.id, order="asc")]
    create(client, tools=[TOOL], input=items)
    assert tool_server.engine.log.submitted[-1].prompt_token_ids == rendered


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="user", content="x" * 50_000),
        ChatMessage(role="assistant", content="", reasoning="x" * 50_000),
        ChatMessage(
            role="assistant",
            content="",
            tool_calls=(MessageToolCall(id="c", name="f", arguments={"a": ["x"] * 5_000}),),
        ),
    ],
    ids=["content", "reasoning", "arguments"],
)
def test_items_are_counted_before_they_are_written(message: ChatMessage) -> None:
    messages = (message,) * 10
    page = items_page(messages, "resp_a", ItemsQuery(limit=10))
    assert 0.25 < size_of_items(messages) / len(page) < 1.1


def test_pages_join_to_all_items(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("Hello.")
    texts = [f"text {index}" for index in range(45)]
    made = create(client, input=[{"role": "user", "content": text} for text in texts])
    for limit in (1, 7, 44, 45, 100):
        items = listed(client, made.id, limit=limit, order="asc")
        assert [item.content[0].text for item in items] == texts
    page = client.responses.input_items.list(made.id, order="asc")
    assert (len(page.data), page.has_more) == (20, True)
    assert len({item.id for item in listed(client, made.id)}) == len(texts)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"limit={limit}", "limit") for limit in ("0", "101", "-1", "x", "", "9" * 5000)),
        *(("order=up", "order"), ("after=msg_1", "after")),
        *(
            ("after=msg_1_" + "9" * 5000, "after"),
            ("after=msg_x_0", "after"),
            ("limit=1&limit=2", "limit"),
            ("befor=1", "befor"),
            ("ofter=1", "ofter"),
        ),
        ("include[]=message.output_text.logprobs", "include"),
        ("include=reasoning.encrypted_content,reasoning", "include"),
    ],
)
def test_bad_queries_are_rejected_by_name(
    tool_server: Server, client: openai.OpenAI, query: str, param: str
) -> None:
    tool_server.say("Hello.")
    made = create(client, input="hi")
    answer = httpx.get(f"{tool_server.url}/v1/responses/{made.id}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < 400


def test_a_misspelled_parameter_names_the_nearest(
    tool_server: Server, client: openai.OpenAI
) -> None:
    made = create(client, input="hi")
    answer = httpx.get(f"{tool_server.url}/v1/responses/{made.id}?includ=x")
    assert answer.json()["error"]["message"].endswith("did you mean include?")


def test_what_the_client_may_ask_of_a_stored_response(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("Hello.")
    made = create(client, input="hi")
    names = get_args(ResponseIncludable)
    include: list[Any] = [one for one in names if one != "message.output_text.logprobs"]
    assert client.responses.retrieve(made.id, include=include, stream=False) == made
    assert listed(client, made.id, include=include)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_1")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


def test_counted_tokens_are_those_of_the_prompt(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("Hello.")
    first = create(client, input="hi", instructions="Be brief.")
    count: Any = client.responses.input_tokens.count
    given: list[dict[str, Any]] = [
        {"input": "hi", "instructions": "Be brief."},
        {"input": "and", "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "look"}], "tools": [TOOL]},
        {"input": "x", "text": {"format": {"type": "json_object"}}, "tool_choice": "none"},
    ]
    for one in given:
        num_tokens = count(model="tiny", **one).input_tokens
        assert num_tokens == count(**one).input_tokens
        assert num_tokens == create(client, **one).usage.input_tokens
    for wrong, param in (
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"personality": "friendly"}, "personality"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"model": "other"}, "model"),
    ):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            count(input="hi", **wrong)
        assert caught.value.param == param


def test_input_of_another_tenants_response_is_unknown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", "one", "two")
    with Server(
        tokenizer, key_file=tmp_path / "keys.toml", store_limits=StoreLimits(), context=1024
    ) as server:
        clients = [
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in keys.values()
        ]
        made = create(clients[0], input="hi", max_output_tokens=4)
        assert len(listed(clients[0], made.id)) == 1
        for act in (clients[1].responses.input_items.list, clients[1].responses.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                act(made.id)
            assert made.id in str(caught.value)
        for one in clients:
            one.close()
