"""Tools and functions over HTTP, through the openai client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from openai.types.chat import ChatCompletionAllowedToolChoiceParam

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

__all__ = ["ASK", "AUTO", "TEMPLATE", "TOOLS"]

TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }} Write <tool_call>.{{ eos_token }}"
    "{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}"
    "({{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% if message.tool_call_id %}[{{ message.tool_call_id }} {{ message.name }}]{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string"}},
}
TOOLS: list[Any] = [  # Any: what the client calls a param
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "time", "strict": None}},
]
ASK: list[Any] = [{"role": "user", "content": "How is it?"}]  # Any: as above
AUTO = (
    'I ask. <tool_call>{"name": "weather", "arguments": {"city": "K\u00f6ln \U0001f642"}}'
    '</tool_call><tool_call>{"name": "time", "arguments": {}}</tool_call>'
)


def write(server: Server, text: str) -> None:
    """Have the model write a text and end."""
    token_ids = server.tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request, index: int) -> list[int]:
        return [*token_ids, 1]

    server.engine.script = script


def prompt_of(server: Server) -> str:
    (request,) = server.engine.log.submitted[-1:]
    return server.tokenizer.decode(request.prompt_token_ids)


def schema_of(server: Server) -> Any:  # Any: JSON
    structure = server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert structure.kind == "json_schema"
    return json.loads(structure.text)


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


class City(BaseModel):
    """What the client parses."""

    city: str


def streamed(
    client: openai.OpenAI, **options: Any
) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return content, calls and finish reason, as a client assembles them."""
    content = ""
    reason = None
    calls: list[tuple[str, str]] = []
    for chunk in client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.type == "function"
                assert call.index == len(calls)
                calls.append((call.function.name or "", call.function.arguments or ""))
            else:
                name, arguments = calls[call.index]
                calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return content, calls, reason


def test_model_may_call_tools(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, AUTO)
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask."
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]  # type: ignore[union-attr]  # never None here
    assert calls == [("weather", '{"city": "K\u00f6ln \U0001f642"}'), ("time", "{}")]
    assert tool_server.engine.log.submitted[-1].sampling.structure is None
    assert "Tells it." in prompt_of(tool_server)
    assert streamed(client, tools=TOOLS) == ("I ask.", calls, "tool_calls")


def test_model_may_write_text_instead(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, "Fine <tool")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    assert answer.choices[0].message.content == "Fine <tool"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client, tools=TOOLS) == ("Fine <tool", [], "stop")


@pytest.mark.parametrize("text", ["", AUTO.removeprefix("I ask.")])
def test_a_stream_begins_with_a_role_and_content_before_there_is_any(
    client: openai.OpenAI, tool_server: Server, text: str
) -> None:
    write(tool_server, text)
    first, *others = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, stream=True
    )
    (choice,) = first.choices
    begun = choice.delta.model_dump(exclude_unset=True)
    assert begun == {"role": "assistant", "content": ""}
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in others]
    assert all("role" not in delta and "content" not in delta for delta in deltas)


def test_without_parallel_calls_there_is_one_call(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, AUTO)
    _, calls, _ = streamed(client, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in calls] == ["weather"]


def test_named_function_is_called_by_its_schema(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, '{"city": "Bonn"}')
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    answer = client.chat.completions.create(model="tiny", messages=ASK, **options)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bonn"}')
    # OpenAI's finish reason for a named function.
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert schema_of(tool_server) == PARAMETERS
    assert streamed(client, **options) == ("", [("weather", '{"city": "Bonn"}')], "stop")


def test_required_calls_are_a_list_of_calls(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, '[{"name": "weather", "parameters": {"city": "Bonn"}}]')
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    content, calls, reason = streamed(client, **options, parallel_tool_calls=False)
    assert (content, calls, reason) == ("", [("weather", '{"city": "Bonn"}')], "tool_calls")
    schema = schema_of(tool_server)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"] == {"$ref": "#/$defs/any call"}
    assert [call["properties"] for call in schema["$defs"]["any call"]["anyOf"]] == [
        {"name": {"enum": [name]}, "parameters": {"$ref": f"#/$defs/{name}"}}
        for name in ("weather", "time")
    ]
    weather = schema["$defs"]["weather"]
    assert weather["properties"]["city"] == {"$ref": "#/$defs/weather/$defs/City"}
    assert weather["$defs"] == {"City": {"type": "string"}}
    assert schema["$defs"]["time"] == {"type": "object", "properties": {}}


