"""Stored responses: conversations, limits of tenants, and their input items."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCallItem,
    ResponseFunctionToolCallOutputItem,
    ResponseIncludable,
    ResponseInputMessageItem,
    ResponseOutputMessage,
)

from cluster.serving.intake import BufferLimits
from cluster.serving.responses.items import ItemsQuery, items_page, size_of_items
from cluster.serving.responses.stored_responses import StoredResponses, StoredTurn, StoreLimits
from cluster.serving.text.template_arguments import ChatMessage, MessageToolCall
from pagedray.errors import InvalidRequestError, UnknownPreviousError, UnknownResponseError
from tests.load.measured_server import write_keys
from tests.serving.conftest import Server
from tests.serving.responses.response_calls import CALL, OUTPUT, TOOL, create, posted

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

MIB = 2**20


def last_prompt(server: Server) -> str:
    return server.tokenizer.decode(server.engine.log.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize("is_stream", [False, True])
def test_chained_calls_render_what_clients_would_send(
    tool_server: Server, client: openai.OpenAI, is_stream: bool
) -> None:
    first_input = [{"role": "user", "content": "look"}]
    tool_server.say("ok" + CALL)
    given = {"tools": [TOOL], "instructions": "Be brief.", "input": first_input}
    first = create(client, **given, stream=is_stream)
    if is_stream:
        first = list(first)[-1].response
    assert [item.type for item in first.output] == ["message", "function_call"]
    tool_server.say("It is five.")
    result = {**OUTPUT, "call_id": first.output[1].call_id}
    second = create(client, tools=[TOOL], input=[result], previous_response_id=first.id)
    third = create(client, input="so?", previous_response_id=second.id)
    chained = last_prompt(tool_server)
    items = [*first_input, *(item.model_dump() for item in first.output), result]
    items += [*(item.model_dump() for item in second.output), {"role": "user", "content": "so?"}]
    create(client, input=items)
    # Instructions belong to their own call only.
    assert chained == last_prompt(tool_server)
    assert "Be brief." not in chained
    assert third.previous_response_id == second.id


def test_stored_responses_are_read_and_deleted(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("Hello.")
    first = client.responses.create(model="tiny", input="hi")
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    second = client.responses.create(model="tiny", input="and", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    # What continued it is whole.
    client.responses.create(model="tiny", input="more", previous_response_id=second.id)
    assert "hi" in last_prompt(tool_server)


def test_only_complete_responses_that_may_be_stored_are(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("Hello.")
    transient = client.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(transient.id)
    body = {"model": "tiny", "input": "hi"}
    found = httpx.post(
        f"{tool_server.url}/v1/responses", json=body, headers={"x-request-id": "mine"}, timeout=60
    )
    # Its id cannot be chosen, or guessed.
    assert len(found.json()["id"]) == len("resp_") + 32
    rejected = httpx.get(f"{tool_server.url}/v1/responses/{found.json()['id']}?stream=true")
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("part", ["output_items", "input_items/1", "cancel/x"])
def test_other_parts_of_a_response_are_no_endpoints(
    tool_server: Server, client: openai.OpenAI, method: str, part: str
) -> None:
    tool_server.say("Hello.")
    found = client.responses.create(model="tiny", input="hi")
    answer = httpx.request(method, f"{tool_server.url}/v1/responses/{found.id}/{part}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Not found: no such endpoint."
    assert client.responses.retrieve(found.id).id == found.id


def test_an_answer_without_text_is_continued(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("")
    first = client.responses.create(model="tiny", input="hi")
    tool_server.say("Hello.")
    client.responses.create(model="tiny", input="and", previous_response_id=first.id)
    assert "hi" in last_prompt(tool_server)


def test_cut_tool_calls_are_continued(tool_server: Server, client: openai.OpenAI) -> None:
    begun = CALL[: CALL.index("1}")]
    tool_server.say(begun)
    num_tokens = len(tool_server.tokenizer.encode(begun, add_special_tokens=False))
    cut = create(client, input="x", tools=[TOOL], max_output_tokens=num_tokens)
    assert cut.status == "incomplete"
    assert cut.output[-1].type == "function_call"
    tool_server.say("Yes.")
    assert posted(tool_server, {"previous_response_id": cut.id}).status_code == 200
    assert "!look{}" in last_prompt(tool_server)


def test_other_tenants_responses_are_unknown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", "one", "two")
    with Server(
        tokenizer, key_file=tmp_path / "keys.toml", store_limits=StoreLimits(), context=1024
    ) as server:
        url = f"{server.url}/v1/responses"
        headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
        known = httpx.post(url, json=body, headers=headers["one"], timeout=60).json()["id"]
        unknown = "resp_" + "0" * 32
        assert httpx.get(f"{url}/{known}", headers=headers["one"]).status_code == 200
        for method in ("GET", "DELETE"):
            theirs, none = (
                httpx.request(method, f"{url}/{one}", headers=headers["two"])
                for one in (known, unknown)
            )
            assert (theirs.status_code, theirs.text.replace(known, unknown)) == (404, none.text)
        theirs, none = (
            httpx.post(url, json=body | {"previous_response_id": one}, headers=headers["two"])
            for one in (known, unknown)
        )
        assert (theirs.status_code, theirs.text.replace(known, unknown)) == (400, none.text)
        assert httpx.get(f"{url}/{known}").status_code == 401


def test_servers_may_store_nothing(server: Server) -> None:
    url = f"{server.url}/v1/responses"
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 4, "store": True}
    answer = httpx.post(url, json=body, timeout=60).json()
    assert answer["store"] is False
    assert httpx.get(f"{url}/{answer['id']}").status_code == 404
    rejected = httpx.post(url, json=body | {"previous_response_id": answer["id"]})
    assert "because responses are not stored" in rejected.json()["error"]["message"]


def turn(size: int = 0, previous: StoredTurn | None = None) -> StoredTurn:
    return StoredTurn(
        b"x" * size, (ChatMessage("user", "a"), ChatMessage("assistant", "b")), previous
    )


def small(num_responses: int = 10, mib: int = 32) -> StoredResponses:
    return StoredResponses(StoreLimits(num_responses, BufferLimits(mib * MIB)))


def test_the_oldest_of_the_same_tenant_is_forgotten() -> None:
    stored = small(num_responses=2)
    stored.keep("b", "other", turn())
    for name in ("r1", "r2", "r3"):
        stored.keep("a", name, turn())
    assert len(stored) == 3
    with pytest.raises(UnknownResponseError):
        stored.find("a", "r1")
    with pytest.raises(UnknownPreviousError):
        stored.find_previous("a", "r1", 100)
    assert stored.find("b", "other")


def test_a_tenant_has_a_quarter_of_the_memory() -> None:
    stored = small(num_responses=1000)
    for number in range(40):
        stored.keep("a", str(number), turn(MIB - 4096))
    assert stored.num_bytes <= 8 * MIB
    assert len(stored) == 8
    # Too large to be kept at all: a 32nd.
    stored.keep("a", "large", turn(MIB))
    with pytest.raises(UnknownResponseError):
        stored.find("a", "large")


def test_long_conversations_are_rejected() -> None:
    stored = small(num_responses=1000)
    last = None
    for number in range(5):
        last = turn(MIB // 4, last)
        stored.keep("a", str(number), last)
    assert stored.find_previous("a", "2", 100)
    with pytest.raises(InvalidRequestError, match="bytes of memory"):
        stored.find_previous("a", "4", 100)
    with pytest.raises(InvalidRequestError, match="has 6 messages; at most 5"):
        stored.find_previous("a", "2", 6)


def test_memory_is_that_of_what_can_be_reached() -> None:
    draws = random.Random(3)
    stored = small(num_responses=6, mib=32)
    known: dict[tuple[str, str], StoredTurn] = {}
    for number in range(3000):
        tenant = draws.choice("abcdef")
        own = [name for owner, name in known if owner == tenant]
        if own and draws.random() < 0.2:
            name = draws.choice(own)
            stored.delete(tenant, name)
        else:
            previous = known[tenant, draws.choice(own)] if own and draws.random() < 0.7 else None
            size = draws.choice((0, 1000, MIB // 2))
            # A proxy that saw no end has a call run again, which keeps its id.
            name = draws.choice(own) if own and draws.random() < 0.1 else str(number)
            known[tenant, name] = turn(size, previous)
            stored.keep(tenant, name, known[tenant, name])
        for place in list(known):
            try:
                stored.find(*place)
            except UnknownResponseError:
                del known[place]
        assert len(stored) == len(known)
        reachable: dict[int, int] = {}
        for held in known.values():
            one: StoredTurn | None = held
            while one is not None:
                reachable[id(one)] = one.num_bytes
                one = one.previous
        assert stored.num_bytes == sum(reachable.values()) <= 32 * MIB
    for place in list(known):
        stored.delete(*place)
    assert stored.num_bytes == 0


def test_sizes_count_all_that_messages_hold() -> None:
    call = MessageToolCall(id="c", name="f", arguments={"a": ["y" * 10_000, {"b": "é" * 10_000}]})
    message = ChatMessage("assistant", "ü" * 10_000, tool_calls=(call,), reasoning="z" * 10_000)
    assert StoredTurn(b"", (message,), None).num_bytes > 40_000


def test_a_turn_that_was_forgotten_meanwhile_is_counted_again() -> None:
    stored = small()
    first = turn(1000)
    stored.keep("a", "first", first)
    stored.delete("a", "first")
    assert stored.num_bytes == 0
    second = turn(1000, first)
    stored.keep("a", "second", second)
    assert stored.num_bytes == first.num_bytes + second.num_bytes
    stored.delete("a", "second")
    assert stored.num_bytes == 0


def test_a_streamed_response_that_repeats_much_is_stored_as_it_was_sent(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("Hello.")
    tools: Any = [
        {"type": "function", "name": f"f{number}", "description": "\u00e9" * 25_000}
        for number in range(4)
    ]
    with client.responses.create(
        model="tiny", input="hi", tools=tools, tool_choice="none", instructions="x", stream=True
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert isinstance(events[0], ResponseCreatedEvent)
    assert isinstance(events[-1], ResponseCompletedEvent)
    ended = events[-1].response
    for response in (events[0].response, ended):
        assert response.instructions == "x"
        assert [tool.model_dump(exclude_unset=True) for tool in response.tools] == tools
    assert client.responses.retrieve(ended.id).model_dump() == ended.model_dump()


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
