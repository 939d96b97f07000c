"""OpenAI's Responses API: what the model reads, what clients get, and what is rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from cluster.serving.responses.stored_responses import StoreLimits
from pagedray.structure import Structure
from tests.serving.conftest import Server
from tests.serving.responses.response_calls import CALL, OUTPUT, SPACE, TEMPLATE, TOOL, USE, posted
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.text.tokenizer import Tokenizer


class City(BaseModel):
    """What the client parses."""

    city: str


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "user()=hi;>"),
    ({"instructions": "Be brief."}, "system()=Be brief.;user()=hi;>"),
    ({"tools": [TOOL]}, "[look]user()=hi;>"),
    ({"tools": [TOOL, SPACE], "client_metadata": {"a": "b"}}, "[lookeyes.look]user()=hi;>"),
    ({"input": [{**USE, "namespace": "eyes"}, OUTPUT]},
     "assistant()=!eyes.look{};tool()c1=5;>"),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, "True low user()=hi;>"),
    ({"chat_template_kwargs": {"reasoning_effort": "odd"}}, "odd user()=hi;>"),
    ({"reasoning": {"effort": "none"}}, "False none user()=hi;>"),
    ({"input": [{"role": "developer", "content": "A"},
                {"role": "user", "content": [{"type": "input_text", "text": "B"},
                                             {"type": "input_text", "text": "C"}]}]},
     "system()=A;user()=BC;>"),
    ({"input": [{"role": "user", "content": "x"},
                {"type": "reasoning", "id": "r", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "id": "m", "status": "completed",
                 "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
                USE, OUTPUT]},
     "user()=x;assistant(hm)=ok!look{};tool()c1=5;>"),
    ({"input": [{"role": "assistant", "content": [
        {"type": "output_text", "text": "hi "}, {"type": "refusal", "refusal": "no"}]}]},
     "assistant()=hi no;>"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), PROMPTS)
def test_template_reads_the_input(tool_server: Server, given: dict[str, Any], text: str) -> None:
    tool_server.engine.reset()
    assert posted(tool_server, given).status_code == 200
    (request,) = tool_server.engine.log.submitted
    assert tool_server.tokenizer.decode(request.prompt_token_ids) == text


def test_parameters_of_vllm_are_those_of_the_request(tool_server: Server) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 3,
        "ignore_eos": True,
        "stop": ["a"],
    }
    tool_server.engine.reset()
    salted = {"cache_salt": "b", "priority": 2}
    assert posted(tool_server, given | salted).status_code == 200
    (request,) = tool_server.engine.log.submitted
    found = {name: getattr(request.sampling, name) for name in given}
    assert found == given | {"stop": ("a",)}
    assert (request.priority, bool(request.cache_salt)) == (2, True)


def test_biases_and_structures_of_vllm_are_those_of_the_request(tool_server: Server) -> None:
    tool_server.engine.reset()
    given = {"logit_bias": {"5": -2}, "structured_outputs": {"regex": "a+"}, "request_id": "mine"}
    answer = posted(tool_server, given)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    (request,) = tool_server.engine.log.submitted
    assert request.sampling.logit_bias == {5: -2}
    assert request.sampling.structure == Structure(kind="regex", text="a+")
    assert request.grammar is not None


def test_text_may_include_its_end(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("One, two, three.")
    whole, kept = (
        client.responses.create(
            model="tiny",
            input="hi",
            extra_body={"stop": [" two"], "include_stop_str_in_output": kept},
        )
        for kept in (False, True)
    )
    assert (whole.output_text, kept.output_text) == ("One,", "One, two")


def test_text_may_include_special_tokens(tool_server: Server, client: openai.OpenAI) -> None:
    (special,) = tool_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    hello = tool_server.tokenizer.encode("Hello", add_special_tokens=False)
    tool_server.engine.script = lambda request, index: [special, *hello, 1]
    skipped, kept = (
        client.responses.create(model="tiny", input="hi", extra_body={"skip_special_tokens": skips})
        for skips in (True, False)
    )
    assert skipped.output_text == "Hello"
    assert kept.output_text.startswith("<|system|>Hello")


def test_special_tokens_that_mark_calls_are_read(
    template_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = template_tokenizer(TEMPLATE, special_tokens=("<tool_call>", "</tool_call>"))
    with Server(tokenizer, context=1024, store_limits=StoreLimits()) as model:
        model.say(CALL)
        answer = posted(model, {"tools": [TOOL], "max_output_tokens": 100})
    call, *others = answer.json()["output"]
    assert (call["type"], call["arguments"], others) == ("function_call", '{"a": 1}', [])


def test_response_has_their_shape(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("Hello.")
    response = client.responses.create(model="tiny", input="hi", metadata={"a": "b"}, store=False)
    Response.model_validate_json(response.model_dump_json())
    assert (response.output_text, response.status) == ("Hello.", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == len(tool_server.engine.script(None, 0))  # type: ignore[arg-type]  # any request
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_metadata_is_repeated(client: openai.OpenAI) -> None:
    labels = {str(number): "é" * 512 for number in range(16)}
    whole = client.responses.create(model="tiny", input="hi", metadata=labels)
    assert whole.metadata == client.responses.retrieve(whole.id).metadata == labels
    events = client.responses.create(model="tiny", input="hi", metadata=labels, stream=True)
    repeated = [event.response.metadata for event in events if hasattr(event, "response")]
    assert repeated == [labels] * len(repeated)
    assert client.responses.create(model="tiny", input="hi").metadata == {}


def test_stream_joins_to_the_response(tool_server: Server, client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hi", max_output_tokens=40)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = list(
        client.responses.create(model="tiny", input="hi", max_output_tokens=40, stream=True)
    )
    for number, event in enumerate(events):
        adapter.validate_python(event.model_dump())
        assert event.sequence_number == number
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=40) as stream:
        final = [event for event in stream if event.type == "response.incomplete"]
    assert final[0].response.output_text == text


def test_items_that_the_client_parsed_may_be_sent_again(
    tool_server: Server, client: openai.OpenAI
) -> None:
    look: Any = {**TOOL, "parameters": {"type": "object", "properties": {}}, "strict": True}
    sent: list[Any] = [{"role": "user", "content": "hi"}]  # Any: of the client
    for text in ('<tool_call>{"name": "look", "arguments": {}}</tool_call>', '{"city": "Bonn"}'):
        tool_server.say(text)
        response = client.responses.parse(model="tiny", input="hi", tools=[look], text_format=City)
        sent += [item.model_dump() for item in response.output]
    assert response.output_parsed == City(city="Bonn")
    assert "parsed_arguments" in sent[1]
    client.responses.create(model="tiny", input=sent, tools=[look])
    request = tool_server.engine.log.submitted[-1]
    text = tool_server.tokenizer.decode(request.prompt_token_ids)
    assert text.endswith('!look{};assistant()={"city": "Bonn"};>')


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_are_called(tool_server: Server, client: openai.OpenAI, is_stream: bool) -> None:
    tool_server.say(f"I look. {CALL}")
    given: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    if is_stream:
        with client.responses.stream(**given) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**given)
    message, call = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert response.output_text == "I look."
    assert (call.name, call.arguments) == ("look", '{"a": 1}')
    again = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "hi"},
            *[item.model_dump(exclude_none=True) for item in response.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
        ],
    )
    prompt = tool_server.tokenizer.decode(tool_server.engine.log.submitted[-1].prompt_token_ids)
    assert prompt.endswith(f"tool(){call.call_id}=5;>")
    assert again.status == "completed"


def test_calls_of_strict_tools_follow_the_schema(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say(CALL)
    strict: Any = TOOL | {"strict": True}
    client.responses.create(model="tiny", input="hi", tools=[strict])
    structure = tool_server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.mark) == ("calls", "<tool_call>")
    strict = strict | {"parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="tools has the strict tool 'look', which"):
        client.responses.create(model="tiny", input="hi", tools=[strict])


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_name_their_namespace(
    tool_server: Server, client: openai.OpenAI, is_stream: bool
) -> None:
    tool_server.say(CALL.replace("look", "eyes.look"))
    given: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [SPACE]}
    if is_stream:
        with client.responses.stream(**given) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**given)
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name, call.arguments) == ("eyes", "look", '{"a": 1}')


@pytest.mark.parametrize("name", ["eyes.look", "look"])
def test_only_allowed_tools_are_called(
    tool_server: Server, client: openai.OpenAI, name: str
) -> None:
    tool_server.say(CALL.replace("look", "eyes.look"))
    tool = {"type": "function", "name": name}
    given: dict[str, Any] = {
        "tools": [SPACE, TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool]},
    }
    response = client.responses.create(model="tiny", input="hi", **given)
    assert [item.type for item in response.output] == [
        "function_call" if name == "eyes.look" else "message"
    ]
    assert response.to_dict()["tool_choice"] == given["tool_choice"]


async def test_repeated_parameters_count_as_unread_output_until_the_call_ends(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("Hi.")
    buffers = tool_server.frontends.servicer.buffers
    description = "x" * 50_000
    tool = TOOL | {"description": description}
    given = {"tools": [tool], "tool_choice": "none", "instructions": "Be brief.", "stream": True}
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 8} | given
    held = []
    with httpx.stream("POST", f"{tool_server.url}/v1/responses", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            held.append(buffers.num_bytes)
            if line.startswith("data:") and '"response.completed"' in line:
                assert '"instructions":"Be brief."' in line
                assert description in line
    assert max(held) > 50_000
    await wait_until(lambda: not buffers.num_bytes)