def test_any_of_as_many_tools_as_are_allowed_is_called(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, '[{"name": "tool127", "parameters": {"city": "Bonn"}}]')
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tools = [
        {"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}}
        for number in range(128)
    ]
    # Their grammar is compiled within the limits on time and memory.
    _, calls, reason = streamed(
        client,
        tools=tools,
        tool_choice="required",
        extra_body={"truncate_prompt_tokens": 100},
    )
    assert (calls, reason) == ([("tool127", '{"city": "Bonn"}')], "tool_calls")


def only(name: str, mode: Literal["auto", "required"]) -> ChatCompletionAllowedToolChoiceParam:
    tool: dict[str, object] = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}


def test_required_call_is_of_an_allowed_tool(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, '[{"name": "time", "parameters": {}}]')
    options = {"tools": TOOLS, "tool_choice": only("time", "required")}
    assert streamed(client, **options) == ("", [("time", "{}")], "tool_calls")
    (called,) = schema_of(tool_server)["$defs"]["any call"]["anyOf"]
    assert called["properties"]["name"] == {"enum": ["time"]}
    assert "Tells it." not in prompt_of(tool_server)


def test_only_allowed_tools_are_called_and_seen(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, AUTO)
    _, calls, reason = streamed(client, tools=TOOLS, tool_choice=only("time", "auto"))
    assert (calls, reason) == ([("time", "{}")], "tool_calls")
    assert '"time"' in (prompt := prompt_of(tool_server))
    assert "Tells it." not in prompt
    # A client may send the whole definition.
    whole = only("weather", "auto")
    whole["allowed_tools"]["tools"] = TOOLS[:1]
    _, calls, _ = streamed(client, tools=TOOLS, tool_choice=whole)
    assert [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize(
    "given", [{}, {"additionalProperties": {"type": "integer"}}, {"type": ["object", "null"]}]
)
def test_forced_arguments_are_an_object(
    client: openai.OpenAI, tool_server: Server, given: dict[str, Any]
) -> None:
    write(tool_server, "{}")
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": given}}]
    named: Any = {"type": "function", "function": {"name": "look"}}
    client.chat.completions.create(model="tiny", messages=ASK, tools=tools, tool_choice=named)
    assert schema_of(tool_server) == {**given, "type": "object"}
    client.chat.completions.create(model="tiny", messages=ASK, tools=tools, tool_choice="required")
    assert schema_of(tool_server)["$defs"]["look"] == {**given, "type": "object"}
    # The model reads what the client wrote.
    assert json.dumps(given) in prompt_of(tool_server)


def test_arguments_that_are_no_object_are_rejected(tool_server: Server) -> None:
    schema = {"type": "string"}
    bodies: dict[str, Any] = {
        "chat/completions": {"function": {"name": "look", "parameters": schema}},
        "responses": {"name": "look", "parameters": schema},
        "messages": {"type": "custom", "name": "look", "input_schema": schema},
    }
    for path, tool in bodies.items():
        said = "input" if path == "responses" else "messages"
        body: dict[str, object] = {
            "model": "tiny",
            said: ASK,
            "tools": [{"type": "function"} | tool],
        }
        if path == "messages":
            body["max_tokens"] = 1
        answer = httpx.post(f"{tool_server.url}/v1/{path}", json=body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("tools.0.")
        assert message.endswith(".type must be object, not 'string'.")


def test_with_tool_choice_none_the_model_sees_no_tools(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, "Fine.")
    client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none")
    assert "Tells it." not in prompt_of(tool_server)


def test_tool_messages_reach_the_template(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, AUTO)
    first = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    (call, _) = message.tool_calls
    write(tool_server, "Rain.")
    second = client.chat.completions.create(
        model="tiny",
        messages=[*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}],  # type: ignore[list-item]  # the client accepts its own responses
        tools=TOOLS,
    )
    assert second.choices[0].message.content == "Rain."
    text = prompt_of(tool_server)
    assert f'({call.id} weather {{"city": "K\u00f6ln \U0001f642"}})' in text
    assert f"rain[{call.id} " in text


# The client's own, for what it parsed.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_messages_that_the_client_parsed_may_be_sent_again(
    client: openai.OpenAI, tool_server: Server, is_stream: bool, as_dictionary: bool
) -> None:
    function = {"name": "weather", "parameters": PARAMETERS, "strict": True}
    asked: Any = {"model": "tiny", "messages": ASK, "response_format": City}
    tools: Any = [{"type": "function", "function": function}]
    sent: list[Any] = [*ASK]  # Any: the client accepts its own messages
    for text, given in ((CALL, asked | {"tools": tools}), ('{"city": "Bonn"}', asked)):
        write(tool_server, text)
        if is_stream:
            with client.chat.completions.stream(**given) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.parse(**given).choices[0].message
        sent.append(message.model_dump() if as_dictionary else message)
    assert message.parsed == City(city="Bonn")
    client.chat.completions.create(model="tiny", messages=sent, tools=tools)
    text = prompt_of(tool_server)
    assert text.endswith('weather {"city": "Bonn"}){"city": "Bonn"}')


def test_truncated_call_finishes_with_length(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, AUTO)
    tokens = tool_server.tokenizer.encode(AUTO.partition("city")[0], add_special_tokens=False)
    _, calls, reason = streamed(client, tools=TOOLS, max_tokens=len(tokens))
    assert reason == "length"
    assert [name for name, _ in calls] == ["weather"]


def test_continued_message_stays_open(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, " there.")
    client.chat.completions.create(
        model="tiny",
        messages=[*ASK, {"role": "assistant", "content": "It is  "}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert prompt_of(tool_server).endswith("It is  ")


def test_calls_of_strict_tools_follow_the_schema(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, AUTO)
    function = TOOLS[0]["function"] | {"strict": True}
    tools = [{"type": "function", "function": function}, TOOLS[1]]
    _, calls, _ = streamed(client, tools=tools)
    assert [name for name, _ in calls] == ["weather", "time"]
    structure = tool_server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.mark) == ("calls", "<tool_call>")
    assert "City" in structure.text


def test_unsupported_schema_of_a_strict_tool_is_rejected(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}
        for strict in (False, True)
    ]
    client.chat.completions.create(model="tiny", messages=ASK, tools=tools[:1])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, tools=tools[1:])
    assert caught.value.param == "tools"
    assert "tools has the strict tool 'f', which has an unsupported JSON Schema" in str(
        caught.value
    )


@pytest.mark.parametrize("kind", ["call", "answer"])
def test_model_calls_or_answers_with_the_schema(
    client: openai.OpenAI, tool_server: Server, kind: str
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    answer = '{"city": "Rome"}'
    write(tool_server, call if kind == "call" else answer)
    schema = {"name": "answer", "schema": PARAMETERS}
    options: dict[str, Any] = {
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    whole = client.chat.completions.create(model="tiny", messages=ASK, **options)
    structure = tool_server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.mark) == ("turn", "<tool_call>")
    (choice,) = whole.choices
    if kind == "answer":
        assert (choice.message.content, choice.finish_reason) == (answer, "stop")
        assert streamed(client, **options) == (answer, [], "stop")
        return
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    expected = [("weather", '{"city": "Bonn"}')]
    assert streamed(client, **options) == ("", expected, "tool_calls")


FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]  # Any: as above


def function_stream(
    client: openai.OpenAI, **options: Any
) -> tuple[str, str | None, str, str | None]:
    """Return content, name, arguments and finish reason, as a client assembles them."""
    content, name, arguments, reason = "", None, "", None
    for chunk in client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options):
        (choice,) = chunk.choices
        assert choice.delta.tool_calls is None
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        if choice.delta.function_call is not None:
            name = choice.delta.function_call.name or name
            arguments += choice.delta.function_call.arguments or ""
    return content, name, arguments, reason


def test_functions_are_called_as_the_tools_that_replaced_them(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, AUTO)
    client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    with_tools = prompt_of(tool_server)
    answer = client.chat.completions.create(model="tiny", messages=ASK, functions=FUNCTIONS)
    assert prompt_of(tool_server) == with_tools
    (choice,) = answer.choices
    call = choice.message.function_call
    assert call is not None
    assert choice.message.tool_calls is None
    expected = ("weather", '{"city": "K\u00f6ln \U0001f642"}', "function_call")
    assert (call.name, call.arguments, choice.finish_reason) == expected
    assert choice.message.content == "I ask."
    assert function_stream(client, functions=FUNCTIONS) == ("I ask.", *expected)


def test_named_function_call_follows_its_schema(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, '{"city": "Bonn"}')
    options: dict[str, Any] = {"functions": FUNCTIONS, "function_call": {"name": "weather"}}
    answer = client.chat.completions.create(model="tiny", messages=ASK, **options)
    assert schema_of(tool_server) == PARAMETERS
    assert answer.choices[0].message.content is None
    assert function_stream(client, **options) == ("", "weather", '{"city": "Bonn"}', "stop")


def test_with_function_call_none_the_model_sees_no_functions(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, "Fine.")
    options: dict[str, Any] = {"functions": FUNCTIONS, "function_call": "none"}
    assert function_stream(client, **options) == ("Fine.", None, "", "stop")
    assert "Tells it." not in prompt_of(tool_server)


def test_function_messages_reach_the_template_as_calls_and_results(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, "Rain.")
    call = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    messages: list[Any] = [  # Any: as above
        *ASK,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "function", "name": "time", "content": "noon"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, functions=FUNCTIONS)
    text = prompt_of(tool_server)
    assert '(call00001 weather {"city": "Bonn"})' in text
    assert "rain[call00001 weather]" in text
    # No call of this function came before.
    assert text.endswith("noon")


# fmt: off
INVALID_FUNCTIONS: list[tuple[dict[str, Any], str, str]] = [  # Any: JSON
    ({"functions": FUNCTIONS, "tools": TOOLS},
     "functions cannot be combined with tools.", "functions"),
    ({"functions": FUNCTIONS, "tool_choice": "auto"},
     "functions cannot be combined with tool_choice.", "functions"),
    ({"function_call": "auto"}, "function_call requires functions.", "function_call"),
    ({"functions": FUNCTIONS, "function_call": {"name": "x"}},
     "function_call names 'x', which is not in functions.", "function_call"),
    ({"functions": FUNCTIONS, "function_call": "required"},
     "function_call must be none, auto or a named function.", "function_call"),
    ({"functions": FUNCTIONS * 2}, "functions must have unique names.", "functions"),
    ({"functions": {}}, "functions must be a list.", "functions"),
    ({"functions": [{"name": "a b"}]},
     "functions.0.name must be 1 to 128 letters, digits, underscores, dashes or dots.",
     "functions.0.name"),
    ({"functions": [{"name": "a", "paramters": {}}]},
     "functions.0.paramters is not supported: did you mean parameters?", "functions.0.paramters"),
    ({"messages": [{"role": "function", "content": "x"}]},
     "messages.0.name is required with role = function.", "messages.0.name"),
    ({"messages": [{"role": "user", "function_call": {"name": "a"}}]},
     "messages.0.function_call requires role = assistant.", "messages.0.function_call"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "a", "arguments": "["}}]},
     "messages.0.function_call.arguments must be a JSON object as a string.",
     "messages.0.function_call.arguments"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "a"},
                    "tool_calls": [{"id": "c", "function": {"name": "a"}}]}]},
     "messages.0.function_call cannot be combined with tool_calls.", "messages.0.function_call"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "message", "param"), INVALID_FUNCTIONS)
def test_invalid_functions_are_rejected_by_their_names(
    client: openai.OpenAI, fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as rejected:
        client.post(
            "/chat/completions", cast_to=object, body={"model": "tiny", "messages": ASK, **fields}
        )
    assert rejected.value.body is not None
    assert (rejected.value.body["message"], rejected.value.param) == (message, param)  # type: ignore[index]  # an object


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(TEMPLATE), context=2048) as server:
        yield server


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    tool_server.engine.reset()
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
